//! The threaded runtime of every staging policy: the sets behind their locks, and the device above them.

use std::sync::Arc;

use crossbeam_utils::CachePadded;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::super::faults::Faults;
use super::super::phases::Recorder;
use super::super::slots::{self, Slots};
use super::super::tier::{collect, state_of};
use super::super::{DramTier, Phases, Policy, TierSummary};
use super::background::{Bell, Threads};
use super::replacement::Replacement;
use super::set::Set;
use super::table::mix;
use crate::device::{
    Attempt, BlockDevice, Context, DeviceError, DeviceErrorKind, Extent, Geometry, Operation,
    Result, WriteFlags, ZeroFlags, is_memory_speed,
};
use crate::stats::Collector;
use crate::sync::{AtomicU64, Ordering};
use crate::tier::{State, Tier};

/// Fewest slots of a set, so that small caches have fewer sets.
const SLOTS_A_SET: u32 = 4;

/// A staging cache over a device, by policy `R`.
pub(super) struct Staging<R: Replacement> {
    pub(super) core: Arc<Core<R>>,
    threads: Threads,
}

/// What requests and background threads share.
pub(super) struct Core<R> {
    policy: Policy,
    pub(super) below: Below,
    pub(super) geometry: Geometry,
    pub(super) slots: Slots,
    sets: Box<[CachePadded<Cell<R>>]>,
    run_log2: u32,
    /// Number of the present epoch: each flush ends one.
    pub(super) epoch: CachePadded<AtomicU64>,
    pub(super) faults: Faults,
    pub(super) recorder: Recorder,
    pub(super) bell: Bell,
}

struct Cell<R> {
    guarded: Mutex<Guarded<R>>,
    changed: Condvar,
    /// Number of the set's first slot among all slots.
    first_slot: u32,
}

struct Guarded<R> {
    set: Set<R>,
    waiters: u32,
    /// The set's number is in the bell's queue, or a background thread works on it.
    called: bool,
}

impl<R: Replacement> Staging<R> {
    /// A cache of at most `bytes` bytes over `below`; `policy` is the name of `R`.
    ///
    /// # Errors
    /// As for [`super::super::open`]; or a thread cannot be started.
    pub(super) fn open(policy: Policy, bytes: u64, below: Arc<dyn BlockDevice>) -> Result<Self> {
        let slots = Slots::new(bytes, below.geometry().block_bytes)?;
        let core = Arc::new(Core::new(policy, slots, below));
        let threads = Threads::start(&core, core.threads())?;
        Ok(Self { core, threads })
    }

    /// What [`open`](Self::open) would make.
    ///
    /// # Errors
    /// As for [`super::super::open`].
    pub(super) fn describe(
        policy: Policy,
        bytes: u64,
        below: Arc<dyn BlockDevice>,
    ) -> Result<TierSummary> {
        let slots = Slots::reserve(bytes, below.geometry().block_bytes)?;
        let core = Core::<R>::new(policy, slots, below);
        Ok(core.summary(u32::try_from(core.threads()).unwrap_or(u32::MAX)))
    }
}

impl<R: Replacement> Core<R> {
    fn new(policy: Policy, slots: Slots, below: Arc<dyn BlockDevice>) -> Self {
        let geometry = below.geometry();
        let sets = (slots.count() / SLOTS_A_SET).clamp(1, R::SETS);
        let run_log2 = (geometry.preferred_bytes / geometry.block_bytes).max(1).ilog2();
        let first_slot = |number: u32| {
            let share = u64::from(slots.count()) * u64::from(number) / u64::from(sets);
            u32::try_from(share).unwrap_or(slots.count())
        };
        let cell = |number| {
            let (first_slot, end) = (first_slot(number), first_slot(number + 1));
            let set = Set::new(end - first_slot, 1 << run_log2);
            let guarded = Mutex::new(Guarded { set, waiters: 0, called: false });
            CachePadded::new(Cell { guarded, changed: Condvar::new(), first_slot })
        };
        Self {
            policy,
            below: Below::new(below, R::WHEN_IDLE),
            geometry,
            sets: (0..sets).map(cell).collect(),
            slots,
            run_log2,
            epoch: CachePadded::default(),
            faults: Faults::default(),
            recorder: Recorder::new(),
            bell: Bell::default(),
        }
    }

    /// Background threads that it starts.
    fn threads(&self) -> usize {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        R::THREADS.min(cpus).min(self.sets.len())
    }

    fn summary(&self, threads: u32) -> TierSummary {
        let counts = || (0..self.sets.len()).map(|number| self.lock(number).set().counts());
        let block_bytes = self.geometry.block_bytes;
        TierSummary {
            policy: self.policy,
            capacity_bytes: u64::from(self.slots.count()) * u64::from(block_bytes),
            block_bytes,
            slots: self.slots.count().into(),
            sets: u32::try_from(self.sets.len()).unwrap_or(u32::MAX),
            metadata_bytes_per_slot: self.metadata_bytes_per_slot(),
            dirty_slots: counts().map(|(dirty, _)| u64::from(dirty)).sum(),
            failed_slots: counts().map(|(_, failed)| u64::from(failed)).sum(),
            threads,
        }
    }

    /// Number of sets.
    pub(super) fn sets(&self) -> usize {
        self.sets.len()
    }

