//! One cache set: the versions of each lba, their slots, and the next steps that each allows.
//!
//! A pure state machine without clock, thread, lock, block data or I/O. The threaded runtime puts
//! each set behind a mutex; a model in virtual time can drive the same methods. Invariants:
//!
//! 1. `Free → Pending → Valid → Evicting → Free`; a hit takes Valid back to Pending, a failed
//!    eviction takes Evicting back to Valid. No other change occurs.
//! 2. The index holds the newest version of an lba, and an lba has at most two: an older one that
//!    is Evicting, or Valid and covered by a flush, and a newer one written beside it.
//! 3. A version is in the write-back queue, where alone eviction starts, only while no older one
//!    exists. So two versions of an lba are never written below at the same time, and the newer one
//!    is written last.
//! 4. An lba leaves the index only when the write of its newest version below has returned.
//! 5. The queue is sorted by epoch, so that the versions that a flush covers come first.
//! 6. While an lba is closed, because a request writes it below around the cache, no write changes
//!    one of its versions or adds one.

use super::super::slots::NO_SLOT;
use super::table::{Home, State, Table, some};

/// The next step of a write to an lba.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteStep {
    /// Copy the data into this slot, now Pending, and call [`Set::written`].
    Copy(u32),
    /// Another write is copying its data to the newest version, or the lba is closed: try again
    /// after the set's next change.
    Wait,
    /// The newest version must not change any more: [`Set::admit`] a free slot for another version,
    /// or try again after the set's next change.
    Beside,
    /// No version is cached: [`Set::admit`] a free slot, or write to the device below.
    Absent,
}

/// The next step of a read of an lba.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadStep {
    /// Read this slot. No thread changes it before the set's lock is released.
    Hit(u32),
    /// A write is copying its data: try again after the set's next change.
    Wait,
    /// Read from the device below.
    Miss,
}

/// The next step of a flush in a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FlushStep {
    /// Evict by [`Set::take_for_eviction`], this lba first.
    Evict(u64),
    /// A covered version is being written: try again after the set's next change.
    Wait,
    /// All is written back except failed versions, such as that of this lba.
    Failed(u64),
    /// All is written back.
    Done,
}

/// A cache set.
#[derive(Debug)]
pub(super) struct Set {
    queue: List,
    waiting: List,
    failed: List,
    /// Number of slots in the set.
    len: u32,
    /// Flushes at work in this set, and the highest epoch that they cover.
    flushes: u32,
    flushing: u64,
    /// Lbas closed to writes: few and rarely.
    closed: Vec<u64>,
}

#[derive(Debug)]
struct List {
    head: u32,
    tail: u32,
}

impl Set {
    pub(super) fn new() -> Self {
        let list = || List { head: NO_SLOT, tail: NO_SLOT };
        Self {
            queue: list(),
            waiting: list(),
            failed: list(),
            len: 0,
            flushes: 0,
            flushing: 0,
            closed: Vec::new(),
        }
    }

    /// Returns whether nothing is cached in this set.
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether an eviction may start.
    pub(super) fn is_ready(&self) -> bool {
        self.queue.head != NO_SLOT
    }

    /// Returns whether a version of `lba` is cached.
    pub(super) fn contains(table: &Table, lba: u64) -> bool {
        table.find(lba).is_some()
    }

    /// Begins a write to `lba`.
    pub(super) fn write(&mut self, table: &Table, lba: u64) -> WriteStep {
        if self.closed.contains(&lba) {
            return WriteStep::Wait;
        }
        let Some(slot) = table.find(lba) else { return WriteStep::Absent };
        match table.state(slot) {
            State::Pending | State::Free => WriteStep::Wait,
            State::Evicting => WriteStep::Beside,
            // A flush waits for this version. If writes could change it again and again, the flush
            // would not end.
            State::Valid if self.is_covered(table, slot) => WriteStep::Beside,
            State::Valid => {
                self.unlink(table, slot);
                table.set_state(slot, State::Pending);
                self.link(table, slot, Home::Waiting);
                WriteStep::Copy(slot)
            }
        }
    }

