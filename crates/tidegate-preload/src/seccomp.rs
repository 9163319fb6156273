//! Hook: `prctl`, by which a thread gives up all system calls but `read`, `write`, `exit` and `sigreturn`.
//!
//! Invariant: before it does, whatever the process has open for writing leaves the log; from then on the thread's hooks do nothing
//! but call the C library.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_ulong};

use crate::raw::{self, words};
use crate::{absorb, process, unseen};

const SECCOMP_MODE_STRICT: c_ulong = 1;

/// Runs the call that makes the calling thread strict.
pub(crate) fn strictly(kernel: impl FnOnce() -> isize) -> isize {
    if process::log().is_none() || process::in_vfork_child() {
        return kernel();
    }
    absorb::sharing();
    unseen::all();
    absorb::shared();
    process::set_strict(true);
    let result = kernel();
    if result < 0 {
        process::set_strict(false);
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    let kernel = || {
        let arguments = words![option, second, third, fourth, fifth];
        // SAFETY: the program's own arguments; what is not given is not looked at.
        unsafe { raw::call(libc::SYS_prctl, arguments) }
    };
    let is_strict = option == libc::PR_SET_SECCOMP && second == SECCOMP_MODE_STRICT;
    raw::returned_int(if is_strict { strictly(kernel) } else { kernel() })
}
