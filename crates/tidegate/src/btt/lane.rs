//! Lanes: each has one free block and one flog group, and serves one write at a time.

use arrayvec::ArrayVec;
use crossbeam_utils::CachePadded;
use parking_lot::{Mutex, MutexGuard};

use super::flog::Newest;
use super::layout::{FlogSlot, next_seq, strip_flags};
use crate::pmem::Region;
use crate::sync::{Ordering, fence};

/// What a lane remembers between writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LaneState {
    /// The block that the next write goes to.
    pub(super) free_block: u32,
    /// Which of the two flog slots the next entry goes to: the older one.
    pub(super) which: usize,
    /// Sequence number of the next entry.
    pub(super) seq: u32,
    /// The lba whose map entry the last write changed and nobody has written back for sure.
    pub(super) unfenced_lba: Option<u32>,
    /// The memory of its block or flog failed: not to be used again.
    pub(super) failed: bool,
}

impl LaneState {
    /// The state after recovery has dealt with the newest flog entry.
    pub(super) fn after(newest: &Newest) -> Self {
        Self {
            free_block: strip_flags(newest.entry.old_map.get()),
            which: 1 - newest.which,
            seq: next_seq(newest.entry.seq.get()),
            unfenced_lba: None,
            failed: false,
        }
    }

    /// The flog entry of a write to `lba` that replaces `old_map`.
    pub(super) fn entry(&self, lba: u32, old_map: u32) -> FlogSlot {
        FlogSlot::new(lba, old_map, self.free_block, self.seq)
    }

    /// The write is done: its old block is free now.
    pub(super) fn advance(&mut self, lba: u32, old_block: u32) {
        self.free_block = old_block;
        self.which = 1 - self.which;
        self.seq = next_seq(self.seq);
        self.unfenced_lba = Some(lba);
    }
}

/// The lanes of one arena.
pub(super) struct Lanes {
    lanes: Box<[CachePadded<Mutex<LaneState>>]>,
}

/// Most blocks that are written between two fences.
pub(super) const GROUP_MAX: usize = 8;

/// The lanes of a group of blocks.
pub(super) type LaneGuards<'a> = ArrayVec<LaneGuard<'a>, GROUP_MAX>;

/// A lane taken.
pub(super) struct LaneGuard<'a> {
    pub(super) number: u32,
    pub(super) state: MutexGuard<'a, LaneState>,
}

impl Lanes {
    pub(super) fn new(states: Vec<LaneState>) -> Self {
        Self {
            lanes: states.into_iter().map(|state| CachePadded::new(Mutex::new(state))).collect(),
        }
    }

    /// Takes up to `wanted` working lanes (at least one, at most [`GROUP_MAX`]): the calling thread's own where it is
    /// free, and the next free ones. Waits for the first, never for more. Empty where all have failed.
    ///
    /// The version that the last change of the free block's owner bumped must be visible before the data that is
    /// stored next (see `lba_lock`). The release fence orders ordinary stores; the non-temporal stores of x86
    /// ignore it, but not the locked instruction that takes the mutex.
    pub(super) fn take(&self, region: &Region, wanted: usize) -> LaneGuards<'_> {
        let start = region.thread_ordinal();
        let mut taken = LaneGuards::new();
        loop {
            let mut failed = 0;
            for step in 0..self.lanes.len() {
                let number = (start + step) % self.lanes.len();
                let Some(state) = self.lanes[number].try_lock() else { continue };
                if state.failed {
                    failed += 1;
                    continue;
                }
                let number = u32::try_from(number).expect("an arena has at most 256 lanes");
                taken.push(LaneGuard { number, state });
                if taken.len() == wanted || taken.is_full() {
                    break;
                }
            }
            if !taken.is_empty() || failed == self.lanes.len() {
                fence(Ordering::Release);
                return taken;
            }
            region.relax();
        }
    }
}
