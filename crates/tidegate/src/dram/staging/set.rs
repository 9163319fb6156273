//! One set of slots as a state machine: it decides which reads, writes, write-backs and flushes
//! each block allows.
//!
//! The set has no clock, thread, lock or I/O: the runtime, or a model in virtual time, calls it
//! under the set's lock and follows its decisions. The [`Replacement`] decides which block goes.
//!
//! 1. A block is in at most one slot, and all its versions pass through that slot. A write changes
//!    the block in place, but not during its write-back, so two versions are never written below at
//!    the same time.
//! 2. A slot with data that is not below is in one of three lists: `writing` during its write-back,
//!    else `failed` if its last write-back failed, else `dirty`, which is in the order of epochs.
//! 3. The epoch of a slot is that of its oldest write that is not written back. A flush that ended
//!    epoch E waits for slots of epochs up to E, and their number only shrinks: a slot that becomes
//!    dirty after the flush began has a higher epoch, and a slot that the flush waits for is not
//!    filled again before it is written back.
//! 4. While a range of lbas is closed, no write to the range starts.

use std::ops::Range;

use super::replacement::{Replacement, View};
use super::table::{State, Table};
use crate::tier::list::{Links, List};

/// The next step of a write of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteStep {
    /// Copy the data into this slot, then call [`Set::filled`].
    Fill(u32),
    /// Try again after the set's next change.
    Wait,
    /// Free slots by [`Set::begin_reclaim`], then try again.
    Full,
}

/// The next step of a read of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadStep {
    /// Copy this slot. No thread changes it before the set is unlocked.
    Hit(u32),
    /// Try again after the set's next change.
    Wait,
    /// Read from the device below.
    Miss,
}

/// The next step of a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FlushStep {
    /// Write back the returned run of slots, then call [`Set::written_back`] for each.
    WriteBack,
    /// Try again after the set's next change.
    Wait,
    /// Nothing is left to do.
    Done,
}

/// The result of the search for a block to give up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Victim {
    /// Write the returned run back, and free this slot.
    Of(u32),
    /// Write the returned run back, and free this slot. The last write-back of every candidate,
    /// this one included, failed.
    Retry(u32),
    /// No candidate: all slots are being filled or written back.
    None,
}

/// A set of slots under policy `R`.
pub(super) struct Set<R> {
    table: Table,
    links: Links,
    free: List,
    dirty: List,
    failed: List,
    writing: List,
    closed: Vec<Range<u64>>,
    /// Number of lbas of an aligned run, whose blocks are written back together.
    run_blocks: u64,
    replacement: R,
}

/// Makes the view for `$set.replacement`. A method would borrow the replacement too.
macro_rules! view {
    ($set:expr) => {
        View {
            table: &$set.table,
            links: &$set.links,
            dirty: &$set.dirty,
            used: $set.table.slots() - $set.free.len(),
        }
    };
}

impl<R: Replacement> Set<R> {
    /// Makes an empty set of `slots` slots; `run_blocks` is a power of two.
    pub(super) fn new(slots: u32, run_blocks: u64) -> Self {
        let mut links = Links::new(slots);
        let mut free = List::EMPTY;
        (0..slots).for_each(|slot| free.push_last(&mut links, slot));
        Self {
            table: Table::new(slots),
            links,
            free,
            dirty: List::EMPTY,
            failed: List::EMPTY,
            writing: List::EMPTY,
            closed: Vec::new(),
            run_blocks,
            replacement: R::new(slots),
        }
    }

    /// Returns the bytes of memory besides `size_of::<Self>()`.
    pub(super) fn bytes(&self) -> usize {
        self.table.bytes() + self.links.bytes() + self.replacement.bytes()
    }

    /// Counts the slots whose data is not below, and those whose last write-back failed.
    pub(super) fn counts(&self) -> (u32, u32) {
        (self.dirty.len() + self.failed.len() + self.writing.len(), self.failed.len())
    }

    /// Returns the lba in `slot`.
    pub(super) fn lba(&self, slot: u32) -> u64 {
        self.table.get(slot).lba
    }

    /// Returns whether `lba` is cached.
    pub(super) fn contains(&self, lba: u64) -> bool {
        self.table.find(lba).is_some()
    }

    /// Returns whether a write of `lba` would find a slot without a write-back.
    pub(super) fn has_slot_for(&self, lba: u64) -> bool {
        match self.table.find(lba) {
            Some(slot) => matches!(self.table.state(slot), State::Dirty | State::Clean),
            None => !self.free.is_empty(),
        }
    }

