//! The functions of PMDK's libpmemblk 1.x, over a [`Btt`].
//!
//! The man page libpmemblk(7) gives their meaning. A block is written all or not at all, and is
//! durable when the function returns. Any number of threads may use a pool at once. A function that
//! fails sets `errno` and the message of the calling thread. Pool sets, and the options that
//! libpmemblk takes from the environment, are not supported.

use std::ffi::{c_char, c_int, c_longlong, c_uint, c_void};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use ::tidegate::btt::{Btt, BttOptions, Summary, Version, check, create, smallest_bytes};
use ::tidegate::device::BlockDeviceExt;
use ::tidegate::pmem::{Region, RegionOptions};

use crate::edge::{self, Failure, Result, answer};

/// The version of the functions, as in libpmemblk.h.
const MAJOR: c_uint = 1;
/// The minor version of the functions.
const MINOR: c_uint = 1;
/// Bytes at the start of a file that must be zero where a pool is made of an existing file.
const HEADER_BYTES: usize = 4096;

/// An open pool; `PMEMblkpool` in C.
pub struct PmemBlkPool {
    btt: Btt,
    block_bytes: usize,
}

impl PmemBlkPool {
    fn new(region: Region) -> Result<Self> {
        // No store may find a full file system.
        region.fill_holes()?;
        let btt = Btt::open(Arc::new(region))?;
        let block_bytes = btt.summary().block_bytes as usize;
        Ok(Self { btt, block_bytes })
    }

    /// Returns the number of a block that C gives.
    fn number(&self, block: c_longlong) -> Result<u64> {
        let number = u64::try_from(block).ok().filter(|&number| number < self.btt.summary().blocks);
        number.ok_or_else(|| {
            let blocks = self.btt.summary().blocks;
            Failure::invalid(format!("block {block} is outside the pool's {blocks} blocks"))
        })
    }
}

/// Makes a pool of `poolsize` bytes with blocks of `bsize` bytes in a new file at `path`, with the
/// permissions `mode`. With `poolsize` 0, makes the pool of an existing file, which must begin with
/// zeroes. Returns the open pool, or null.
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pmemblk_create(
    path: *const c_char,
    bsize: usize,
    poolsize: usize,
    mode: libc::mode_t,
) -> *mut PmemBlkPool {
    answer(std::ptr::null_mut(), || {
        // SAFETY: passed on from the caller.
        let path = unsafe { edge::path(path) }?;
        let block_bytes = u32::try_from(bsize).ok().filter(|&bytes| bytes > 0);
        let block_bytes = block_bytes
            .ok_or_else(|| Failure::invalid(format!("blocks cannot have {bsize} bytes")))?;
        let options = BttOptions::libpmemblk(block_bytes);
        let pool = if poolsize == 0 {
            of_existing_file(path, &options, mode)
        } else {
            of_new_file(path, poolsize as u64, &options, mode)
        };
        Ok(Box::into_raw(Box::new(pool?)))
    })
}

fn of_new_file(
    path: &Path,
    pool_bytes: u64,
    options: &BttOptions,
    mode: libc::mode_t,
) -> Result<PmemBlkPool> {
    check_size(pool_bytes, options)?;
    let created = RegionOptions { create_bytes: Some(pool_bytes), ..RegionOptions::default() };
    let region = Region::open(path, &created)?;
    let pool = format(region, options).and_then(|pool| set_mode(path, mode).map(|()| pool));
    pool.inspect_err(|_| {
        // The file is new, and of no use. If it stays, the next call names it.
        let _ = std::fs::remove_file(path);
    })
}

fn of_existing_file(path: &Path, options: &BttOptions, mode: libc::mode_t) -> Result<PmemBlkPool> {
    let region = Region::open(path, &RegionOptions::default())?;
    check_size(region.len_bytes(), options)?;
    let mut header = [0; HEADER_BYTES];
    region.read(0, &mut header)?;
    if header.iter().any(|&byte| byte != 0) {
        let message = format!("{} does not begin with zeroes: it holds data", path.display());
        return Err(Failure::new(libc::EEXIST, message));
    }
    let pool = format(region, options)?;
    set_mode(path, mode)?;
    Ok(pool)
}

