//! `tidegate create`: makes a pool in a new or blank file, or, with `--force`, over other content.
//!
//! Invariants:
//! 1. A refusal changes nothing: the size is checked, and its space allocated, before the old
//!    header is erased.
//! 2. While an existing pool is overwritten, no header is valid. The old header is erased before
//!    the file changes its size, and the engine writes the new one last. A crash in between leaves
//!    a file that holds no pool, never half of one.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rustix::fs::{FallocateFlags, StatVfsMountFlags};
use tidegate::backing::loop_over;
use tidegate::btt::Version;
use tidegate::dram::{Policy, TierSpec};
use tidegate::log::LogEngine;
use tidegate::opening::{self, Expected};
use tidegate::pmem::{Region, RegionOptions};
use tidegate::pool::{self, Content, PoolError, PoolKind};
use tidegate::size::Size;
use tidegate::stack::REGISTRY;
use tidegate::tier::{Engine, Options, Plan};

use crate::args::CreateArgs;
use crate::output::{field, print_lines, spinner, stack_error};
use crate::pool::{in_pool, map};

/// The unit of the space that a file has.
const BLOCK_BYTES: u64 = 512;

/// Runs the command.
///
/// # Errors
/// The options contradict each other, the size does not fit, or the file holds something.
pub(crate) fn run(args: &CreateArgs) -> Result<()> {
    let plan = REGISTRY.plan(args.engine, &args.options.given).map_err(stack_error)?;
    check_size(&args.pool, args.engine, &*plan, args.size)?;
    let sign_of_life = spinner("creating");
    let region = prepare(args)?;
    let created = plan.create(&region).with_context(|| in_pool(&region));
    sign_of_life.finish_and_clear();
    created?;
    let none = TierSpec { policy: Policy::None, bytes: 0 };
    print_lines(&REGISTRY.describe(&Arc::new(region), none)?.lines())?;
    Ok(field("next", args.engine.next_command(&args.pool))?)
}

/// Refuses a size for a new log pool at `pool` that could not be used fully.
///
/// # Errors
/// The size is refused.
pub(crate) fn check_log_size(pool: &Path, asked: Size) -> Result<()> {
    let engine: &'static dyn Engine = &LogEngine;
    let plan = REGISTRY.plan(engine, &Options::new())?;
    check_size(pool, engine, &*plan, asked)
}

/// Refuses a size that the engine could not use fully, and names the nearest size that it could.
fn check_size(pool: &Path, engine: &dyn Engine, plan: &dyn Plan, asked: Size) -> Result<()> {
    let pool = pool.display();
    let smallest = Size { bytes: plan.smallest_bytes() };
    if asked < smallest {
        bail!(
            "{pool}: --size {asked} is too small for a {engine} pool; the smallest is {smallest}"
        );
    }
    let largest = Size { bytes: plan.largest_fit_bytes(asked.bytes) };
    if largest < asked {
        bail!(
            "{pool}: a {engine} pool cannot use all of --size {asked}; the largest that fits is {largest}"
        );
    }
    Ok(())
}

/// Returns the region to write the pool to: a new file, or an existing one that may be overwritten.
fn prepare(args: &CreateArgs) -> Result<Region> {
    let metadata = match std::fs::metadata(&args.pool) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return create_file(args),
        found => found.with_context(|| format!("cannot inspect {}", args.pool.display()))?,
    };
    let is_device = metadata.file_type().is_char_device();
    if metadata.is_file() && metadata.len() == 0 {
        resize(&allocate(&args.pool, args.size)?, args)?;
        return map(&args.pool, &args.memory, false);
    }
    refuse_looped(&args.pool)?;
    let region = map(&args.pool, &args.memory, false)?;
    if !args.force {
        refuse_content(&region, &args.pool)?;
    }
    let found = Size { bytes: region.len_bytes() };
    let has_size = found == args.size;
    if is_device && !has_size {
        bail!(
            "{} is a device of {found}, but --size says {}; a pool takes the whole device",
            args.pool.display(),
            args.size
        );
    }
    let file = if is_device { None } else { Some(allocate(&args.pool, args.size)?) };
    if args.force {
        erase(&region)?;
    }
    let Some(file) = file.filter(|_| !has_size) else { return Ok(region) };
    drop(region);
    resize(&file, args)?;
    map(&args.pool, &args.memory, false)
}

