//! Keeps signal handlers out of operations that must finish: operations that hold a lock of the
//! log, operations that have opened a descriptor, and admissions. A handler could leave them by
//! `longjmp`, or wait for that lock.
//!
//! Most operations *defer* signals, without a system call: `handlers` stands in front of the
//! program's handlers. When a signal arrives in an operation, all signals are blocked until the
//! operation ends, and the thread sends the signal to itself again. A system call that the signal
//! interrupts fails as without Tidegate. Operations that wait for the supervisor block signals, and
//! so do operations of a thread for which deferring is not safe.
//!
//! Invariants:
//! 1. Signals are blocked or deferred only in programs that handle some. Signals of a fault of the
//!    thread itself are neither: blocked, they would kill the thread.
//! 2. A thread's signals are as the program has set them once the last [`SignalsBlocked`] of the
//!    thread is dropped, in any order.
//! 3. While a handler runs inside an operation, which only a fault can start, signals are blocked.
//! 4. An operation inside a handler blocks signals. It may run on another stack (`own_stack`), and
//!    the kernel would take the handler's alternate stack for free.
#![allow(unsafe_code)] // system calls, and the context of a handler

use std::cell::Cell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};

use crate::sys::raw::{self, words};

/// Whether the program has installed a handler for a signal that comes from outside.
pub(super) static HANDLES_SIGNALS: AtomicBool = AtomicBool::new(false);
/// Whether a handler may be installed before which `handlers` does not stand.
pub(super) static HAS_BARE_HANDLERS: AtomicBool = AtomicBool::new(false);

const MASK_BYTES: usize = size_of::<u64>();
/// The signals that a fault of the thread itself raises.
pub(super) const FAULTS: [c_int; 7] = [
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

/// What this module has done to the thread's mask.
#[derive(Clone, Copy)]
struct Masked {
    /// Operations that have blocked signals.
    blocking: usize,
    /// The program's mask, if this module has blocked signals.
    before: Option<u64>,
}

const UNMASKED: Masked = Masked { blocking: 0, before: None };

/// The operations of a thread, for a handler of a fault that runs inside them.
#[derive(Clone, Copy)]
pub(super) struct Operations {
    deferring: usize,
    masked: Masked,
}

thread_local! {
    /// The thread's operations that defer signals. Handlers leave it as they find it.
    static DEFERRING: Cell<usize> = const { Cell::new(0) };
    /// A handler changes this only while operations defer signals; the thread, only while signals
    /// are blocked.
    static MASKED: Cell<Masked> = const { Cell::new(UNMASKED) };
    /// Handlers that have begun and not returned. One that jumps out counts for ever: operations
    /// then block signals.
    static HANDLERS: Cell<u32> = const { Cell::new(0) };
}

/// How an operation keeps handlers out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The program has no handlers.
    Nothing,
    Blocks,
    Defers,
}

/// While this lives, the calling thread runs no signal handler.
pub(crate) struct SignalsBlocked {
    way: Way,
    /// Not `Send`: it counts for the thread that has made it.
    of_thread: PhantomData<*const ()>,
}

impl SignalsBlocked {
    /// Blocks signals, by two system calls.
    #[inline]
    pub(crate) fn new() -> Self {
        let way = if HANDLES_SIGNALS.load(Ordering::Relaxed) { Way::Blocks } else { Way::Nothing };
        if way == Way::Blocks {
            block();
        }
        Self { way, of_thread: PhantomData }
    }

    /// Defers signals, without a system call if none arrives; or blocks them.
    #[inline]
    pub(crate) fn deferred() -> Self {
        if !HANDLES_SIGNALS.load(Ordering::Relaxed)
            || HAS_BARE_HANDLERS.load(Ordering::Relaxed)
            || HANDLERS.get() > 0
        {
            return Self::new();
        }
        DEFERRING.set(DEFERRING.get() + 1);
        // The operation does not begin before a handler sees it.
        compiler_fence(Ordering::SeqCst);
        Self { way: Way::Defers, of_thread: PhantomData }
    }
}

impl Drop for SignalsBlocked {
    #[inline]
    fn drop(&mut self) {
        match self.way {
            Way::Nothing => {}
            Way::Blocks => unblock(),
            Way::Defers => end_deferring(),
        }
    }
}

