//! The log as a tier: a block device whose writes are durable in the log with one fence, over a slower device.
//!
//! Invariants:
//! 1. A write is one record, or several of whole blocks where it is larger than a record may be. It is in the index before
//!    its slot is given back, so the cleaner finds every block of a finished record in the index, or superseded there.
//! 2. The newest record of a block wins, by position: in the index, after a crash, and on the way to the backing. So
//!    writers need no lock of a block: of two at once either may be the newer one, and all agree which.
//! 3. A block is read from the log while its newest record is not before the tail, else from the backing. A copy out of the
//!    log counts if the tail has not passed the record meanwhile; one from the backing if no cleaning of its blocks began.
//! 4. The tail moves past a record when the backing has flushed what the record said or a newer one says, and never
//!    past the last definition of the device: the log always tells which backing its records are for.
//! 5. A backing that fails loses nothing: the tail stays, the next flush reports the failure, cleaning is tried again.
//!
//! After a crash the index is rebuilt from the records and all goes on: nothing is brought home before the first request.
//!
//! Map: [`LogDevice`] the requests, `index` who has the newest version of a block, `clean` bringing records home, `background`
//! the thread that does it, `recover` opening, `trouble` failures, `binding` which backing it is.

mod background;
mod binding;
mod clean;
mod error;
mod index;
mod recover;
#[cfg(all(test, not(feature = "loom")))]
mod tests;
mod trouble;

use std::io::IoSlice;
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
use crate::device::{
    BlockDevice, DeviceError, DeviceErrorKind, Extent, Geometry, Result, WriteFlags, ZeroFlags,
};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use background::Thread;
use clean::Scratch;
use index::{Index, Place};
use trouble::Trouble;

/// Blocks that share a version: of neighbours, so that a long read looks at few.
const GROUP_BLOCKS: u64 = 64;
/// Versions; groups that share one only read again more often.
const VERSIONS: u64 = 4096;
/// Most bytes of a record: a larger write is several.
const RECORD_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of the log that are brought home between two flushes of the backing.
const BATCH_BYTES_MAX: u64 = 8 << 20;
/// How long a write waits for room before it looks again.
const PATIENCE: Duration = Duration::from_secs(1);

/// How a [`LogDevice`] is to work.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogDeviceOptions {
    /// No thread: the log is cleaned by the writes that fill it.
    pub no_thread: bool,
    /// How full the log may be before it is cleaned, in bytes; half of it unless set.
    pub clean_from_bytes: Option<u64>,
    /// Bring the records of another backing to this one: it is the same by another name, or a copy.
    pub adopt_foreign: bool,
}

/// A block device over a log and a backing device.
pub struct LogDevice {
    core: Arc<Core>,
    thread: Mutex<Option<Thread>>,
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
    /// Each grows when cleaning writes to one of its groups of blocks.
    versions: Box<[AtomicU32]>,
    trouble: Trouble,
    cleaning: Mutex<Scratch>,
    clean_from_bytes: u64,
    batch_bytes: u64,
    /// Where the last definition ends: a log that ends there has nothing to bring home.
    defined_end: AtomicU64,
    /// A thread cleans.
    has_thread: AtomicBool,
    stopping: AtomicBool,
}

impl LogDevice {
    /// Opens the log in `pool` as a device over `backing`, which `binding` names, and so recovers it.
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
        let thread = if options.no_thread { None } else { Some(Thread::start(&core)?) };
        Ok(Self { core, thread: Mutex::new(thread), recovered })
    }

    /// What was found in the log when it was opened.
    pub fn recovered(&self) -> Recovered {
        self.recovered
    }

    /// Bytes of the log that are in use, and that it has.
    pub fn fill_bytes(&self) -> (u64, u64) {
        (self.core.used_bytes(), self.core.log.pool().ring_bytes())
    }

    /// Brings everything home and stops the thread: afterwards the backing has all by itself. The device stays usable, and
    /// cleans where writes fill the log.
    ///
    /// # Errors
    /// Those of the backing; what it does not take stays in the log, and calling again tries again.
    pub fn shutdown(&self) -> Result<()> {
        self.stop_thread();
        let mut scratch = self.core.lock_cleaning();
        while self.core.has_work() {
            if !self.core.clean(&mut scratch)? {
                self.core.log.pool().region().relax();
            }
        }
        Ok(self.core.log.pool().set_session(CLOSED)?)
    }

    fn stop_thread(&self) {
        if let Some(thread) = self.thread.lock().take() {
            thread.stop(&self.core);
        }
    }
}

