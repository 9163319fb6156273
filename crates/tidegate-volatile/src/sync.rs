//! Hooks: syncs.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_long, c_uint, c_void};

use libc::off_t;
use tidegate_interpose::cancel;
use tidegate_interpose::file_systems::REAL_SYNC;
use tidegate_interpose::raw::{self, words};

use crate::confined::is_confined;
use crate::place;

/// All flags that `sync_file_range` has.
const RANGE_FLAGS: c_uint = libc::SYNC_FILE_RANGE_WAIT_BEFORE
    | libc::SYNC_FILE_RANGE_WRITE
    | libc::SYNC_FILE_RANGE_WAIT_AFTER;

/// Returns `fd` as an argument that makes a filter of system calls let the call pass. The kernel
/// ignores the upper half; a filter of the program's own may not.
fn passing(fd: c_int) -> u64 {
    let mark = if is_confined() { 0 } else { u64::from(REAL_SYNC) };
    mark << 32 | u64::from(fd.cast_unsigned())
}

/// Answers the sync `number` of the file behind `fd`, or makes that system call.
pub(crate) fn synced(number: c_long, fd: c_int) -> c_int {
    if place::is_answered(fd) {
        return 0;
    }
    // SAFETY: no pointers.
    raw::returned_int(unsafe { raw::call(number, words![passing(fd)]) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fsync(fd: c_int) -> c_int {
    cancel::point();
    synced(libc::SYS_fsync, fd)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fdatasync(fd: c_int) -> c_int {
    cancel::point();
    synced(libc::SYS_fdatasync, fd)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn syncfs(fd: c_int) -> c_int {
    synced(libc::SYS_syncfs, fd)
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn sync() {}

/// Removes the flags where syncs are answered: the kernel then only checks the arguments.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sync_file_range(
    fd: c_int,
    offset: off_t,
    len: off_t,
    flags: c_uint,
) -> c_int {
    cancel::point();
    let flags = if place::is_answered(fd) { flags & !RANGE_FLAGS } else { flags };
    let arguments = words![passing(fd), offset, len, flags];
    // SAFETY: no pointers.
    raw::returned_int(unsafe { raw::call(libc::SYS_sync_file_range, arguments) })
}

/// Turns `MS_SYNC` into `MS_ASYNC`: the kernel then only checks the arguments.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn msync(at: *mut c_void, len: usize, flags: c_int) -> c_int {
    cancel::point();
    let both = libc::MS_SYNC | libc::MS_ASYNC;
    let flags = if flags & both == libc::MS_SYNC { flags ^ both } else { flags };
    // SAFETY: the kernel checks the range, and changes no memory of the program.
    raw::returned_int(unsafe { raw::call(libc::SYS_msync, words![at, len, flags]) })
}
