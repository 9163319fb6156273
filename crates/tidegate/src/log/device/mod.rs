//! The log as a tier: a block device over a slower one. One fence makes a write durable.
//!
//! Invariants:
//! 1. A write is one record, or several of whole blocks if it is larger than a record may be. The
//!    writer adds the record to the index before it frees its slot. So the cleaner finds every
//!    block of a finished record in the index, or a newer version there.
//! 2. The newest record of a block wins, by position: in the index, after a crash, and on the way
//!    to the backing. So writers need no lock of a block: of two concurrent writes either may be
//!    the newer one, and index, recovery and cleaner agree on it.
//! 3. A block is read from the log while its newest record is not before the tail, otherwise from
//!    the backing. A copy from the log counts if the tail has not passed the record meanwhile; a
//!    copy from the backing counts if no cleaning of its blocks began.
//! 4. The tail moves past a record once the backing has flushed its data or newer data, and never
//!    past the last definition of the device: the log always names the backing of its records.
//! 5. A failing backing loses no data: the tail stays, the cleaner tries again, and writes fail
//!    only once the log is full. A flush reports only failures of the log itself.
//!
//! After a crash, opening rebuilds the index from the records, and destages nothing.
//!
//! Map: `requests` reads and writes, `attempt` serves requests that must not wait, `start` has
//! requests that wait without a thread, `index` locates the newest version of a block, `clean`
//! destages records, `background` decides when, `recover` opens, `binding` identifies the backing.

mod attempt;
mod background;
mod binding;
mod clean;
mod error;
#[cfg(all(test, not(loom)))]
mod failing_tests;
mod index;
mod recover;
mod requests;
mod start;
#[cfg(all(test, not(loom)))]
mod tests;
mod tier;

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

pub use binding::Binding;
pub use error::LogDeviceError;
pub use recover::Recovered;
pub use recover::{expect_fit, has_records_of};

use super::error::AppendError;
use super::{CLOSED, CONTROL_BYTES, LogPool, NO_BOOT, Ring};
use crate::device::{
    AsyncRequest, Attempt, BlockDevice, BlockDeviceExt, Context, DeviceError, DeviceErrorKind,
    Extent, Geometry, Operation, Result, ZeroFlags,
};
use crate::log::control::table::FileRef;
use crate::stats::Requests;
use crate::sync::AtomicU64;
use crate::tier::background::{Waker, Work, Workers};
use crate::tier::begin;
use crate::tier::ledger::Ledger;
use crate::tier::version_locks::VersionLocks;
use background::Cleaner;
use clean::Scratch;
use index::Index;
use start::Blocked;

/// Neighbouring blocks that share a version, so that a long read checks few versions.
const GROUP_BLOCKS: u64 = 64;
/// Number of versions, as a power of two. Groups that share one only cause repeated reads.
const VERSIONS_LOG2: u32 = 12;
/// Most bytes of a record; a larger write is split.
const RECORD_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of the log that are destaged between two flushes of the backing, unless set.
const BATCH_BYTES: u64 = 8 << 20;
/// The options of a [`LogDevice`].
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools)]
pub struct LogDeviceOptions {
    /// Start no thread: writes that fill the log clean it.
    pub no_thread: bool,
    /// Start no thread: a scheduler runs [`LogDevice::cleaner`], and waiting writers call
    /// [`Region::relax`](crate::pmem::Region::relax).
    pub is_scheduled: bool,
    /// How full the log may be before it is cleaned, in bytes; half its size unless set.
    pub clean_from_bytes: Option<u64>,
    /// Destage the records of another backing to this one, its copy or the same under a new name.
    pub adopt_foreign: bool,
    /// Open the log despite lost records.
    pub salvage: bool,
}

/// A block device over a log and a backing device.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::device::memory::MemoryDevice;
/// use tidegate::device::{BlockDeviceExt, WriteFlags};
/// use tidegate::log::device::{Binding, LogDevice, LogDeviceOptions};
/// use tidegate::log::{self, LogOptions, LogPool};
/// use tidegate::pmem::Region;
/// use tidegate::tier::Tier;
///
/// let region = Arc::new(Region::anonymous(8 << 20)?);
/// log::create(&region, &LogOptions::default())?;
/// let backing = Arc::new(MemoryDevice::new(4096, 1024)?);
/// let (pool, options) = (LogPool::open(region)?, LogDeviceOptions::default());
/// let device = LogDevice::open(pool, backing.clone(), Binding::unnamed(1), options)?;
/// device.write(0, &[3; 4096], WriteFlags::default())?; // Durable in the log, with one fence.
/// device.drain()?; // The backing has it too.
/// let mut block = [0; 4096];
/// backing.read(0, &mut block)?;
/// assert_eq!(block, [3; 4096]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct LogDevice {
    core: Arc<Core>,
    workers: Workers,
    recovered: Recovered,
}

