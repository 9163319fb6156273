//! The state that requests and workers of a staging tier share: the sets behind their locks, and
//! the device below.

use std::sync::Arc;

use crossbeam_utils::CachePadded;

use super::super::phases::{Phase, Recorder};
use super::super::slots::{self, Slots};
use super::super::{NAME, Policy, TierSummary};
use super::calls::Calls;
use super::replacement::Replacement;
use super::set::Set;
use super::table::mix;
use crate::device::{AsyncRequest, BlockDevice, Geometry, is_memory_speed};
use crate::sync::machine::cpus;
use crate::sync::{AtomicU64, Ordering};
use crate::tier::ledger::Ledger;
use crate::tier::set_locks::{SetLock, SetLocks};

/// Fewest slots of a set, so that small caches have fewer sets.
const SLOTS_A_SET: u32 = 4;

/// The state that requests and workers share.
pub(super) struct StagingCache<R> {
    policy: Policy,
    pub(super) below: Below,
    pub(super) geometry: Geometry,
    pub(super) slots: Slots,
    sets: SetLocks<Guarded<R>>,
    run_log2: u32,
    /// Number of the current epoch; each flush ends one.
    pub(super) epoch: CachePadded<AtomicU64>,
    pub(super) ledger: Ledger,
    pub(super) recorder: Recorder,
    pub(super) calls: Calls,
}

/// The state under the lock of a set.
struct Guarded<R> {
    set: Set<R>,
    /// Number of the set's first slot among all slots.
    first_slot: u32,
    /// Whether the set's number is in the queue of calls, or a worker works on the set.
    called: bool,
}

/// A locked set. Unlocking it calls a worker if the set wants one.
pub(super) struct SetGuard<'a, R: Replacement> {
    core: &'a StagingCache<R>,
    number: usize,
    lock: SetLock<'a, Guarded<R>>,
}

impl<R: Replacement> StagingCache<R> {
    /// Makes an empty cache over `below`.
    pub(super) fn new(policy: Policy, slots: Slots, below: Arc<dyn BlockDevice>) -> Self {
        let geometry = below.geometry();
        let sets = (slots.count() / SLOTS_A_SET).clamp(1, R::SETS);
        let run_log2 = (geometry.preferred_bytes / geometry.block_bytes).max(1).ilog2();
        let first_slot = |number: u32| {
            let share = u64::from(slots.count()) * u64::from(number) / u64::from(sets);
            u32::try_from(share).unwrap_or(slots.count())
        };
        let guarded = |number| {
            let (first_slot, end) = (first_slot(number), first_slot(number + 1));
            let set = Set::new(end - first_slot, 1 << run_log2);
            Guarded { set, first_slot, called: false }
        };
        Self {
            policy,
            below: Below::new(below, R::WHEN_IDLE),
            geometry,
            sets: SetLocks::new((0..sets).map(guarded), None),
            slots,
            run_log2,
            epoch: CachePadded::default(),
            ledger: Ledger::new(NAME),
            recorder: Recorder::default(),
            calls: Calls::new(workers::<R>(sets)),
        }
    }

    /// Returns the number of workers of the tier.
    pub(super) fn workers(&self) -> u32 {
        workers::<R>(u32::try_from(self.sets.count()).unwrap_or(u32::MAX))
    }

    /// Returns the summary of the tier with `threads` threads.
    pub(super) fn summary(&self, threads: u32) -> TierSummary {
        let counts = || (0..self.sets()).map(|number| self.lock(number).set().counts());
        let block_bytes = self.geometry.block_bytes;
        TierSummary {
            policy: self.policy,
            capacity_bytes: u64::from(self.slots.count()) * u64::from(block_bytes),
            block_bytes,
            slots: self.slots.count().into(),
            sets: u32::try_from(self.sets()).unwrap_or(u32::MAX),
            metadata_bytes_per_slot: self.metadata_bytes_per_slot(),
            dirty_slots: counts().map(|(dirty, _)| u64::from(dirty)).sum(),
            failed_slots: counts().map(|(_, failed)| u64::from(failed)).sum(),
            threads,
        }
    }

    /// Returns the number of sets.
    pub(super) fn sets(&self) -> usize {
        self.sets.count()
    }

    /// Returns the set of `lba`. All lbas of an aligned run share a set.
    pub(super) fn set_of(&self, lba: u64) -> usize {
        let product = u128::from(mix(lba >> self.run_log2)) * self.sets() as u128;
        #[expect(clippy::cast_possible_truncation, reason = "below the number of sets")]
        let number = (product >> 64) as usize;
        number
    }

