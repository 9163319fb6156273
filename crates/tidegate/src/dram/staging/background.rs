//! The background work of staging tiers: workers serve the calls of sets.

use std::sync::Arc;

use super::super::phases::Phase;
use super::cache::{Activity, StagingCache};
use super::drain::Batch;
use super::replacement::Replacement;

use crate::tier::background::{Step, Work};

/// Time without requests after which the device below counts as idle.
const IDLE_NS: u64 = 1_000_000;

/// Detects whether a device is idle, by comparing its requests at two looks.
#[derive(Default)]
struct Idleness {
    seen: Option<Activity>,
}

impl Idleness {
    /// Returns whether no request runs, and none came since the last look.
    fn look(&mut self, now: Activity) -> bool {
        let before = self.seen.replace(now);
        now.begun == now.ended && before == Some(now)
    }
}

/// A worker of a staging tier.
pub(super) struct Stager<R: Replacement> {
    core: Arc<StagingCache<R>>,
    /// The set under work.
    number: Option<usize>,
    batch: Batch,
    idleness: Idleness,
}

impl<R: Replacement> Stager<R> {
    /// Makes a worker of the tier with this core.
    pub(super) fn new(core: Arc<StagingCache<R>>) -> Self {
        Self { core, number: None, batch: Batch::default(), idleness: Idleness::default() }
    }

    /// Returns the current set to requests and to the next call.
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
            // The ledger has the failure.
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
    /// Leaves the set. Requests that waited for the stopped worker then do its work themselves.
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
