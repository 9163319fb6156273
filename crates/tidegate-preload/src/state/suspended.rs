//! Logging is suspended for the length of a call, during which a program starts or a library runs
//! code that no hook sees.
//!
//! Invariant: the supervisor counts a process once. So the process counts the calls, and the last
//! one that returns has logging resumed, unless the log was given up meanwhile.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tidegate::log::cover::Cause;

use crate::state::{process, supervisor};
use crate::sys::raw;
use crate::sys::signals::SignalsBlocked;

/// While this lives, no file of the tree is logged.
pub(crate) struct Suspended(());

/// Those that live.
static CALLS: AtomicU32 = AtomicU32::new(0);
/// Held while the supervisor is asked: 0 is free.
static LOCK: AtomicU32 = AtomicU32::new(0);
/// How long a thread sleeps at a time.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

impl Suspended {
    /// Has logging suspended. The cause is as for [`supervisor::suspend`].
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

/// Runs `ask`, as the only thread, with the number of calls, which has changed by `more`. No signal
/// handler runs meanwhile, which could wait for its own thread.
fn locked(more: i32, ask: impl FnOnce(u32)) {
    if process::in_vfork_child() {
        // The memory is the parent's, which stands still and may be in the middle of this; the
        // process is another one, with this call only.
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

/// In a forked child: its calls are the parent's.
pub(crate) fn become_child() {
    CALLS.store(0, Ordering::Relaxed);
    LOCK.store(0, Ordering::Relaxed);
}
