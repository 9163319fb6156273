//! The log as a tier: a block device over a slower one. A write is durable in the log with one
//! fence.
//!
//! Invariants:
//! 1. A write is one record, or several of whole blocks where it is larger than a record may be. It
//!    is in the index before its slot is given back, so the cleaner finds every block of a finished
//!    record in the index, or superseded there.
//! 2. The newest record of a block wins, by position: in the index, after a crash, and on the way
//!    to the backing. So writers need no lock of a block: of two at once either may be the newer
//!    one, and all agree which.
//! 3. A block is read from the log while its newest record is not before the tail, else from the
//!    backing. A copy out of the log counts if the tail has not passed the record meanwhile; one
//!    from the backing if no cleaning of its blocks began.
//! 4. The tail moves past a record when the backing has flushed what the record said or a newer one
//!    says, and never past the last definition of the device: the log always tells which backing
//!    its records are for.
//! 5. A backing that fails loses nothing: the tail stays, the next flush reports the failure,
//!    cleaning is tried again.
//!
//! After a crash the index is rebuilt from the records and the device goes on: nothing has to be
//! destaged before the first request.
//!
//! Map: [`LogDevice`] the requests, `attempt` those that wait for nothing, `start` those that wait
//! without a thread, `index` where the newest version of a block is, `clean` destaging records,
//! `background` when that is done, `recover` opening, `binding` which backing it is.

mod attempt;
mod background;
mod binding;
mod clean;
mod error;
mod index;
mod recover;
mod start;
#[cfg(all(test, not(loom)))]
mod tests;
mod tier;

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

pub use binding::Binding;
pub use error::LogDeviceError;
pub use recover::Recovered;
pub use recover::has_records_of;

use super::append::Ticket;
use super::error::AppendError;
use super::stats::Counter;
use super::table::{self, FileKey, FileRef};
use super::{CLOSED, CONTROL_BYTES, Log, LogPool, NO_BOOT};
use crate::device::waits;
use crate::device::{
    AsyncRequest, Attempt, BlockDevice, Context, DeviceError, DeviceErrorKind, Extent, Geometry,
    Operation, Result, WriteFlags, ZeroFlags,
};
use crate::stats::{RequestKind, Requests};
use crate::sync::{AtomicU64, Ordering, fence};
use crate::tier::background::{Waker, Work, Workers};
use crate::tier::ledger::Ledger;
use crate::tier::version_locks::VersionLocks;
use background::Cleaner;
use clean::Scratch;
use index::{Index, Location};
use start::Blocked;

/// Blocks that share a version: of neighbours, so that a long read looks at few.
const GROUP_BLOCKS: u64 = 64;
/// Number of versions, as a power of two; groups that share one only read again more often.
const VERSIONS_LOG2: u32 = 12;
/// Most bytes of a record: a larger write is several.
const RECORD_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of the log that are destaged between two flushes of the backing, unless set.
const BATCH_BYTES: u64 = 8 << 20;
/// How long a write waits for free space before it looks again.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How a [`LogDevice`] is to work.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools)]
pub struct LogDeviceOptions {
    /// No thread: the writes that fill the log clean it.
    pub no_thread: bool,
    /// No thread: a scheduler runs [`LogDevice::cleaner`], and writers wait for it by
    /// [`Region::relax`](crate::pmem::Region::relax).
    pub is_scheduled: bool,
    /// How full the log may be before it is cleaned, in bytes; half of it unless set.
    pub clean_from_bytes: Option<u64>,
    /// Destage the records of another backing to this one: it is that backing by another name, or a
    /// copy.
    pub adopt_foreign: bool,
    /// Go on without what the log has lost.
    pub salvage: bool,
}

/// A block device over a log and a backing device.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::device::memory::MemoryDevice;
/// use tidegate::device::{BlockDevice, WriteFlags};
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