/// The state that requests and the cleaner share.
struct Core {
    ring: Ring,
    file: FileRef,
    binding: Binding,
    backing: Arc<dyn BlockDevice>,
    geometry: Geometry,
    index: Index,
    /// By group of blocks: changes when cleaning writes to a block of the group.
    versions: VersionLocks,
    ledger: Ledger,
    blocked: Blocked,
    cleaning: Mutex<Scratch>,
    /// How full the log may be before it is cleaned, in bytes; may change at any time.
    clean_from_bytes: AtomicU64,
    requests: Requests,
    /// Bytes of the log destaged between two flushes of the backing; may change at any time.
    batch_bytes: AtomicU64,
    /// End of the last definition: a log that ends there has nothing to destage.
    defined_end: AtomicU64,
    waker: Arc<Waker>,
    /// See [`LogDeviceOptions::is_scheduled`].
    is_scheduled: bool,
}

impl LogDevice {
    /// Opens and recovers the log in `pool` as a device over `backing`, which `binding` identifies.
    ///
    /// # Errors
    /// [`LogDeviceError`]: the log is damaged, or has records that are not for this backing.
    pub fn open(
        pool: LogPool,
        backing: Arc<dyn BlockDevice>,
        binding: Binding,
        options: LogDeviceOptions,
    ) -> std::result::Result<Self, LogDeviceError> {
        let (core, recovered) = recover::open(pool, backing, binding, options)?;
        let core = Arc::new(core);
        let has_thread = !options.no_thread && !options.is_scheduled;
        let cleaner = has_thread.then(|| Cleaner(Arc::clone(&core)));
        let workers = Workers::start("log-cleaner", Arc::clone(&core.waker), cleaner)
            .map_err(LogDeviceError::Thread)?;
        Ok(Self { core, workers, recovered })
    }

    /// Returns the work of the cleaner, for a scheduler that runs it beside requests.
    pub fn cleaner(&self) -> impl Work + use<> {
        Cleaner(Arc::clone(&self.core))
    }

    /// Returns the content of the log at its opening.
    pub fn recovered(&self) -> &Recovered {
        &self.recovered
    }

    /// Returns the used bytes and the size of the ring.
    pub fn fill_bytes(&self) -> (u64, u64) {
        (self.core.used_bytes(), self.core.ring.pool().ring_bytes())
    }

    fn stop_thread(&self) {
        self.workers.stop();
        self.core.end_blocking(self);
        // Writers that wait for the thread now clean the log themselves.
        self.core.ring.announce_space();
    }
}

impl Drop for LogDevice {
    fn drop(&mut self) {
        // Needs no drain: the data in the log is durable.
        self.stop_thread();
    }
}

impl Core {
    fn block_bytes(&self) -> u64 {
        u64::from(self.geometry.block_bytes)
    }

    fn used_bytes(&self) -> u64 {
        self.ring.head().saturating_sub(self.ring.tail())
    }

    /// Returns the most bytes, in whole blocks, of one record.
    fn record_bytes_max(&self) -> usize {
        let most = self.ring.pool().payload_bytes_max().min(RECORD_BYTES_MAX);
        usize::try_from(most - most % self.block_bytes()).unwrap_or(usize::MAX)
    }

    /// Returns the error of a write that finds no free space after a failed write-back.
    fn full_and_failing(&self) -> DeviceError {
        self.ledger.blocked("the log is full and cannot be written back")
    }

    /// Returns the backing's extents, or all as data if the log has a record of the range.
    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        if self.index.touches(&self.blocks_of(offset, len), self.ring.tail()) {
            return Ok(vec![Extent::data(offset, len)]);
        }
        self.backing.status(offset, len, most)
    }

    /// Returns the numbers of the blocks in `len` bytes at `offset`.
    fn blocks_of(&self, offset: u64, len: u64) -> Range<u64> {
        offset / self.block_bytes()..(offset + len) / self.block_bytes()
    }
}

fn append_failed(error: AppendError) -> DeviceError {
    DeviceError::with_source(DeviceErrorKind::Io, "the log did not take the write", error)
}

impl BlockDevice for LogDevice {
    /// Returns the geometry of the backing, but with atomic and immediately durable writes.
    fn geometry(&self) -> Geometry {
        self.core.geometry
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let core = &self.core;
        core.geometry.check_operation(operation)?;
        let _running = begin(&core.requests, operation);
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                let below = |at, part: &mut [u8]| core.backing.read(at, part).map(|()| true);
                core.read(offset, buf, &below).map(drop)
            }
            Operation::Write { offset, data, .. } => core.write(offset, data),
            // Every acknowledged write is durable in the log already, even if the backing fails. A
            // flush fails only if the log failed since the last flush.
            Operation::Flush => core.ledger.report(),
            Operation::Discard { offset, len } => core.zero(offset, len, ZeroFlags::DISCARD),
            Operation::WriteZeroes { offset, len, flags } => core.zero(offset, len, flags),
            Operation::Status { offset, len, most, ref mut extents } => {
                **extents = core.status(offset, len, most)?;
                Ok(())
            }
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        self.core.attempt(operation, context)
    }

    fn start(self: Arc<Self>, request: AsyncRequest) {
        self.start_request(request);
    }
}
