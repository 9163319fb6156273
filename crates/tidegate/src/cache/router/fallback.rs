//! Pass-through after errors of the memory: after a number of errors, requests are treated as in
//! mode `pt`, so that a failing memory gets no new page (Open CAS's fallback).
//!
//! Dirty pages are cleaned before the backing is read: even now a dirty page that cannot be read is
//! an error, and never read as the backing's older bytes.

use crate::cache::pages::Failures;
use crate::sync::{AtomicU64, Ordering};

/// Threshold of failures for pass-through.
#[derive(Default)]
pub(in crate::cache) struct Fallback {
    /// Number of failures that are too many; 0 for no limit.
    threshold: AtomicU64,
    /// Failures before the threshold was set.
    before: AtomicU64,
}

impl Fallback {
    /// Passes requests through after `errors` failures more than the present `failures`.
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
