//! The functions of `libtidegate.so`: pools of every engine as block devices.
//!
//! cbindgen makes `include/tidegate.h` of this file, comments included.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::Arc;

use ::tidegate::backing::BackingUrl;
use ::tidegate::device::{BlockDevice, BlockDeviceExt, DeviceError, WriteFlags, ZeroFlags};
use ::tidegate::pmem::{Region, RegionOptions};
use ::tidegate::stack::{REGISTRY, Stack, StackOptions};
use ::tidegate::tier::Options;

use crate::edge::{self, Failure, Result, answer};

/// Of `tidegate_open`: nothing is written to the pool.
pub const TIDEGATE_READ_ONLY: c_uint = 1;

/// Of `tidegate_check`: restores all that the pool itself proves.
pub const TIDEGATE_REPAIR: c_uint = 2;

/// An open pool.
pub struct TidegatePool {
    stack: Stack,
    device: Arc<dyn BlockDevice>,
}

/// Makes a pool of `pool_bytes` bytes in a new file at `path`, which the owner alone may read. The
/// `engine` is "btt", "raw", "log" or "cache". The `options` are those of `tidegate create`, such
/// as "block-size=512", separated by commas, or null. Returns 0 or -1.
///
/// # Safety
/// `path`, `engine` and `options` are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_create(
    path: *const c_char,
    engine: *const c_char,
    pool_bytes: u64,
    options: *const c_char,
) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let path = unsafe { edge::path(path) }?;
        // SAFETY: passed on from the caller.
        let engine = unsafe { edge::optional_word("engine", engine) }?;
        // SAFETY: passed on from the caller.
        let options = unsafe { edge::optional_word("options", options) }?;
        create(path, engine.unwrap_or(""), pool_bytes, &parse(options)?).map(|()| 0)
    })
}

/// Returns the options of `create` in a text such as `block-size=512,btt-version=2.0`.
fn parse(text: Option<&str>) -> Result<Options> {
    let known = REGISTRY.options();
    let mut options = Options::new();
    for option in text.unwrap_or("").split(',').filter(|option| !option.is_empty()) {
        let Some((name, value)) = option.split_once('=') else {
            return Err(Failure::invalid(format!("option {option} has no value: NAME=VALUE")));
        };
        let Some((spec, _)) = known.iter().find(|(spec, _)| spec.name == name) else {
            let names: Vec<_> = known.iter().map(|(spec, _)| spec.name).collect();
            let names = names.join(", ");
            return Err(Failure::invalid(format!("there is no option {name}: expected {names}")));
        };
        options.insert(spec.name, value.to_owned());
    }
    Ok(options)
}

fn create(path: &Path, engine: &str, pool_bytes: u64, options: &Options) -> Result<()> {
    let plan = REGISTRY.plan(REGISTRY.engine(engine)?, options)?;
    let least_bytes = plan.smallest_bytes();
    if pool_bytes < least_bytes {
        return Err(Failure::invalid(format!(
            "a {engine} pool of {pool_bytes} bytes is too small: it needs {least_bytes}"
        )));
    }
    let created = RegionOptions { create_bytes: Some(pool_bytes), ..RegionOptions::default() };
    let region = Region::open(path, &created)?;
    plan.create(&region).map_err(|error| {
        // The file is new, and of no use. If it stays, the next call names it.
        let _ = std::fs::remove_file(path);
        error.into()
    })
}

/// Opens the pool in the file or devdax device at `path`, and completes writes that a crash cut
/// off. `backing` is the file, disk or URL behind a log or cache pool, `dram` a tier before the
/// pool, such as "transit:64M"; both may be null. `flags` is 0 or `TIDEGATE_READ_ONLY`. Returns the
/// pool, or null.
///
/// # Safety
/// `path`, `backing` and `dram` are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_open(
    path: *const c_char,
    backing: *const c_char,
    dram: *const c_char,
    flags: c_uint,
) -> *mut TidegatePool {
    answer(std::ptr::null_mut(), || {
        // SAFETY: passed on from the caller.
        let path = unsafe { edge::path(path) }?;
        // SAFETY: passed on from the caller.
        let backing = unsafe { edge::optional_word("backing", backing) }?;
        // SAFETY: passed on from the caller.
        let dram = unsafe { edge::optional_word("dram", dram) }?;
        expect_flags(flags, TIDEGATE_READ_ONLY)?;
        let pool = open(path, backing, dram, flags & TIDEGATE_READ_ONLY != 0)?;
        Ok(Box::into_raw(Box::new(pool)))
    })
}

fn open(
    path: &Path,
    backing: Option<&str>,
    dram: Option<&str>,
    read_only: bool,
) -> Result<TidegatePool> {
    let region = Region::open(path, &RegionOptions { read_only, ..RegionOptions::default() })?;
    let mut options = StackOptions::alone(Arc::new(region), path.to_path_buf());
    options.backing =
        backing.map(str::parse::<BackingUrl>).transpose().map_err(Failure::invalid)?;
    if let Some(dram) = dram {
        options.dram = dram.parse().map_err(|error| Failure::invalid(format!("{error}")))?;
    }
    let stack = REGISTRY.open(options)?;
    let device = stack.top();
    Ok(TidegatePool { stack, device })
}

