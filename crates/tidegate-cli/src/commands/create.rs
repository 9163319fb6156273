//! `tidegate create`: a new pool, over nothing, over a blank file, or, with `--force`, over what is there.
//!
//! Invariant: while an existing pool is overwritten no header is valid. The old one is erased first, before
//! the file changes its size, and the engine writes the new one last; a crash in between leaves a file that
//! holds no pool, never half of one.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::{FallocateFlags, StatVfsMountFlags};
use tidegate::btt::{self, BttOptions, Version};
use tidegate::log::{self, LogOptions};
use tidegate::pmem::{Region, RegionOptions};
use tidegate::pool::{self, Content, PoolError, PoolKind};
use tidegate::raw::{self, RawOptions};
use tidegate::size::Size;

use super::info;
use crate::args::{BttVersion, CreateArgs, Engine};
use crate::output::{UsageError, field, spinner};
use crate::pool::{in_pool, map};

/// Pools of engine `raw` are whole pages: two of headers, at least one of data, and the second header's.
const RAW_BYTES_MIN: u64 = 4 * PAGE_BYTES;
const PAGE_BYTES: u64 = 4096;
/// Pools of engine `log` have headers of their own before the ring.
const LOG_BYTES_MIN: u64 = 3 * PAGE_BYTES + log::layout::RING_OFFSET + log::RING_BYTES_MIN;

