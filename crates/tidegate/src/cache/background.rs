//! The background work of a cache: keeping what was read, evicting and cleaning ahead of need.

use std::sync::Arc;

use super::Core;
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

/// A worker of a cache.
pub(super) struct Background {
    core: Arc<Core>,
    /// The last step left the times of cleaning to the worker of a batch that was under way.
    awaits_batch: bool,
}

impl Background {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self { core, awaits_batch: false }
    }

    /// There was nothing to do: until when.
    fn idle(&mut self) -> Step {
        // Its thread looks for work afterwards, or wakes a worker.
        self.awaits_batch = self.core.batches.under_way() > 0;
        match self.core.next_cleaning_ns() {
            Some(wake_at_ns) if !self.awaits_batch => Step::Doze { wake_at_ns },
            _ => Step::IDLE,
        }
    }
}

impl Work for Background {
    fn step(&mut self) -> Step {
        self.awaits_batch = false;
        let done = self.core.step();
        match done {
            Ok(Progress::Idle) => self.idle(),
            Ok(Progress::Some) => Step::Again,
            Ok(Progress::Filled) if self.core.has_work() => Step::Again,
            Ok(Progress::Filled) => Step::rest(FILL_REST_NS),
            Ok(Progress::Blocked) => Step::rest(MOMENT_NS),
            Err(_) => {
                // Writers that wait look at the ledger.
                self.core.notify_all();
                Step::rest(RETRY_NS)
            }
        }
    }

    fn has_work(&self) -> bool {
        let is_batch_over = self.awaits_batch && self.core.batches.under_way() == 0;
        is_batch_over || self.core.has_work()
    }
}

/// What the cache needs, the most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
        let now_ns = now_ns();
        let Some(need) = self.next_need(now_ns) else { return Ok(Progress::Idle) };
        let Some(mut scratch) = self.batches.begin() else {
            // Requests clean.
            return Ok(Progress::Blocked);
        };
        if self.next_need(now_ns) == Some(Need::FreeSlots) {
            // For more than this batch can be.
            self.waker.wake_another();
        }
        let done = match need {
            Need::FreeSlots => self.reclaim(&self.short_shards(), &mut scratch)? > 0,
            Need::Cleaning => self.clean_by_policy(&mut scratch)?,
        };
        Ok(if done { Progress::Some } else { Progress::Blocked })
    }

    fn has_work(&self) -> bool {
        self.fills.are_waiting() || self.next_need(now_ns()).is_some()
    }

    fn next_need(&self, now_ns: u64) -> Option<Need> {
        let shards = 0..self.shards.count();
        if shards.clone().any(|it| self.is_short(it)) {
            return Some(Need::FreeSlots);
        }
        let may_clean = self.may_clean_ahead() && self.pace.is_free(now_ns);
        let wants = |it| self.shards.lock(it).wants_cleaning(now_ns);
        (may_clean && shards.clone().any(wants)).then_some(Need::Cleaning)
    }

    /// Shard `number` has so few slots that a batch is due. Another batch beside one that is under
    /// way is due later: that one is to free slots too.
    fn is_short(&self, number: usize) -> bool {
        self.shards.lock(number).available() < self.reserve >> self.batches.under_way()
    }

    /// The shards that a batch is to free slots in, once it is due.
    fn short_shards(&self) -> Vec<usize> {
        let is_short = |it: &usize| self.shards.lock(*it).available() < self.reserve;
        (0..self.shards.count()).filter(is_short).collect()
    }

    /// What is cleaned ahead of need is one batch, so that requests have the most of the backing.
    fn may_clean_ahead(&self) -> bool {
        self.batches.under_way() == 0
    }

    /// After a change of `page`: wakes the worker, which sleeps only where nothing is to do.
    ///
    /// No wake-up is lost: the change was made under the lock of its shard, or of the queue of
    /// fills, and the worker looks under the same locks after it said that it sleeps.
    pub(super) fn wake_where_due(&self, page: u64) {
        self.wake_for_shard(self.shard_of(page));
    }

    /// After a change in shard `number`: likewise.
    pub(super) fn wake_for_shard(&self, number: usize) {
        let is_due = || self.fills.are_waiting() || self.needs_worker(number);
        if self.waker.needs_call() && is_due() {
            self.waker.wake();
        }
    }

    /// Shard `number` needs a worker that sleeps: one that waits for a time wakes by itself.
    fn needs_worker(&self, number: usize) -> bool {
        let may_clean = self.may_clean_ahead() && self.pace.free_at_ns() == 0;
        self.is_short(number) || may_clean && self.shards.lock(number).wants_cleaning(0)
    }
}
