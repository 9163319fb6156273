//! A worker of a cache: caches pages that were read, evicts and cleans ahead of need.

use std::sync::Arc;

use super::Core;
use super::background::Progress;
use crate::tier::background::{Step, Work};

/// Time until another try after a failure, unless a writer waits for a free slot before.
const RETRY_NS: u64 = 1_000_000_000;
/// Time until another look at pages that other writes keep busy.
const MOMENT_NS: u64 = 1_000_000;
/// Rest after a fill, before the next look for pages to cache. Reads that miss come one after the
/// other, and waking an idle worker costs a reader some microseconds each time.
const FILL_REST_NS: u64 = 250_000;

/// A worker of a cache; there are two, so that a batch is copied while another one is written.
pub(super) struct Worker(pub(super) Arc<Core>);

impl Work for Worker {
    fn step(&mut self) -> Step {
        let core = &*self.0;
        let done = core.background.step(&core.router.admission);
        match done {
            Ok(Progress::Idle) => match core.background.cleaners.next_cleaning_ns() {
                Some(wake_at_ns) => Step::Doze { wake_at_ns },
                None => Step::IDLE,
            },
            Ok(Progress::Some) => Step::Again,
            Ok(Progress::Filled) if core.background.has_work() => Step::Again,
            Ok(Progress::Filled) => Step::rest(FILL_REST_NS),
            Ok(Progress::Blocked) => Step::rest(MOMENT_NS),
            Err(_) => {
                // Waiting writers look at the stalls.
                core.pages.notify_all();
                Step::rest(RETRY_NS)
            }
        }
    }

    fn has_work(&self) -> bool {
        self.0.background.has_work()
    }
}