    /// Begins a write of `lba` in `epoch`, which never decreases from call to call.
    pub(super) fn write(&mut self, lba: u64, epoch: u64) -> WriteStep {
        if self.closed.iter().any(|range| range.contains(&lba)) {
            return WriteStep::Wait;
        }
        match self.table.find(lba) {
            Some(slot) => self.write_hit(slot, epoch),
            None => match self.vacant() {
                Some(slot) => {
                    self.free.remove(&mut self.links, slot);
                    self.table.insert(slot, lba, epoch);
                    self.dirty.push_last(&mut self.links, slot);
                    WriteStep::Fill(slot)
                }
                None => WriteStep::Full,
            },
        }
    }

    fn write_hit(&mut self, slot: u32, epoch: u64) -> WriteStep {
        let header = self.table.get_mut(slot);
        match header.state {
            State::Filling | State::Writing | State::Free => return WriteStep::Wait,
            State::Dirty if header.awaited => return WriteStep::Wait,
            State::Dirty => {}
            State::Clean => {
                header.epoch = epoch;
                self.dirty.push_last(&mut self.links, slot);
            }
        }
        header.state = State::Filling;
        if !header.failed {
            self.replacement.leaves(slot);
        }
        WriteStep::Fill(slot)
    }

    /// Returns a free slot, if necessary by giving up a clean copy.
    fn vacant(&mut self) -> Option<u32> {
        if self.free.is_empty() {
            let victim = self.replacement.victim(view!(self));
            let copy = victim.filter(|&slot| self.table.state(slot) == State::Clean)?;
            self.give_up(copy);
        }
        self.free.first()
    }

    fn give_up(&mut self, slot: u32) {
        self.replacement.leaves(slot);
        self.table.remove(slot);
        self.free.push_last(&mut self.links, slot);
    }

    /// Marks the data of `slot` as complete.
    pub(super) fn filled(&mut self, slot: u32) {
        let header = self.table.get_mut(slot);
        header.state = State::Dirty;
        if !header.failed {
            self.replacement.dirtied(slot, view!(self));
        }
    }

    /// Begins a read of `lba`.
    pub(super) fn read(&mut self, lba: u64) -> ReadStep {
        let Some(slot) = self.table.find(lba) else { return ReadStep::Miss };
        let header = self.table.get(slot);
        match header.state {
            State::Filling | State::Free => return ReadStep::Wait,
            State::Dirty | State::Clean if !header.failed => self.replacement.touched(slot),
            State::Dirty | State::Clean | State::Writing => {}
        }
        ReadStep::Hit(slot)
    }

    /// Returns the number of blocks that a write to a full set has to write back: the write gets
    /// them from [`take_victim`](Self::take_victim) and then calls
    /// [`end_reclaim`](Self::end_reclaim). 0: wait for the set's next change instead.
    pub(super) fn begin_reclaim(&mut self) -> u32 {
        if self.next_victim() == Victim::None {
            return 0;
        }
        self.replacement.begin_reclaim(view!(self))
    }

    /// Ends the work of a writer that freed slots.
    pub(super) fn end_reclaim(&mut self) {
        self.replacement.end_reclaim();
    }

    /// Starts the write-back of a block, and its neighbours, to free its slot. `run` gets the slots
    /// by ascending lba.
    pub(super) fn take_victim(&mut self, run: &mut Vec<u32>) -> Victim {
        let victim = self.next_victim();
        if let Victim::Of(slot) | Victim::Retry(slot) = victim {
            self.start(slot, run);
        }
        victim
    }

    fn next_victim(&self) -> Victim {
        if let Some(slot) = self.replacement.victim(view!(self)) {
            return Victim::Of(slot);
        }
        let mut failed = self.failed.iter(&self.links);
        let retry = failed.find(|&slot| self.table.state(slot) == State::Dirty);
        retry.map_or(Victim::None, Victim::Retry)
    }

    /// Returns whether a worker has something to do.
    pub(super) fn wants_background(&self) -> bool {
        self.replacement.wants_background(view!(self))
    }

    /// Starts a write-back in the background. Returns false if there is nothing to do.
    pub(super) fn take_background(&mut self, run: &mut Vec<u32>) -> bool {
        let next = self.replacement.background(view!(self));
        if let Some(slot) = next {
            self.start(slot, run);
        }
        next.is_some()
    }

    /// Notes that the worker stops before [`take_background`](Self::take_background) returned
    /// false.
    pub(super) fn end_background(&mut self) {
        self.replacement.end_background();
    }