    /// Closes `lba` to writes until [`open`](Self::open). Returns false if it is closed already:
    /// try again after the set's next change.
    pub(super) fn close(&mut self, lba: u64) -> bool {
        let free = !self.closed.contains(&lba);
        if free {
            self.closed.push(lba);
        }
        free
    }

    /// Opens `lba`, which is closed.
    pub(super) fn open(&mut self, lba: u64) {
        self.closed.retain(|&closed| closed != lba);
    }

    fn is_covered(&self, table: &Table, slot: u32) -> bool {
        self.flushes > 0 && table.epoch(slot) <= self.flushing && table.home(slot) == Home::Queue
    }

    /// Makes `slot`, just taken from the free set, the newest version of `lba`: Pending, written in
    /// `epoch`. Call it after [`WriteStep::Beside`] or [`WriteStep::Absent`], under the same lock.
    pub(super) fn admit(&mut self, table: &Table, lba: u64, slot: u32, epoch: u64) {
        let older = table.find(lba);
        table.set_lba(slot, lba);
        table.set_epoch(slot, epoch);
        table.set_older(slot, older);
        table.set_state(slot, State::Pending);
        table.insert(slot, older);
        self.link(table, slot, Home::Waiting);
        self.len += 1;
    }

    /// Marks the data of `slot` as complete: it may be read, and queues for eviction once it is the
    /// oldest version.
    pub(super) fn written(&mut self, table: &Table, slot: u32) {
        table.set_state(slot, State::Valid);
        if table.older(slot).is_none() {
            self.move_to(table, slot, Home::Queue);
        }
    }

    /// Begins a read of `lba`.
    pub(super) fn read(table: &Table, lba: u64) -> ReadStep {
        let Some(slot) = table.find(lba) else { return ReadStep::Miss };
        match table.state(slot) {
            State::Valid | State::Evicting => ReadStep::Hit(slot),
            State::Pending | State::Free => ReadStep::Wait,
        }
    }

    /// Starts evicting the first slot in the queue, if its epoch is at most `upto`, and its
    /// neighbours in the same aligned run. Fills `run` with the slots by ascending lba; returns
    /// whether there are any.
    pub(super) fn take_for_eviction(
        &mut self,
        table: &Table,
        upto: u64,
        run: &mut Vec<u32>,
    ) -> bool {
        run.clear();
        let first = self.queue.head;
        if first == NO_SLOT || table.epoch(first) > upto {
            return false;
        }
        let lba = table.lba(first);
        let aligned = lba & !(table.run_blocks() - 1);
        let queued = |lba: &u64| Self::queued(table, *lba);
        run.extend((aligned..lba).rev().map_while(|lba| queued(&lba)));
        run.reverse();
        run.push(first);
        run.extend((lba + 1..aligned + table.run_blocks()).map_while(|lba| queued(&lba)));
        for &slot in &*run {
            self.unlink(table, slot);
            table.set_state(slot, State::Evicting);
            self.link(table, slot, Home::Waiting);
        }
        true
    }

    fn queued(table: &Table, lba: u64) -> Option<u32> {
        table
            .find(lba)
            .filter(|&slot| table.state(slot) == State::Valid && table.home(slot) == Home::Queue)
    }

    /// Ends the eviction of `slot`. Returns the slot if it is free now: its data is below, or a
    /// newer version has replaced it.
    pub(super) fn evicted(&mut self, table: &Table, slot: u32, ok: bool) -> Option<u32> {
        let newest = table.find(table.lba(slot));
        if newest == Some(slot) && !ok {
            table.set_state(slot, State::Valid);
            self.move_to(table, slot, Home::Failed);
            return None;
        }
        self.unlink(table, slot);
        if newest == Some(slot) {
            table.remove(slot);
        } else if let Some(newer) = newest {
            self.succeed(table, newer, slot, ok);
        }
        table.set_state(slot, State::Free);
        self.len -= 1;
        if ok {
            self.retry_one(table);
        }
        Some(slot)
    }

