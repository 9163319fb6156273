//! Hooks: limits of the process.
//!
//! Invariants:
//! 1. The library knows the largest file that this process may make ([`process::file_bytes_max`]).
//!    A process that is killed for a larger write has not made the write, and its record must not
//!    be completed. A limit that another process sets is noticed when this process next sets one.
//! 2. Before a program limits its address space, the log is given up: its mappings would count.
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
    // SAFETY: the caller's arguments; the structure has 64 bits for each limit here.
    let result =
        unsafe { raw::call(libc::SYS_prlimit64, words![process, resource, limit, before]) };
    if resource == libc::RLIMIT_FSIZE && !limit.is_null() && process::log().is_some() {
        process::find_file_limit();
    }
    raw::returned_int(result)
}

/// Returns whether the program limits its address space, where the log's mappings count.
fn limits_own_memory(process: pid_t, limit: *const rlimit) -> bool {
    /// No machine has so much memory.
    const UNLIMITED_BYTES: u64 = 1 << 46;
    let is_own = process == 0 || process.cast_unsigned() == process::number();
    is_own
        && is_readable(limit.cast(), size_of::<rlimit>())
        // SAFETY: `is_readable` has checked the limit.
        && unsafe { limit.read_unaligned() }.rlim_cur < UNLIMITED_BYTES
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn prlimit(
    process: pid_t,
    resource: c_uint,
    limit: *const rlimit,
    before: *mut rlimit,
) -> c_int {
    // SAFETY: `prlimit` and `prlimit64` take the same arguments on 64-bit machines.
    unsafe { prlimit64(process, resource, limit, before) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setrlimit64(resource: c_uint, limit: *const rlimit) -> c_int {
    // SAFETY: the caller's limit; process 0 is the caller.
    unsafe { prlimit64(0, resource, limit, ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn setrlimit(resource: c_uint, limit: *const rlimit) -> c_int {
    // SAFETY: `setrlimit` and `setrlimit64` take the same arguments on 64-bit machines.
    unsafe { setrlimit64(resource, limit) }
}