/// Blocks signals. Stores nothing before: until then a handler may run and not return.
#[cold]
fn block() {
    let before = change_mask(libc::SIG_BLOCK, BLOCKED);
    let masked = match MASKED.get() {
        // If signals are not blocked now, a fault's handler has jumped out of the operations.
        Masked { before: Some(_), .. } if before & BLOCKED != BLOCKED => UNMASKED,
        masked => masked,
    };
    let blocking = masked.blocking + 1;
    MASKED.set(Masked { blocking, before: masked.before.or(Some(before)) });
}

#[cold]
fn unblock() {
    let masked = MASKED.get();
    MASKED.set(Masked { blocking: masked.blocking.saturating_sub(1), ..masked });
    release_after_last();
}

#[inline]
fn end_deferring() {
    // The operation has ended before a handler runs again.
    compiler_fence(Ordering::SeqCst);
    DEFERRING.set(DEFERRING.get().saturating_sub(1));
    // A signal that arrives from here on finds no operation.
    compiler_fence(Ordering::SeqCst);
    if MASKED.get().before.is_some() {
        release_after_last();
    }
}

/// Returns how many handlers run in this thread.
pub(crate) fn handlers() -> u32 {
    HANDLERS.get()
}

/// Forgets all operations of this thread, and handlers beyond the first `handlers`: a child of
/// `vfork`, which ran on the memory of this thread, was killed in them.
pub(crate) fn forget_child(handlers: u32) {
    DEFERRING.set(0);
    MASKED.set(UNMASKED);
    HANDLERS.set(handlers);
}

/// Restores the program's mask after the last operation. Stores nothing after: a handler may run at
/// once.
#[cold]
fn release_after_last() {
    let Masked { blocking: 0, before: Some(before) } = MASKED.get() else { return };
    if DEFERRING.get() > 0 {
        return;
    }
    MASKED.set(UNMASKED);
    set_mask(before);
}

/// Sends the signal to the calling thread, which blocks it.
///
/// # Safety
/// `info` is null or points to a `siginfo_t` that the kernel has filled.
unsafe fn send(signal: c_int, info: *const libc::siginfo_t) {
    let process = rustix::process::getpid().as_raw_pid();
    let thread = rustix::thread::gettid().as_raw_pid();
    // The signal is lost only if the limit of pending signals is reached.
    if info.is_null() {
        let _ = raw::tgkill(process.unsigned_abs(), thread.unsigned_abs(), signal);
        return;
    }
    // SAFETY: the kernel reads the `siginfo_t`, as the caller says.
    unsafe { raw::call(libc::SYS_rt_tgsigqueueinfo, words![process, thread, signal, info]) };
}

/// Begins a handler for `signal`, which ends by [`end_handler`]. Returns `None` if the handler must
/// not run now: all signals are blocked in the interrupted operation, and this one is sent again.
///
/// Another signal may interrupt this function until it blocks signals. The mask that the other one
/// interrupts has the program's signals and some more, so what both masks have is the program's
/// mask. A handler may leave its own signal open (`SA_NODEFER`), and would be called without end by
/// the signal that is sent again: so this function blocks signals before it sends one.
///
/// # Safety
/// `context` is the kernel's argument of the handler; `info` is null, or filled by the kernel.
pub(super) unsafe fn begin_handler(
    signal: c_int,
    info: *const libc::siginfo_t,
    context: *mut libc::ucontext_t,
) -> Option<Operations> {
    let interrupted = Operations { deferring: DEFERRING.get(), masked: MASKED.get() };
    if FAULTS.contains(&signal) {
        if interrupted.deferring > 0 || interrupted.masked.blocking > 0 {
            // As if the operations blocked signals; the kernel restores the mask afterwards.
            change_mask(libc::SIG_BLOCK, BLOCKED);
        }
    } else if interrupted.deferring > 0 {
        // The kernel restores the mask of the context when the handler returns.
        change_mask(libc::SIG_BLOCK, BLOCKED);
        // SAFETY: the kernel's context, which nothing else refers to.
        let context = unsafe { &mut *context };
        // SAFETY: the kernel's mask is the first word of the C library's.
        let mask = unsafe { &mut *(&raw mut context.uc_sigmask).cast::<u64>() };
        let before = MASKED.get().before.map_or(*mask, |before| before & *mask);
        MASKED.set(Masked { before: Some(before), ..interrupted.masked });
        *mask |= BLOCKED;
        // SAFETY: as the caller says.
        unsafe { send(signal, info) };
        return None;
    }
    // If the handler jumps out, these operations are over.
    DEFERRING.set(0);
    MASKED.set(UNMASKED);
    HANDLERS.set(HANDLERS.get() + 1);
    Some(interrupted)
}

