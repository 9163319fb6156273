//! The background work of a cache: keeping what was read, evicting and cleaning ahead of need.

use std::sync::Arc;

use super::Core;
use super::index::Usage;
use crate::device::Result;
use crate::sync::Ordering;
use crate::tier::background::{Step, Work};

/// After a failure: when to try again, unless a writer waits for a free slot before.
const RETRY_NS: u64 = 1_000_000_000;
/// When to look again at pages that other writes keep busy.
const MOMENT_NS: u64 = 1_000_000;
/// When to look again for pages to keep, after some were kept. Reads that miss come one after the
/// other, and to wake an idle worker costs a reader some microseconds each time.
const FILL_REST_NS: u64 = 250_000;

/// The worker of a cache.
pub(super) struct Background(pub(super) Arc<Core>);

impl Work for Background {
    fn step(&mut self) -> Step {
        let core = &*self.0;
        let done = core.step();
        match done {
            Ok(Progress::Idle) => Step::IDLE,
            Ok(Progress::Some) => Step::Again,
            Ok(Progress::Filled) if core.has_work() => Step::Again,
            Ok(Progress::Filled) => Step::rest(FILL_REST_NS),
            Ok(Progress::Blocked) => Step::rest(MOMENT_NS),
            Err(_) => {
                // Writers that wait look at the ledger.
                core.notify_all();
                Step::rest(RETRY_NS)
            }
        }
    }

    fn has_work(&self) -> bool {
        self.0.has_work()
    }
}

/// Why a shard needs work, the most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    FreeSlots,
    Cleaning,
}

/// What became of a step.
enum Progress {
    /// There was nothing to do.
    Idle,
    /// Something was done.
    Some,
    /// Pages that were read are kept, and more are likely.
    Filled,
    /// There is work, and other threads are at it.
    Blocked,
}

impl Core {
    fn step(&self) -> Result<Progress> {
        if self.fills.are_waiting() {
            self.store_fills()?;
            return Ok(Progress::Filled);
        }
        let Some((number, need)) = self.next_need() else { return Ok(Progress::Idle) };
        let Some(mut scratch) = self.cleaning.try_lock() else {
            // A request cleans.
            return Ok(Progress::Blocked);
        };
        let done = match need {
            Need::FreeSlots => self.reclaim(number, &mut scratch)? > 0,
            Need::Cleaning => self.clean_next(number, &mut scratch)?,
        };
        Ok(if done { Progress::Some } else { Progress::Blocked })
    }

    fn has_work(&self) -> bool {
        self.fills.are_waiting() || self.next_need().is_some()
    }

    /// A shard that needs work, one without free slots first.
    fn next_need(&self) -> Option<(usize, Need)> {
        let needs = (0..self.shards.count()).filter_map(|it| Some((it, self.need_of(it)?)));
        needs.min_by_key(|(_, need)| *need)
    }

    fn need_of(&self, number: usize) -> Option<Need> {
        let pct = self.clean_from_pct.load(Ordering::Relaxed);
        let reserve = self.reserve;
        let shard = self.shards.lock(number);
        if shard.available() < reserve {
            return Some(Need::FreeSlots);
        }
        let Usage { dirty, .. } = shard.usage();
        let is_dirty = dirty * 100 > u64::from(shard.slot_count()) * u64::from(pct);
        is_dirty.then_some(Need::Cleaning)
    }

    /// After a change of `page`: wakes the worker, which sleeps only where nothing is to do.
    ///
    /// No wake-up is lost: the change was made under the lock of its shard, or of the queue of
    /// fills, and the worker looks under the same locks after it said that it sleeps.
    pub(super) fn wake_where_due(&self, page: u64) {
        let is_due = || self.fills.are_waiting() || self.need_of(self.shard_of(page)).is_some();
        if self.waker.needs_call() && is_due() {
            self.waker.wake();
        }
    }
}