    /// Queues one failed slot again, after another write-back succeeded.
    pub(super) fn retry_one(&mut self, table: &Table) {
        if let Some(slot) = some(self.failed.head) {
            self.move_to(table, slot, Home::Queue);
        }
    }

    /// Makes `newer` the oldest version of its lba, now that `older` is gone. If `older` failed,
    /// flushes that covered it cover `newer` instead.
    fn succeed(&mut self, table: &Table, newer: u32, older: u32, ok: bool) {
        table.set_older(newer, None);
        if !ok {
            table.set_epoch(newer, table.epoch(older));
        }
        if table.state(newer) == State::Valid {
            self.move_to(table, newer, Home::Queue);
        }
    }

    /// Begins a flush of epochs up to `upto`: the versions that it covers change no more, and
    /// failed ones are tried again.
    pub(super) fn begin_flush(&mut self, table: &Table, upto: u64) {
        self.flushes += 1;
        self.flushing = self.flushing.max(upto);
        self.retry_failed(table, upto);
    }

    /// Ends the flush.
    pub(super) fn end_flush(&mut self) {
        self.flushes -= 1;
        if self.flushes == 0 {
            self.flushing = 0;
        }
    }

    /// Queues the failed slots of epochs up to `upto` again.
    pub(super) fn retry_failed(&mut self, table: &Table, upto: u64) {
        let mut slot = self.failed.head;
        while slot != NO_SLOT {
            let next = table.next(slot);
            if table.epoch(slot) <= upto {
                self.move_to(table, slot, Home::Queue);
            }
            slot = next;
        }
    }

    /// Returns the next step of a flush of epochs up to `upto` in this set.
    pub(super) fn flush_step(&self, table: &Table, upto: u64) -> FlushStep {
        let first = |list: &List| list.slots(table).find(|&slot| table.epoch(slot) <= upto);
        let queued = some(self.queue.head).filter(|&slot| table.epoch(slot) <= upto);
        if let Some(slot) = queued {
            FlushStep::Evict(table.lba(slot))
        } else if first(&self.waiting).is_some() {
            FlushStep::Wait
        } else if let Some(slot) = first(&self.failed) {
            FlushStep::Failed(table.lba(slot))
        } else {
            FlushStep::Done
        }
    }

    /// Returns the number of slots in the set, and how many of the slots failed.
    pub(super) fn counts(&self, table: &Table) -> (u64, u64) {
        (u64::from(self.len), self.failed.slots(table).count() as u64)
    }

    fn move_to(&mut self, table: &Table, slot: u32, home: Home) {
        self.unlink(table, slot);
        self.link(table, slot, home);
    }

    /// Links `slot` into its list, behind all slots whose epoch is not higher.
    fn link(&mut self, table: &Table, slot: u32, home: Home) {
        table.set_home(slot, home);
        let epoch = table.epoch(slot);
        let list = self.list(home);
        let mut previous = list.tail;
        while previous != NO_SLOT && table.epoch(previous) > epoch {
            previous = table.previous(previous);
        }
        let next = some(previous).map_or(list.head, |previous| table.next(previous));
        table.set_previous(slot, previous);
        table.set_next(slot, next);
        match some(previous) {
            Some(previous) => table.set_next(previous, slot),
            None => list.head = slot,
        }
        match some(next) {
            Some(next) => table.set_previous(next, slot),
            None => list.tail = slot,
        }
    }

    fn unlink(&mut self, table: &Table, slot: u32) {
        let list = self.list(table.home(slot));
        let (previous, next) = (table.previous(slot), table.next(slot));
        match some(previous) {
            Some(previous) => table.set_next(previous, next),
            None => list.head = next,
        }
        match some(next) {
            Some(next) => table.set_previous(next, previous),
            None => list.tail = previous,
        }
    }

    fn list(&mut self, home: Home) -> &mut List {
        match home {
            Home::Queue => &mut self.queue,
            Home::Waiting => &mut self.waiting,
            Home::Failed => &mut self.failed,
        }
    }
}