/// What requests and the cleaner share.
struct Core {
    log: Log,
    file: FileRef,
    binding: Binding,
    backing: Arc<dyn BlockDevice>,
    geometry: Geometry,
    index: Index,
    /// By group of blocks: changes when cleaning writes to one of them.
    versions: VersionLocks,
    ledger: Ledger,
    blocked: Blocked,
    cleaning: Mutex<Scratch>,
    /// How full the log may be before it is cleaned; may change at any time.
    clean_from_bytes: AtomicU64,
    requests: Requests,
    /// Bytes of the log that are destaged between two flushes of the backing; may change at any
    /// time.
    batch_bytes: AtomicU64,
    /// Where the last definition ends: a log that ends there has nothing to destage.
    defined_end: AtomicU64,
    waker: Arc<Waker>,
    /// See [`LogDeviceOptions::is_scheduled`].
    is_scheduled: bool,
}

impl LogDevice {
    /// Opens the log in `pool` as a device over `backing`, which `binding` names, and so recovers
    /// it.
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

    /// The work of the cleaner, for a scheduler that runs it beside requests.
    pub fn cleaner(&self) -> impl Work + use<> {
        Cleaner(Arc::clone(&self.core))
    }

    /// What was found in the log when it was opened.
    pub fn recovered(&self) -> &Recovered {
        &self.recovered
    }

    /// Bytes of the log that are in use, and that it has.
    pub fn fill_bytes(&self) -> (u64, u64) {
        (self.core.used_bytes(), self.core.log.pool().ring_bytes())
    }

    fn stop_thread(&self) {
        self.workers.stop();
        self.core.end_blocking(self);
        // Writers that wait for the thread clean by themselves now.
        self.core.log.announce_space();
    }
}

impl Drop for LogDevice {
    fn drop(&mut self) {
        // The data in the log is durable.
        self.stop_thread();
    }
}

impl Core {
    fn block_bytes(&self) -> u64 {
        u64::from(self.geometry.block_bytes)
    }

    fn used_bytes(&self) -> u64 {
        self.log.head().saturating_sub(self.log.tail())
    }

    /// Whole blocks that a record may have.
    fn record_bytes_max(&self) -> usize {
        let most = self.log.pool().payload_bytes_max().min(RECORD_BYTES_MAX);
        usize::try_from(most - most % self.block_bytes()).unwrap_or(usize::MAX)
    }

    /// Appends one record, once the log has free space for it. `note` puts it into the index.
    fn append(&self, mut record: impl Record, note: impl Fn(u64)) -> Result<()> {
        if self.blocked.is_waiting() || !self.try_append(&mut record, &note)? {
            self.append_in_turn(record, note)?;
        }
        self.clean_where_due();
        Ok(())
    }

    /// Appends one record behind all writers that wait for free space.
    fn append_in_turn(&self, mut record: impl Record, note: impl Fn(u64)) -> Result<()> {
        let failures = self.ledger.failures();
        let turn = self.join_queue();
        let _waiting = waits::begin(start::WHO, start::SPACE);
        loop {
            let space = self.log.space_changes();
            if turn.has_come() && self.try_append(&mut record, &note)? {
                return Ok(());
            }
            self.wait_for_space(space, failures)?;
        }
    }

    /// Appends one record, which `note` puts into the index. False: the log has no free space.
    fn try_append(&self, record: &mut impl Record, note: &impl Fn(u64)) -> Result<bool> {
        loop {
            let appended = self.log.begin_unlocked(self.file).and_then(|mut ticket| {
                // Noted before the ticket is given back: invariant 1.
                record(&mut ticket).inspect(|position| {
                    debug_assert!(*position >= self.log.tail());
                    note(*position);
                })
            });
            match appended {
                Ok(_) => {
                    self.wake_cleaner_where_due();
                    return Ok(true);
                }
                Err(AppendError::NoSlot) => self.log.pool().region().relax(),
                Err(AppendError::Full) => return Ok(false),
                Err(error) => return Err(append_failed(error)),
            }
        }
    }

