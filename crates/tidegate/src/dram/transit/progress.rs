//! The event "a slot may be free now", for writes that need one.
//!
//! A signaller increments `signals` and then checks for waiters; a waiter increments `waiters` and
//! then checks whether `signals` is unchanged since before its search for a slot. Both modify
//! `signals` (the waiter without changing its value), so one modification comes after the other and
//! sees everything that the other thread did before.

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
    /// Returns the current count of signals, for a thread that is about to look for a slot.
    pub(super) fn now(&self) -> u64 {
        self.signals.load(Ordering::Acquire)
    }

    /// Signals a change to waiting threads.
    pub(super) fn signal(&self) {
        if self.raise() {
            let _gate = self.gate.lock();
            self.changed.notify_all();
        }
    }

    /// Waits for a signal after `seen`.
    pub(super) fn wait(&self, seen: u64) {
        let mut gate = self.gate.lock();
        self.waiters.fetch_add(1, Ordering::Release);
        while self.is_still(seen) {
            self.changed.wait(&mut gate);
        }
        self.waiters.fetch_sub(1, Ordering::Release);
    }

    /// Counts a signal. Returns whether a thread waits.
    fn raise(&self) -> bool {
        self.signals.fetch_add(1, Ordering::AcqRel);
        self.waiters.load(Ordering::Acquire) > 0
    }

    /// Reports whether no signal came since `seen`. Call it after raising `waiters`.
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
            // A signal before `now` needs no wake-up: the waiter finds the slot itself.
            assert!(seen == 1 || !waits || wakes, "the waiter sleeps and no signaller wakes it");
        });
    }
}
