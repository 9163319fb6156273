//! One arena at run time: its parts, the read of a block, and zeroing. The write is in `write`.

use std::ops::Range;
use std::sync::Arc;

use super::BttError;
use super::bitmap::Bitmap;
use super::flog::Flog;
use super::lane::Lanes;
use super::layout::{FlogSlots, MAP_ENTRY_BYTES, MapEntry, MapState, Version};
use super::map::Map;
use crate::pmem::{PmemError, Region};
use crate::tier::version_locks::VersionLocks;

type Result<T> = std::result::Result<T, BttError>;

/// A reader takes the lba's lock after so many reads that met a writer.
const OPTIMISTIC_READS: u32 = 8;

/// An open arena.
pub(super) struct Arena {
    /// The memory of the pool.
    pub(super) region: Arc<Region>,
    /// Number of the arena, from 0.
    pub(super) number: usize,
    /// Version of the format.
    pub(super) version: Version,
    /// Number of its lbas.
    pub(super) lbas: u32,
    /// Number of its blocks, the lanes' free ones included.
    pub(super) blocks: u32,
    /// Where its data blocks start in the region, in bytes.
    pub(super) data_base: u64,
    /// Size of a data block on the medium, in bytes.
    pub(super) block_bytes: u64,
    /// Size of a block's metadata in bytes, right behind its data.
    pub(super) metadata_bytes: usize,
    /// Where its map starts in the region, in bytes.
    pub(super) map_base: u64,
    /// Where its flog starts in the region, in bytes.
    pub(super) flog_base: u64,
    /// The slots of the flog that hold entries.
    pub(super) flog_slots: FlogSlots,
    pub(super) lanes: Lanes,
    /// Locks by lba; readers use only their versions. Their invariants:
    /// 1. A thread that changes the map entry of an lba holds the lock of that lba, and no holder
    ///    waits for a lane.
    /// 2. While a version stands still, at most the present holder has changed a map entry of the
    ///    bucket, and no block that such a change freed has been reused: the holder releases its
    ///    lane, and so the freed block, only after it has unlocked. So a reader that finds the same
    ///    version before it looks up the map and after it has copied the block has copied a block
    ///    that belonged to its lba all the while.
    /// 3. The last holder's number is the lane that last changed a map entry of the bucket. In a
    ///    bucket, only the entry that this lane changed in its last write may not be durable: each
    ///    writer makes its predecessor's entry durable before it leaves its own number. So a writer
    ///    knows whether the entry that it replaces needs to be written back, which is seldom.
    pub(super) lba_locks: VersionLocks,
    /// Map changes that recovery found but could not store in a read-only region: (lba, block), by
    /// lba.
    pub(super) overlay: Vec<(u32, u32)>,
    /// Blocks with several owners: their bytes may belong to either.
    pub(super) suspects: Option<Bitmap>,
}