fn check_size(pool_bytes: u64, options: &BttOptions) -> Result<()> {
    let least_bytes = smallest_bytes(options);
    if pool_bytes >= least_bytes {
        return Ok(());
    }
    let message = format!("a pool of {pool_bytes} bytes is too small: it needs {least_bytes}");
    Err(Failure::invalid(message))
}

fn format(region: Region, options: &BttOptions) -> Result<PmemBlkPool> {
    create(&region, options)?;
    PmemBlkPool::new(region)
}

fn set_mode(path: &Path, mode: libc::mode_t) -> Result<()> {
    let file = File::open(path)?;
    if file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// Opens the pool in the file at `path`. `bsize` is the size of its blocks, or 0 for any. Returns
/// null on failure.
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pmemblk_open(path: *const c_char, bsize: usize) -> *mut PmemBlkPool {
    answer(std::ptr::null_mut(), || {
        // SAFETY: passed on from the caller.
        let path = unsafe { edge::path(path) }?;
        let region = Region::open(path, &RegionOptions::default())?;
        expect_pool(path, &Btt::summarize(&region)?, bsize)?;
        Ok(Box::into_raw(Box::new(PmemBlkPool::new(region)?)))
    })
}

/// Checks that a pool is one of libpmemblk with blocks of `bsize` bytes, or any if that is 0.
fn expect_pool(path: &Path, summary: &Summary, bsize: usize) -> Result<()> {
    let (path, found) = (path.display(), summary.block_bytes);
    if summary.version != Version::Libpmemblk {
        let version = summary.version;
        let message = format!(
            "{path} is a BTT of version {version}, which libpmemblk does not open: use libtidegate"
        );
        return Err(Failure::invalid(message));
    }
    if bsize != 0 && bsize != found as usize {
        let message = format!("{path} has blocks of {found} bytes, and {bsize} were expected");
        return Err(Failure::invalid(message));
    }
    Ok(())
}

/// Closes a pool; null is allowed.
///
/// # Safety
/// `pool` is null or a handle that nothing uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pmemblk_close(pool: *mut PmemBlkPool) {
    answer((), || {
        if !pool.is_null() {
            // SAFETY: the handle was made of a box, and is used here for the last time.
            drop(unsafe { Box::from_raw(pool) });
        }
        Ok(())
    });
}

/// Checks the pool in the file at `path`: 1 if it is consistent, 0 if not, -1 if the check cannot
/// be made.
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pmemblk_check(path: *const c_char, bsize: usize) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let path = unsafe { edge::path(path) }?;
        let read_only = RegionOptions { read_only: true, ..RegionOptions::default() };
        let region = Region::open(path, &read_only)?;
        expect_pool(path, &Btt::summarize(&region)?, bsize)?;
        let report = check::check(&region, &mut |_| ())?;
        // A block that a program marked is no inconsistency.
        Ok(c_int::from(report.faults == report.error_blocks))
    })
}

/// Returns the size of a block in bytes, or 0 for a null pointer.
///
/// # Safety
/// `pool` is null or an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pmemblk_bsize(pool: *mut PmemBlkPool) -> usize {
    // SAFETY: passed on from the caller.
    answer(0, || Ok(unsafe { edge::pool(pool) }?.block_bytes))
}

/// Returns the number of blocks, or 0 for a null pointer.
///
/// # Safety
/// `pool` is null or an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pmemblk_nblock(pool: *mut PmemBlkPool) -> usize {
    answer(0, || {
        // SAFETY: passed on from the caller.
        let blocks = unsafe { edge::pool(pool) }?.btt.summary().blocks;
        Ok(usize::try_from(blocks).unwrap_or(usize::MAX))
    })
}

