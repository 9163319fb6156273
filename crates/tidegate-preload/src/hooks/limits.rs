//! Hooks: limits of the process.
//!
//! Invariant: the largest file that this process may make is known here
//! ([`process::file_bytes_max`]): a process that is killed for a larger write has not made it, and
//! its record must not be completed for it. A limit that another process sets counts from the next
//! one that this one sets. A program that limits its address space has all of that for itself: the
//! log is given up before, which the process has mapped.
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_uint};
use std::ptr;

use libc::{pid_t, rlimit};
use tidegate::log::cover::Cause;

use crate::hooks::rights;
use crate::state::process;
use crate::sys::raw::{self, words};
use crate::sys::readable::is_readable;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn prlimit64(
    process: pid_t,
    resource: c_uint,
    limit: *const rlimit,
    before: *mut rlimit,
) -> c_int {
    if resource == libc::RLIMIT_AS && limits_own_memory(process, limit) {
        rights::give_up_for(Cause::MemoryLimit);
    }
    // SAFETY: the program's own arguments; the structure has 64 bits for each limit here.
    let result =
        unsafe { raw::call(libc::SYS_prlimit64, words![process, resource, limit, before]) };
    if resource == libc::RLIMIT_FSIZE && !limit.is_null() && process::log().is_some() {
        process::find_file_limit();
    }
    raw::returned_int(result)
}

/// Returns whether the program limits its address space, which the log's memory counts in.
fn limits_own_memory(process: pid_t, limit: *const rlimit) -> bool {
    /// No machine has so much.
    const UNLIMITED_BYTES: u64 = 1 << 46;
    let is_own = process == 0 || process.cast_unsigned() == process::number();
    is_own
        && is_readable(limit.cast(), size_of::<rlimit>())
        // SAFETY: readable.
        && unsafe { limit.read_unaligned() }.rlim_cur < UNLIMITED_BYTES
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn prlimit(
    process: pid_t,
    resource: c_uint,
    limit: *const rlimit,
    before: *mut rlimit,
) -> c_int {
    // SAFETY: the same function.
    unsafe { prlimit64(process, resource, limit, before) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setrlimit64(resource: c_uint, limit: *const rlimit) -> c_int {
    // SAFETY: what the C library does: 0 is the caller.
    unsafe { prlimit64(0, resource, limit, ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn setrlimit(resource: c_uint, limit: *const rlimit) -> c_int {
    // SAFETY: the same function.
    unsafe { setrlimit64(resource, limit) }
}
