//! The background work of a cache: keeping what was read, evicting and cleaning ahead of need.

pub(super) mod clean;
pub(super) mod clusters;
pub(super) mod evict;
pub(super) mod fill;
pub(super) mod pace;
pub(super) mod purge;
pub(super) mod resize;

use std::sync::Arc;

use super::Core;
use super::pages::index::Shard;
use crate::device::Result;
use crate::tier::background::{Step, Work};
use crate::tier::clock::now_ns;

/// After a failure: when to try again, unless a writer waits for a free slot before.
const RETRY_NS: u64 = 1_000_000_000;
/// When to look again at pages that other writes keep busy.
const MOMENT_NS: u64 = 1_000_000;
/// When to look again for pages to keep, after some were kept. Reads that miss come one after the
/// other, and to wake an idle worker costs a reader some microseconds each time.
const FILL_REST_NS: u64 = 250_000;

/// A worker of a cache; there are two, so that a batch is copied while another one is written.
pub(super) struct Background(pub(super) Arc<Core>);

impl Work for Background {
    fn step(&mut self) -> Step {
        let core = &*self.0;
        let done = core.step();
        match done {
            Ok(Progress::Idle) => match core.next_cleaning_ns() {
                Some(wake_at_ns) => Step::Doze { wake_at_ns },
                None => Step::IDLE,
            },
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
        let Some((number, need)) = self.next_need(now_ns()) else { return Ok(Progress::Idle) };
        let Some(mut scratch) = self.cleaners.try_lock() else {
            // Requests clean.
            return Ok(Progress::Blocked);
        };
        let done = match need {
            Need::FreeSlots => self.reclaim_where_needed(&mut scratch)? > 0,
            Need::Cleaning => {
                let Some(_ahead) = self.cleaners.ahead.try_lock() else {
                    return Ok(Progress::Blocked);
                };
                self.clean_by_policy(number, &mut scratch)?
            }
        };
        Ok(if done { Progress::Some } else { Progress::Blocked })
    }

    fn has_work(&self) -> bool {
        self.fills.are_waiting() || self.next_need(now_ns()).is_some()
    }

    /// A shard that needs work, one without free slots first.
    fn next_need(&self, now_ns: u64) -> Option<(usize, Need)> {
        let may_clean = !self.cleaners.ahead.is_locked() && self.pace.is_free(now_ns);
        let need_of = |it| {
            let shard = self.shards.lock(it);
            Some((it, self.need_of(&shard, may_clean.then_some(now_ns))?))
        };
        let needs = (0..self.shards.count()).filter_map(need_of);
        needs.min_by_key(|(_, need)| *need)
    }

    /// The shards that need free slots.
    pub(super) fn needy_shards(&self) -> Vec<usize> {
        let needs_slots = |it: &usize| self.shards.lock(*it).needs_slots(self.reserve());
        (0..self.shards.count()).filter(needs_slots).collect()
    }

    /// What `shard` needs; cleaning at `now_ns`, where that may begin.
    fn need_of(&self, shard: &Shard, now_ns: Option<u64>) -> Option<Need> {
        if shard.needs_slots(self.reserve()) {
            return Some(Need::FreeSlots);
        }
        now_ns.filter(|now_ns| shard.wants_cleaning(*now_ns)).map(|_| Need::Cleaning)
    }

    /// After a change of `page`: wakes the worker, which sleeps only where nothing is to do.
    pub(super) fn wake_where_due(&self, page: u64) {
        self.wake_for_shard(self.shard_of(page));
    }

    /// After a change in shard `number`, or in the queue of fills: likewise.
    pub(super) fn wake_for_shard(&self, number: usize) {
        let is_due = || self.fills.are_waiting() || self.needs_worker(&self.shards.lock(number));
        if self.waker.needs_call() && is_due() {
            self.waker.wake();
        }
    }

    /// `shard`, which the caller has locked and may have changed, needs a worker, and all sleep. A
    /// worker that waits for a time wakes by itself.
    ///
    /// No wake-up is lost: the worker looks under the same lock after it said that it sleeps.
    /// Either it sees the change, or what it said is seen here.
    pub(super) fn needs_worker(&self, shard: &Shard) -> bool {
        let may_clean = self.pace.free_at_ns() == 0;
        self.waker.needs_call() && self.need_of(shard, may_clean.then_some(0)).is_some()
    }
}