impl List {
    fn slots<'a>(&self, table: &'a Table) -> impl Iterator<Item = u32> + use<'a> {
        std::iter::successors(some(self.head), move |&slot| some(table.next(slot)))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ALL: u64 = u64::MAX;

    /// A set with a table of eight slots and what the runtime would do around it.
    struct Model {
        table: Table,
        set: Set,
    }

    impl Model {
        fn new(run_log2: u32) -> Self {
            Self { table: Table::new(8, 0, run_log2), set: Set::new() }
        }

        /// Writes `lba` into `slot`, which is free.
        fn put(&mut self, lba: u64, slot: u32, epoch: u64) {
            self.set.admit(&self.table, lba, slot, epoch);
            self.set.written(&self.table, slot);
        }

        fn write(&mut self, lba: u64) -> WriteStep {
            self.set.write(&self.table, lba)
        }

        fn read(&self, lba: u64) -> ReadStep {
            Set::read(&self.table, lba)
        }

        fn take(&mut self, upto: u64) -> Vec<u32> {
            let mut run = Vec::new();
            self.set.take_for_eviction(&self.table, upto, &mut run);
            run
        }

        fn evicted(&mut self, slot: u32, ok: bool) -> Option<u32> {
            self.set.evicted(&self.table, slot, ok)
        }

        fn state(&self, slot: u32) -> State {
            self.table.state(slot)
        }
    }

    #[test]
    fn a_miss_goes_from_free_to_free() {
        let mut model = Model::new(0);
        assert_eq!((model.write(5), model.read(5)), (WriteStep::Absent, ReadStep::Miss));
        model.set.admit(&model.table, 5, 2, 0);
        assert_eq!(model.state(2), State::Pending);
        assert_eq!((model.write(5), model.read(5)), (WriteStep::Wait, ReadStep::Wait));
        assert!(model.take(ALL).is_empty() && !model.set.is_ready());
        model.set.written(&model.table, 2);
        assert_eq!((model.state(2), model.read(5)), (State::Valid, ReadStep::Hit(2)));
        assert!(model.set.is_ready());
        assert_eq!(model.take(ALL), [2]);
        assert_eq!((model.state(2), model.read(5)), (State::Evicting, ReadStep::Hit(2)));
        assert_eq!(model.evicted(2, true), Some(2));
        assert_eq!((model.state(2), model.read(5)), (State::Free, ReadStep::Miss));
        assert!(model.set.is_empty() && !model.set.is_ready());
    }

    #[test]
    fn a_hit_on_valid_is_written_in_place_and_keeps_its_epoch() {
        let mut model = Model::new(0);
        model.put(5, 2, 3);
        assert_eq!(model.write(5), WriteStep::Copy(2));
        assert_eq!((model.state(2), model.read(5)), (State::Pending, ReadStep::Wait));
        assert!(model.take(ALL).is_empty());
        model.set.written(&model.table, 2);
        assert_eq!(model.table.epoch(2), 3);
        assert_eq!(model.take(3), [2]);
    }

    #[test]
    fn a_hit_on_evicting_goes_beside_and_waits_its_turn() {
        let mut model = Model::new(0);
        model.put(5, 2, 0);
        assert_eq!(model.take(ALL), [2]);
        assert_eq!(model.write(5), WriteStep::Beside);
        model.put(5, 3, 1);
        assert_eq!(model.read(5), ReadStep::Hit(3));
        assert!(model.take(ALL).is_empty(), "the newer version overtook the older one");
        // A third write finds the newer version at rest and needs no slot.
        assert_eq!(model.write(5), WriteStep::Copy(3));
        assert_eq!(model.evicted(2, true), Some(2));
        assert!(model.take(ALL).is_empty(), "a Pending slot was evicted");
        model.set.written(&model.table, 3);
        assert_eq!(model.take(ALL), [3]);
        assert_eq!(model.evicted(3, true), Some(3));
        assert!(model.set.is_empty());
    }

    #[test]
    fn a_failed_eviction_stays_valid_until_an_event_tries_it_again() {
        let mut model = Model::new(0);
        model.put(5, 2, 1);
        model.take(ALL);
        assert_eq!(model.evicted(2, false), None);
        assert_eq!((model.state(2), model.read(5)), (State::Valid, ReadStep::Hit(2)));
        assert!(!model.set.is_ready(), "a failed slot is tried again without cause");
        assert_eq!(model.set.counts(&model.table), (1, 1));
        assert_eq!(model.set.flush_step(&model.table, 1), FlushStep::Failed(5));
        assert_eq!(model.set.flush_step(&model.table, 0), FlushStep::Done);
        model.set.retry_failed(&model.table, 0);
        assert!(!model.set.is_ready());
        model.set.begin_flush(&model.table, 1);
        assert_eq!(model.set.flush_step(&model.table, 1), FlushStep::Evict(5));
        model.set.end_flush();
        assert_eq!(model.take(ALL), [2]);
        assert_eq!(model.evicted(2, false), None);
        // Another block's success is an event too, and so is a write of the block.
        model.put(6, 3, 1);
        assert_eq!(model.take(ALL), [3]);
        model.evicted(3, true);
        assert_eq!(model.take(ALL), [2]);
        model.evicted(2, false);
        assert_eq!(model.write(5), WriteStep::Copy(2));
        model.set.written(&model.table, 2);
        assert_eq!(model.take(ALL), [2]);
    }

    #[test]
    fn a_newer_version_inherits_what_a_failed_older_one_has_pending() {
        let mut model = Model::new(0);
        model.put(5, 2, 1);
        model.take(ALL);
        model.put(5, 3, 9);
        assert_eq!(model.evicted(2, false), Some(2));
        assert_eq!((model.state(2), model.read(5)), (State::Free, ReadStep::Hit(3)));
        assert_eq!(model.set.flush_step(&model.table, 1), FlushStep::Evict(5));
        assert_eq!(model.take(1), [3]);
    }

    #[test]
    fn a_flush_takes_its_epochs_first_and_waits_for_no_later_one() {
        let mut model = Model::new(0);
        model.put(1, 1, 7);
        model.set.admit(&model.table, 2, 2, 5);
        model.put(3, 3, 5);
        model.set.written(&model.table, 2);
        model.set.admit(&model.table, 4, 4, 7);
        assert_eq!(model.take(6), [3]);
        assert_eq!(model.take(6), [2]);
        assert!(model.take(6).is_empty());
        assert_eq!(model.set.flush_step(&model.table, 6), FlushStep::Wait);
        model.evicted(3, true);
        model.evicted(2, true);
        assert_eq!(model.set.flush_step(&model.table, 6), FlushStep::Done);
        assert_eq!(model.take(ALL), [1]);
    }

    #[test]
    fn what_a_flush_covers_is_not_written_again() {
        let mut model = Model::new(0);
        model.put(1, 1, 5);
        model.put(2, 2, 6);
        model.set.begin_flush(&model.table, 5);
        assert_eq!(model.write(2), WriteStep::Copy(2));
        assert_eq!(model.write(1), WriteStep::Beside);
        model.put(1, 3, 6);
        assert_eq!(model.read(1), ReadStep::Hit(3));
        assert_eq!(model.write(1), WriteStep::Copy(3));
        assert_eq!(model.take(5), [1]);
        model.evicted(1, true);
        assert_eq!(model.set.flush_step(&model.table, 5), FlushStep::Done);
        model.set.end_flush();
        model.set.written(&model.table, 3);
        assert_eq!(model.write(1), WriteStep::Copy(3));
    }

    #[test]
    fn neighbours_in_an_aligned_run_leave_together_by_ascending_lba() {
        let mut model = Model::new(2);
        for (slot, lba) in [(0, 6), (1, 5), (2, 7), (3, 8), (4, 3)] {
            model.put(lba, slot, 0);
        }
        model.set.admit(&model.table, 4, 5, 0);
        assert_eq!(model.take(ALL), [1, 0, 2]);
        assert_eq!(model.take(ALL), [3]);
        assert_eq!(model.take(ALL), [4]);
        assert!(model.take(ALL).is_empty());
    }
}
