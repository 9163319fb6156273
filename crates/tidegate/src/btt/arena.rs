//! One arena at run time: the write and the read of a block, and the argument why they are atomic.

use super::BttError;
use super::flog::Flog;
use super::lane::{LaneGuard, Lanes};
use super::layout::{MAP_ENTRY_BYTES, MapEntry, MapState};
use super::lba_lock::LbaLocks;
use super::map::Map;
use crate::pmem::{PmemError, Region};

/// Reads that met a writer this often take the lba's lock.
const OPTIMISTIC_READS: u32 = 8;

/// An open arena.
pub(super) struct Arena {
    /// Number of the arena, from 0.
    pub(super) number: usize,
    /// Number of its lbas.
    pub(super) lbas: u32,
    /// Where its data blocks start in the region, in bytes.
    pub(super) data_base: u64,
    /// Size of a data block on the medium, in bytes.
    pub(super) block_bytes: u64,
    /// Size of a block's metadata in bytes, right behind its data.
    pub(super) metadata_bytes: usize,
    pub(super) map: Map,
    pub(super) flog: Flog,
    pub(super) lanes: Lanes,
    pub(super) lba_locks: LbaLocks,
    /// Map changes that recovery found but could not store in a read-only region: (lba, block), by lba.
    pub(super) overlay: Vec<(u32, u32)>,
}

impl Arena {
    /// Writes one block: atomic, and durable on return.
    ///
    /// A lane whose memory fails is retired and the next one tried.
    pub(super) fn write_block(
        &self,
        region: &Region,
        lba: u32,
        data: &[u8],
        metadata: &[u8],
    ) -> Result<(), BttError> {
        loop {
            let mut lane =
                self.lanes.take(region).ok_or(BttError::NoLanes { arena: self.number })?;
            match self.write_in_lane(region, &mut lane, lba, data, metadata) {
                Err(BttError::Pmem(PmemError::Poisoned { .. })) => lane.state.failed = true,
                // Its flog entry may or may not be valid on the medium: the lane must not touch its block again.
                Err(error @ BttError::Pmem(_)) => {
                    lane.state.failed = true;
                    return Err(error);
                }
                result => return result,
            }
        }
    }

    /// The write, with two fences where the kernel has four. Why each store precedes the next:
    ///
    /// - The previous write of this lane left its map entry in the cache. It is written back here, by the
    ///   thread that also fences, and is durable at fence 1: before fence 2 makes this write's flog entry the
    ///   lane's newest and the previous one forgotten (invariant 4).
    /// - The data and the first half of the flog slot are durable at fence 1, before the second half exists:
    ///   a valid entry points at complete data and has its own lba (invariant 2). Until then the slot's old
    ///   sequence number makes it the lane's older entry, which nobody reads.
    /// - The entry that this write replaces may be in the cache only, stored by another lane. It is written
    ///   back here under the lba's lock and durable at fence 1 (invariant 5). So of all lanes' newest entries
    ///   for one lba, only that of the last write can still find its `old_map` in the map on the medium: an
    ///   older entry's `old_map` was replaced durably and is that lane's free block, so it cannot return.
    ///   Replay in any order therefore completes just the last write.
    /// - The map entry is stored after fence 2, so whoever sees it sees a write that recovery would complete
    ///   (invariant 3). It needs no fence of its own: until it is durable, the flog entry is there.
    /// - The lock's version grows after the map entry changed and before the lane, and with it the old
    ///   block, is free for the next write (invariant 6; see `lba_lock`).
    fn write_in_lane(
        &self,
        region: &Region,
        lane: &mut LaneGuard<'_>,
        lba: u32,
        data: &[u8],
        metadata: &[u8],
    ) -> Result<(), BttError> {
        if let Some(lba) = lane.state.unfenced_lba {
            self.map.write_back(region, lba)?;
        }
        let new_block = lane.state.free_block;
        self.store_data(region, new_block, data, metadata)?;
        let _guard = self.lba_locks.lock(lba, || region.relax());
        let (old_entry, old_block) = self.map.load_block(region, lba)?;
        self.map.write_back(region, lba)?;
        let entry = lane.state.entry(lba, logged_old_map(old_entry, old_block));
        self.flog.prepare(region, lane.number, lane.state.which, &entry)?;
        region.fence()?;
        self.flog.commit(region, lane.number, lane.state.which, &entry)?;
        region.fence()?;
        self.map.store(region, lba, MapEntry::normal(new_block))?;
        lane.state.advance(lba, old_block);
        Ok(())
    }

