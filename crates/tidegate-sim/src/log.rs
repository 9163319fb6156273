//! The log as a device, on a backing that a crash tears too.
//!
//! One region holds both: the pool at its start, the backing's blocks behind it. A write of the
//! backing is streamed, and durable with the fence of the backing's flush: a crash before that
//! leaves any part of the write.
//!
//! There is no thread: a write that fills the log above a few records cleans it, beside writes of
//! other threads and, if enabled, a cleaner that the scheduler runs. Or writers leave all cleaning
//! to that cleaner and wait, as writers wait for the cleaner's thread in a server.

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use tidegate::device::memory::MemoryDevice;
use tidegate::device::{
    BlockDevice, BlockDeviceExt, Geometry, Operation, Result as DeviceResult, WriteFlags,
};
use tidegate::log::device::{Binding, LogDevice, LogDeviceOptions};
use tidegate::log::layout::RING_OFFSET;
use tidegate::log::{LogOptions, LogPool, Scanner, create};
use tidegate::pmem::Region;
use tidegate::tier::background::Work;
use uuid::Uuid;

use crate::history::payload;
use crate::model::Stamp;
use crate::subject::{Alive, Subject};

pub(crate) const BLOCK_BYTES: u32 = 512;
/// Header, ring of the least size, both superblocks.
pub(crate) const POOL_BYTES: u64 = 8192 + RING_OFFSET + (64 << 10) + 4096;
/// The log is cleaned from about five records on.
pub(crate) const CLEAN_FROM_BYTES: u64 = 3000;
/// Stamp of the writes to an older pool in the same bytes.
const STALE: Stamp = 0x7000_0000;

/// A planted fault of the log or its backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFault {
    /// Nothing.
    None,
    /// All pools have the same salt.
    NoSalt,
    /// Recovery takes a record for whole whatever its payload is.
    PayloadsIgnored,
    /// The tail moves though the backing was not flushed.
    NoBackingFlush,
}

/// The log as a device over a backing in the same region.
pub struct LogSubject {
    blocks: u64,
    fault: LogFault,
    cleaners: usize,
    /// Writers wait for the cleaner.
    is_scheduled: bool,
    clean_from_bytes: u64,
}

impl LogSubject {
    /// Makes a device of `blocks` blocks of 512 bytes with `fault`.
    pub fn new(blocks: u64, fault: LogFault) -> Self {
        let clean_from_bytes = CLEAN_FROM_BYTES;
        Self { blocks, fault, cleaners: 0, is_scheduled: false, clean_from_bytes }
    }

    /// Lets the scheduler run a cleaner beside requests.
    #[must_use]
    pub fn with_cleaner(self) -> Self {
        Self { cleaners: 1, ..self }
    }

    /// Makes writers leave all cleaning to a cleaner that the scheduler runs, which cleans the log
    /// from `clean_from_bytes` on.
    #[must_use]
    pub fn with_writers_that_wait(self, clean_from_bytes: u64) -> Self {
        Self { cleaners: 1, is_scheduled: true, clean_from_bytes, ..self }
    }

    fn open_device(
        &self,
        region: &Arc<Region>,
        options: LogDeviceOptions,
    ) -> Result<LogDevice, String> {
        let pool = LogPool::open(Arc::clone(region)).map_err(text)?;
        if self.fault == LogFault::PayloadsIgnored {
            make_whole(&pool)?;
        }
        let backing = Arc::new(Backing {
            region: Arc::clone(region),
            blocks: self.blocks,
            flushes: self.fault != LogFault::NoBackingFlush,
        });
        LogDevice::open(pool, backing, Binding::unnamed(2), options).map_err(text)
    }

    /// Returns the options of a device; one that is opened for a look has no cleaner to wait for.
    fn options(&self, is_alive: bool) -> LogDeviceOptions {
        let is_scheduled = self.is_scheduled && is_alive;
        LogDeviceOptions {
            no_thread: !is_scheduled,
            is_scheduled,
            clean_from_bytes: Some(self.clean_from_bytes),
            ..LogDeviceOptions::default()
        }
    }

    /// Writes records of an older pool that fill the ring more than once.
    fn fill_older_pool(&self, region: &Arc<Region>) -> Result<(), String> {
        create(region, &log_options(1)).map_err(text)?;
        let pool = LogPool::open(Arc::clone(region)).map_err(text)?;
        let backing = Arc::new(MemoryDevice::new(BLOCK_BYTES, self.blocks).map_err(text)?);
        let device = LogDevice::open(pool, backing, Binding::unnamed(1), self.options(false))
            .map_err(text)?;
        for round in 0..130 {
            let lba = round % self.blocks;
            let data = payload(lba, STALE, BLOCK_BYTES as usize);
            let offset = lba * u64::from(BLOCK_BYTES);
            device.write(offset, &data, WriteFlags::default()).map_err(text)?;
        }
        Ok(())
    }
}

