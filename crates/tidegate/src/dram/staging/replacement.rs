//! The interface of a staging policy: which block goes next, how many, and when.

use super::table::{State, Table};
use crate::tier::list::{Links, List};

/// A policy as a state machine without clock, threads, locks or I/O: [`Set`](super::set::Set)
/// reports changes of the slots of one set and asks for decisions.
///
/// A slot is *listed* from [`dirtied`](Self::dirtied) until [`leaves`](Self::leaves). Slots whose
/// write-back failed are not listed: the set keeps them separately, so that a policy does not
/// choose the same bad block again.
pub(super) trait Replacement: Send + 'static {
    /// Whether a block stays as a clean copy after its write-back, unless the write-back was to
    /// free its slot.
    const KEEPS_CLEAN: bool = false;
    /// Most sets of a cache: 1 if the policy orders all its blocks.
    const SETS: u32;
    /// Most workers.
    const WORKERS: u32 = 0;
    /// Whether background work waits until the device below is idle.
    const WHEN_IDLE: bool = false;

    /// Makes the policy of a set of `slots` slots.
    fn new(slots: u32) -> Self;

    /// Lists `slot`, which now holds a complete dirty block.
    fn dirtied(&mut self, _slot: u32, _view: View<'_>) {}

    /// Removes the slot from the lists: its block is about to be changed in place, cannot be
    /// written back, or is given up.
    fn leaves(&mut self, _slot: u32) {}

    /// Notes a read hit of `slot`, which is listed.
    fn touched(&mut self, _slot: u32) {}

    /// Marks the begin of the write-back of `slot`, which is listed.
    fn writing(&mut self, _slot: u32) {}

    /// Marks `slot` as a clean copy after its write-back.
    fn cleaned(&mut self, _slot: u32) {}

    /// Returns the next slot to give up, Dirty or Clean.
    fn victim(&self, view: View<'_>) -> Option<u32>;

    /// Returns the number of blocks that a write to a full set has to write back; 0 if another
    /// thread already frees slots.
    fn begin_reclaim(&mut self, _view: View<'_>) -> u32 {
        1
    }

    /// Marks that the write has freed its slots.
    fn end_reclaim(&mut self) {}

    /// Returns whether a worker has something to do.
    fn wants_background(&self, _view: View<'_>) -> bool {
        false
    }

    /// Returns the next Dirty slot for a worker to write back. `None` ends its work until
    /// [`wants_background`](Self::wants_background).
    fn background(&mut self, _view: View<'_>) -> Option<u32> {
        None
    }

    /// Marks that the worker stops before [`background`](Self::background) returned `None`.
    fn end_background(&mut self) {}

    /// Returns the bytes of memory besides `size_of::<Self>()`.
    fn bytes(&self) -> usize {
        0
    }
}

/// The part of a set's state that a policy reads.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) table: &'a Table,
    pub(super) links: &'a Links,
    /// Slots with a Dirty block, or being filled with one, by the age of their oldest write.
    pub(super) dirty: &'a List,
    /// Slots that are not free.
    pub(super) used: u32,
}

impl View<'_> {
    /// Returns the slot that has been dirty for longest.
    pub(super) fn oldest_dirty(&self) -> Option<u32> {
        self.dirty.iter(self.links).find(|&slot| self.is_dirty(slot))
    }

    pub(super) fn is_dirty(&self, slot: u32) -> bool {
        self.table.state(slot) == State::Dirty
    }

    /// Returns whether the slot is neither being filled nor written back.
    pub(super) fn is_at_rest(&self, slot: u32) -> bool {
        matches!(self.table.state(slot), State::Dirty | State::Clean)
    }
}