    fn store_data(
        &self,
        region: &Region,
        block: u32,
        data: &[u8],
        metadata: &[u8],
    ) -> Result<(), PmemError> {
        let offset = self.block_offset(block);
        region.write_streaming(offset, data)?;
        if !metadata.is_empty() {
            region.write_streaming(offset + data.len() as u64, metadata)?;
        }
        Ok(())
    }

    /// Reads one block: the last write that returned before this read began, or one that overlaps it; never a
    /// mixture.
    pub(super) fn read_block(
        &self,
        region: &Region,
        lba: u32,
        data: &mut [u8],
        metadata: &mut [u8],
    ) -> Result<(), BttError> {
        for _ in 0..OPTIMISTIC_READS {
            let version = self.lba_locks.version(lba);
            let result = self.copy_block(region, lba, data, metadata);
            if self.lba_locks.unchanged(lba, version) {
                return self.note_lost_block(region, lba, result);
            }
            region.relax();
        }
        let guard = self.lba_locks.lock(lba, || region.relax());
        let result = self.copy_block(region, lba, data, metadata);
        drop(guard);
        self.note_lost_block(region, lba, result)
    }

    fn copy_block(
        &self,
        region: &Region,
        lba: u32,
        data: &mut [u8],
        metadata: &mut [u8],
    ) -> Result<(), BttError> {
        let (entry, block) = self.look_up(region, lba)?;
        match entry.state() {
            MapState::Unwritten | MapState::Zero => {
                data.fill(0);
                metadata.fill(0);
                Ok(())
            }
            MapState::Error => Err(BttError::BlockLost { lba }),
            MapState::Normal => {
                let offset = self.block_offset(block);
                region.read(offset, data)?;
                if !metadata.is_empty() {
                    region.read(offset + data.len() as u64, metadata)?;
                }
                Ok(())
            }
        }
    }

    /// A block whose memory failed is marked in the map, as the kernel does, until it is written again.
    fn note_lost_block(
        &self,
        region: &Region,
        lba: u32,
        result: Result<(), BttError>,
    ) -> Result<(), BttError> {
        if let Err(BttError::Pmem(PmemError::Poisoned { .. })) = &result
            && !region.read_only()
        {
            let _guard = self.lba_locks.lock(lba, || region.relax());
            let (entry, block) = self.map.load_block(region, lba)?;
            if entry.state() == MapState::Normal {
                self.map.store(region, lba, MapEntry::error(block))?;
                self.map.write_back(region, lba)?;
                region.fence()?;
            }
        }
        result
    }

    /// Makes the blocks of `lbas` read as zeroes, by the map alone; durable on return.
    ///
    /// An entry is one atomic word, so each block is old or zero. The flog is not needed: the block stays
    /// with its lba. A flog entry of an earlier write of that lba does not undo it, since replay compares
    /// blocks without flags and finds the write's own block there.
    pub(super) fn zero_blocks(
        &self,
        region: &Region,
        lbas: std::ops::Range<u32>,
    ) -> Result<(), BttError> {
        let entries = (self.map.entry_offset(lbas.start), lbas.len() as u64 * MAP_ENTRY_BYTES);
        for lba in lbas {
            let _guard = self.lba_locks.lock(lba, || region.relax());
            let (entry, block) = self.map.load_block(region, lba)?;
            if entry.state() != MapState::Unwritten {
                self.map.store(region, lba, MapEntry::zero(block))?;
            }
        }
        region.persist(entries.0, entries.1)?;
        Ok(())
    }

    /// Whether `lba` holds data, that is, was written and not discarded since.
    pub(super) fn is_written(&self, region: &Region, lba: u32) -> Result<bool, BttError> {
        let (entry, _) = self.look_up(region, lba)?;
        Ok(matches!(entry.state(), MapState::Normal | MapState::Error))
    }

    fn look_up(&self, region: &Region, lba: u32) -> Result<(MapEntry, u32), BttError> {
        if !self.overlay.is_empty()
            && let Ok(index) = self.overlay.binary_search_by_key(&lba, |&(lba, _)| lba)
        {
            let block = self.overlay[index].1;
            return Ok((MapEntry::normal(block), block));
        }
        self.map.load_block(region, lba)
    }

    fn block_offset(&self, block: u32) -> u64 {
        self.data_base + u64::from(block) * self.block_bytes
    }
}

/// The old map entry as the kernel logs it: without flags, but a block that is in error keeps that flag.
fn logged_old_map(entry: MapEntry, block: u32) -> u32 {
    match entry.state() {
        MapState::Error => block | MapEntry::ERROR,
        _ => block,
    }
}
