//! I/O transit caching (the Caiti paper): blocks pass through DRAM on their way to the device below.
//!
//! A write copies its blocks into free slots and returns; background threads write them back at once (eager
//! eviction), and with no slot free the write goes straight below (conditional bypass). Reads hit what is
//! still here and never fill. `transit-no-eager` and `transit-no-bypass` leave one of the two out.
//!
//! Why reads and writes stay in order (`set` keeps the rules for one lba):
//!
//! - **A read never returns less than an acknowledged write.** A version leaves the index only after its
//!   write below has returned, and a bypass is acknowledged only then. So whatever was acknowledged before a
//!   read looked its lba up was found in the index or is below, where only later versions replace it.
//! - **A bypass cannot undo a later write.** It happens only where, under the lock of the set, no version of the
//!   lba was cached: all earlier acknowledged writes are below. Until it returns the lba is closed to writes
//!   (`closing`), so no later one can overtake it through the cache.
//! - **Zeroes, discards and FUA writes** close their range, settle what is cached of it, and then go below, so they
//!   are bypasses too.
//!
//! Map: `set` the state machine, `table` its cells, `sets` its locks; `evict` writing back, `flush` settling,
//! `evictor` the threads, `costs` what is cheaper. Lock order: set, then slot or the gates of `evictor` and
//! `progress`; nothing is held over a call to the device below but the slot that is written, for reading.

mod closing;
mod costs;
mod evict;
mod evictor;
mod flags;
mod flush;
#[cfg(all(test, not(feature = "loom")))]
mod interleavings;
mod progress;
mod read;
mod set;
mod sets;
mod table;
#[cfg(all(test, not(feature = "loom")))]
mod tests;
mod write;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crossbeam_utils::CachePadded;

use super::faults::Faults;
use super::free_set::{self, FreeSet};
use super::phases::{Phase, Recorder};
use super::slots::{self, Slots};
use super::{DramTier, Phases, Policy, TierSummary};
use crate::device::{BlockDevice, Extent, Geometry, Result, WriteFlags, ZeroFlags};
use costs::Costs;
use evictor::{Doorbell, Pool};
use progress::Progress;
use sets::Sets;
use table::Table;

/// Most sets; a cache with few slots has fewer, so that a set has some.
const SETS_LOG2: u32 = 8;
const SLOTS_A_SET_LOG2: u32 = 4;
/// Most bytes of metadata a slot may cost, locks and index included (the paper: 102).
#[cfg(all(test, not(feature = "loom")))]
const MOST_METADATA_BYTES: f64 = 64.0;

/// A transit cache over a device.
pub(super) struct Transit {
    core: Arc<Core>,
    pool: Pool,
}

/// What requests and evictors share.
struct Core {
    policy: Policy,
    below: Arc<dyn BlockDevice>,
    geometry: Geometry,
    slots: Slots,
    free: FreeSet,
    table: Table,
    sets: Sets,
    /// Number of the present epoch: each flush ends one.
    epoch: CachePadded<AtomicU64>,
    faults: Faults,
    recorder: Recorder,
    costs: Costs,
    bell: Doorbell,
    progress: Progress,
}

impl Transit {
    /// A cache of `bytes` bytes over `below`, by one of the three transit policies.
    ///
    /// # Errors
    /// As for [`super::open`]; or a thread cannot be started.
    pub(super) fn open(policy: Policy, bytes: u64, below: Arc<dyn BlockDevice>) -> Result<Self> {
        let evictors = match policy {
            Policy::TransitNoEager => 0,
            _ => evictor::cpus(),
        };
        Self::with_evictors(policy, bytes, below, evictors)
    }

    fn with_evictors(
        policy: Policy,
        bytes: u64,
        below: Arc<dyn BlockDevice>,
        evictors: usize,
    ) -> Result<Self> {
        let core = Arc::new(Core::new(policy, bytes, below, evictors)?);
        let pool = Pool::start(&core, evictors)?;
        Ok(Self { core, pool })
    }
}

impl Core {
    fn new(
        policy: Policy,
        bytes: u64,
        below: Arc<dyn BlockDevice>,
        evictors: usize,
    ) -> Result<Self> {
        let geometry = below.geometry();
        let slots = Slots::new(bytes, geometry.block_bytes)?;
        let sets_log2 = slots.count().ilog2().saturating_sub(SLOTS_A_SET_LOG2).min(SETS_LOG2);
        let run_blocks = (geometry.preferred_bytes / geometry.block_bytes).max(1);
        let table = Table::new(slots.count(), sets_log2, run_blocks.ilog2());
        Ok(Self {
            policy,
            below,
            geometry,
            free: FreeSet::full(slots.count()),
            slots,
            sets: Sets::new(table.sets()),
            table,
            epoch: CachePadded::default(),
            faults: Faults::default(),
            recorder: Recorder::new(),
            costs: Costs::default(),
            bell: Doorbell::new(evictors),
            progress: Progress::default(),
        })
    }

    /// Bytes of metadata by slot: all that grows with the number of slots, and the sets.
    fn metadata_bytes_per_slot(&self) -> f64 {
        let slots = f64::from(self.slots.count());
        let shared = self.table.bytes() + self.sets.bytes();
        #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
        let shared = shared as f64;
        #[expect(clippy::cast_precision_loss, reason = "a dozen")]
        let own = (slots::LOCK_BYTES + free_set::LINK_BYTES) as f64;
        own + shared / slots
    }

    /// About how many slots hold something.
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
        self.core.geometry.check(offset, len)?;
        self.core.past_the_cache(offset, len, |offset, len| self.core.below.discard(offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.core.geometry.check(offset, len)?;
        let zero = |offset, len| self.core.below.write_zeroes(offset, len, flags);
        self.core.past_the_cache(offset, len, zero)?;
        if flags.fua { self.core.faults.report() } else { Ok(()) }
    }

    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        self.core.geometry.check(offset, len)?;
        self.core.settle_range(offset, len)?;
        self.core.below.status(offset, len, most)
    }
}

impl DramTier for Transit {
    fn summary(&self) -> TierSummary {
        let core = &self.core;
        let (mut dirty_slots, mut failed_slots) = (0, 0);
        for number in 0..core.sets.count() {
            let (dirty, failed) = core.sets.lock(number).set().counts(&core.table);
            dirty_slots += dirty;
            failed_slots += failed;
        }
        TierSummary {
            policy: core.policy,
            capacity_bytes: u64::from(core.slots.count()) * u64::from(core.geometry.block_bytes),
            block_bytes: core.geometry.block_bytes,
            slots: u64::from(core.slots.count()),
            sets: u32::try_from(core.sets.count()).unwrap_or(u32::MAX),
            metadata_bytes_per_slot: core.metadata_bytes_per_slot(),
            dirty_slots,
            failed_slots,
            threads: self.pool.threads(),
        }
    }

    fn phases(&self) -> Phases {
        self.core.recorder.snapshot()
    }

    fn shutdown(&self) -> Result<()> {
        self.pool.stop(&self.core.bell);
        self.core.flush()
    }
}

impl Drop for Transit {
    fn drop(&mut self) {
        // What this could not write back is lost with the cache; `shutdown` is there to hear of it.
        let _ = self.shutdown();
    }
}
