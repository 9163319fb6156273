//! Hooks: `_Fork` and `clone`, which run none of the C library's handlers, and `unshare`.
//!
//! Invariants:
//! 1. A child with a copy of the memory says that it is another process before it runs any of the
//!    program. One in other namespaces has given the log up by then: its numbers mean other
//!    processes to the others.
//! 2. Where descriptors are no longer those of the whole process, its files have left the log, and
//!    the thread asks the kernel what its descriptors are.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_void};

use libc::pid_t;

use crate::covered::unseen;
use crate::hooks::{lifecycle, rights};
use crate::state::process;
use crate::sys::next::{self, Entry};
use crate::sys::raw;

/// Runs `fork`, whose result in the child is 0; `flags` are those of `clone`.
pub(crate) fn forking<N: PartialEq + From<bool>>(flags: u64, fork: impl FnOnce() -> N) -> N {
    let shares_descriptors = flags & u64::from(libc::CLONE_FILES.cast_unsigned()) != 0;
    let result = if shares_descriptors { unseen::sharing_table(fork) } else { fork() };
    if result == N::from(false) {
        in_child(flags);
    }
    result
}

/// In a child with a copy of the memory, before it runs any of the program.
fn in_child(flags: u64) {
    lifecycle::forked();
    if rights::leads_to_namespaces(flags) {
        rights::give_up();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn _Fork() -> pid_t {
    let Some(fork) = next::_Fork.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the same function.
    forking(0, || unsafe { fork() })
}

/// Flags of a thread of this process, as far as hooks know the difference.
const THREAD: c_int = libc::CLONE_VM | libc::CLONE_FILES;

/// What the program wants a child to run.
struct Start {
    entry: Entry,
    argument: *mut c_void,
    flags: u64,
}

/// Runs in a child, with its copy of the parent's [`Start`].
extern "C-unwind" fn started(start: *mut c_void) -> c_int {
    // SAFETY: `clone` has left it there; its frame is below in this memory, too.
    let start = unsafe { &*start.cast::<Start>() };
    in_child(start.flags);
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
    // SAFETY: the same function.
    let call = || unsafe { clone(entry, stack, flags, argument, parent, storage, child) };
    if process::log().is_none() || flags & THREAD == THREAD {
        return call();
    }
    if flags & libc::CLONE_VM != 0 {
        return in_same_memory(flags, call);
    }
    let start = Start { entry, argument, flags: u64::from(flags.cast_unsigned()) };
    let at = (&raw const start).cast_mut().cast();
    // SAFETY: the same function; what is at `at` is in the child's memory, too.
    let call = || unsafe { clone(started, stack, flags, at, parent, storage, child) };
    if flags & libc::CLONE_FILES == 0 { call() } else { unseen::sharing_table(call) }
}

/// Makes a child in this memory that has descriptors of its own.
fn in_same_memory(flags: c_int, clone: impl FnOnce() -> c_int) -> c_int {
    if flags & libc::CLONE_VFORK == 0 {
        return unseen::leaving_table(clone);
    }
    process::set_vfork_child(true);
    let result = clone();
    process::set_vfork_child(false);
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn unshare(flags: c_int) -> c_int {
    if rights::leads_to_namespaces(u64::from(flags.cast_unsigned())) {
        rights::give_up();
    }
    // SAFETY: no pointers.
    let call = || raw::returned_int(unsafe { raw::call(libc::SYS_unshare, raw::words![flags]) });
    if flags & libc::CLONE_FILES == 0 { call() } else { unseen::leaving_table(call) }
}