impl Drop for LogDevice {
    fn drop(&mut self) {
        // What is in the log is safe there.
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

    fn version(&self, lba: u64) -> &AtomicU32 {
        let group = lba / GROUP_BLOCKS % VERSIONS;
        &self.versions[usize::try_from(group).unwrap_or(0)]
    }

    /// Appends one record. `note` puts it into the index.
    fn append(
        &self,
        mut record: impl FnMut(&mut Ticket<'_>) -> std::result::Result<u64, AppendError>,
        note: impl FnOnce(u64),
    ) -> Result<()> {
        let failures = self.trouble.failures();
        let position = loop {
            let room = self.log.room();
            let full = match self.log.begin_unlocked(self.file) {
                Ok(mut ticket) => match record(&mut ticket) {
                    Ok(position) => {
                        // Before the ticket goes: invariant 1.
                        note(position);
                        break position;
                    }
                    Err(error) => error,
                },
                Err(error) => error,
            };
            match full {
                AppendError::NoSlot => self.log.pool().region().relax(),
                AppendError::Full => self.wait_for_room(room, failures)?,
                error => return Err(append_failed(error)),
            }
        };
        debug_assert!(position >= self.log.tail());
        if !self.has_thread.load(Ordering::Relaxed) {
            self.clean_in_passing();
        }
        Ok(())
    }

    /// The log was full when `room` was read.
    fn wait_for_room(&self, room: u32, failures: u64) -> Result<()> {
        if self.trouble.failures() != failures {
            return Err(self.trouble.stuck());
        }
        self.log.stats().add(Counter::FullWaits, 1);
        if self.has_thread.load(Ordering::Relaxed) {
            self.log.wait_for_room(room, PATIENCE);
            return Ok(());
        }
        if let Some(mut scratch) = self.cleaning.try_lock() {
            return self.clean(&mut scratch).map(drop);
        }
        self.log.pool().region().relax();
        Ok(())
    }

    /// Cleans where no thread does, the log is full enough, and nobody is at it.
    fn clean_in_passing(&self) {
        if self.used_bytes() > self.clean_from_bytes
            && let Some(mut scratch) = self.cleaning.try_lock()
        {
            // What failed is kept, and reported by the next flush.
            let _ = self.clean(&mut scratch);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut at = offset;
        for part in data.chunks(self.record_bytes_max()) {
            let (first, count) = (at / self.block_bytes(), part.len() as u64 / self.block_bytes());
            let note = |position| self.index.wrote(first, count, position, self.block_bytes());
            self.append(|ticket| ticket.write(at, &[IoSlice::new(part)], false), note)?;
            at += part.len() as u64;
        }
        let stats = self.log.stats();
        stats.add(Counter::Writes, 1);
        stats.add(Counter::WriteBytes, data.len() as u64);
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> Result<()> {
        self.geometry.check_write(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let blocks = offset / self.block_bytes()..(offset + len) / self.block_bytes();
        let note = |position| self.index.zeroed(blocks, position);
        self.append(|ticket| ticket.zero(offset, len), note)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let (block, block_bytes) = (self.block_bytes(), self.geometry.block_bytes as usize);
        let (mut lba, mut rest) = (offset / block, buf);
        while !rest.is_empty() {
            let in_group = GROUP_BLOCKS - lba % GROUP_BLOCKS;
            let step = usize::try_from(in_group).unwrap_or(1).saturating_mul(block_bytes);
            let (part, after) = rest.split_at_mut(step.min(rest.len()));
            while !self.read_group(lba, part)? {}
            lba += in_group;
            rest = after;
        }
        Ok(())
    }

    /// Reads blocks of one group. False: they were cleaned meanwhile, and have to be read again.
    fn read_group(&self, first: u64, buf: &mut [u8]) -> Result<bool> {
        let version = self.version(first);
        // Before the index: a cleaning that began before this and has not ended is known by what the index says.
        let before = version.load(Ordering::Acquire);
        let block_bytes = self.geometry.block_bytes as usize;
        let blocks = buf.len() / block_bytes;
        let tail = self.log.tail();
        let place_of = |block: usize| self.index.find(first + block as u64, tail);
        let mut block = 0;
        let mut from_backing = false;
        while block < blocks {
            let place = place_of(block);
            let mut end = block + 1;
            if place == Place::Backing {
                while end < blocks && place_of(end) == Place::Backing {
                    end += 1;
                }
            }
            let part = &mut buf[block * block_bytes..end * block_bytes];
            match place {
                Place::Zero => part.fill(0),
                Place::Log(at) if !self.read_log(at, part)? => return Ok(false),
                Place::Log(_) => {}
                Place::Backing => {
                    from_backing = true;
                    self.backing.read((first + block as u64) * self.block_bytes(), part)?;
                }
            }
            block = end;
        }
        fence(Ordering::Acquire);
        Ok(!from_backing || version.load(Ordering::Relaxed) == before)
    }

    /// Copies a block out of the log. False: its room was given to others meanwhile.
    fn read_log(&self, at: u64, buf: &mut [u8]) -> Result<bool> {
        self.log.pool().region().read(self.log.pool().region_offset(at), buf)?;
        fence(Ordering::Acquire);
        Ok(self.log.tail() <= at)
    }
}

fn append_failed(error: AppendError) -> DeviceError {
    DeviceError::with_source(DeviceErrorKind::Io, "the log did not take the write", error)
}

impl BlockDevice for LogDevice {
    /// That of the backing, but atomic, durable at once, and quick to zero.
    fn geometry(&self) -> Geometry {
        self.core.geometry
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.core.geometry.check(offset, buf.len() as u64)?;
        self.core.read(offset, buf)
    }

    fn write(&self, offset: u64, data: &[u8], _flags: WriteFlags) -> Result<()> {
        self.core.geometry.check_write(offset, data.len() as u64)?;
        self.core.write(offset, data)
    }

    /// All that was acknowledged is durable in the log. Says what failed on the way to the backing since it was asked last.
    fn flush(&self) -> Result<()> {
        self.core.trouble.report()
    }

    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.core.zero(offset, len)
    }

    fn write_zeroes(&self, offset: u64, len: u64, _flags: ZeroFlags) -> Result<()> {
        self.core.zero(offset, len)
    }

    /// Where the log has something, all counts as data.
    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        let core = &self.core;
        core.geometry.check(offset, len)?;
        let blocks = offset / core.block_bytes()..(offset + len) / core.block_bytes();
        if core.index.touches(&blocks, core.log.tail()) {
            return Ok(vec![Extent { offset, len, hole: false, zero: false }]);
        }
        core.backing.status(offset, len, most)
    }
}