/// Reads block `blockno` to `buf`, which has the bytes of a block. A block that was never written
/// is zeroes. Returns 0 or -1.
///
/// # Safety
/// `pool` is null or an open pool; `buf` is null or has the bytes of a block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pmemblk_read(
    pool: *mut PmemBlkPool,
    buf: *mut c_void,
    blockno: c_longlong,
) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let pool = unsafe { edge::pool(pool) }?;
        // SAFETY: the buffer has the bytes of a block.
        let data = unsafe { edge::output(buf, pool.block_bytes) }?;
        pool.btt.read_with_metadata(pool.number(blockno)?, data, &mut [])?;
        Ok(0)
    })
}

/// Writes block `blockno` from `buf`, which has the bytes of a block: all or not at all, and
/// durable on return. Returns 0 or -1.
///
/// # Safety
/// `pool` is null or an open pool; `buf` is null or has the bytes of a block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pmemblk_write(
    pool: *mut PmemBlkPool,
    buf: *const c_void,
    blockno: c_longlong,
) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let pool = unsafe { edge::pool(pool) }?;
        // SAFETY: the buffer has the bytes of a block.
        let data = unsafe { edge::input(buf, pool.block_bytes) }?;
        pool.btt.write_with_metadata(pool.number(blockno)?, data, &[])?;
        Ok(0)
    })
}

/// Makes block `blockno` read as zeroes; durable on return. Returns 0 or -1.
///
/// # Safety
/// `pool` is null or an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pmemblk_set_zero(pool: *mut PmemBlkPool, blockno: c_longlong) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let pool = unsafe { edge::pool(pool) }?;
        let len = pool.block_bytes as u64;
        pool.btt.discard(pool.number(blockno)? * len, len)?;
        Ok(0)
    })
}

/// Lets reads of block `blockno` fail with `EIO` until it is written; durable on return. Returns 0
/// or -1.
///
/// # Safety
/// `pool` is null or an open pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pmemblk_set_error(pool: *mut PmemBlkPool, blockno: c_longlong) -> c_int {
    answer(-1, || {
        // SAFETY: passed on from the caller.
        let pool = unsafe { edge::pool(pool) }?;
        pool.btt.set_error(pool.number(blockno)?)?;
        Ok(0)
    })
}

/// Returns null if this library has version `major`.`minor` of the functions, else a message.
#[unsafe(no_mangle)]
pub extern "C" fn pmemblk_check_version(major: c_uint, minor: c_uint) -> *const c_char {
    let has_version = answer(false, || {
        if major == MAJOR && minor <= MINOR {
            return Ok(true);
        }
        let message = format!(
            "version {major}.{minor} of libpmemblk is needed, and this one is {MAJOR}.{MINOR}"
        );
        Err(Failure::invalid(message))
    });
    if has_version { std::ptr::null() } else { edge::last_message() }
}

/// Returns the message of the calling thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn pmemblk_errormsg() -> *const c_char {
    edge::last_message()
}

/// Has no effect: this library's memory does not come from functions that a program can replace.
#[unsafe(no_mangle)]
pub extern "C" fn pmemblk_set_funcs(
    _malloc: *const c_void,
    _free: *const c_void,
    _realloc: *const c_void,
    _strdup: *const c_void,
) {
}

/// Fails: there are no parameters to read.
#[unsafe(no_mangle)]
pub extern "C" fn pmemblk_ctl_get(
    _pool: *mut PmemBlkPool,
    _name: *const c_char,
    _argument: *mut c_void,
) -> c_int {
    no_parameters()
}

/// Fails: there are no parameters to set.
#[unsafe(no_mangle)]
pub extern "C" fn pmemblk_ctl_set(
    _pool: *mut PmemBlkPool,
    _name: *const c_char,
    _argument: *mut c_void,
) -> c_int {
    no_parameters()
}

/// Fails: there are no parameters to run.
#[unsafe(no_mangle)]
pub extern "C" fn pmemblk_ctl_exec(
    _pool: *mut PmemBlkPool,
    _name: *const c_char,
    _argument: *mut c_void,
) -> c_int {
    no_parameters()
}

fn no_parameters() -> c_int {
    answer(-1, || {
        let message = "Tidegate's libpmemblk has no parameters: the functions pmemblk_ctl_* fail";
        Err(Failure::new(libc::ENOTSUP, message))
    })
}