fn expect_flags(flags: c_uint, known: c_uint) -> Result<()> {
    let unknown = flags & !known;
    if unknown == 0 {
        return Ok(());
    }
    Err(Failure::invalid(format!("flags {unknown:#x} are not known, expected {known:#x} or 0")))
}

/// Writes all that a DRAM tier holds to the pool, and closes the pool, which may be null. A pool
/// that fails to close is closed all the same: flush it first. Returns 0 or -1.
///
/// # Safety
/// `pool` is null or a handle that nothing uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_close(pool: *mut TidegatePool) -> c_int {
    answer(-1, || {
        if pool.is_null() {
            return Ok(0);
        }
        // SAFETY: the handle was made of a box, and is used here for the last time.
        let pool = unsafe { Box::from_raw(pool) };
        pool.stack.close()?;
        Ok(0)
    })
}

/// Returns the size of a block in bytes, or 0 for a null pointer. Offsets and lengths of all
/// functions are multiples.
///
/// # Safety
/// `pool` is null or an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_block_bytes(pool: *const TidegatePool) -> u32 {
    // SAFETY: passed on from the caller.
    answer(0, || Ok(unsafe { edge::pool(pool) }?.device.geometry().block_bytes))
}

/// Returns the number of blocks, or 0 for a null pointer.
///
/// # Safety
/// `pool` is null or an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_blocks(pool: *const TidegatePool) -> u64 {
    // SAFETY: passed on from the caller.
    answer(0, || Ok(unsafe { edge::pool(pool) }?.device.geometry().blocks))
}

/// Reads `len` bytes at `offset` to `buffer`. Each block is as one write left it. Returns 0 or -1.
///
/// # Safety
/// `pool` is null or an open pool; `buffer` is null or has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_read(
    pool: *mut TidegatePool,
    buffer: *mut c_void,
    offset: u64,
    len: usize,
) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let pool = unsafe { edge::pool(pool) }?;
        // SAFETY: the buffer has `len` bytes.
        let data = unsafe { edge::output(buffer, len) }?;
        pool.device.read(offset, data)?;
        Ok(0)
    })
}

/// Writes `len` bytes at `offset` from `buffer`. After a crash, each block of a btt, log or cache
/// pool is all old or all new. The write is durable on return, with a DRAM tier after the next
/// `tidegate_flush`. Returns 0 or -1.
///
/// # Safety
/// `pool` is null or an open pool; `buffer` is null or has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_write(
    pool: *mut TidegatePool,
    buffer: *const c_void,
    offset: u64,
    len: usize,
) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let pool = unsafe { edge::pool(pool) }?;
        // SAFETY: the buffer has `len` bytes.
        let data = unsafe { edge::input(buffer, len) }?;
        pool.device.write(offset, data, WriteFlags::default())?;
        Ok(0)
    })
}

/// Makes `len` bytes at `offset` read as zeroes. Returns 0 or -1.
///
/// # Safety
/// `pool` is null or an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_zero(pool: *mut TidegatePool, offset: u64, len: u64) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let pool = unsafe { edge::pool(pool) }?;
        pool.device.write_zeroes(offset, len, ZeroFlags::default())?;
        Ok(0)
    })
}

/// Lets reads of the block at `offset` fail with `EIO` until it is written. Only a btt pool without
/// a DRAM tier can do so. Returns 0 or -1.
///
/// # Safety
/// `pool` is null or an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_set_error(pool: *mut TidegatePool, offset: u64) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let pool = unsafe { edge::pool(pool) }?;
        let geometry = pool.device.geometry();
        if geometry.read_only {
            return Err(DeviceError::read_only(offset, geometry.block_bytes.into()).into());
        }
        pool.stack.set_error(offset)?;
        Ok(0)
    })
}

/// Makes all writes that have returned durable. Returns 0 or -1.
///
/// # Safety
/// `pool` is null or an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_flush(pool: *mut TidegatePool) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        unsafe { edge::pool(pool) }?.device.flush()?;
        Ok(0)
    })
}

/// Looks for damage in the pool in the file at `path`, which no process may have open. `flags` is 0
/// or `TIDEGATE_REPAIR`. Returns the number of faults that remain, or -1.
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tidegate_check(path: *const c_char, flags: c_uint) -> i64 {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let path = unsafe { edge::path(path) }?;
        expect_flags(flags, TIDEGATE_REPAIR)?;
        let repair = flags & TIDEGATE_REPAIR != 0;
        let options = RegionOptions { read_only: !repair, ..RegionOptions::default() };
        let region = Region::open(path, &options)?;
        let (_, checked) = REGISTRY.check(region, repair, &mut |_| ())?;
        Ok(i64::try_from(checked.faults).unwrap_or(i64::MAX))
    })
}

/// Returns the message of the calling thread's last error, or an empty text. It is valid until the
/// thread's next error.
#[unsafe(no_mangle)]
pub extern "C" fn tidegate_errormsg() -> *const c_char {
    edge::last_message()
}

/// Returns the version of this library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn tidegate_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}
