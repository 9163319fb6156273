//! Stacks for hooks that need more than the stack of a signal handler or a thread may have. A
//! handler's stack may be as small as the kernel allows; a thread's stack has at least 16 KiB.
//!
//! Invariants:
//! 1. A stack has one user at a time. No lock and no heap, as for pages.
//! 2. The caller keeps handlers out of the thread (`signals`), and inside of a handler blocks
//!    signals: while a thread runs on another stack, the kernel takes the handler's own stack for
//!    free.
#![allow(unsafe_code)] // the stack pointer

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::sys::page;

const STACK_BYTES: usize = 64 << 10;
/// Threads that can be in a hook at once without a mapping. Untouched stacks take no memory, but
/// count if a program locks all its memory, under a limit that is 8 MiB for most users.
const STACKS: usize = 8;

/// Whether a stack is taken, in a cache line of its own.
#[repr(align(64))]
struct Taken(AtomicBool);

#[repr(C, align(64))]
struct Stacks {
    memory: UnsafeCell<[[u8; STACK_BYTES]; STACKS]>,
    taken: [Taken; STACKS],
}

// SAFETY: only the thread that has set the flag of a stack uses it.
unsafe impl Sync for Stacks {}

static STATIC: Stacks = Stacks {
    memory: UnsafeCell::new([[0; STACK_BYTES]; STACKS]),
    taken: [const { Taken(AtomicBool::new(false)) }; STACKS],
};

/// Where the next thread begins to look for a stack.
static NEXT_START: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The stack that this thread had last: it looks there first.
    static START: Cell<Option<usize>> = const { Cell::new(None) };
}

/// A stack for the length of a call.
struct Stack {
    at: *mut u8,
    /// The static stack's number, if it is one.
    number: Option<usize>,
}

impl Stack {
    fn take() -> Option<Self> {
        let start = START.get().unwrap_or_else(|| NEXT_START.fetch_add(1, Ordering::Relaxed));
        let number = (start..start + STACKS).map(|number| number % STACKS).find(|&number| {
            let Taken(taken) = &STATIC.taken[number];
            !taken.load(Ordering::Relaxed) && !taken.swap(true, Ordering::Acquire)
        });
        START.set(number.or(Some(start % STACKS)));
        let at = match number {
            // SAFETY: `number` is below `STACKS`.
            Some(number) => unsafe { STATIC.memory.get().cast::<u8>().add(number * STACK_BYTES) },
            None => page::map(STACK_BYTES)?,
        };
        Some(Self { at, number })
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        match self.number {
            Some(number) => STATIC.taken[number].0.store(false, Ordering::Release),
            None => page::unmap(self.at, STACK_BYTES),
        }
    }
}

/// The function to run, and then its result.
struct Work<F, R> {
    work: Option<F>,
    result: Option<R>,
}

/// Runs the work at `at` and stores its result. Not inlined: the stack of the caller would have to
/// hold all that the work needs.
#[inline(never)]
extern "C" fn work<F: FnOnce() -> R, R>(at: *mut c_void) {
    // SAFETY: `at` is the `Work` in the frame of `run`, which waits for this call.
    let this = unsafe { &mut *at.cast::<Work<F, R>>() };
    this.result = this.work.take().map(|work| work());
}

/// Runs `run`, which needs more stack than there may be, on another stack; no signal handler runs
/// meanwhile. If there is no memory for a stack, runs on the present one.
pub(crate) fn run<R, F: FnOnce() -> R>(run: F) -> R {
    let mut this = Work { work: Some(run), result: None };
    let at = (&raw mut this).cast();
    match (!is_here()).then(Stack::take).flatten() {
        // SAFETY: the end of a stack that this call alone uses until it returns.
        Some(stack) => unsafe { call(stack.at.wrapping_add(STACK_BYTES), work::<F, R>, at) },
        None => work::<F, R>(at),
    }
    match this.result {
        Some(result) => result,
        // `work` has returned, and so stored its result.
        None => std::process::abort(),
    }
}

/// Returns whether the calling thread runs on one of the static stacks.
fn is_here() -> bool {
    let here = 0_u8;
    let start = STATIC.memory.get().addr();
    (start..start + STACKS * STACK_BYTES).contains(&ptr::from_ref(&here).addr())
}

/// Calls `function` with a stack that ends at `top`.
///
/// # Safety
/// `top` is aligned. `STACK_BYTES` bytes below it are unused until the call has returned.
#[cfg(target_arch = "x86_64")]
unsafe fn call(top: *mut u8, function: extern "C" fn(*mut c_void), argument: *mut c_void) {
    // SAFETY: `function` preserves the register that holds the old stack pointer.
    unsafe {
        std::arch::asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            "call {function}",
            "mov rsp, r12",
            top = in(reg) top,
            function = in(reg) function,
            in("rdi") argument,
            out("r12") _,
            clobber_abi("C"),
        );
    }
}

/// Calls `function` with a stack that ends at `top`.
///
/// # Safety
/// `top` is aligned. `STACK_BYTES` bytes below it are unused until the call has returned.
#[cfg(target_arch = "aarch64")]
unsafe fn call(top: *mut u8, function: extern "C" fn(*mut c_void), argument: *mut c_void) {
    // SAFETY: `function` preserves the register that holds the old stack pointer.
    unsafe {
        std::arch::asm!(
            "mov x20, sp",
            "mov sp, {top}",
            "blr {function}",
            "mov sp, x20",
            top = in(reg) top,
            function = in(reg) function,
            in("x0") argument,
            out("x20") _,
            clobber_abi("C"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_runs_on_another_stack_and_nested_work_on_the_same() {
        let taken =
            || STATIC.taken.iter().filter(|Taken(taken)| taken.load(Ordering::Relaxed)).count();
        assert_eq!(run(|| (is_here(), run(is_here), taken())), (true, true, 1));
        assert!(!is_here() && taken() == 0);
    }

    #[test]
    fn each_thread_has_a_stack_of_its_own() {
        let barrier = std::sync::Barrier::new(2 * STACKS);
        let deep = |number: u8| {
            let mut bytes = [number; STACK_BYTES / 4];
            barrier.wait();
            std::hint::black_box(&mut bytes);
            bytes.iter().all(|byte| *byte == number)
        };
        std::thread::scope(|scope| {
            let number = |number| u8::try_from(number).unwrap();
            let spawn = |of| scope.spawn(move || run(|| deep(number(of))));
            let threads: Vec<_> = (0..2 * STACKS).map(spawn).collect();
            assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
        });
    }
}
