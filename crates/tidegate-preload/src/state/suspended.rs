//! Suspension of logging during a call that starts a program, or runs code that no hook sees.
//!
//! Invariant: the supervisor counts a process once. So the process counts its calls, and the last
//! call that returns resumes logging, unless the log was given up meanwhile.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tidegate::log::cover::Cause;

use crate::state::{process, supervisor};
use crate::sys::raw;
use crate::sys::signals::SignalsBlocked;

/// While this lives, no file of the tree is logged.
pub(crate) struct Suspended(());

/// Number of live [`Suspended`]s.
static CALLS: AtomicU32 = AtomicU32::new(0);
/// Lock that is held while the supervisor is asked; 0 if it is free.
static LOCK: AtomicU32 = AtomicU32::new(0);
/// Timeout of one wait for the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

impl Suspended {
    /// Asks the supervisor to suspend logging, for a cause as for [`supervisor::suspend`].
    pub(crate) fn new(cause: Option<Cause>, program: &CStr) -> Self {
        locked(1, |_| supervisor::suspend(process::number(), cause, program));
        Self(())
    }
}

impl Drop for Suspended {
    fn drop(&mut self) {
        locked(-1, |calls| {
            if calls == 0 && !process::has_given_up() {
                supervisor::resume(process::number());
            }
        });
    }
}

/// Changes the number of calls by `more`, and runs `ask` with the new number under the lock. Blocks
/// signals meanwhile, since a handler could wait for the lock of its own thread.
fn locked(more: i32, ask: impl FnOnce(u32)) {
    if process::in_vfork_child() {
        // The count and the lock are the stopped parent's. The child has this one call.
        return ask(0);
    }
    let _signals = SignalsBlocked::new();
    while LOCK.swap(1, Ordering::Acquire) != 0 {
        raw::wait(&LOCK, 1, LOCK_TIMEOUT);
    }
    let calls = CALLS.load(Ordering::Relaxed).saturating_add_signed(more);
    CALLS.store(calls, Ordering::Relaxed);
    ask(calls);
    LOCK.store(0, Ordering::Release);
    raw::wake(&LOCK);
}

/// Resets the count in a forked child: the inherited calls are the parent's.
pub(crate) fn become_child() {
    CALLS.store(0, Ordering::Relaxed);
    LOCK.store(0, Ordering::Relaxed);
}