    /// The set of `lba`: the same for all lbas of an aligned run.
    pub(super) fn set_of(&self, lba: u64) -> usize {
        let product = u128::from(mix(lba >> self.run_log2)) * self.sets.len() as u128;
        #[expect(clippy::cast_possible_truncation, reason = "below the number of sets")]
        let number = (product >> 64) as usize;
        number
    }

    /// Locks set `number`.
    pub(super) fn lock(&self, number: usize) -> SetGuard<'_, R> {
        SetGuard { core: self, number, guard: self.sets[number].guarded.lock() }
    }

    pub(super) fn lba_of(&self, offset: u64) -> u64 {
        offset / u64::from(self.geometry.block_bytes)
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.geometry.block_bytes as usize
    }

    /// Bytes of metadata by slot: all that grows with the number of slots, and the sets.
    fn metadata_bytes_per_slot(&self) -> f64 {
        let inside = |number| self.lock(number).set().bytes();
        let sets = size_of_val(&*self.sets) + (0..self.sets.len()).map(inside).sum::<usize>();
        #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
        let (sets, locks) = (sets as f64, slots::LOCK_BYTES as f64);
        sets / f64::from(self.slots.count()) + locks
    }
}

/// A set locked. Unlocking calls a background thread where there is work for one.
pub(super) struct SetGuard<'a, R: Replacement> {
    core: &'a Core<R>,
    number: usize,
    guard: MutexGuard<'a, Guarded<R>>,
}

impl<R: Replacement> SetGuard<'_, R> {
    /// The state machine.
    pub(super) fn set(&mut self) -> &mut Set<R> {
        &mut self.guard.set
    }

    /// The number among all slots of a slot of this set.
    pub(super) fn slot(&self, slot: u32) -> u32 {
        self.core.sets[self.number].first_slot + slot
    }

    /// Unlocks the set until it has changed, and locks it again.
    pub(super) fn wait(&mut self) {
        self.call();
        self.guard.waiters += 1;
        self.core.sets[self.number].changed.wait(&mut self.guard);
        self.guard.waiters -= 1;
    }

    /// Wakes whoever waits for this set to change.
    pub(super) fn notify(&self) {
        if self.guard.waiters > 0 {
            self.core.sets[self.number].changed.notify_all();
        }
    }

    /// Unlocks the set while `run` runs.
    pub(super) fn unlocked<T>(&mut self, run: impl FnOnce() -> T) -> T {
        self.call();
        MutexGuard::unlocked(&mut self.guard, run)
    }

    /// The background thread that worked on this set is done.
    pub(super) fn end_call(&mut self) {
        self.guard.called = false;
    }

    fn call(&mut self) {
        if !self.guard.called && self.guard.set.wants_background() {
            self.guard.called = true;
            self.core.bell.call(self.number);
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
    /// It works at the speed of memory.
    pub(super) is_memory: bool,
    begun: CachePadded<AtomicU64>,
    ended: CachePadded<AtomicU64>,
}

/// How many requests the device below has got that were not background work.
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

    /// Runs a request that somebody waits for.
    pub(super) fn request<T>(&self, run: impl FnOnce(&dyn BlockDevice) -> T) -> T {
        if !self.is_watched {
            return run(&*self.device);
        }
        self.begun.fetch_add(1, Ordering::Relaxed);
        let result = run(&*self.device);
        self.ended.fetch_add(1, Ordering::Relaxed);
        result
    }

    /// Runs a request of a background thread.
    pub(super) fn background<T>(&self, run: impl FnOnce(&dyn BlockDevice) -> T) -> T {
        run(&*self.device)
    }

    /// What requests did so far; always the same where nobody watches.
    pub(super) fn activity(&self) -> Activity {
        let ended = self.ended.load(Ordering::Relaxed);
        Activity { begun: self.begun.load(Ordering::Relaxed), ended }
    }
}

impl<R: Replacement> BlockDevice for Staging<R> {
    /// That of the device below, but volatile.
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.core.geometry }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.core.read(offset, buf)
    }

    fn write(&self, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        self.core.write(offset, data, flags)
    }

    fn flush(&self) -> Result<()> {
        self.core.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.core.change_below(offset, len, |below| below.discard(offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.core.change_below(offset, len, |below| below.write_zeroes(offset, len, flags))?;
        if flags.fua { self.core.faults.report() } else { Ok(()) }
    }

    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        self.core.status(offset, len, most)
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        if self.core.waits_for_nothing(operation) {
            Attempt::Done(operation.run_on(self))
        } else {
            Attempt::WouldBlock
        }
    }
}

impl<R: Replacement> Tier for Staging<R> {
    fn state(&self) -> State {
        state_of(self)
    }

    fn drain(&self) -> Result<()> {
        self.threads.stop(&self.core.bell);
        self.core.flush()
    }

    fn metrics(&self, collector: &mut Collector) {
        collect(self, collector);
    }
}

impl<R: Replacement> DramTier for Staging<R> {
    fn summary(&self) -> TierSummary {
        self.core.summary(self.threads.count())
    }

    fn phases(&self) -> Phases {
        self.core.recorder.snapshot()
    }
}

impl<R: Replacement> Drop for Staging<R> {
    fn drop(&mut self) {
        // Whoever wants to know what failed calls `drain` before.
        let _ = self.drain();
    }
}

/// The error of a thread that the system refuses.
pub(super) fn no_thread(error: std::io::Error) -> DeviceError {
    let context = "cannot start a background thread of the DRAM tier";
    DeviceError::with_source(DeviceErrorKind::Io, context, error)
}
