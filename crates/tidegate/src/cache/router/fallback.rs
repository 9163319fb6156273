//! Pass-through after errors of the memory: from a number of them on, requests are treated as in
//! mode `pt`, so that a failing memory is given no new page (Open CAS's fallback).
//!
//! What is dirty is cleaned before the backing is asked: a dirty page that cannot be read is an
//! error in this state too, never the backing's older bytes.

use crate::cache::pages::Failures;
use crate::sync::{AtomicU64, Ordering};

/// How many failures are too many.
#[derive(Default)]
pub(in crate::cache) struct Fallback {
    /// 0: no number is.
    threshold: AtomicU64,
    /// Failures before the threshold was set.
    before: AtomicU64,
}

impl Fallback {
    /// Passes requests through from `errors` more failures on, where there were `failures`.
    pub(in crate::cache) fn set_threshold(&self, errors: u64, failures: &Failures) {
        self.before.store(failures.total(), Ordering::Relaxed);
        self.threshold.store(errors, Ordering::Relaxed);
    }

    /// Returns whether too many of `failures` came after the threshold was set.
    pub(in crate::cache) fn is_reached(&self, failures: &Failures) -> bool {
        let threshold = self.threshold.load(Ordering::Relaxed);
        threshold > 0 && failures.total() - self.before.load(Ordering::Relaxed) >= threshold
    }
}
