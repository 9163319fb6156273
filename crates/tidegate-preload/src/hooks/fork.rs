//! Hooks: `_Fork` and `clone`, which do not run the fork handlers of the C library, and `unshare`.
//!
//! Invariants:
//! 1. A child with a copy of the memory announces itself as another process before it runs any code
//!    of the program. A child in other namespaces gives the log up before that: its process numbers
//!    mean other processes outside.
//! 2. Before a thread leaves the process's table of descriptors, or another process comes to share
//!    the table, all files of the process leave the log. After that, descriptors are looked up in
//!    the kernel.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_void};

use libc::pid_t;

use crate::covered::unseen;
use crate::hooks::{lifecycle, rights};
use crate::state::process;
use crate::sys::next::{self, Entry};
use crate::sys::raw;

/// Runs `fork`, which returns 0 in the child; `flags` are as for `clone`.
pub(crate) fn forking<N: PartialEq + From<bool>>(flags: u64, fork: impl FnOnce() -> N) -> N {
    let shares_descriptors = flags & u64::from(libc::CLONE_FILES.cast_unsigned()) != 0;
    let result = if shares_descriptors { unseen::sharing_table(fork) } else { fork() };
    if result == N::from(false) {
        in_child(flags);
    }
    result
}

/// Prepares a child that has a copy of the memory, before it runs any code of the program.
fn in_child(flags: u64) {
    lifecycle::forked();
    if rights::leads_to_namespaces(flags) {
        rights::give_up();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn _Fork() -> pid_t {
    let Some(fork) = next::_Fork.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the C library's function of this type, with the caller's arguments.
    forking(0, || unsafe { fork() })
}

/// Flags that make a thread of this process, as far as the hooks tell threads from processes.
const THREAD: c_int = libc::CLONE_VM | libc::CLONE_FILES;

/// The function that the program passes to `clone` for the child.
struct Start {
    entry: Entry,
    argument: *mut c_void,
    flags: u64,
}

/// Runs in a child, with its copy of the parent's [`Start`].
extern "C-unwind" fn started(start: *mut c_void) -> c_int {
    // SAFETY: the hook of `clone` passes the address of its `Start`, and its frame is in the
    // child's copy of the memory.
    let start = unsafe { &*start.cast::<Start>() };
    in_child(start.flags);
    (start.entry)(start.argument)
}

/// Passes the last three arguments on unread: callers give them only if the flags need them.
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
    // SAFETY: the C library's function of this type, with the caller's arguments.
    let call = || unsafe { clone(entry, stack, flags, argument, parent, storage, child) };
    if process::log().is_none() || flags & THREAD == THREAD {
        return call();
    }
    if flags & libc::CLONE_VM != 0 {
        return in_same_memory(flags, call);
    }
    let start = Start { entry, argument, flags: u64::from(flags.cast_unsigned()) };
    let at = (&raw const start).cast_mut().cast();
    // SAFETY: the C library's function; `at` is valid in the child's copy of the memory, too.
    let call = || unsafe { clone(started, stack, flags, at, parent, storage, child) };
    if flags & libc::CLONE_FILES == 0 { call() } else { unseen::sharing_table(call) }
}

/// Makes a child that shares this memory and has descriptors of its own.
fn in_same_memory(flags: c_int, clone: impl FnOnce() -> c_int) -> c_int {
    if flags & libc::CLONE_VFORK == 0 {
        return unseen::leaving_table(clone);
    }
    let before = process::become_vfork_child();
    let result = clone();
    process::end_vfork_child(before);
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn unshare(flags: c_int) -> c_int {
    if rights::leads_to_namespaces(u64::from(flags.cast_unsigned())) {
        rights::give_up();
    }
    // SAFETY: the call takes no pointers.
    let call = || raw::returned_int(unsafe { raw::call(libc::SYS_unshare, raw::words![flags]) });
    if flags & libc::CLONE_FILES == 0 { call() } else { unseen::leaving_table(call) }
}
