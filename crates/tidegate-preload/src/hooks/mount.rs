//! Hooks: `mount`, `umount` and their kin.
//!
//! A file system that is stacked on others changes their files inside the kernel, under names and
//! numbers of its own. Before one is mounted, logging is suspended until the session ends: a mount
//! outlives the process that makes it.
//!
//! The supervisor holds descriptors of files and file systems whose records are not retired. A
//! program that unmounts a file system waits until all records are retired and the descriptors are
//! closed.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};

use tidegate::log::cover::Cause;

use crate::state::{process, supervisor};
use crate::sys::raw::{self, words};
use crate::sys::readable::text_up_to;

/// File systems whose files lie in other file systems.
const STACKED: [&CStr; 5] = [c"overlay", c"overlayfs", c"ecryptfs", c"aufs", c"unionfs"];

/// Suspends logging if `kind`, the caller's argument, names a stacked file system.
fn about_to_stack(kind: *const c_char) {
    const KIND_BYTES: usize = 16;
    if process::log().is_some()
        && text_up_to(kind, KIND_BYTES).is_some_and(|kind| STACKED.contains(&kind))
    {
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
    about_to_stack(kind);
    let arguments = words![source, target, kind, flags, data];
    // SAFETY: the caller's arguments go to the kernel as they are.
    raw::returned_int(unsafe { raw::call(libc::SYS_mount, arguments) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fsopen(kind: *const c_char, flags: c_uint) -> c_int {
    about_to_stack(kind);
    // SAFETY: the caller's arguments go to the kernel as they are.
    raw::returned_int(unsafe { raw::call(libc::SYS_fsopen, words![kind, flags]) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn umount2(target: *const c_char, flags: c_int) -> c_int {
    if process::log().is_some_and(tidegate::log::Log::has_stories) {
        supervisor::flush();
    }
    // SAFETY: the caller's arguments go to the kernel as they are.
    raw::returned_int(unsafe { raw::call(libc::SYS_umount2, words![target, flags]) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn umount(target: *const c_char) -> c_int {
    // SAFETY: the caller's target, and no flags.
    unsafe { umount2(target, 0) }
}
