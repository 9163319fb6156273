//! No signal handler runs in the middle of an operation that holds a lock: it could leave by
//! `longjmp`, or wait for that lock.
//!
//! Invariants: signals are blocked only in programs that handle some, since blocking takes two
//! system calls. Those that a fault of the thread itself raises are not: blocked, they would kill
//! it.
#![allow(unsafe_code)] // system calls, and C's calling convention

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::next;
use crate::raw::{self, words};

/// The program has installed a handler for a signal that comes from outside.
static HANDLES_SIGNALS: AtomicBool = AtomicBool::new(false);

const MASK_BYTES: usize = size_of::<u64>();
const SIGNALS: c_int = 64;
/// What a fault of the thread itself raises.
const FAULTS: [c_int; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
];
/// All others.
const BLOCKED: u64 = {
    let (mut mask, mut at) = (u64::MAX, 0);
    while at < FAULTS.len() {
        mask &= !(1 << (FAULTS[at] - 1));
        at += 1;
    }
    mask
};

/// While this lives, the calling thread runs no signal handler.
pub(crate) struct SignalsBlocked {
    before: Option<u64>,
}

impl SignalsBlocked {
    #[inline]
    pub(crate) fn new() -> Self {
        let before = HANDLES_SIGNALS.load(Ordering::Relaxed).then(|| set_mask(BLOCKED));
        Self { before }
    }
}

impl Drop for SignalsBlocked {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before {
            set_mask(before);
        }
    }
}

/// Sets the thread's mask of blocked signals: what it was.
#[cold]
fn set_mask(mask: u64) -> u64 {
    let mut before = 0_u64;
    let (mask, place) = (&raw const mask, &raw mut before);
    let arguments = words![libc::SIG_SETMASK, mask, place, MASK_BYTES];
    // SAFETY: one mask to read and free space for one, of the size that is passed.
    unsafe { raw::call(libc::SYS_rt_sigprocmask, arguments) };
    before
}

/// Looks for handlers that were installed before the library was there.
pub(crate) fn find_handlers() {
    // The kernel's structure: handler, flags, restorer, mask.
    let mut action = [0_u64; 4];
    for signal in 1..=SIGNALS {
        let place = action.as_mut_ptr();
        let arguments = words![signal, 0_usize, place, MASK_BYTES];
        // SAFETY: memory for the answer.
        if unsafe { raw::call(libc::SYS_rt_sigaction, arguments) } == 0 {
            installed(signal, usize::try_from(action[0]).unwrap_or(0));
        }
    }
}

/// A handler is about to be installed for a signal.
fn installed(signal: c_int, handler: usize) {
    if comes_from_outside(signal, handler) {
        HANDLES_SIGNALS.store(true, Ordering::Relaxed);
    }
}

/// Whether a handler runs that no fault has called for.
fn comes_from_outside(signal: c_int, handler: usize) -> bool {
    let is_function = handler != libc::SIG_DFL && handler != libc::SIG_IGN;
    is_function && !FAULTS.contains(&signal)
}

/// `sigaction`.
macro_rules! actions {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            signal: c_int,
            action: *const libc::sigaction,
            before: *mut libc::sigaction,
        ) -> c_int {
            let Some(sigaction) = next::sigaction.get() else { return raw::failed_int(libc::ENOSYS) };
            // SAFETY: the program's own, or null.
            if let Some(action) = unsafe { action.as_ref() } {
                installed(signal, action.sa_sigaction);
            }
            // SAFETY: the same function.
            unsafe { sigaction(signal, action.cast(), before.cast()) }
        }
    )*};
}
actions!(sigaction __sigaction);

/// `signal` and its kin.
macro_rules! handlers {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(signal: c_int, handler: *mut c_void) -> *mut c_void {
            let Some(function) = next::$name.get() else {
                raw::set_errno(libc::ENOSYS);
                return std::ptr::without_provenance_mut(libc::SIG_ERR);
            };
            installed(signal, handler.addr());
            // SAFETY: the same function.
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
        let before = set_mask(0);
        installed(libc::SIGTERM, 4096);
        let blocked = SignalsBlocked::new();
        assert_eq!(blocked.before, Some(0));
        drop(blocked);
        assert_eq!(set_mask(before), 0);
    }
}
