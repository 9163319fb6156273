//! Hooks: `mount`, `umount` and their kin.
//!
//! A file system that is stacked on others writes to their files by the kernel, under names and
//! numbers of its own. So nothing is logged any more before one is mounted, until the session ends:
//! a mount outlives the process that makes it.
//!
//! The supervisor holds descriptors of files and file systems whose records are not retired. A
//! program that unmounts one waits until all are retired and the descriptors are closed.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};

use tidegate::log::cover::Cause;

use crate::state::{process, supervisor};
use crate::sys::raw::{self, words};
use crate::sys::readable::is_readable;

/// File systems whose files lie in other file systems.
const STACKED: [&CStr; 5] = [c"overlay", c"overlayfs", c"ecryptfs", c"aufs", c"unionfs"];

/// Suspends logging if `kind` is a stacked file system.
///
/// # Safety
/// `kind` is the program's own argument of a call that takes the kind of a file system.
unsafe fn about_to_stack(kind: *const c_char) {
    const KIND_BYTES: usize = 16;
    if process::log().is_none() || kind.is_null() {
        return;
    }
    let mut copy = [0_u8; KIND_BYTES];
    for (at, byte) in copy[..KIND_BYTES - 1].iter_mut().enumerate() {
        let from = kind.wrapping_add(at);
        if !is_readable(from.cast(), 1) {
            break;
        }
        // SAFETY: readable.
        *byte = unsafe { from.read() }.cast_unsigned();
        if *byte == 0 {
            break;
        }
    }
    let is_stacked = CStr::from_bytes_until_nul(&copy).is_ok_and(|kind| STACKED.contains(&kind));
    if is_stacked {
        supervisor::suspend_session(Cause::StackedMount);
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn mount(
    source: *const c_char,
    target: *const c_char,
    kind: *const c_char,
    flags: c_ulong,
    data: *const c_void,
) -> c_int {
    // SAFETY: the program's own argument.
    unsafe { about_to_stack(kind) };
    let arguments = words![source, target, kind, flags, data];
    // SAFETY: the program's own arguments.
    raw::returned_int(unsafe { raw::call(libc::SYS_mount, arguments) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fsopen(kind: *const c_char, flags: c_uint) -> c_int {
    // SAFETY: the program's own argument.
    unsafe { about_to_stack(kind) };
    // SAFETY: the program's own arguments.
    raw::returned_int(unsafe { raw::call(libc::SYS_fsopen, words![kind, flags]) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn umount2(target: *const c_char, flags: c_int) -> c_int {
    if process::log().is_some_and(tidegate::log::Log::has_stories) {
        supervisor::flush();
    }
    // SAFETY: the program's own arguments.
    raw::returned_int(unsafe { raw::call(libc::SYS_umount2, words![target, flags]) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn umount(target: *const c_char) -> c_int {
    // SAFETY: the same call without flags.
    unsafe { umount2(target, 0) }
}
