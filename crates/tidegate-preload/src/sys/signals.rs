//! Blocks signals during operations that must be finished: those that hold a lock of the log, those
//! that have opened a descriptor, and admissions. A handler could leave them by `longjmp`, or wait
//! for that lock.
//!
//! Invariants:
//! 1. Signals are blocked only in programs that handle some, since blocking takes two system calls.
//!    Signals that a fault of the thread itself raises are not blocked: blocked, they would kill
//!    the thread.
//! 2. A thread's signals are as the program has set them once the last [`SignalsBlocked`] of the
//!    thread is dropped, in any order.
#![allow(unsafe_code)] // system calls, and C's calling convention

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sys::next;
use crate::sys::raw::{self, words};

/// Whether the program has installed a handler for a signal that comes from outside.
static HANDLES_SIGNALS: AtomicBool = AtomicBool::new(false);

const MASK_BYTES: usize = size_of::<u64>();
const SIGNALS: c_int = 64;
/// The signals that a fault of the thread itself raises.
const FAULTS: [c_int; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
];
/// All other signals, except those that the kernel does not let a program block.
const BLOCKED: u64 = {
    let (mut mask, mut at) = (!(1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1)), 0);
    while at < FAULTS.len() {
        mask &= !(1 << (FAULTS[at] - 1));
        at += 1;
    }
    mask
};

/// The state of blocking of a thread.
#[derive(Clone, Copy)]
struct Blocking {
    /// The number of [`SignalsBlocked`] that live and have blocked signals.
    count: usize,
    /// The mask before the first one.
    before: u64,
}

thread_local! {
    static BLOCKING: Cell<Blocking> = const { Cell::new(Blocking { count: 0, before: 0 }) };
}

/// While this lives, the calling thread runs no signal handler.
pub(crate) struct SignalsBlocked {
    has_blocked: bool,
    /// Not `Send`: it counts for the thread that has made it.
    of_thread: PhantomData<*const ()>,
}

impl SignalsBlocked {
    #[inline]
    pub(crate) fn new() -> Self {
        let has_blocked = HANDLES_SIGNALS.load(Ordering::Relaxed);
        if has_blocked {
            block();
        }
        Self { has_blocked, of_thread: PhantomData }
    }
}

impl Drop for SignalsBlocked {
    #[inline]
    fn drop(&mut self) {
        if self.has_blocked {
            unblock();
        }
    }
}

/// Sets the mask. Stores nothing before: until then a handler may run and not return.
#[cold]
fn block() {
    let before = set_mask(BLOCKED);
    let blocking = BLOCKING.get();
    // If signals are not blocked now, a handler of a fault has jumped out of the operations.
    let is_first = blocking.count == 0 || before & BLOCKED != BLOCKED;
    BLOCKING.set(if is_first {
        Blocking { count: 1, before }
    } else {
        Blocking { count: blocking.count + 1, ..blocking }
    });
}

/// Restores the mask after the last operation. Stores nothing after: a handler may run at once.
#[cold]
fn unblock() {
    let Blocking { count, before } = BLOCKING.get();
    let count = count.saturating_sub(1);
    BLOCKING.set(Blocking { count, before });
    if count == 0 {
        set_mask(before);
    }
}

/// Sets the mask of blocked signals of the thread. Returns the old mask.
fn set_mask(mask: u64) -> u64 {
    let mut before = 0_u64;
    let (mask, place) = (&raw const mask, &raw mut before);
    let arguments = words![libc::SIG_SETMASK, mask, place, MASK_BYTES];
    // SAFETY: a mask to read and memory to write one, both of `MASK_BYTES`.
    unsafe { raw::call(libc::SYS_rt_sigprocmask, arguments) };
    before
}

/// Looks for handlers that were installed before the library was loaded.
pub(crate) fn find_handlers() {
    // The kernel's structure: handler, flags, restorer, mask.
    let mut action = [0_u64; 4];
    for signal in 1..=SIGNALS {
        let place = action.as_mut_ptr();
        let arguments = words![signal, 0_usize, place, MASK_BYTES];
        // SAFETY: null for the new action, and memory for the old one.
        if unsafe { raw::call(libc::SYS_rt_sigaction, arguments) } == 0 {
            installed(signal, usize::try_from(action[0]).unwrap_or(0));
        }
    }
}

