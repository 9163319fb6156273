//! Hooks: `stat` and its kin.
//!
//! Invariant: they add nothing to what the kernel says, but for the size and times of a file that some process of the tree absorbs.
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_char, c_int, c_uint};

use tidegate::log::Log;

use crate::alike::alike;
use crate::process;
use crate::raw::{self, words};

/// What the kernel does not know of an absorbed file.
struct Newer {
    size: i64,
    /// When it was written last: seconds and nanoseconds.
    modified: (i64, i64),
}

#[inline]
fn newer(device: u64, inode: u64) -> Option<Newer> {
    let log = process::log().filter(|log| log.absorbs())?;
    let (size, modified_ns) = log.absorbed_of(device, inode)?;
    let modified_ns = i64::try_from(modified_ns).ok()?;
    let modified = (modified_ns / 1_000_000_000, modified_ns % 1_000_000_000);
    Some(Newer { size: i64::try_from(size).ok()?, modified })
}

/// Asks the kernel, and has corrected what it says: `correct` tells whether the file is absorbed.
///
/// One that is absorbed no more when that is looked at may have been when the kernel was asked, which has heard of all since: where
/// any file was settled meanwhile, it is asked once more.
fn ask(kernel: impl Fn() -> isize, correct: impl Fn() -> bool) -> c_int {
    let settled = || process::log().map(Log::settled);
    let settled_before = settled();
    let mut result = kernel();
    if result == 0 && !correct() && settled() != settled_before {
        result = kernel();
        if result == 0 {
            correct();
        }
    }
    raw::returned_int(result)
}

/// Corrects what the kernel said of a file, if it is absorbed: whether it is.
///
/// # Safety
/// `stat` is where the kernel has put its answer.
unsafe fn correct(stat: *mut libc::stat) -> bool {
    // SAFETY: the kernel has filled it.
    let stat = unsafe { &mut *stat };
    let Some(newer) = newer(stat.st_dev, stat.st_ino) else { return false };
    stat.st_size = stat.st_size.max(newer.size);
    let modified = newer.modified.max((stat.st_mtime, stat.st_mtime_nsec));
    (stat.st_mtime, stat.st_mtime_nsec) = modified;
    (stat.st_ctime, stat.st_ctime_nsec) = modified.max((stat.st_ctime, stat.st_ctime_nsec));
    true
}

/// The same for `statx`.
///
/// # Safety
/// As for [`correct`].
unsafe fn correct_extended(stat: *mut libc::statx) -> bool {
    // SAFETY: the kernel has filled it.
    let stat = unsafe { &mut *stat };
    let device = libc::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    let Some(newer) = newer(device, stat.stx_ino) else { return false };
    stat.stx_size = stat.stx_size.max(newer.size.unsigned_abs());
    for time in [&mut stat.stx_mtime, &mut stat.stx_ctime] {
        let kernels = (time.tv_sec, i64::from(time.tv_nsec));
        let (seconds, rest) = newer.modified.max(kernels);
        (time.tv_sec, time.tv_nsec) = (seconds, u32::try_from(rest).unwrap_or(0));
    }
    true
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fstat64(fd: c_int, stat: *mut libc::stat) -> c_int {
    // SAFETY: the program's own arguments.
    let kernel = || unsafe { raw::call(libc::SYS_fstat, words![fd, stat]) };
    // SAFETY: filled by the kernel.
    ask(kernel, || unsafe { correct(stat) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fstatat64(
    dir: c_int,
    path: *const c_char,
    stat: *mut libc::stat,
    flags: c_int,
) -> c_int {
    // SAFETY: the program's own arguments.
    let kernel = || unsafe { raw::call(libc::SYS_newfstatat, words![dir, path, stat, flags]) };
    // SAFETY: filled by the kernel.
    ask(kernel, || unsafe { correct(stat) })
}

const FOLLOW: c_int = 0;
const NO_FOLLOW: c_int = libc::AT_SYMLINK_NOFOLLOW;
const HERE: c_int = libc::AT_FDCWD;

alike! {
    fstat(fd: c_int, stat: *mut libc::stat) = fstat64(fd, stat);
    stat(path: *const c_char, stat: *mut libc::stat) = fstatat64(HERE, path, stat, FOLLOW);
    stat64(path: *const c_char, stat: *mut libc::stat) = fstatat64(HERE, path, stat, FOLLOW);
    lstat(path: *const c_char, stat: *mut libc::stat) = fstatat64(HERE, path, stat, NO_FOLLOW);
    lstat64(path: *const c_char, stat: *mut libc::stat) = fstatat64(HERE, path, stat, NO_FOLLOW);
    fstatat(dir: c_int, path: *const c_char, stat: *mut libc::stat, flags: c_int) = fstatat64(dir, path, stat, flags);
    __fxstat(_version: c_int, fd: c_int, stat: *mut libc::stat) = fstat64(fd, stat);
    __fxstat64(_version: c_int, fd: c_int, stat: *mut libc::stat) = fstat64(fd, stat);
    __xstat(_version: c_int, path: *const c_char, stat: *mut libc::stat) = fstatat64(HERE, path, stat, FOLLOW);
    __xstat64(_version: c_int, path: *const c_char, stat: *mut libc::stat) = fstatat64(HERE, path, stat, FOLLOW);
    __lxstat(_version: c_int, path: *const c_char, stat: *mut libc::stat) = fstatat64(HERE, path, stat, NO_FOLLOW);
    __lxstat64(_version: c_int, path: *const c_char, stat: *mut libc::stat) = fstatat64(HERE, path, stat, NO_FOLLOW);
    __fxstatat(_version: c_int, dir: c_int, path: *const c_char, stat: *mut libc::stat, flags: c_int) = fstatat64(dir, path, stat, flags);
    __fxstatat64(_version: c_int, dir: c_int, path: *const c_char, stat: *mut libc::stat, flags: c_int) = fstatat64(dir, path, stat, flags);
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn statx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    stat: *mut libc::statx,
) -> c_int {
    // SAFETY: the program's own arguments.
    let kernel = || unsafe { raw::call(libc::SYS_statx, words![dir, path, flags, mask, stat]) };
    // SAFETY: filled by the kernel.
    ask(kernel, || unsafe { correct_extended(stat) })
}
