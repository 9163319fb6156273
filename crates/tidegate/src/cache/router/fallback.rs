//! Pass-through after errors of the memory: from a number of them on, requests are treated as in
//! mode `pt`, so that a failing memory is given no new page (Open CAS's fallback).
//!
//! What is dirty is cleaned before the backing is asked: a dirty page that cannot be read is an
//! error in this state too, never the backing's older bytes.

use super::mode::{Behaviour, Mode};
use crate::cache::Core;
use crate::sync::{AtomicU64, Ordering};

/// The errors so far, and how many are too many.
#[derive(Default)]
pub(in crate::cache) struct Fallback {
    /// 0: no number is.
    threshold: AtomicU64,
    /// Since the threshold was set.
    errors: AtomicU64,
}

impl Fallback {
    /// Passes through from `errors` errors on, counted from now.
    pub(in crate::cache) fn set_threshold(&self, errors: u64) {
        self.errors.store(0, Ordering::Relaxed);
        self.threshold.store(errors, Ordering::Relaxed);
    }

    /// The memory failed, or a page was not what its checksum says.
    pub(in crate::cache) fn count(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    /// There were too many errors.
    pub(in crate::cache) fn is_reached(&self) -> bool {
        let threshold = self.threshold.load(Ordering::Relaxed);
        threshold > 0 && self.errors.load(Ordering::Relaxed) >= threshold
    }
}

impl Core {
    /// What requests do now whose IO class has the mode `own`: as the mode says, unless there were
    /// too many errors.
    pub(in crate::cache) fn behaviour(&self, own: Option<Mode>) -> &'static dyn Behaviour {
        if self.fallback.is_reached() {
            return Mode::PassThrough.behaviour();
        }
        own.unwrap_or_else(|| self.mode()).behaviour()
    }
}