/// Runs the command.
///
/// # Errors
/// The options contradict each other, the size does not fit, or the file holds something.
pub(crate) fn run(args: &CreateArgs) -> Result<ExitCode> {
    let recipe = Recipe::new(args)?;
    recipe.check_size(&args.pool, args.engine, args.size)?;
    let sign_of_life = spinner("creating");
    let region = prepare(args)?;
    let created = recipe.write(&region);
    sign_of_life.finish_and_clear();
    created?;
    info::describe(&Arc::new(region), &args.pool)?.print()?;
    let pool = args.pool.display();
    match args.engine {
        Engine::Log => field("next", format_args!("tidegate run --pool {pool} -- CMD"))?,
        _ => field("next", format_args!("tidegate serve {pool} --nbd unix:/tmp/tidegate.sock"))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses a size for the log pool to be made at `pool` that could not be used fully.
///
/// # Errors
/// The size is refused.
pub(crate) fn check_log_size(pool: &Path, asked: Size) -> Result<()> {
    Recipe::Log.check_size(pool, Engine::Log, asked)
}

/// What to make.
enum Recipe {
    Btt(BttOptions),
    Raw(RawOptions),
    Log,
}

impl Recipe {
    fn new(args: &CreateArgs) -> Result<Self> {
        match args.engine {
            Engine::Btt => btt_options(args).map(Self::Btt),
            Engine::Raw => raw_options(args).map(Self::Raw),
            Engine::Log => log_options(args).map(|()| Self::Log),
        }
    }

    fn smallest(&self) -> Size {
        let bytes = match self {
            Self::Btt(options) => btt::smallest_bytes(options),
            Self::Raw(_) => RAW_BYTES_MIN,
            Self::Log => LOG_BYTES_MIN,
        };
        Size { bytes }
    }

    fn largest_fit(&self, size: Size) -> Size {
        let bytes = match self {
            Self::Btt(options) => btt::largest_fit_bytes(options, size.bytes),
            Self::Raw(_) | Self::Log => size.bytes - size.bytes % PAGE_BYTES,
        };
        Size { bytes }
    }

    /// Refuses a size that the engine could not use fully, and says which sizes it could.
    fn check_size(&self, pool: &Path, engine: Engine, asked: Size) -> Result<()> {
        let pool = pool.display();
        let (smallest, largest) = (self.smallest(), self.largest_fit(asked));
        if asked < smallest {
            bail!(
                "{pool}: --size {asked} is too small for a {engine} pool; the smallest is {smallest}"
            );
        }
        if largest < asked {
            bail!(
                "{pool}: a {engine} pool cannot use all of --size {asked}; the largest that fits is {largest}"
            );
        }
        Ok(())
    }

    fn write(&self, region: &Region) -> Result<()> {
        match self {
            Self::Btt(options) => {
                btt::create(region, options).map(drop).with_context(|| in_pool(region))
            }
            Self::Raw(options) => {
                raw::create(region, options).map(drop).with_context(|| in_pool(region))
            }
            Self::Log => {
                let made = log::create(region, &LogOptions::default());
                made.map(drop).with_context(|| in_pool(region))
            }
        }
    }
}

fn btt_options(args: &CreateArgs) -> Result<BttOptions> {
    let lba_bytes = args.btt.lba_size.or(args.block_size).unwrap_or(4096);
    let block_bytes = if lba_bytes < 4096 { 512 } else { 4096 };
    if let Some(asked) = args.block_size.filter(|&asked| asked != block_bytes) {
        return Err(UsageError(format!(
            "--lba-size {lba_bytes} holds blocks of {block_bytes} bytes, but --block-size asks for {asked}; leave \
             --block-size out or say {block_bytes}"
        ))
        .into());
    }
    let version = match args.btt.btt_version {
        Some(BttVersion::V2_0) => Version::V2_0,
        Some(BttVersion::V1_1) | None => Version::V1_1,
    };
    Ok(BttOptions { lba_bytes, version, ..BttOptions::default() })
}

fn raw_options(args: &CreateArgs) -> Result<RawOptions> {
    if args.btt.lba_size.is_some() || args.btt.btt_version.is_some() {
        let message =
            "--lba-size and --btt-version belong to --engine btt; leave them out for --engine raw";
        return Err(UsageError(message.into()).into());
    }
    Ok(RawOptions { block_bytes: args.block_size.unwrap_or(4096), ..RawOptions::default() })
}

fn log_options(args: &CreateArgs) -> Result<()> {
    let of_blocks =
        args.block_size.is_some() || args.btt.lba_size.is_some() || args.btt.btt_version.is_some();
    if of_blocks {
        let message = "--block-size, --lba-size and --btt-version belong to engines with blocks; leave them out for \
                       --engine log";
        return Err(UsageError(message.into()).into());
    }
    Ok(())
}

/// The region to write the pool to: a new file, or what is there once it may be overwritten.
fn prepare(args: &CreateArgs) -> Result<Region> {
    let metadata = match std::fs::metadata(&args.pool) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return create_file(args),
        Err(error) => {
            return Err(anyhow!(error).context(format!("cannot inspect {}", args.pool.display())));
        }
    };
    let is_device = metadata.file_type().is_char_device();
    if metadata.is_file() && metadata.len() == 0 {
        resize(&args.pool, args.size)?;
        return map(&args.pool, &args.memory, false);
    }
    let region = map(&args.pool, &args.memory, false)?;
    if args.force {
        erase(&region)?;
    } else {
        refuse_content(&region, &args.pool)?;
    }
    if region.len_bytes() == args.size.bytes {
        return Ok(region);
    }
    if is_device {
        let found = Size { bytes: region.len_bytes() };
        bail!(
            "{} is a device of {found}, but --size says {}; a pool takes the whole device",
            args.pool.display(),
            args.size
        );
    }
    drop(region);
    resize(&args.pool, args.size)?;
    map(&args.pool, &args.memory, false)
}

fn create_file(args: &CreateArgs) -> Result<Region> {
    check_space(&args.pool, args.size, 0)?;
    let options =
        RegionOptions { create_bytes: Some(args.size.bytes), ..args.memory.region_options() };
    Ok(Region::open(&args.pool, &options)?)
}

/// Makes the file at `path` `size` long, with all of its space allocated: no store may end in a full file
/// system.
fn resize(path: &Path, size: Size) -> Result<()> {
    let in_file = || format!("cannot resize {} to {size}", path.display());
    let file = File::options().write(true).open(path).with_context(in_file)?;
    check_space(path, size, file.metadata().with_context(in_file)?.len())?;
    file.set_len(size.bytes).with_context(in_file)?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size.bytes)
        .or_else(|errno| if errno == rustix::io::Errno::OPNOTSUPP { Ok(()) } else { Err(errno) })
        .with_context(in_file)?;
    file.sync_all().with_context(in_file)
}

/// Says early, and in words, that the file system cannot hold `size` where it holds `present_bytes` of it.
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
        // Too small for any pool: there is no header to keep half of.
        Ok(()) | Err(PoolError::TooSmall { .. }) => Ok(()),
        Err(error) => Err(anyhow!(error).context(in_pool(region))),
    }
}

/// Refuses to overwrite a pool, and anything else that is not blank.
fn refuse_content(region: &Region, path: &Path) -> Result<()> {
    let found = match pool::identify(region) {
        Ok(PoolKind::Unknown(Content::Zeroes)) => return Ok(()),
        Ok(PoolKind::Unknown(content)) => content.to_string(),
        Ok(PoolKind::Btt(version)) => format!("a btt pool (version {version})"),
        Ok(PoolKind::Tidegate(found)) => format!("a {} pool", found.superblock.engine),
        Err(error) => format!("a pool that cannot be used ({error})"),
    };
    bail!(
        "{} already holds {found}; choose another path, or overwrite it with --force",
        path.display()
    )
}