    /// The error of a write for which a failed write-back leaves no free space.
    fn full_and_failing(&self) -> DeviceError {
        self.ledger.blocked("the log is full and cannot be written back")
    }

    /// The log was full when [`Log::space_changes`] returned `free space`: returns when it may have
    /// free space.
    ///
    /// # Errors
    /// Cleaning has failed since `failures` was counted.
    fn wait_for_space(&self, space: u32, failures: u64) -> Result<()> {
        if self.ledger.failures() != failures {
            return Err(self.full_and_failing());
        }
        self.log.stats().add(Counter::FullWaits, 1);
        if self.waker.is_running() {
            // Also a cleaner that rests after a failure.
            self.waker.wake_all();
            if self.is_scheduled {
                self.log.pool().region().relax();
            } else {
                self.log.wait_for_space(space, TIMEOUT);
            }
            return Ok(());
        }
        if let Some(mut scratch) = self.cleaning.try_lock() {
            return self.clean(&mut scratch).map(drop);
        }
        self.log.pool().region().relax();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut at = offset;
        for part in data.chunks(self.record_bytes_max()) {
            self.append(write_record(at, part), self.note_write(at, part))?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Puts a record of `data` for `offset` into the index.
    fn note_write(&self, offset: u64, data: &[u8]) -> impl Fn(u64) {
        let block = self.block_bytes();
        let (first, count) = (offset / block, data.len() as u64 / block);
        move |position| self.index.wrote(first, count, position, block)
    }

    fn zero(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.geometry.check_zeroes(offset, len, flags)?;
        let _running = self.requests.begin(RequestKind::Zero, len);
        if len == 0 {
            return Ok(());
        }
        self.append(zero_record(offset, len, flags), self.note_zeroes(offset, len))
    }

    /// Puts a record of `len` zero bytes at `offset` into the index.
    fn note_zeroes(&self, offset: u64, len: u64) -> impl Fn(u64) {
        let blocks = self.blocks_of(offset, len);
        move |position| self.index.zeroed(blocks.clone(), position)
    }

    /// The numbers of the blocks in `len` bytes at `offset`.
    fn blocks_of(&self, offset: u64, len: u64) -> Range<u64> {
        offset / self.block_bytes()..(offset + len) / self.block_bytes()
    }

    /// Reads; `below` reads what only the backing has. False where `below` said so.
    fn read(&self, offset: u64, buf: &mut [u8], below: &impl ReadBelow) -> Result<bool> {
        let (block, block_bytes) = (self.block_bytes(), self.geometry.block_bytes as usize);
        let (mut lba, mut rest) = (offset / block, buf);
        while !rest.is_empty() {
            let in_group = GROUP_BLOCKS - lba % GROUP_BLOCKS;
            let step = usize::try_from(in_group).unwrap_or(1).saturating_mul(block_bytes);
            let (part, after) = rest.split_at_mut(step.min(rest.len()));
            loop {
                match self.read_group(lba, part, below)? {
                    GroupRead::Whole => break,
                    GroupRead::Cleaned => {}
                    GroupRead::WouldBlock => return Ok(false),
                }
            }
            lba += in_group;
            rest = after;
        }
        Ok(true)
    }

    /// Reads blocks of one group.
    fn read_group(&self, first: u64, buf: &mut [u8], below: &impl ReadBelow) -> Result<GroupRead> {
        let group = first / GROUP_BLOCKS;
        // Before the index, which has the blocks of a cleaning that began before this and has not
        // ended.
        let version = self.versions.version(group);
        let block_bytes = self.geometry.block_bytes as usize;
        let blocks = buf.len() / block_bytes;
        let tail = self.log.tail();
        let location_of = |block: usize| self.index.find(first + block as u64, tail);
        let mut block = 0;
        let mut from_backing = false;
        while block < blocks {
            let location = location_of(block);
            let mut end = block + 1;
            if location == Location::Backing {
                while end < blocks && location_of(end) == Location::Backing {
                    end += 1;
                }
            }
            let part = &mut buf[block * block_bytes..end * block_bytes];
            match location {
                Location::Zero => part.fill(0),
                Location::Log(at) if !self.read_log(at, part)? => return Ok(GroupRead::Cleaned),
                Location::Log(_) => {}
                Location::Backing => {
                    from_backing = true;
                    if !below((first + block as u64) * self.block_bytes(), part)? {
                        return Ok(GroupRead::WouldBlock);
                    }
                }
            }
            block = end;
        }
        let is_whole = !from_backing || self.versions.unchanged(group, version);
        Ok(if is_whole { GroupRead::Whole } else { GroupRead::Cleaned })
    }

    /// Copies a block out of the log. False: its space was reused meanwhile.
    fn read_log(&self, at: u64, buf: &mut [u8]) -> Result<bool> {
        self.log.pool().region().read(self.log.pool().region_offset(at), buf)?;
        fence(Ordering::Acquire);
        Ok(self.log.tail() <= at)
    }
}

/// Writes a record with a ticket, any number of times: its position.
trait Record: FnMut(&mut Ticket<'_>) -> std::result::Result<u64, AppendError> {}

impl<F: FnMut(&mut Ticket<'_>) -> std::result::Result<u64, AppendError>> Record for F {}

fn write_record(offset: u64, data: &[u8]) -> impl Record {
    move |ticket: &mut Ticket<'_>| ticket.write(offset, &[IoSlice::new(data)], false)
}

fn zero_record(offset: u64, len: u64, flags: ZeroFlags) -> impl Record {
    move |ticket: &mut Ticket<'_>| ticket.zero(offset, len, !flags.may_unmap)
}

/// Reads at an offset of the backing. False where that would block.
trait ReadBelow: Fn(u64, &mut [u8]) -> Result<bool> {}

impl<F: Fn(u64, &mut [u8]) -> Result<bool>> ReadBelow for F {}

/// What became of a read of blocks of one group.
enum GroupRead {
    /// All of them are the last versions.
    Whole,
    /// They were cleaned meanwhile, and have to be read again.
    Cleaned,
    /// The backing would block.
    WouldBlock,
}

fn append_failed(error: AppendError) -> DeviceError {
    DeviceError::with_source(DeviceErrorKind::Io, "the log did not take the write", error)
}

impl BlockDevice for LogDevice {
    /// That of the backing, but atomic and durable at once.
    fn geometry(&self) -> Geometry {
        self.core.geometry
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.core.geometry.check(offset, buf.len() as u64)?;
        let _running = self.core.requests.begin(RequestKind::Read, buf.len() as u64);
        let below = |at, part: &mut [u8]| self.core.backing.read(at, part).map(|()| true);
        self.core.read(offset, buf, &below).map(drop)
    }

    fn write(&self, offset: u64, data: &[u8], _flags: WriteFlags) -> Result<()> {
        self.core.geometry.check_write(offset, data.len() as u64)?;
        let _running = self.core.requests.begin(RequestKind::Write, data.len() as u64);
        self.core.write(offset, data)
    }

    /// Every acknowledged write is durable in the log, whatever the backing does. Fails where the
    /// log itself failed since the last flush.
    fn flush(&self) -> Result<()> {
        drop(self.core.requests.begin(RequestKind::Flush, 0));
        self.core.ledger.report()
    }

    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.core.zero(offset, len, ZeroFlags::DISCARD)
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.core.zero(offset, len, flags)
    }

    /// Where the log has a record of the range, all of it counts as data.
    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        let core = &self.core;
        core.geometry.check(offset, len)?;
        if core.index.touches(&core.blocks_of(offset, len), core.log.tail()) {
            return Ok(vec![Extent { offset, len, hole: false, zero: false }]);
        }
        core.backing.status(offset, len, most)
    }

    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        self.core.attempt(operation, context)
    }

    fn start(self: Arc<Self>, request: AsyncRequest) {
        self.start_request(request);
    }
}
