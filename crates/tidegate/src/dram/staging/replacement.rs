//! What tells the staging policies apart: which block goes next, how many, and when.

use super::table::{State, Table};
use crate::tier::list::{Links, List};

/// A policy as a state machine without clock, threads, locks or I/O: [`Set`](super::set::Set) tells
/// it what happens to the slots of one set and asks it what to do.
///
/// A slot is *listed* from [`dirtied`](Self::dirtied) until [`leaves`](Self::leaves). Slots whose
/// write-back failed are not listed: the set keeps them apart, so that a policy never meets the
/// same bad block twice.
pub(super) trait Replacement: Send + 'static {
    /// A block that was written back stays as a clean copy, except where the write-back was for its
    /// slot.
    const KEEPS_CLEAN: bool = false;
    /// Most sets of a cache: 1 where the policy orders all blocks of it.
    const SETS: u32;
    /// Most workers.
    const WORKERS: u32 = 0;
    /// Background work waits until the device below is idle.
    const WHEN_IDLE: bool = false;

    /// The policy of a set of `slots` slots.
    fn new(slots: u32) -> Self;

    /// Listed from now on: `slot` holds a whole dirty block.
    fn dirtied(&mut self, _slot: u32, _view: View<'_>) {}

    /// No longer listed: its block is about to be changed in place, cannot be written back, or is
    /// given up.
    fn leaves(&mut self, _slot: u32) {}

    /// A read hit `slot`, which is listed.
    fn touched(&mut self, _slot: u32) {}

    /// The write-back of `slot`, which is listed, began.
    fn writing(&mut self, _slot: u32) {}

    /// The write-back of `slot` succeeded, and it stays as a clean copy.
    fn cleaned(&mut self, _slot: u32) {}

    /// The next slot to give up, Dirty or Clean.
    fn victim(&self, view: View<'_>) -> Option<u32>;

    /// A write found the set full: the number of blocks that it has to write back. 0: another
    /// thread frees slots already.
    fn begin_reclaim(&mut self, _view: View<'_>) -> u32 {
        1
    }

    /// The write that was told to free slots is done with it.
    fn end_reclaim(&mut self) {}

    /// A worker has something to do.
    fn wants_background(&self, _view: View<'_>) -> bool {
        false
    }

    /// The next slot, Dirty, for a worker to write back. None ends its work until
    /// [`wants_background`](Self::wants_background).
    fn background(&mut self, _view: View<'_>) -> Option<u32> {
        None
    }

    /// The worker stops before [`background`](Self::background) said so.
    fn end_background(&mut self) {}

    /// Bytes of memory beside `size_of::<Self>()`.
    fn bytes(&self) -> usize {
        0
    }
}

/// What a policy may know of its set.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) table: &'a Table,
    pub(super) links: &'a Links,
    /// Slots whose block is Dirty, or being filled to become so, by the age of their oldest write.
    pub(super) dirty: &'a List,
    /// Slots that are not free.
    pub(super) used: u32,
}

impl View<'_> {
    /// The slot that has been dirty for longest.
    pub(super) fn oldest_dirty(&self) -> Option<u32> {
        self.dirty.iter(self.links).find(|&slot| self.is_dirty(slot))
    }

    pub(super) fn is_dirty(&self, slot: u32) -> bool {
        self.table.state(slot) == State::Dirty
    }

    /// Neither being filled nor written back.
    pub(super) fn is_at_rest(&self, slot: u32) -> bool {
        matches!(self.table.state(slot), State::Dirty | State::Clean)
    }
}
