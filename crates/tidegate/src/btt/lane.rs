//! Lanes: each has one free block and one flog group, and serves one write at a time.
//!
//! Invariants:
//! 1. Only the holder of a lane changes it. Its fields are atomics, so that other writers may look.
//! 2. `unfenced_lba` is the lba whose map entry the lane's last write changed. It moves on only
//!    after that entry became durable, so a writer that finds another lba there knows that the
//!    entry is durable.
//!
//! Releasing a lane is a plain store. A locked instruction there would wait for the store of the
//! map entry before it, which the next write's fence waits for anyway.

use crossbeam_utils::CachePadded;

use super::flog::Newest;
use super::layout::{FlogSlot, next_seq, strip_flags};
use crate::sync::{AtomicBool, AtomicU32, Ordering, fence};

const NO_LBA: u32 = u32::MAX;

/// The state of a lane between writes.
pub(super) struct Lane {
    number: u32,
    taken: AtomicBool,
    /// The block for the next write.
    free_block: AtomicU32,
    /// Index of the flog slot for the next entry: the older one of the lane's two.
    which: AtomicU32,
    /// Sequence number of the next entry.
    seq: AtomicU32,
    /// The lba whose map entry the last write changed.
    unfenced_lba: AtomicU32,
    /// The memory of the lane's block, of its flog or of its last write's map entry failed: no
    /// writer may use the lane.
    failed: AtomicBool,
}

impl Lane {
    /// Makes the lane after recovery has completed its newest flog entry.
    pub(super) fn after(number: u32, newest: &Newest) -> Self {
        let older = u32::from(newest.which == 0);
        Self::new(
            number,
            strip_flags(newest.entry.old_map.get()),
            older,
            next_seq(newest.entry.seq.get()),
        )
    }

    /// Makes a lane that no writer takes, since its free block is unknown.
    pub(super) fn unusable(number: u32) -> Self {
        let lane = Self::new(number, 0, 0, 1);
        lane.failed.store(true, Ordering::Relaxed);
        lane
    }

    fn new(number: u32, free_block: u32, which: u32, seq: u32) -> Self {
        Self {
            number,
            taken: AtomicBool::new(false),
            free_block: AtomicU32::new(free_block),
            which: AtomicU32::new(which),
            seq: AtomicU32::new(seq),
            unfenced_lba: AtomicU32::new(NO_LBA),
            failed: AtomicBool::new(false),
        }
    }

    fn try_take(&self) -> bool {
        !self.taken.load(Ordering::Relaxed)
            && self
                .taken
                .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
    }
}

/// The lanes of one arena.
pub(super) struct Lanes {
    lanes: Box<[CachePadded<Lane>]>,
}

/// A lane taken; its drop releases the lane.
pub(super) struct LaneGuard<'a> {
    pub(super) number: u32,
    lane: &'a Lane,
}

impl LaneGuard<'_> {
    /// Returns the block for this write.
    pub(super) fn free_block(&self) -> u32 {
        self.lane.free_block.load(Ordering::Relaxed)
    }

    /// Returns the index of the flog slot for this write's entry.
    pub(super) fn which(&self) -> usize {
        self.lane.which.load(Ordering::Relaxed) as usize
    }

    /// Returns the lba whose map entry the last write of this lane changed, durably or not.
    pub(super) fn unfenced_lba(&self) -> Option<u32> {
        Some(self.lane.unfenced_lba.load(Ordering::Relaxed)).filter(|&lba| lba != NO_LBA)
    }

    /// Makes the flog entry of a write to `lba` that replaces `old_map` by `new_map`.
    pub(super) fn entry(&self, lba: u32, old_map: u32, new_map: u32) -> FlogSlot {
        FlogSlot::new(lba, old_map, new_map, self.lane.seq.load(Ordering::Relaxed))
    }

    /// Ends the write of `lba`: its old block becomes the lane's free block. Its map entry need not
    /// be durable yet, but the map entry of the lane's write before it is.
    pub(super) fn advance(&mut self, lba: u32, old_block: u32) {
        let lane = self.lane;
        lane.free_block.store(old_block, Ordering::Relaxed);
        lane.which.store(1 - lane.which.load(Ordering::Relaxed), Ordering::Relaxed);
        lane.seq.store(next_seq(lane.seq.load(Ordering::Relaxed)), Ordering::Relaxed);
        lane.unfenced_lba.store(lba, Ordering::Release);
    }

    /// Retires the lane, so that no writer takes it any more: the memory of its block, of its flog
    /// or of its last write's map entry failed.
    pub(super) fn retire(&mut self) {
        self.lane.failed.store(true, Ordering::Relaxed);
    }
}

impl Drop for LaneGuard<'_> {
    fn drop(&mut self) {
        self.lane.taken.store(false, Ordering::Release);
    }
}

impl Lanes {
    pub(super) fn new(lanes: Vec<Lane>) -> Self {
        Self { lanes: lanes.into_iter().map(CachePadded::new).collect() }
    }

    /// Takes the working lanes that are free now, one at each step, from number `start` on: the
    /// calling thread's own lane if it is free, and the next free ones.
    ///
    /// The version that the last change of the free block's owner bumped must be visible before the
    /// data that is stored next (see `Arena::lba_locks`). The release fence orders ordinary stores.
    /// The non-temporal stores of x86 ignore it, but not the locked instruction that takes the
    /// lane.
    pub(super) fn free_from(&self, start: usize) -> impl Iterator<Item = LaneGuard<'_>> {
        let (behind, before) = self.lanes.split_at(start % self.lanes.len());
        before.iter().chain(behind).filter_map(|lane| {
            let taken = !lane.failed.load(Ordering::Relaxed) && lane.try_take();
            taken.then(|| {
                fence(Ordering::Release);
                LaneGuard { number: lane.number, lane }
            })
        })
    }

    /// Takes one lane as [`free_from`](Self::free_from) does, and calls `relax` while no lane is
    /// free. Returns `None` if all lanes have failed.
    pub(super) fn wait_for_one(&self, start: usize, relax: impl Fn()) -> Option<LaneGuard<'_>> {
        while !self.lanes.iter().all(|lane| lane.failed.load(Ordering::Relaxed)) {
            if let Some(lane) = self.free_from(start).next() {
                return Some(lane);
            }
            relax();
        }
        None
    }

    /// Returns the lba whose map entry the last write of lane `number` changed. The entries of all
    /// earlier lbas there are durable.
    pub(super) fn unfenced_lba(&self, number: u32) -> Option<u32> {
        let lba = self.lanes[number as usize].unfenced_lba.load(Ordering::Acquire);
        Some(lba).filter(|&lba| lba != NO_LBA)
    }

    /// Makes lanes with the free blocks `free_blocks`, for models of the engine.
    #[cfg(all(test, loom))]
    pub(super) fn with_free_blocks(free_blocks: impl IntoIterator<Item = u32>) -> Self {
        Self::new(
            (0..).zip(free_blocks).map(|(number, block)| Lane::new(number, block, 0, 1)).collect(),
        )
    }
}