/// Notes that a handler is about to be installed for a signal.
fn installed(signal: c_int, handler: usize) {
    if comes_from_outside(signal, handler) {
        HANDLES_SIGNALS.store(true, Ordering::Relaxed);
    }
}

/// Returns whether a handler runs that no fault of the thread has raised.
fn comes_from_outside(signal: c_int, handler: usize) -> bool {
    let is_function = handler != libc::SIG_DFL && handler != libc::SIG_IGN;
    is_function && !FAULTS.contains(&signal)
}

/// Declares hooks of `sigaction`.
macro_rules! actions {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            signal: c_int,
            action: *const libc::sigaction,
            before: *mut libc::sigaction,
        ) -> c_int {
            let Some(sigaction) = next::sigaction.get() else { return raw::failed_int(libc::ENOSYS) };
            // SAFETY: null or the caller's action.
            if let Some(action) = unsafe { action.as_ref() } {
                installed(signal, action.sa_sigaction);
            }
            // SAFETY: the C library's function of this type, with the caller's arguments.
            unsafe { sigaction(signal, action.cast(), before.cast()) }
        }
    )*};
}
actions!(sigaction __sigaction);

/// Declares hooks of `signal` and its kin.
macro_rules! handlers {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(signal: c_int, handler: *mut c_void) -> *mut c_void {
            let Some(function) = next::$name.get() else {
                raw::set_errno(libc::ENOSYS);
                return std::ptr::without_provenance_mut(libc::SIG_ERR);
            };
            installed(signal, handler.addr());
            // SAFETY: the C library's function of this type, with the caller's arguments.
            unsafe { function(signal, handler) }
        }
    )*};
}
handlers!(signal bsd_signal ssignal sysv_signal __sysv_signal sigset);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_not_blocked() {
        assert_eq!(BLOCKED & 1 << (libc::SIGSEGV - 1), 0);
        assert_ne!(BLOCKED & 1 << (libc::SIGTERM - 1), 0);
    }

    #[test]
    fn only_functions_for_signals_from_outside_count() {
        assert!(comes_from_outside(libc::SIGALRM, 4096));
        assert!(!comes_from_outside(libc::SIGSEGV, 4096));
        assert!(!comes_from_outside(libc::SIGALRM, libc::SIG_IGN));
        assert!(!comes_from_outside(libc::SIGALRM, libc::SIG_DFL));
    }

    #[test]
    fn signals_are_blocked_where_some_are_handled_and_as_before_afterwards() {
        const SOME: u64 = 1 << (libc::SIGUSR1 - 1);
        let before = set_mask(SOME);
        installed(libc::SIGTERM, 4096);
        let blocked = SignalsBlocked::new();
        assert_eq!(set_mask(BLOCKED), BLOCKED);
        drop(blocked);
        assert_eq!(set_mask(before), SOME);
    }

    #[test]
    fn signals_come_again_with_the_last_one_that_goes() {
        let before = set_mask(0);
        installed(libc::SIGTERM, 4096);
        let (first, second) = (SignalsBlocked::new(), SignalsBlocked::new());
        drop(first);
        assert_eq!(set_mask(BLOCKED), BLOCKED);
        drop(second);
        assert_eq!(set_mask(before), 0);
    }

    /// Jumps out as the handler of a fault does.
    #[test]
    fn after_a_jump_out_signals_are_blocked_and_come_again() {
        let before = set_mask(0);
        installed(libc::SIGTERM, 4096);
        std::mem::forget(SignalsBlocked::new());
        set_mask(0);
        let blocked = SignalsBlocked::new();
        assert_eq!(set_mask(BLOCKED), BLOCKED);
        drop(blocked);
        assert_eq!(set_mask(before), 0);
    }
}
