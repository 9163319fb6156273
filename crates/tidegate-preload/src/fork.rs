//! Hooks: forks that run none of the C library's handlers: `_Fork`, and `clone` where the child gets a copy of the memory.
//!
//! Invariant: the child says that it is another process before it runs any of the program.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_void};

use libc::pid_t;

use crate::next::{self, Entry};
use crate::{process, raw};

/// Runs `fork`, whose result in the child is 0.
pub(crate) fn forking<N: PartialEq + From<bool>>(fork: impl FnOnce() -> N) -> N {
    if process::log().is_none() {
        return fork();
    }
    process::forking();
    let result = fork();
    if result == N::from(false) {
        process::forked();
    } else {
        process::forking_done();
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn _Fork() -> pid_t {
    let Some(fork) = next::_Fork.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the same function.
    forking(|| unsafe { fork() })
}

/// What the program wants a child to run.
struct Start {
    entry: Entry,
    argument: *mut c_void,
}

/// Runs in a child, with its copy of the parent's [`Start`].
extern "C-unwind" fn started(start: *mut c_void) -> c_int {
    process::forked();
    // SAFETY: `clone` has left it there; its frame is below in this memory, too.
    let start = unsafe { &*start.cast::<Start>() };
    (start.entry)(start.argument)
}

/// The last three are given where the flags want them.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn clone(
    entry: Option<Entry>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut pid_t,
    storage: *mut c_void,
    child: *mut pid_t,
) -> c_int {
    let (Some(clone), Some(entry)) = (next::clone.get(), entry) else {
        return raw::failed_int(libc::EINVAL);
    };
    if flags & libc::CLONE_VM != 0 || process::log().is_none() {
        // SAFETY: the same function.
        return unsafe { clone(entry, stack, flags, argument, parent, storage, child) };
    }
    let start = Start { entry, argument };
    let at = (&raw const start).cast_mut().cast();
    process::forking();
    // SAFETY: the same function; what is at `at` is in the child's memory, too.
    let result = unsafe { clone(started, stack, flags, at, parent, storage, child) };
    process::forking_done();
    result
}
