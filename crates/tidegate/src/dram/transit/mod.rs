//! I/O transit caching (the Caiti paper): blocks pass through DRAM on their way to the device
//! below.
//!
//! A write copies its blocks into free slots and returns; background workers write them back at
//! once (eager eviction). If no slot is free, the write goes to the device below (conditional
//! bypass). Reads hit blocks that are still cached, and never fill the cache. `transit-no-eager`
//! and `transit-no-bypass` each omit one of the two.
//!
//! Why reads and writes stay in order (`set` keeps the rules for one lba):
//!
//! - **A read never returns less than an acknowledged write.** A version leaves the index only
//!   after its write below has returned, or for a newer version, and a bypass is acknowledged only
//!   when it has returned. So data acknowledged before a read looked its lba up is in the index or
//!   below, where only later versions replace it.
//! - **A bypass cannot undo a later write.** It happens only if, under the lock of the set, no
//!   version of the lba was cached: all earlier acknowledged writes are below. Until it returns,
//!   the lba is closed to writes (`closing`), so no later write can overtake it through the cache.
//! - **In the bypassing write mode** (`write_mode`) the cache admits no block.
//! - **Zeroes, discards and FUA writes** close their range, drain its cached blocks, and then go
//!   below, so they are bypasses too.
//!
//! Map: `set` is the state machine, `table` has its cells, `sets` its locks; `drain` writes back
//! and drains, `evictor` is the background work, `cpu_share` decides when it rests, `costs`
//! measures which way is cheaper, `write_mode` acts on that. Lock order: set, then slot or the
//! gates of the waker and of `progress`. During a call to the device below, a thread holds at most
//! the read lock of the slot that it writes.

mod closing;
mod costs;
mod cpu_share;
mod drain;
mod evictor;
mod flags;
mod in_flight;
#[cfg(all(test, not(loom)))]
mod interleavings;
mod progress;
mod read;
mod set;
mod sets;
mod table;
#[cfg(all(test, not(loom)))]
mod tests;
mod write;
mod write_mode;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crossbeam_utils::CachePadded;

use super::free_set::{self, FreeSet};
use super::phases::{Phase, Recorder, draw};
use super::slots::{self, Slots};
use super::tier::{collect, is_read_below, state_of};
use super::{DramTier, Make, Phases, Policy, TierSummary, no_thread};
use crate::device::{
    AsyncRequest, Attempt, BlockDevice, BlockDeviceExt, Context, Geometry, Operation, Result,
    WriteFlags, is_memory_speed, start_on_pool,
};
use crate::stats::Collector;
use crate::sync::machine::cpus;
use crate::tier::background::{Waker, Work, Workers};
use crate::tier::ledger::Ledger;
use crate::tier::set_locks::Relax;
use crate::tier::{State, Tier};
use costs::Costs;
use evictor::{Evictor, UnpacedEvictor};
use in_flight::InFlight;
use progress::Progress;
use sets::Sets;
use table::Table;
use write_mode::ModeSwitch;

/// Most sets; a cache with few slots has fewer sets, each with several slots.
const SETS_LOG2: u32 = 8;
const SLOTS_A_SET_LOG2: u32 = 4;
/// Most bytes of metadata a slot may cost, locks and index included (the paper: 102).
#[cfg(all(test, not(loom)))]
const MOST_METADATA_BYTES: f64 = 64.0;

/// A transit cache over a device.
pub(super) struct Transit {
    core: Arc<Core>,
    workers: Workers,
}

/// The state that requests and evictors share.
struct Core {
    policy: Policy,
    /// Whether a scheduler runs the work and changes the write mode, instead of measured time.
    is_driven: bool,
    below: Arc<dyn BlockDevice>,
    /// Whether the device below works at the speed of memory, on its caller's CPU.
    is_below_memory: bool,
    geometry: Geometry,
    slots: Slots,
    free: FreeSet,
    table: Table,
    sets: Sets,
    /// Number of the current epoch; each flush ends one.
    epoch: CachePadded<AtomicU64>,
    ledger: Ledger,
    recorder: Recorder,
    costs: Costs,
    mode_switch: ModeSwitch,
    /// Writes and flushes in flight, except those that `mode_switch` counts.
    busy: InFlight,
    waker: Arc<Waker>,
    /// 1 if a write that finds the cache full should end a nap.
    napping: AtomicU32,
    cpus: u32,
    progress: Progress,
}

