//! Hooks: `mount`, `umount` and their kin.
//!
//! A file system that is stacked on others changes their files inside the kernel, under names and
//! numbers of its own. Before one is mounted, logging is suspended until the session ends: a mount
//! outlives the process that makes it.
//!
//! The supervisor holds descriptors of files and file systems whose records are not retired. A
//! program that unmounts a file system, or makes it read-only, waits until all records are retired
//! and the descriptors are closed: on a read-only file system no record can be retired.
//!
//! On a frozen file system no record can be retired either, and a program may thaw it only after
//! another one that cannot be watched has run. So nothing is logged from before a freeze until the
//! thaw, which another process may make.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};

use tidegate::log::cover::Cause;

use crate::state::{process, supervisor};
use crate::sys::raw::{self, words};
use crate::sys::readable::text_up_to;
use crate::sys::signals::SignalsBlocked;

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

/// Waits until all records are retired, and the supervisor has closed its descriptors.
fn about_to_leave() {
    if process::log().is_some_and(tidegate::log::Log::has_stories) {
        supervisor::flush();
    }
}

/// The number that stands for the session instead of a process. Without a cause, the supervisor
/// suspends logging until the session is resumed.
const SESSION: u32 = 0;

/// Freezes a file system by `call`, and suspends logging until it is thawed.
pub(super) fn freezing(call: impl FnOnce() -> c_int) -> c_int {
    let is_logging = process::log().is_some();
    let _signals = is_logging.then(SignalsBlocked::new);
    if is_logging {
        supervisor::suspend(SESSION, None, c"");
    }
    let result = call();
    if is_logging && result < 0 {
        resume_session();
    }
    result
}

/// Thaws a file system by `call`, and resumes logging.
pub(super) fn thawing(call: impl FnOnce() -> c_int) -> c_int {
    let is_logging = process::log().is_some();
    let _signals = is_logging.then(SignalsBlocked::new);
    let result = call();
    if is_logging && result >= 0 {
        resume_session();
    }
    result
}

/// Resumes logging; the caller still sees its own error number.
fn resume_session() {
    let errno = raw::errno();
    supervisor::resume(SESSION);
    raw::set_errno(errno);
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn mount(
    source: *const c_char,
    target: *const c_char,
    kind: *const c_char,
    flags: c_ulong,
    data: *const c_void,
) -> c_int {
    const READ_ONLY: c_ulong = libc::MS_REMOUNT | libc::MS_RDONLY;
    if flags & READ_ONLY == READ_ONLY {
        about_to_leave();
    }
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

/// `mount -o remount` makes a file system read-only by this call where the kernel has it.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fsconfig(
    fd: c_int,
    command: c_uint,
    key: *const c_char,
    value: *const c_void,
    number: c_int,
) -> c_int {
    const FSCONFIG_CMD_RECONFIGURE: c_uint = 7;
    if command == FSCONFIG_CMD_RECONFIGURE {
        about_to_leave();
    }
    // SAFETY: the caller's arguments go to the kernel as they are.
    raw::returned_int(unsafe {
        raw::call(libc::SYS_fsconfig, words![fd, command, key, value, number])
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn mount_setattr(
    directory: c_int,
    path: *const c_char,
    flags: c_uint,
    attributes: *mut c_void,
    bytes: libc::size_t,
) -> c_int {
    about_to_leave();
    let arguments = words![directory, path, flags, attributes, bytes];
    // SAFETY: the caller's arguments go to the kernel as they are.
    raw::returned_int(unsafe { raw::call(libc::SYS_mount_setattr, arguments) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn umount2(target: *const c_char, flags: c_int) -> c_int {
    about_to_leave();
    // SAFETY: the caller's arguments go to the kernel as they are.
    raw::returned_int(unsafe { raw::call(libc::SYS_umount2, words![target, flags]) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn umount(target: *const c_char) -> c_int {
    // SAFETY: the caller's target, and no flags.
    unsafe { umount2(target, 0) }
}
