//! The background work of a log device: cleaning ahead of need.

use std::sync::Arc;

use super::Core;
use crate::tier::background::{Step, Work};

/// Pause after a failure, unless a writer waits for free space before.
const RETRY_NS: u64 = 1_000_000_000;
/// Pause before another look at the record of a write in progress.
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
            // A request is cleaning.
            return Step::rest(MOMENT_NS);
        };
        match core.clean(&mut scratch) {
            Ok(true) => Step::Again,
            Ok(false) => Step::rest(MOMENT_NS),
            Err(_) => {
                core.fail_blocked();
                // Writers that wait with a thread then check the ledger.
                core.ring.announce_space();
                Step::rest(RETRY_NS)
            }
        }
    }

    fn has_work(&self) -> bool {
        self.0.is_filling()
    }
}
