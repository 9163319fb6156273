//! The background work of a log device: it cleans ahead of need, and is idle where nothing is to
//! do.

use std::sync::Arc;

use super::Core;
use crate::sync::Ordering;
use crate::tier::background::{Step, Work};

/// After a failure: when to try again, unless a writer waits for free space before.
const RETRY_NS: u64 = 1_000_000_000;
/// When to look again at the record of a write under way.
const MOMENT_NS: u64 = 1_000_000;

/// The cleaner of a log device.
pub(super) struct Cleaner(pub(super) Arc<Core>);

impl Work for Cleaner {
    fn step(&mut self) -> Step {
        let core = &*self.0;
        core.resume_blocked();
        if !core.is_filling() {
            return Step::IDLE;
        }
        let Some(mut scratch) = core.cleaning.try_lock() else {
            // A request cleans.
            return Step::rest(MOMENT_NS);
        };
        match core.clean(&mut scratch) {
            Ok(true) => Step::Again,
            Ok(false) => Step::rest(MOMENT_NS),
            Err(_) => {
                core.fail_blocked();
                // Writers that wait with a thread look at the ledger.
                core.log.announce_space();
                Step::rest(RETRY_NS)
            }
        }
    }

    fn has_work(&self) -> bool {
        self.0.is_filling()
    }
}

impl Core {
    /// After an append: wakes the cleaner where the log is full enough.
    ///
    /// No wake-up is lost: the append changed the head, in the one order of sequentially consistent
    /// stores and loads, before this looks whether the cleaner is idle. A cleaner that turns idle
    /// says so and then looks at the head.
    #[inline]
    pub(super) fn wake_cleaner_where_due(&self) {
        if self.is_full_enough() {
            self.waker.wake();
        }
    }

    /// After an append that may wait: cleans where no thread does and the log is full enough.
    pub(super) fn clean_where_due(&self) {
        if !self.waker.is_running()
            && self.is_full_enough()
            && let Some(mut scratch) = self.cleaning.try_lock()
        {
            // The next flush reports a failure.
            let _ = self.clean(&mut scratch);
        }
    }

    fn is_filling(&self) -> bool {
        (self.is_full_enough() || self.blocked.is_waiting()) && self.has_work()
    }

    fn is_full_enough(&self) -> bool {
        self.used_bytes() > self.clean_from_bytes.load(Ordering::Relaxed)
    }
}
