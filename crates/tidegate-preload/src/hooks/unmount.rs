//! Hooks: `umount` and its kin.
//!
//! The supervisor holds descriptors of files and file systems whose records are not retired. A
//! program that unmounts one waits until all are retired and the descriptors are closed.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_char, c_int};

use crate::state::{process, supervisor};
use crate::sys::raw::{self, words};

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
