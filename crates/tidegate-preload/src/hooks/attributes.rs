//! Hooks: owner, mode, times and extended attributes of files.
//!
//! Invariant: the kernel makes all these changes. Each is counted as pending, and makes the next
//! sync of a covered file real. A file whose names the log has leaves the log first, and so does a
//! file whose times are set. `fchown` to the present owner is an exception (`covered/owner.rs`).
#![allow(unsafe_code)] // C's functions

use std::ffi::{c_char, c_int, c_void};

use libc::{gid_t, mode_t, size_t, timespec, timeval, uid_t, utimbuf};

use crate::covered::metadata::{Named, Sets, counted_attributes};
use crate::covered::{Open, chown_to_same};
use crate::sys::{next, raw};

macro_rules! hooks {
    ($sets:ident: $($name:ident($($argument:ident: $kind:ty),*): $named:expr;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> c_int {
            let Some(function) = next::$name.get() else { return raw::failed_int(libc::ENOSYS) };
            // SAFETY: the C library's function of this type, with the caller's arguments.
            counted_attributes($named, Sets::$sets, || unsafe { function($($argument),*) })
        }
    )*};
}

hooks! {
    Times:
    utime(path: *const c_char, times: *const utimbuf): Named::path(path);
    utimes(path: *const c_char, times: *const timeval): Named::path(path);
    lutimes(path: *const c_char, times: *const timeval): Named::entry(libc::AT_FDCWD, path);
    futimes(fd: c_int, times: *const timeval): Named::Descriptor(fd);
    futimesat(directory: c_int, path: *const c_char, times: *const timeval): Named::at(directory, path, 0);
    futimens(fd: c_int, times: *const timespec): Named::Descriptor(fd);
    utimensat(directory: c_int, path: *const c_char, times: *const timespec, flags: c_int): Named::at(directory, path, flags);
}

hooks! {
    Others:
    chmod(path: *const c_char, mode: mode_t): Named::path(path);
    lchmod(path: *const c_char, mode: mode_t): Named::entry(libc::AT_FDCWD, path);
    fchmod(fd: c_int, mode: mode_t): Named::Descriptor(fd);
    fchmodat(directory: c_int, path: *const c_char, mode: mode_t, flags: c_int): Named::at(directory, path, flags);
    chown(path: *const c_char, uid: uid_t, gid: gid_t): Named::path(path);
    lchown(path: *const c_char, uid: uid_t, gid: gid_t): Named::entry(libc::AT_FDCWD, path);
    fchownat(directory: c_int, path: *const c_char, uid: uid_t, gid: gid_t, flags: c_int): Named::at(directory, path, flags);
    setxattr(path: *const c_char, name: *const c_char, value: *const c_void, len: size_t, flags: c_int): Named::path(path);
    lsetxattr(path: *const c_char, name: *const c_char, value: *const c_void, len: size_t, flags: c_int): Named::entry(libc::AT_FDCWD, path);
    fsetxattr(fd: c_int, name: *const c_char, value: *const c_void, len: size_t, flags: c_int): Named::Descriptor(fd);
    removexattr(path: *const c_char, name: *const c_char): Named::path(path);
    lremovexattr(path: *const c_char, name: *const c_char): Named::entry(libc::AT_FDCWD, path);
    fremovexattr(fd: c_int, name: *const c_char): Named::Descriptor(fd);
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C-unwind" fn fchown(fd: c_int, uid: uid_t, gid: gid_t) -> c_int {
    let Some(function) = next::fchown.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the C library's function of this type, with the caller's arguments.
    let call = || unsafe { function(fd, uid, gid) };
    let made = Open::of(fd).and_then(|open| chown_to_same(&open, uid, gid, call));
    made.unwrap_or_else(|| counted_attributes(Named::Descriptor(fd), Sets::Others, call))
}
