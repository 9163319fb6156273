//! One arena at run time: the write and the read of a block, and the argument why they are atomic.

use arrayvec::ArrayVec;

use super::BttError;
use super::flog::Flog;
use super::lane::{GROUP_MAX, LaneGuard, LaneGuards, Lanes};
use super::layout::{FlogSlot, MAP_ENTRY_BYTES, MapEntry, MapState};
use super::lba_lock::{LbaGuard, LbaGuards, LbaLocks};
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
    /// Writes whole blocks from `lba` on, each atomic and all durable on return. `metadata` goes behind the data of
    /// each block.
    ///
    /// Neighbours are written in groups, a lane each, that share the two fences. A lane whose memory fails is
    /// retired and the group tried again with others.
    pub(super) fn write_blocks(
        &self,
        region: &Region,
        lba: u32,
        data: &[u8],
        data_bytes: usize,
        metadata: &[u8],
    ) -> Result<(), BttError> {
        let mut blocks = Blocks { lba, data, data_bytes, metadata };
        while !blocks.data.is_empty() {
            let wanted = self.lba_locks.apart(blocks.lba, blocks.count().min(GROUP_MAX));
            let mut lanes = self.lanes.take(region.thread_ordinal(), wanted, || region.relax());
            if lanes.is_empty() {
                return Err(BttError::NoLanes { arena: self.number });
            }
            let (group, rest) = blocks.split(lanes.len());
            match self.write_group(region, &mut lanes, &group) {
                Ok(()) => blocks = rest,
                Err(GroupError::LaneRetired) => {}
                Err(GroupError::Failed(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// The write of a group of blocks, with two fences where the kernel has four a block. Why each store precedes
    /// the next (for a group: each lane's steps are done for all lanes before the next fence, so every argument
    /// holds lane by lane; the lbas differ):
    ///
    /// - The previous write of a lane left its map entry in the cache. It is written back here, by the
    ///   thread that also fences, and is durable at fence 1: before fence 2 makes this write's flog entry the
    ///   lane's newest and the previous one forgotten (invariant 4).
    /// - The data and the first half of the flog slot are durable at fence 1, before the second half exists:
    ///   a valid entry points at complete data and has its own lba (invariant 2). Until then the slot's old
    ///   sequence number makes it the lane's older entry, which nobody reads.
    /// - The entry that this write replaces may be in the cache only, stored by another lane: then that lane is the
    ///   bucket's last writer and has not written since. It is written back here under the lba's lock and
    ///   durable at fence 1 (invariant 5). So of all lanes' newest entries for one lba, only that of the last
    ///   write can still find its `old_map` in the map on the medium: an older entry's `old_map` was replaced
    ///   durably and is that lane's free block, so it cannot return. Replay in any order therefore completes
    ///   just the last write.
    /// - The map entry is stored after fence 2, so whoever sees it sees a write that recovery would complete
    ///   (invariant 3). It needs no fence of its own: until it is durable, the flog entry is there.
    /// - The lock's version grows after the map entry changed and before the lane, and with it the old
    ///   block, is free for the next write (invariant 6; see `lba_lock`).
    fn write_group(
        &self,
        region: &Region,
        lanes: &mut LaneGuards<'_>,
        group: &Blocks<'_>,
    ) -> Result<(), GroupError> {
        let mut guards = self.lba_locks.lock_group(group.lba, group.count(), || region.relax());
        let mut changes = ArrayVec::new();
        self.prepare_group(region, lanes, &guards, group, &mut changes)?;
        self.store_group(region, lanes, group)?;
        let committed = self.commit_group(region, lanes, &mut guards, &changes);
        if committed.is_err() {
            // The entries may or may not be valid on the medium: these lanes must not touch their blocks again.
            lanes.iter_mut().for_each(LaneGuard::retire);
        }
        Ok(committed?)
    }

    /// The first halves of the flog entries, and the map entries that they replace on their way.
    ///
    /// This and the locks come before the data: a locked instruction behind non-temporal stores waits for them.
    fn prepare_group(
        &self,
        region: &Region,
        lanes: &mut LaneGuards<'_>,
        guards: &LbaGuards<'_>,
        group: &Blocks<'_>,
        changes: &mut ArrayVec<Change, GROUP_MAX>,
    ) -> Result<(), GroupError> {
        for ((lane, guard), lba) in lanes.iter_mut().zip(guards).zip(group.lba..) {
            let (old_entry, old_block) = self.map.load_block(region, lba)?;
            if let Some(stale_lba) = self.unfenced_in_bucket(guard, lba) {
                self.map.write_back(region, stale_lba)?;
            }
            let entry = lane.entry(lba, logged_old_map(old_entry, old_block));
            let prepared = self.flog.prepare(region, lane.number, lane.which(), &entry);
            lane.retire_if_poisoned(prepared)?;
            changes.push(Change { entry, old_block });
        }
        Ok(())
    }

    /// The one lba of the bucket that `guard` locks whose map entry may not be durable.
    fn unfenced_in_bucket(&self, guard: &LbaGuard<'_>, lba: u32) -> Option<u32> {
        let stale_lba = self.lanes.unfenced_lba(guard.last_writer()?)?;
        self.lba_locks.same_bucket(stale_lba, lba).then_some(stale_lba)
    }

    /// The data of each block to its lane's free block, and the lane's previous map entry on its way.
    fn store_group(
        &self,
        region: &Region,
        lanes: &mut LaneGuards<'_>,
        group: &Blocks<'_>,
    ) -> Result<(), GroupError> {
        for (lane, data) in lanes.iter_mut().zip(group.data.chunks_exact(group.data_bytes)) {
            if let Some(lba) = lane.unfenced_lba() {
                self.map.write_back(region, lba)?;
            }
            let stored = self.store_data(region, lane.free_block(), data, group.metadata);
            lane.retire_if_poisoned(stored)?;
        }
        Ok(())
    }

    /// Fence 1, the second halves of the flog entries, fence 2, and the map entries.
    fn commit_group(
        &self,
        region: &Region,
        lanes: &mut LaneGuards<'_>,
        guards: &mut LbaGuards<'_>,
        changes: &[Change],
    ) -> Result<(), PmemError> {
        region.fence()?;
        for (lane, change) in lanes.iter().zip(changes) {
            self.flog.commit(region, lane.number, lane.which(), &change.entry)?;
        }
        region.fence()?;
        for ((lane, guard), change) in lanes.iter_mut().zip(guards).zip(changes) {
            let lba = change.entry.lba.get();
            self.map.store(region, lba, MapEntry::normal(change.entry.new_map.get()))?;
            lane.advance(lba, change.old_block);
            guard.set_writer(lane.number);
        }
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
    /// blocks without flags and finds the write's own block there. A block that was never written gets the
    /// flag too: the kernel would read what lies in its place on the medium.
    pub(super) fn zero_blocks(
        &self,
        region: &Region,
        lbas: std::ops::Range<u32>,
    ) -> Result<(), BttError> {
        let entries = (self.map.entry_offset(lbas.start), lbas.len() as u64 * MAP_ENTRY_BYTES);
        for lba in lbas {
            let _guard = self.lba_locks.lock(lba, || region.relax());
            let (_, block) = self.map.load_block(region, lba)?;
            self.map.store(region, lba, MapEntry::zero(block))?;
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

/// Blocks to write: neighbours from `lba` on.
#[derive(Clone, Copy)]
struct Blocks<'a> {
    lba: u32,
    data: &'a [u8],
    /// Size of each block's data in bytes.
    data_bytes: usize,
    /// Goes behind the data of each.
    metadata: &'a [u8],
}

impl Blocks<'_> {
    fn split(&self, count: usize) -> (Self, Self) {
        let (head, tail) = self.data.split_at(count * self.data_bytes);
        let skipped = u32::try_from(count).expect("a group is small");
        (Self { data: head, ..*self }, Self { data: tail, lba: self.lba + skipped, ..*self })
    }

    fn count(&self) -> usize {
        self.data.len() / self.data_bytes
    }
}

/// What the write of one block changes in the map.
struct Change {
    entry: FlogSlot,
    old_block: u32,
}

/// Why a group was not written.
enum GroupError {
    /// A lane's memory failed before anything was committed; others can do it.
    LaneRetired,
    /// Nothing helps.
    Failed(BttError),
}

impl<E: Into<BttError>> From<E> for GroupError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl LaneGuard<'_> {
    fn retire_if_poisoned(&mut self, result: Result<(), PmemError>) -> Result<(), GroupError> {
        match result {
            Err(PmemError::Poisoned { .. }) => {
                self.retire();
                Err(GroupError::LaneRetired)
            }
            result => Ok(result?),
        }
    }
}

/// The old map entry as the kernel logs it: without flags, but a block that is in error keeps that flag.
fn logged_old_map(entry: MapEntry, block: u32) -> u32 {
    match entry.state() {
        MapState::Error => block | MapEntry::ERROR,
        _ => block,
    }
}