impl Arena {
    #[inline]
    pub(super) fn map(&self) -> Map<'_> {
        Map { region: &self.region, base: self.map_base, blocks: self.blocks }
    }

    #[inline]
    pub(super) fn flog(&self) -> Flog<'_> {
        let is_pair = self.version == Version::Libpmemblk;
        Flog { region: &self.region, base: self.flog_base, slots: self.flog_slots, is_pair }
    }

    /// Reads one block: the last write that returned before this read began, or one that overlaps
    /// it, and never a mixture.
    pub(super) fn read_block(&self, lba: u32, data: &mut [u8], metadata: &mut [u8]) -> Result<()> {
        for _ in 0..OPTIMISTIC_READS {
            let version = self.lba_locks.version(lba);
            let result = self.copy_block(lba, data, metadata);
            if self.lba_locks.unchanged(lba, version) {
                if has_failed_memory(&result) {
                    break;
                }
                return result;
            }
            self.region.relax();
        }
        // Failed memory is read again with the lock: no writer replaces the block between the read
        // that fails and the mark that tells so.
        let _guard = self.lba_locks.lock(lba, || self.region.relax());
        let result = self.copy_block(lba, data, metadata);
        if has_failed_memory(&result) && !self.region.read_only() {
            self.mark_lost(lba)?;
        }
        result
    }

    fn copy_block(&self, lba: u32, data: &mut [u8], metadata: &mut [u8]) -> Result<()> {
        let (entry, block) = self.look_up(lba)?;
        match entry.state() {
            MapState::Unwritten | MapState::Zero => {
                data.fill(0);
                metadata.fill(0);
                Ok(())
            }
            MapState::Error => Err(BttError::BlockLost { lba }),
            MapState::Normal if self.is_suspect(block) => {
                Err(BttError::BlockDisputed { lba, block })
            }
            MapState::Normal => {
                let offset = self.block_offset(block);
                self.region.read(offset, data)?;
                if !metadata.is_empty() {
                    self.region.read(offset + data.len() as u64, metadata)?;
                }
                Ok(())
            }
        }
    }

    /// Marks the block of `lba` in the map as lost, as the kernel does, until a write. The caller
    /// holds the lock of `lba`, and the read of that block failed since it took the lock.
    #[cold]
    fn mark_lost(&self, lba: u32) -> Result<()> {
        let (entry, block) = self.map().load_block(lba)?;
        if entry.state() == MapState::Normal { self.store_error(lba, block) } else { Ok(()) }
    }

    /// Lets reads of `lba` fail until it is written; durable on return.
    pub(super) fn set_error(&self, lba: u32) -> Result<()> {
        let _guard = self.lba_locks.lock(lba, || self.region.relax());
        let (_, block) = self.map().load_block(lba)?;
        self.store_error(lba, block)
    }

    fn store_error(&self, lba: u32, block: u32) -> Result<()> {
        self.map().store(lba, MapEntry::error(block))?;
        self.map().write_back(lba)?;
        Ok(self.region.fence()?)
    }

    /// Makes the blocks of `lbas` read as zeroes, by the map alone; durable on return.
    ///
    /// An entry is one atomic word, so each block is old or zero. The flog is not needed: the block
    /// stays with its lba. A flog entry of an earlier write of that lba does not undo the change,
    /// since replay compares blocks without flags and finds the write's own block there. A block
    /// that was never written gets the flag too: the kernel would read the old bytes of that block
    /// on the medium.
    pub(super) fn zero_blocks(&self, lbas: Range<u32>) -> Result<()> {
        let map = self.map();
        let (start, len) = (map.entry_offset(lbas.start), lbas.len() as u64 * MAP_ENTRY_BYTES);
        for lba in lbas {
            let _guard = self.lba_locks.lock(lba, || self.region.relax());
            let (_, block) = map.load_block(lba)?;
            map.store(lba, MapEntry::zero(block))?;
        }
        Ok(self.region.persist(start, len)?)
    }

    /// Returns whether `lba` holds data, that is, was written and not discarded since.
    pub(super) fn is_written(&self, lba: u32) -> Result<bool> {
        let (entry, _) = self.look_up(lba)?;
        Ok(matches!(entry.state(), MapState::Normal | MapState::Error))
    }

    fn look_up(&self, lba: u32) -> Result<(MapEntry, u32)> {
        if !self.overlay.is_empty()
            && let Ok(index) = self.overlay.binary_search_by_key(&lba, |&(lba, _)| lba)
        {
            let block = self.overlay[index].1;
            return Ok((MapEntry::normal(block), block));
        }
        self.map().load_block(lba)
    }

    fn is_suspect(&self, block: u32) -> bool {
        self.suspects.as_ref().is_some_and(|suspects| suspects.get(block))
    }

    /// Returns the offset of block `block` in the region, in bytes.
    #[inline]
    pub(super) fn block_offset(&self, block: u32) -> u64 {
        self.data_base + u64::from(block) * self.block_bytes
    }
}

fn has_failed_memory(result: &Result<()>) -> bool {
    matches!(result, Err(BttError::Pmem(PmemError::Poisoned { .. })))
}