fn create_file(args: &CreateArgs) -> Result<Region> {
    check_space(&args.pool, args.size, 0)?;
    let options =
        RegionOptions { create_bytes: Some(args.size.bytes), ..args.memory.region_options() };
    Ok(Region::open(&args.pool, &options)?)
}

/// Gives the pool's file, whose space is allocated, its size, so that no store finds a full file
/// system.
fn resize(file: &File, CreateArgs { pool, size, .. }: &CreateArgs) -> Result<()> {
    let resized = file.set_len(size.bytes).and_then(|()| file.sync_all());
    resized.with_context(|| not_resized(pool, *size))
}

/// Allocates `size` bytes for the file at `path`, whose size stays. If they do not fit, the file
/// keeps what it had.
fn allocate(path: &Path, size: Size) -> Result<File> {
    let in_file = || not_resized(path, size);
    let opened = opening::open(path, Expected::Pool, File::options().write(true));
    let file = opened.with_context(in_file)?;
    let metadata = file.metadata().with_context(in_file)?;
    check_space(path, size, metadata.blocks() * BLOCK_BYTES)?;
    match rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, size.bytes) {
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(file),
        Err(errno) => {
            // Releases what was allocated behind the end. The caller returns the error that
            // matters.
            let _ = file.set_len(metadata.len());
            Err(errno).with_context(in_file)
        }
    }
}

fn not_resized(path: &Path, size: Size) -> String {
    format!("cannot resize {} to {size}", path.display())
}

/// Fails early if the file system cannot hold `size`. The file has `present_bytes` of it already.
fn check_space(path: &Path, size: Size, present_bytes: u64) -> Result<()> {
    let parent =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Ok(found) = rustix::fs::statvfs(parent) else { return Ok(()) };
    if found.f_flag.contains(StatVfsMountFlags::RDONLY) {
        bail!("cannot make {}: its file system is read-only", path.display());
    }
    let fits = found.f_bavail.saturating_mul(found.f_frsize).saturating_add(present_bytes);
    if size.bytes <= fits {
        return Ok(());
    }
    let largest = Size { bytes: fits & !0xF_FFFF };
    bail!(
        "{}: --size {size} does not fit its file system; the largest size that does is {largest}",
        path.display()
    )
}

/// Removes the headers of any pool, durably.
fn erase(region: &Region) -> Result<()> {
    match pool::erase(region) {
        // The file is too small for any pool, so it has no header.
        Err(PoolError::TooSmall { .. }) => Ok(()),
        erased => erased.with_context(|| in_pool(region)),
    }
}

/// Refuses to overwrite a file that a loop device shows to others, such as a mounted file system.
fn refuse_looped(path: &Path) -> Result<()> {
    let inspected = opening::open(path, Expected::Pool, File::options().read(true));
    let over = inspected.and_then(|file| loop_over(&file));
    let over = over.with_context(|| format!("cannot inspect {}", path.display()))?;
    let Some(device) = over else { return Ok(()) };
    let (path, device) = (path.display(), device.display());
    bail!(
        "{path} is in use: the loop device {device} is over it, by which a file system may be \
         mounted; unmount and detach that (`losetup -d {device}`), or choose another path"
    )
}

/// Refuses to overwrite a pool, or any other content that is not blank.
fn refuse_content(region: &Region, path: &Path) -> Result<()> {
    let found = match pool::identify(region) {
        Ok(PoolKind::Unknown(Content::Zeroes)) => return Ok(()),
        Ok(PoolKind::Unknown(content)) => {
            bail!(
                "{} already holds {content}, no pool; choose another path (--force would destroy that)",
                path.display()
            )
        }
        Ok(PoolKind::Btt(Version::Libpmemblk)) => {
            "a libpmemblk pool, which can be served as it is".to_owned()
        }
        Ok(_) => match REGISTRY.identify(region) {
            Ok(engine) => format!("a {engine} pool"),
            Err(error) => format!("a pool that cannot be used ({error})"),
        },
        Err(error) => format!("a pool that cannot be used ({error})"),
    };
    bail!(
        "{} already holds {found}; choose another path, or overwrite it with --force",
        path.display()
    )
}
