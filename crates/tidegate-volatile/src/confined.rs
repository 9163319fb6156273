//! Programs that install a filter of system calls: it may kill the program for calls that the
//! program does not make itself. From then on the hooks make the program's own calls only. The
//! filter of `tidegate run`, if there is one, still answers syncs.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_long, c_ulong};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use tidegate_interpose::raw::{self, words};

static IS_CONFINED: AtomicBool = AtomicBool::new(false);

/// Returns whether the process may have installed a filter.
pub(crate) fn is_confined() -> bool {
    IS_CONFINED.load(Relaxed)
}

/// Notes a system call that installs a filter, before it is made.
pub(crate) fn before(number: c_long, first: c_int) {
    let is_request = number == libc::SYS_prctl && first == libc::PR_SET_SECCOMP;
    if is_request || number == libc::SYS_seccomp {
        IS_CONFINED.store(true, Relaxed);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    before(libc::SYS_prctl, option);
    let arguments = words![option, second, third, fourth, fifth];
    // SAFETY: the caller's arguments; the kernel ignores those that the option does not take.
    raw::returned_int(unsafe { raw::call(libc::SYS_prctl, arguments) })
}
