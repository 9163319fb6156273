//! The write: copy on write into the free blocks of lanes, and the argument why each block is
//! atomic.

use arrayvec::ArrayVec;

use super::BttError;
use super::arena::Arena;
use super::lane::LaneGuard;
use super::layout::{FlogSlot, MapEntry, MapState};
use crate::pmem::PmemError;
use crate::tier::version_locks::VersionGuard;

/// Most blocks of a write that share the two fences.
const GROUP_MAX: usize = 8;

/// One block of a group during its write. Its drop unlocks the lba before it releases the lane.
struct Member<'a> {
    lock: Option<VersionGuard<'a>>,
    lane: LaneGuard<'a>,
    lba: u32,
    data: &'a [u8],
    /// The flog entry that commits the block.
    entry: FlogSlot,
    /// The block that the write replaces.
    old_block: u32,
}

/// Blocks that share the two fences, each in its own lane.
type Group<'a> = ArrayVec<Member<'a>, GROUP_MAX>;

/// Why a group was not written.
enum GroupError {
    /// Memory that a lane depends on failed before the commit; other lanes can write the group.
    LaneRetired,
    /// Other lanes cannot help.
    Failed(BttError),
}

impl<E: Into<BttError>> From<E> for GroupError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl Arena {
    /// Writes whole blocks of `data_bytes` from `lba` on, each atomic and all durable on return.
    /// `metadata` goes behind the data of each block.
    ///
    /// Neighbours are written in groups that share the two fences, each block in its own lane. A
    /// lane whose memory fails is retired, and the group is tried again with other lanes. So is a
    /// lane whose last write has its map entry in failed memory.
    pub(super) fn write_blocks(
        &self,
        mut lba: u32,
        mut data: &[u8],
        data_bytes: usize,
        metadata: &[u8],
    ) -> Result<(), BttError> {
        while !data.is_empty() {
            let mut group = Group::new();
            self.gather(lba, data.chunks_exact(data_bytes), &mut group)?;
            match self.write_group(&mut group, metadata) {
                Ok(()) => {
                    data = &data[group.len() * data_bytes..];
                    lba += u32::try_from(group.len()).expect("a group is small");
                }
                Err(GroupError::LaneRetired) => {}
                Err(GroupError::Failed(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// Takes a lane for the first of `blocks`, and lanes for the next blocks as long as lanes are
    /// free at once and the lbas are in different buckets.
    fn gather<'a>(
        &'a self,
        first: u32,
        blocks: impl Iterator<Item = &'a [u8]>,
        group: &mut Group<'a>,
    ) -> Result<(), BttError> {
        let mut free = self.lanes.free_from(self.region.thread_ordinal());
        for (lba, data) in (first..).zip(blocks.take(GROUP_MAX)) {
            if group.iter().any(|member| self.lba_locks.same_bucket(member.lba, lba)) {
                break;
            }
            let lane = match free.next() {
                Some(lane) => lane,
                None if !group.is_empty() => break,
                None => self
                    .lanes
                    .wait_for_one(self.region.thread_ordinal(), || self.region.relax())
                    .ok_or(BttError::NoLanes { arena: self.number })?,
            };
            group.push(Member {
                lock: None,
                lane,
                lba,
                data,
                entry: FlogSlot::default(),
                old_block: 0,
            });
        }
        Ok(())
    }

    /// Writes a group of blocks, with two fences where the kernel has four a block. The following
    /// argument shows why each store precedes the next. In a group, each step is done for all lanes
    /// before the next fence, so every argument holds for each lane; the lbas differ.
    ///
    /// - The previous write of a lane left its map entry in the cache. It is written back here, by
    ///   the thread that also fences, and is durable at fence 1: before fence 2 makes this write's
    ///   flog entry the lane's newest and the previous one forgotten (invariant 4).
    /// - The data and the first half of the flog slot are durable at fence 1, before the second
    ///   half is stored: a valid entry points at complete data and has its own lba (invariant 2).
    ///   Until then the slot's old sequence number makes it the lane's older entry, which no
    ///   recovery reads.
    /// - The entry that this write replaces may be in the cache only, stored by another lane: then
    ///   that lane is the bucket's last writer and has not written since. It is written back here
    ///   under the lba's lock and durable at fence 1 (invariant 5). So among all lanes' newest
    ///   entries for one lba, only that of the last write can still find its `old_map` in the map
    ///   on the medium: an older entry's `old_map` was replaced durably and is that lane's free
    ///   block, so it cannot return. Replay in any order therefore completes just the last write.
    /// - The map entry is stored after fence 2, so a reader that sees it sees a write that recovery
    ///   would complete (invariant 3). It needs no fence of its own: until it is durable, the flog
    ///   entry is there.
    /// - The lock's version grows after the map entry changed and before the lane, and with it the
    ///   old block, is free for the next write (invariant 6; see `Arena::lba_locks`).
    fn write_group<'a>(&'a self, group: &mut Group<'a>, metadata: &[u8]) -> Result<(), GroupError> {
        self.lock_group(group);
        for member in group.iter_mut() {
            self.prepare(member)?;
        }
        for member in group.iter_mut() {
            self.store(member, metadata)?;
        }
        let committed = self.commit_group(group);
        if committed.is_err() {
            // The entries may or may not be valid on the medium: these lanes must not touch their
            // blocks again.
            group.iter_mut().for_each(|member| member.lane.retire());
        }
        Ok(committed?)
    }

    /// Locks the lbas in the order of their locks, so that two groups never wait for each other.
    ///
    /// The locks come before the data: a locked instruction after non-temporal stores waits for
    /// their end.
    fn lock_group<'a>(&'a self, group: &mut Group<'a>) {
        group.sort_unstable_by_key(|member| self.lba_locks.rank(member.lba));
        for member in group {
            member.lock = Some(self.lba_locks.lock(member.lba, || self.region.relax()));
        }
    }

    /// Stores the first half of the flog entry. Writes the map entry that it replaces back if
    /// needed.
    fn prepare(&self, member: &mut Member<'_>) -> Result<(), GroupError> {
        let (old_entry, old_block) = self.map().load_block(member.lba)?;
        if let Some(stale_lba) = self.unfenced_in_bucket(member) {
            self.write_stale_back(stale_lba, member.lba)?;
        }
        if self.version.flog_has_flags() && old_entry.state() != MapState::Normal {
            // The flags may have changed without a fence. Recovery by libpmemblk compares them.
            self.map().write_back(member.lba)?;
        }
        let old_map = self.version.replaced_map(old_entry, old_block);
        let new_map = self.version.written_map(member.lane.free_block());
        member.entry = member.lane.entry(member.lba, old_map, new_map);
        member.old_block = old_block;
        let which = member.lane.which();
        let prepared = self.flog().prepare(member.lane.number, which, &member.entry);
        retire_if_poisoned(&mut member.lane, prepared)
    }

    /// Returns the one lba of the member's bucket whose map entry may not be durable, if there is
    /// one.
    fn unfenced_in_bucket(&self, member: &Member<'_>) -> Option<u32> {
        let last_writer = member.lock.as_ref()?.last_holder()?;
        let stale_lba = self.lanes.unfenced_lba(last_writer)?;
        self.lba_locks.same_bucket(stale_lba, member.lba).then_some(stale_lba)
    }

    /// Writes the map entry of `stale_lba` back, which shares the bucket of `lba`.
    ///
    /// If the memory of that entry failed, a write to another lba of the bucket goes on. Its own
    /// order does not need the stale entry: among the flog entries of one lba, only those of that
    /// lba count. The bucket then forgets that the entry may not be durable. Only a next write to
    /// `stale_lba` would have to know that, and there is none: the region refuses to load the entry
    /// for as long as it is open. The flog entry of the lane that stored it stays that lane's
    /// newest: `store` retires the lane, so recovery finds the write there.
    fn write_stale_back(&self, stale_lba: u32, lba: u32) -> Result<(), PmemError> {
        match self.map().write_back(stale_lba) {
            Err(PmemError::Poisoned { .. }) if stale_lba != lba => Ok(()),
            result => result,
        }
    }

    /// Stores the data in the lane's free block. Writes the lane's previous map entry back.
    ///
    /// If that entry's memory failed, the lane's flog entry stays the only record of the previous
    /// write: this write may not replace it (invariant 4), and the lane is retired.
    fn store(&self, member: &mut Member<'_>, metadata: &[u8]) -> Result<(), GroupError> {
        let offset = self.block_offset(member.lane.free_block());
        let mut stored = self.region.write_streaming(offset, member.data);
        if stored.is_ok() && !metadata.is_empty() {
            stored = self.region.write_streaming(offset + member.data.len() as u64, metadata);
        }
        if let Some(lba) = member.lane.unfenced_lba() {
            stored = stored.and_then(|()| self.map().write_back(lba));
        }
        retire_if_poisoned(&mut member.lane, stored)
    }

    /// Commits a group: fence 1, the second halves of the flog entries, fence 2, and the map
    /// entries.
    fn commit_group(&self, group: &mut Group<'_>) -> Result<(), PmemError> {
        self.region.fence()?;
        for Member { lane, entry, .. } in group.iter() {
            self.flog().commit(lane.number, lane.which(), entry)?;
        }
        self.region.fence()?;
        for Member { lock, lane, lba, old_block, entry, .. } in group.iter_mut() {
            self.map().store(*lba, MapEntry::normal(entry.new_map.get()))?;
            lane.advance(*lba, *old_block);
            if let Some(lock) = lock {
                lock.set_holder(lane.number);
            }
        }
        Ok(())
    }
}

fn retire_if_poisoned(
    lane: &mut LaneGuard<'_>,
    result: Result<(), PmemError>,
) -> Result<(), GroupError> {
    match result {
        Err(PmemError::Poisoned { .. }) => {
            lane.retire();
            Err(GroupError::LaneRetired)
        }
        result => Ok(result?),
    }
}