    /// Locks set `number`.
    pub(super) fn lock(&self, number: usize) -> SetGuard<'_, R> {
        SetGuard { core: self, number, lock: self.sets.lock(number) }
    }

    /// Returns whether `lba` is cached.
    pub(super) fn is_cached(&self, lba: u64) -> bool {
        self.lock(self.set_of(lba)).set().contains(lba)
    }

    /// Starts `request`, a read of blocks that are not cached, on the device below.
    pub(super) fn start_below(self: &Arc<Self>, request: AsyncRequest) {
        let core = Arc::clone(self);
        let miss = core.recorder.begin_detached(Phase::ReadMiss);
        core.below.begun.fetch_add(1, Ordering::Relaxed);
        Arc::clone(&self.below.device).start(request.forward(move |request, result| {
            core.below.ended.fetch_add(1, Ordering::Relaxed);
            core.recorder.end(miss);
            request.complete(result);
        }));
    }

    pub(super) fn lba_of(&self, offset: u64) -> u64 {
        offset / u64::from(self.geometry.block_bytes)
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.geometry.block_bytes as usize
    }

    /// Returns the bytes of metadata by slot, including the sets.
    fn metadata_bytes_per_slot(&self) -> f64 {
        let inside = |number| self.lock(number).set().bytes();
        let sets = self.sets.bytes() + (0..self.sets()).map(inside).sum::<usize>();
        #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
        let (sets, locks) = (sets as f64, slots::LOCK_BYTES as f64);
        sets / f64::from(self.slots.count()) + locks
    }
}

impl<R: Replacement> SetGuard<'_, R> {
    /// Returns the state machine.
    pub(super) fn set(&mut self) -> &mut Set<R> {
        &mut self.lock.set
    }

    /// Returns the number, among all slots, of a slot of this set.
    pub(super) fn slot(&self, slot: u32) -> u32 {
        self.lock.first_slot + slot
    }

    /// Unlocks the set until it has changed, and locks it again.
    pub(super) fn wait(&mut self) {
        self.call();
        self.lock.wait();
    }

    /// Wakes the threads that wait for this set to change.
    pub(super) fn notify(&self) {
        self.lock.notify();
    }

    /// Unlocks the set while `run` runs.
    pub(super) fn unlocked<T>(&mut self, run: impl FnOnce() -> T) -> T {
        self.call();
        self.lock.unlocked(run)
    }

    /// Marks that no worker works on this set any more.
    pub(super) fn end_call(&mut self) {
        self.lock.called = false;
    }

    fn call(&mut self) {
        if !self.lock.called && self.lock.set.wants_background() {
            self.lock.called = true;
            self.core.calls.call(self.number);
        }
    }
}

impl<R: Replacement> Drop for SetGuard<'_, R> {
    fn drop(&mut self) {
        self.call();
    }
}

/// The device below, and how busy requests keep it.
pub(super) struct Below {
    device: Arc<dyn BlockDevice>,
    is_watched: bool,
    /// Whether it works at the speed of memory.
    pub(super) is_memory: bool,
    begun: CachePadded<AtomicU64>,
    ended: CachePadded<AtomicU64>,
}

/// Requests to the device below, without background work, begun and ended so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Activity {
    pub(super) begun: u64,
    pub(super) ended: u64,
}

impl Below {
    fn new(device: Arc<dyn BlockDevice>, is_watched: bool) -> Self {
        let (begun, ended) = (CachePadded::default(), CachePadded::default());
        let is_memory = is_memory_speed(&*device);
        Self { device, is_watched, is_memory, begun, ended }
    }

    /// Runs a request of a waiting caller.
    pub(super) fn request<T>(&self, run: impl FnOnce(&dyn BlockDevice) -> T) -> T {
        if !self.is_watched {
            return run(&*self.device);
        }
        self.begun.fetch_add(1, Ordering::Relaxed);
        let result = run(&*self.device);
        self.ended.fetch_add(1, Ordering::Relaxed);
        result
    }

    /// Runs a request of a worker.
    pub(super) fn background<T>(&self, run: impl FnOnce(&dyn BlockDevice) -> T) -> T {
        run(&*self.device)
    }

    /// Returns the activity of requests so far; counted only if a worker watches.
    pub(super) fn activity(&self) -> Activity {
        let ended = self.ended.load(Ordering::Relaxed);
        Activity { begun: self.begun.load(Ordering::Relaxed), ended }
    }
}

/// Returns the number of workers of a tier of `sets` sets.
fn workers<R: Replacement>(sets: u32) -> u32 {
    R::WORKERS.min(cpus()).min(sets)
}