impl Make for Transit {
    /// Opens the cache by one of the three transit policies.
    fn open(policy: Policy, bytes: u64, below: Arc<dyn BlockDevice>) -> Result<Self> {
        Self::start(policy, bytes, below, evictors(policy), None)
    }

    fn describe(policy: Policy, bytes: u64, below: Arc<dyn BlockDevice>) -> Result<TierSummary> {
        let slots = Slots::reserve(bytes, below.geometry().block_bytes)?;
        Ok(Core::new(policy, slots, below, 0, None).summary(evictors(policy)))
    }
}

impl Transit {
    /// Opens a cache without threads: waiting requests call `relax`, and a scheduler runs
    /// [`unpaced_evictor`](Self::unpaced_evictor).
    ///
    /// # Errors
    /// Fails as [`super::open`] does.
    pub(super) fn open_driven(
        bytes: u64,
        below: Arc<dyn BlockDevice>,
        relax: Relax,
    ) -> Result<Self> {
        Self::start(Policy::Transit, bytes, below, 0, Some(relax))
    }

    /// Returns the work of an evictor, for a scheduler.
    pub(super) fn unpaced_evictor(&self) -> impl Work + use<> {
        UnpacedEvictor { core: Arc::clone(&self.core) }
    }

    /// Changes the write mode by one step, towards bypassing or towards cached.
    pub(super) fn step_write_mode(&self, bypass: bool) {
        self.core.switch_mode(|_| bypass);
    }

    fn start(
        policy: Policy,
        bytes: u64,
        below: Arc<dyn BlockDevice>,
        evictors: u32,
        relax: Option<Relax>,
    ) -> Result<Self> {
        let slots = Slots::new(bytes, below.geometry().block_bytes)?;
        let core = Arc::new(Core::new(policy, slots, below, evictors, relax));
        let works = (0..evictors).map(|number| Evictor::new(Arc::clone(&core), number));
        let workers =
            Workers::start("evictor", Arc::clone(&core.waker), works).map_err(no_thread)?;
        Ok(Self { core, workers })
    }
}

/// Returns the number of threads of a policy.
fn evictors(policy: Policy) -> u32 {
    if policy == Policy::TransitNoEager { 0 } else { cpus() }
}

impl Core {
    fn new(
        policy: Policy,
        slots: Slots,
        below: Arc<dyn BlockDevice>,
        evictors: u32,
        relax: Option<Relax>,
    ) -> Self {
        let geometry = below.geometry();
        let sets_log2 = slots.count().ilog2().saturating_sub(SLOTS_A_SET_LOG2).min(SETS_LOG2);
        let run_blocks = (geometry.preferred_bytes / geometry.block_bytes).max(1);
        let table = Table::new(slots.count(), sets_log2, run_blocks.ilog2());
        Self {
            policy,
            is_below_memory: is_memory_speed(&*below),
            below,
            geometry,
            free: FreeSet::full(slots.count()),
            slots,
            is_driven: relax.is_some(),
            sets: Sets::new(table.sets(), relax),
            table,
            epoch: CachePadded::default(),
            ledger: Ledger::new(super::NAME),
            recorder: Recorder::default(),
            costs: Costs::default(),
            mode_switch: ModeSwitch::new(),
            busy: InFlight::default(),
            waker: Arc::new(Waker::new(evictors)),
            napping: AtomicU32::new(0),
            cpus: cpus(),
            progress: Progress::default(),
        }
    }

