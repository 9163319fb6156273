//! The background work of staging tiers: workers answer the calls of sets.

use std::sync::Arc;

use super::super::phases::Phase;
use super::cache::{Activity, StagingCache};
use super::drain::Batch;
use super::replacement::Replacement;

use crate::tier::background::{Step, Work};

/// How long the device below must be without requests to count as idle.
const IDLE_NS: u64 = 1_000_000;

/// Whether a device is idle, by its requests at one look and the next.
#[derive(Default)]
struct Idleness {
    seen: Option<Activity>,
}

impl Idleness {
    /// No request is under way, and none came since the last look.
    fn look(&mut self, now: Activity) -> bool {
        let before = self.seen.replace(now);
        now.begun == now.ended && before == Some(now)
    }
}

/// A worker of a staging tier.
pub(super) struct Stager<R: Replacement> {
    core: Arc<StagingCache<R>>,
    /// The set that it works on.
    number: Option<usize>,
    batch: Batch,
    idleness: Idleness,
}

impl<R: Replacement> Stager<R> {
    /// A worker of the tier with this core.
    pub(super) fn new(core: Arc<StagingCache<R>>) -> Self {
        Self { core, number: None, batch: Batch::default(), idleness: Idleness::default() }
    }

    /// Leaves the set that it works on to requests, and to the next call.
    fn leave_set(&mut self) {
        if let Some(number) = self.number.take() {
            let mut set = self.core.lock(number);
            set.set().end_background();
            set.end_call();
            set.notify();
        }
    }
}

impl<R: Replacement> Work for Stager<R> {
    fn step(&mut self) -> Step {
        let Some(number) = self.number.or_else(|| self.core.calls.answer()) else {
            return Step::IDLE;
        };
        self.number = Some(number);
        let mut set = self.core.lock(number);
        let may_write = !R::WHEN_IDLE || self.idleness.look(self.core.below.activity());
        if may_write && set.set().take_background(&mut self.batch.run) {
            let _operation = self.core.recorder.begin_single(Phase::Eviction);
            // A failure is in the ledger.
            let _ = self.core.write_back_in_background(&mut set, &mut self.batch);
        } else if !may_write && set.set().wants_background() {
            return Step::rest(IDLE_NS);
        } else {
            drop(set);
            self.leave_set();
        }
        Step::Again
    }

    fn has_work(&self) -> bool {
        self.core.calls.is_open()
    }
}

impl<R: Replacement> Drop for Stager<R> {
    /// Requests may wait for what a stopped worker was about to do: they do it by themselves now.
    fn drop(&mut self) {
        self.leave_set();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_idle_after_two_looks_without_a_request() {
        let mut idleness = Idleness::default();
        let mut look = |begun, ended| idleness.look(Activity { begun, ended });
        assert!(!look(0, 0), "one look tells nothing");
        assert!(look(0, 0));
        assert!(!look(1, 0), "a request is under way");
        assert!(!look(1, 0), "and stays under way");
        assert!(!look(1, 1), "it ended only now");
        assert!(look(1, 1));
        assert!(!look(2, 2), "one came and went");
    }
}