/// Returns options without random parts: the images of a seed are identical in each run.
pub(crate) fn log_options(salt: u64) -> LogOptions {
    LogOptions { uuid: Uuid::from_u128(7), salt }
}

pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Subject for LogSubject {
    fn create(&self, region: &Region) -> Result<(), String> {
        let scratch = Arc::new(Region::anonymous(POOL_BYTES).map_err(text)?);
        self.fill_older_pool(&scratch)?;
        let salt = if self.fault == LogFault::NoSalt { 1 } else { 2 };
        create(&scratch, &log_options(salt)).map_err(text)?;
        copy(&scratch, region)
    }

    fn open(&self, region: &Arc<Region>) -> Result<Arc<dyn BlockDevice>, String> {
        Ok(Arc::new(self.open_device(region, self.options(false))?))
    }

    fn open_alive(&self, region: &Arc<Region>) -> Result<Alive, String> {
        let device = self.open_device(region, self.options(true))?;
        let cleaner = |_| -> Box<dyn Work> { Box::new(device.cleaner()) };
        let background = (0..self.cleaners).map(cleaner).collect();
        Ok(Alive { device: Arc::new(device), background })
    }

    fn background_threads(&self) -> usize {
        self.cleaners
    }

    fn check(&self, region: &Region) -> Result<(), String> {
        check_pool(region)
    }

    fn region_bytes(&self) -> u64 {
        (POOL_BYTES + self.blocks * u64::from(BLOCK_BYTES)).next_multiple_of(4096)
    }

    fn rounds_after_recovery(&self) -> u32 {
        8
    }
}

/// Copies all of one region to the start of another.
pub(crate) fn copy(from: &Region, to: &Region) -> Result<(), String> {
    let mut image = vec![0; usize::try_from(from.len_bytes()).unwrap_or(0)];
    from.read(0, &mut image).map_err(text)?;
    to.write(0, &image).map_err(text)
}

/// Checks that no record lies in the free part of the ring, behind the limit.
pub(crate) fn check_pool(region: &Region) -> Result<(), String> {
    let scratch = Arc::new(Region::anonymous(region.len_bytes()).map_err(text)?);
    copy(region, &scratch)?;
    let pool = LogPool::open(scratch).map_err(text)?;
    let (tail, limit) = (pool.tail().map_err(text)?, pool.limit().map_err(text)?);
    let beyond = Scanner::new(&pool, limit, tail + pool.ring_bytes()).next();
    beyond.map_or(Ok(()), |record| Err(format!("a record beyond the limit {limit}: {record:?}")))
}

/// Plants the bug in recovery: gives each torn record the checksums of the bytes in the ring.
fn make_whole(pool: &LogPool) -> Result<(), String> {
    let region = pool.region();
    let data_offset = pool.superblock().data_offset;
    let salt = region.load_u64(data_offset + 16).map_err(text)?;
    let (mut position, limit) = (pool.tail().map_err(text)?, pool.limit().map_err(text)?);
    while position < limit {
        let Some(header) = pool.read_header(position).map_err(text)? else {
            position += 64;
            continue;
        };
        let mut bytes = vec![0; usize::try_from(header.payload_bytes).unwrap_or(0)];
        pool.read_payload(&header, 0, &mut bytes).map_err(text)?;
        let payload_sum = checksum(CrcAlgorithm::Crc32Iscsi, &bytes);
        let at = data_offset + RING_OFFSET + position % pool.ring_bytes();
        // The checksum covers the header and the same number of zeroes behind it.
        let mut words = [0; 128];
        region.read(at, &mut words[..64]).map_err(text)?;
        words[52..56].copy_from_slice(&payload_sum.to_le_bytes()[..4]);
        words[..8].copy_from_slice(&salt.to_le_bytes());
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &words);
        words[..8].copy_from_slice(&sum.to_le_bytes());
        region.write(at, &words[..64]).map_err(text)?;
        position += header.record_bytes();
    }
    Ok(())
}

/// Blocks behind the pool: a write is durable with the next flush.
struct Backing {
    region: Arc<Region>,
    blocks: u64,
    flushes: bool,
}

impl BlockDevice for Backing {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: BLOCK_BYTES,
            blocks: self.blocks,
            preferred_bytes: BLOCK_BYTES,
            read_only: false,
            atomic_block: false,
            volatile_cache: true,
            fast_zero: false,
            keeps_data: true,
        }
    }

    fn run(&self, operation: &mut Operation<'_>) -> DeviceResult<()> {
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                self.region.read(POOL_BYTES + offset, buf)?;
            }
            Operation::Write { offset, data, .. } => {
                self.region.write_streaming(POOL_BYTES + offset, data)?;
            }
            Operation::Flush if self.flushes => self.region.fence()?,
            Operation::Flush | Operation::Discard { .. } => {}
            Operation::WriteZeroes { offset, len, .. } => {
                self.region.zero_streaming(POOL_BYTES + offset, len)?;
            }
            Operation::Status { .. } => operation.report_data(),
        }
        Ok(())
    }
}