    fn summary(&self, threads: u32) -> TierSummary {
        let (mut dirty_slots, mut failed_slots) = (0, 0);
        for number in 0..self.sets.count() {
            let (dirty, failed) = self.sets.lock(number).set().counts(&self.table);
            dirty_slots += dirty;
            failed_slots += failed;
        }
        TierSummary {
            policy: self.policy,
            capacity_bytes: u64::from(self.slots.count()) * u64::from(self.geometry.block_bytes),
            block_bytes: self.geometry.block_bytes,
            slots: u64::from(self.slots.count()),
            sets: u32::try_from(self.sets.count()).unwrap_or(u32::MAX),
            metadata_bytes_per_slot: self.metadata_bytes_per_slot(),
            dirty_slots,
            failed_slots,
            threads,
        }
    }

    /// Returns the bytes of metadata by slot, including the sets.
    fn metadata_bytes_per_slot(&self) -> f64 {
        let slots = f64::from(self.slots.count());
        let shared = self.table.bytes() + self.sets.bytes();
        #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
        let shared = shared as f64;
        #[expect(clippy::cast_precision_loss, reason = "a dozen")]
        let own = (slots::LOCK_BYTES + free_set::LINK_BYTES) as f64;
        own + shared / slots
    }

    /// Reports whether to measure this time.
    fn draw(&self) -> bool {
        !self.is_driven && draw()
    }

    /// Returns about how many slots are in use.
    fn used_slots(&self) -> u32 {
        self.slots.count().saturating_sub(self.free.count())
    }

    fn lba_of(&self, offset: u64) -> u64 {
        offset / u64::from(self.geometry.block_bytes)
    }

    fn block_bytes(&self) -> usize {
        self.geometry.block_bytes as usize
    }
}

impl BlockDevice for Transit {
    /// Returns the geometry of the device below, with a volatile cache.
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.core.geometry }
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let core = &self.core;
        core.geometry.check_operation(operation)?;
        match *operation {
            Operation::Read { offset, ref mut buf } => core.read(offset, buf),
            Operation::Write { offset, data, flags } => core.write(offset, data, flags),
            Operation::Flush => core.flush(),
            Operation::Discard { offset, len } => {
                core.bypass_range(offset, len, |at, len| core.below.discard(at, len))
            }
            Operation::WriteZeroes { offset, len, flags } => {
                core.bypass_range(offset, len, |at, len| core.below.write_zeroes(at, len, flags))?;
                if flags.fua { core.ledger.report() } else { Ok(()) }
            }
            Operation::Status { offset, len, .. } => {
                core.drain_range(offset, len)?;
                core.below.run(operation)
            }
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        if self.core.waits_for_nothing(operation) {
            Attempt::Done(self.run(operation))
        } else {
            Attempt::WouldBlock
        }
    }

    /// Starts a read of uncached blocks directly on the device below, other requests on the pool.
    fn start(self: Arc<Self>, request: AsyncRequest) {
        let is_cached = |lba| self.core.is_cached(lba);
        if !is_read_below(request.owned(), &self.core.geometry, is_cached) {
            return start_on_pool(self, request);
        }
        let (core, below) = (Arc::clone(&self.core), Arc::clone(&self.core.below));
        let miss = core.recorder.begin_detached(Phase::ReadMiss);
        below.start(request.forward(move |request, result| {
            core.recorder.end(miss);
            request.complete(result);
        }));
    }
}

impl Tier for Transit {
    fn state(&self) -> State {
        state_of(self)
    }

    fn drain(&self) -> Result<()> {
        self.workers.stop();
        self.core.flush()
    }

    fn metrics(&self, collector: &mut Collector) {
        collect(self, collector);
    }
}

impl DramTier for Transit {
    fn summary(&self) -> TierSummary {
        self.core.summary(self.workers.count())
    }

    fn phases(&self) -> Phases {
        self.core.recorder.snapshot()
    }
}

impl Drop for Transit {
    fn drop(&mut self) {
        if !self.core.is_driven {
            // Data that this cannot write back is lost with the cache; `drain` reports it.
            let _ = self.drain();
        }
    }
}