    /// Changes `slot` from Dirty to Writing and, unless it failed before, its neighbours too.
    fn start(&mut self, slot: u32, run: &mut Vec<u32>) {
        run.clear();
        let lba = self.lba(slot);
        let blocks = if self.table.get(slot).failed { 1 } else { self.run_blocks };
        let aligned = lba & !(blocks - 1);
        run.extend((aligned..lba).rev().map_while(|lba| self.neighbour(lba)));
        run.reverse();
        run.push(slot);
        run.extend((lba + 1..aligned + blocks).map_while(|lba| self.neighbour(lba)));
        for &slot in &*run {
            let header = self.table.get_mut(slot);
            let list = if header.failed { &mut self.failed } else { &mut self.dirty };
            list.remove(&mut self.links, slot);
            self.writing.push_last(&mut self.links, slot);
            header.state = State::Writing;
            header.awaited = false;
            if !header.failed {
                self.replacement.writing(slot);
            }
        }
    }

    fn neighbour(&self, lba: u64) -> Option<u32> {
        let slot = self.table.find(lba)?;
        let header = self.table.get(slot);
        (header.state == State::Dirty && !header.failed).then_some(slot)
    }

    /// Ends the write-back of `slot`, successful if `ok`, and meant to free the slot if `free`.
    pub(super) fn written_back(&mut self, slot: u32, ok: bool, free: bool) {
        self.writing.remove(&mut self.links, slot);
        let header = self.table.get_mut(slot);
        let is_listed = !std::mem::replace(&mut header.failed, !ok);
        if !ok {
            header.state = State::Dirty;
            self.failed.push_last(&mut self.links, slot);
            if is_listed {
                self.replacement.leaves(slot);
            }
            return;
        }
        header.state = State::Clean;
        if !is_listed {
            self.table.remove(slot);
            self.free.push_last(&mut self.links, slot);
            return;
        }
        self.replacement.cleaned(slot);
        if free || !R::KEEPS_CLEAN {
            self.give_up(slot);
        }
    }

    /// Returns the next step of a flush of epochs up to `upto`, without failed blocks.
    pub(super) fn flush_step(&mut self, upto: u64, run: &mut Vec<u32>) -> FlushStep {
        let covered = |slot: u32| self.table.get(slot).epoch <= upto;
        match self.dirty.first().filter(|&slot| covered(slot)) {
            Some(slot) => self.write_back_next(slot, run),
            None if self.writing.iter(&self.links).any(covered) => FlushStep::Wait,
            None => FlushStep::Done,
        }
    }

    /// Returns the next step until the current version of `lba` is below.
    pub(super) fn drain_step(&mut self, lba: u64, run: &mut Vec<u32>) -> FlushStep {
        match self.table.find(lba) {
            Some(slot) => self.write_back_next(slot, run),
            None => FlushStep::Done,
        }
    }

    fn write_back_next(&mut self, slot: u32, run: &mut Vec<u32>) -> FlushStep {
        let header = self.table.get_mut(slot);
        match header.state {
            State::Dirty => {
                self.start(slot, run);
                FlushStep::WriteBack
            }
            State::Filling => {
                header.awaited = true;
                FlushStep::Wait
            }
            State::Writing => FlushStep::Wait,
            State::Clean | State::Free => FlushStep::Done,
        }
    }

    /// Returns the lbas, of epochs up to `upto`, whose last write-back failed.
    pub(super) fn failed_upto(&self, upto: u64) -> Vec<u64> {
        let headers = self.failed.iter(&self.links).map(|slot| self.table.get(slot));
        headers.filter(|header| header.epoch <= upto).map(|header| header.lba).collect()
    }

    /// Returns whether the last write-back of the cached block `lba` failed.
    pub(super) fn has_failed(&self, lba: u64) -> bool {
        self.table.find(lba).is_some_and(|slot| self.table.get(slot).failed)
    }

    /// Returns the cached lbas of `range`.
    pub(super) fn cached_in(&self, range: &Range<u64>) -> Vec<u64> {
        self.table.cached_in(range)
    }

    /// Closes `range`: writes to it wait until it is opened.
    pub(super) fn close(&mut self, range: Range<u64>) {
        self.closed.push(range);
    }

    /// Takes back one [`close`](Self::close) of `range`.
    pub(super) fn open(&mut self, range: &Range<u64>) {
        if let Some(index) = self.closed.iter().position(|closed| closed == range) {
            self.closed.swap_remove(index);
        }
    }

    /// Gives up the copy of `lba`, if there is one and it is clean.
    pub(super) fn forget(&mut self, lba: u64) {
        let copy = self.table.find(lba).filter(|&slot| self.table.state(slot) == State::Clean);
        if let Some(slot) = copy {
            self.give_up(slot);
        }
    }
}
