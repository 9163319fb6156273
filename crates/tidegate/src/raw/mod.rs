//! Engine `raw`: blocks in place on persistent memory, the fastest engine with the fewest promises.
//!
//! Invariants:
//! 1. A write streams its data to the block and fences once: it is durable when acknowledged, so a
//!    flush has nothing to do and forced writes cost nothing more.
//! 2. Nothing is atomic: a crash during a write leaves any mixture of old and new 8-byte words in
//!    its blocks, and a read during a write of the same block may see both. Users that need whole
//!    blocks use [`btt`](crate::btt).
//!
//! Map: [`create`] makes a pool, [`RawDevice::open`] opens one and repairs a damaged copy of its
//! superblock.

use std::sync::Arc;

use uuid::Uuid;

use crate::device::{Attempt, BlockDevice, Context, Geometry, Operation, Result};
use crate::pmem::Region;
use crate::pool::{self, PoolError, Superblock};
use crate::stats::Requests;
use crate::tier::begin;

mod engine;

pub use engine::{CODE, RawEngine};

/// How to make a raw pool.
#[derive(Debug, Clone)]
pub struct RawOptions {
    /// Size of a block in bytes: 512, 1024, 2048 or 4096.
    pub block_bytes: u32,
    /// The pool's uuid.
    pub uuid: Uuid,
}

impl Default for RawOptions {
    fn default() -> Self {
        Self { block_bytes: 4096, uuid: Uuid::new_v4() }
    }
}

/// Makes a raw pool of all of `region` and overwrites any headers there. Blocks keep the bytes that
/// are in them.
///
/// # Errors
/// Fails as [`PoolError::BlockBytes`] or [`PoolError::TooSmall`] before anything changes; as
/// [`PoolError::Pmem`] if the memory fails.
pub fn create(region: &Region, options: &RawOptions) -> std::result::Result<Superblock, PoolError> {
    let mut superblock = Superblock::plan(region, CODE, options.uuid, options.block_bytes)?;
    pool::erase(region)?;
    superblock.write(region)?;
    Ok(superblock)
}

/// A raw pool as a device.
pub struct RawDevice {
    region: Arc<Region>,
    superblock: Superblock,
    requests: Requests,
}

impl RawDevice {
    /// Opens the pool in `region`. Rewrites a damaged copy of the superblock, unless the region is
    /// read-only.
    ///
    /// # Errors
    /// Fails as [`PoolError`] if the region holds no raw pool, or the pool cannot be used.
    pub fn open(region: Arc<Region>) -> std::result::Result<Self, PoolError> {
        let found = Superblock::read(&region)?;
        let mut superblock = found.superblock;
        superblock.expect_engine(CODE)?;
        if !found.is_whole() && !region.read_only() {
            superblock.write(&region)?;
        }
        Ok(Self { region, superblock, requests: Requests::default() })
    }

    /// Returns the pool's superblock.
    pub fn superblock(&self) -> Superblock {
        self.superblock
    }

    /// Returns the memory under the pool.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

impl BlockDevice for RawDevice {
    fn geometry(&self) -> Geometry {
        let block_bytes = self.superblock.block_bytes;
        Geometry {
            read_only: self.region.read_only(),
            volatile_cache: false,
            ..Geometry::plain(block_bytes, self.superblock.data_bytes / u64::from(block_bytes))
        }
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.geometry().check_operation(operation)?;
        let _running = begin(&self.requests, operation);
        let base = self.superblock.data_offset;
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                return Ok(self.region.read(base + offset, buf)?);
            }
            Operation::Write { offset, data, .. } => {
                self.region.write_streaming(base + offset, data)?;
            }
            Operation::Flush => return Ok(()),
            Operation::Discard { offset, len } | Operation::WriteZeroes { offset, len, .. } => {
                self.region.zero_streaming(base + offset, len)?;
            }
            Operation::Status { .. } => {
                operation.report_data();
                return Ok(());
            }
        }
        // The only fence: no metadata depends on the data, but the acknowledgement does.
        Ok(self.region.fence()?)
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        Attempt::Done(self.run(operation))
    }
}

#[cfg(test)]
mod tests;
