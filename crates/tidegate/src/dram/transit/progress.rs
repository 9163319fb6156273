//! The event "a slot may be free now", for writes that must have one.
//!
//! A signaller counts `signals` up and then looks for waiters; a waiter raises `waiters` and then
//! looks whether `signals` still is what it was before it looked for a slot. Both change `signals`
//! (the waiter by a change that changes nothing), so one comes after the other and sees what that
//! one did before.

use crate::sync::lock::{Condvar, Mutex};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

#[derive(Default)]
pub(super) struct Progress {
    signals: AtomicU64,
    waiters: AtomicU32,
    gate: Mutex<()>,
    changed: Condvar,
}

impl Progress {
    /// The moment before a look for a slot.
    pub(super) fn now(&self) -> u64 {
        self.signals.load(Ordering::Acquire)
    }

    /// Something changed that a waiter may wait for.
    pub(super) fn signal(&self) {
        if self.raise() {
            let _gate = self.gate.lock();
            self.changed.notify_all();
        }
    }

    /// Waits until there was a signal after `seen`.
    pub(super) fn wait(&self, seen: u64) {
        let mut gate = self.gate.lock();
        self.waiters.fetch_add(1, Ordering::Release);
        while self.is_still(seen) {
            self.changed.wait(&mut gate);
        }
        self.waiters.fetch_sub(1, Ordering::Release);
    }

    /// Counts a signal. Returns whether a thread waits for it.
    fn raise(&self) -> bool {
        self.signals.fetch_add(1, Ordering::AcqRel);
        self.waiters.load(Ordering::Acquire) > 0
    }

    /// Whether there was no signal since `seen`, asked after `waiters` was raised.
    fn is_still(&self, seen: u64) -> bool {
        self.signals.fetch_add(0, Ordering::AcqRel) == seen
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn loom_no_thread_waits_for_a_signal_that_was() {
        loom::model(|| {
            let progress = Arc::new(Progress::default());
            let signaller = {
                let progress = progress.clone();
                thread::spawn(move || progress.raise())
            };
            let seen = progress.now();
            progress.waiters.fetch_add(1, Ordering::Release);
            let waits = progress.is_still(seen);
            let wakes = signaller.join().unwrap();
            // What was signalled before `now` the waiter finds by itself.
            assert!(seen == 1 || !waits || wakes, "the waiter sleeps and no signaller wakes it");
        });
    }
}