/// Ends a handler, which has returned to the operations that it `interrupted`.
pub(super) fn end_handler(interrupted: Operations) {
    HANDLERS.set(HANDLERS.get().saturating_sub(1));
    DEFERRING.set(interrupted.deferring);
    MASKED.set(interrupted.masked);
}

/// Sets the mask of blocked signals of the thread. Returns the old mask.
fn set_mask(mask: u64) -> u64 {
    change_mask(libc::SIG_SETMASK, mask)
}

/// Changes the mask of blocked signals of the thread as `how` says. Returns the old mask.
fn change_mask(how: c_int, mask: u64) -> u64 {
    let mut before = 0_u64;
    let arguments = words![how, &raw const mask, &raw mut before, MASK_BYTES];
    // SAFETY: a mask to read and memory to write one, both of `MASK_BYTES`.
    unsafe { raw::call(libc::SYS_rt_sigprocmask, arguments) };
    before
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::process::{self, Holding};

    fn begin_handling() {
        HANDLES_SIGNALS.store(true, Ordering::Relaxed);
    }

    #[test]
    fn faults_are_not_blocked() {
        assert_eq!(BLOCKED & 1 << (libc::SIGSEGV - 1), 0);
        assert_ne!(BLOCKED & 1 << (libc::SIGTERM - 1), 0);
    }

    #[test]
    fn signals_are_blocked_where_some_are_handled_and_as_before_afterwards() {
        const SOME: u64 = 1 << (libc::SIGUSR1 - 1);
        let before = set_mask(SOME);
        begin_handling();
        let blocked = SignalsBlocked::new();
        assert_eq!(set_mask(BLOCKED), BLOCKED);
        drop(blocked);
        assert_eq!(set_mask(before), SOME);
    }

    #[test]
    fn a_signal_that_the_program_blocks_stays_blocked() {
        let before = set_mask(1 << (libc::SIGABRT - 1));
        begin_handling();
        let blocked = SignalsBlocked::new();
        assert_ne!(change_mask(libc::SIG_BLOCK, 0) & 1 << (libc::SIGABRT - 1), 0);
        drop(blocked);
        set_mask(before);
    }

    /// The child of `vfork` is killed in an operation that defers signals, or in one that blocks
    /// them because a handler runs.
    #[test]
    fn operations_of_a_killed_child_of_vfork_are_over() {
        let before = set_mask(0);
        begin_handling();
        for is_in_handler in [false, true] {
            let child = process::become_vfork_child();
            assert!(!is_in_handler || deliver(libc::SIGCONT).0.is_some());
            std::mem::forget((Holding::new(), SignalsBlocked::deferred()));
            process::end_vfork_child(child);
            // The mask of the child is not that of its parent.
            set_mask(0);
            assert!(!process::Holder::is_here() && !process::is_apart());
            let deferred = SignalsBlocked::deferred();
            assert!(deferred.way == Way::Defers && deliver(libc::SIGCONT).0.is_none());
            drop(deferred);
            assert_eq!(set_mask(0), 0, "its end lets signals through");
            let interrupted = deliver(libc::SIGCONT).0.expect("no operation is left");
            end_handler(interrupted);
        }
        set_mask(before);
    }

    #[test]
    fn signals_come_again_with_the_last_one_that_goes() {
        let before = set_mask(0);
        begin_handling();
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
        begin_handling();
        std::mem::forget(SignalsBlocked::new());
        set_mask(0);
        let blocked = SignalsBlocked::new();
        assert_eq!(set_mask(BLOCKED), BLOCKED);
        drop(blocked);
        assert_eq!(set_mask(before), 0);
    }

    /// Delivers a signal to this thread as the kernel does. Returns what its handler interrupts, if
    /// that runs, and the mask after that.
    fn deliver(signal: c_int) -> (Option<Operations>, u64) {
        // SAFETY: all zeroes are a context.
        let mut context: libc::ucontext_t = unsafe { std::mem::zeroed() };
        let at = (&raw mut context.uc_sigmask).cast::<u64>();
        let mask = set_mask(0);
        set_mask(mask);
        // SAFETY: the first word of the mask.
        unsafe { at.write(mask) };
        // SAFETY: a context, and no information.
        let begun = unsafe { begin_handler(signal, std::ptr::null(), &raw mut context) };
        // SAFETY: the first word of the mask.
        let after = unsafe { at.read() };
        set_mask(after);
        (begun, after)
    }

    #[test]
    fn a_signal_in_an_operation_is_sent_again_at_its_end() {
        let before = set_mask(0);
        begin_handling();
        let (outer, inner) = (SignalsBlocked::deferred(), SignalsBlocked::deferred());
        assert_eq!(set_mask(0), 0, "nothing is blocked before one arrives");
        let (begun, after) = deliver(libc::SIGCONT);
        assert!(begun.is_none() && after == BLOCKED);
        let blocking = SignalsBlocked::new();
        drop((inner, outer));
        assert_eq!(set_mask(BLOCKED), BLOCKED, "blocked by the one that is left");
        drop(blocking);
        assert_eq!(set_mask(before), 0);
    }

    /// The kernel lets a signal interrupt its own handler if the program wants that.
    #[test]
    fn a_handler_that_leaves_its_signal_open_is_not_called_by_the_signal_that_it_sends() {
        let before = set_mask(0);
        begin_handling();
        let operation = SignalsBlocked::deferred();
        // SAFETY: all zeroes are a context.
        let mut context: libc::ucontext_t = unsafe { std::mem::zeroed() };
        // SAFETY: a context, and no information.
        let begun = unsafe { begin_handler(libc::SIGCONT, std::ptr::null(), &raw mut context) };
        assert!(begun.is_none());
        assert_eq!(change_mask(libc::SIG_BLOCK, 0) & BLOCKED, BLOCKED, "in the handler");
        drop(operation);
        assert_eq!(set_mask(before), 0);
    }

    /// A signal interrupts the handler of another one, which has stored its mask, or not yet.
    #[test]
    fn after_signals_in_one_another_the_mask_is_as_the_program_has_set_it() {
        const INTERRUPTED: u64 = 1 << (libc::SIGCONT - 1);
        let before = set_mask(0);
        begin_handling();
        for masks in [[0, INTERRUPTED], [INTERRUPTED, 0]] {
            let operation = SignalsBlocked::deferred();
            for (signal, mask) in [libc::SIGCONT, libc::SIGURG].into_iter().zip(masks) {
                set_mask(mask);
                assert!(deliver(signal).0.is_none());
            }
            drop(operation);
            assert_eq!(set_mask(0), 0);
        }
        set_mask(before);
    }

    #[test]
    fn outside_of_operations_handlers_run_and_operations_in_them_block() {
        let before = set_mask(0);
        begin_handling();
        let interrupted = deliver(libc::SIGCONT).0.expect("it runs");
        let inside = SignalsBlocked::deferred();
        assert_eq!(set_mask(BLOCKED), BLOCKED);
        drop(inside);
        end_handler(interrupted);
        drop(SignalsBlocked::deferred());
        assert_eq!(set_mask(before), 0);
    }

    /// The handler of a fault runs inside an operation, with operations of its own, and returns.
    #[test]
    fn after_the_handler_of_a_fault_the_operation_goes_on() {
        let before = set_mask(0);
        begin_handling();
        let outer = SignalsBlocked::deferred();
        let interrupted = deliver(libc::SIGSEGV).0.expect("it runs");
        drop(SignalsBlocked::deferred());
        end_handler(interrupted);
        set_mask(0);
        let (begun, after) = deliver(libc::SIGCONT);
        assert!(begun.is_none() && after == BLOCKED);
        drop(outer);
        assert_eq!(set_mask(before), 0);
    }

    /// The handler of a fault runs inside an operation and jumps out: signals arrive again.
    #[test]
    fn after_a_fault_that_jumps_out_handlers_run() {
        let before = set_mask(0);
        begin_handling();
        std::mem::forget(SignalsBlocked::deferred());
        assert!(deliver(libc::SIGSEGV).0.is_some());
        set_mask(0);
        assert!(deliver(libc::SIGCONT).0.is_some());
        set_mask(before);
    }
}
