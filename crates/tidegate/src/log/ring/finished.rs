//! The finished position: all records below it are durable, or are holes that hold nothing
//! acknowledged. Each record carries the finished position that its writer has read, so that
//! recovery can tell a lost record from one that a crash cut off.
//!
//! Invariants:
//! 1. When a thread reads position P here, all records below P are fenced. The thread's later
//!    stores, and so any record that carries P, are durable later than these records.
//! 2. No hole lies between the tail and P, except holes that a durable Gap before P covers.
//!
//! Why 1 holds: before a writer moves the head, its slot says that it reserves space from there on;
//! after its fence the slot says that the record is finished. P moves in two ways. A writer that
//! found P equal to the head that it moved then moves P behind its own record, after its fence: no
//! record below was unfinished. No other thread can move P past that record meanwhile, since the
//! slot holds P back. Or a writer that finds P far behind reads the head and then all slots: a
//! record below that head was announced by its slot before the head moved, so the writer sees it,
//! unless it is finished.
//!
//! Why 2 holds: the Gap of a lap is fenced before its writer's slot leaves the former head. Holes
//! of writers that died, or whose memory failed, are noted before the slot is free
//! ([`Ring::note_hole`]); P stays below them until the tail has passed them.

use super::Ring;
use super::reserve::Reserved;
use crate::log::control::SLOTS;
use crate::log::control::slots::{FINISHED, SlotWords};
use crate::sync::Ordering;

/// How far the finished position may be behind before a writer looks at all slots. With concurrent
/// writers, this many of the last bytes may be in doubt after a crash.
const BEHIND_BYTES: u64 = 64 << 10;

impl Ring {
    /// Returns the finished position for a record whose space was just reserved.
    #[inline]
    pub(in crate::log) fn finished_before(&self, reserved: &Reserved) -> u64 {
        let finished = self.control.finished().load(Ordering::Acquire);
        // A finished position above the record may come from damaged control memory.
        if reserved.from.saturating_sub(finished) < BEHIND_BYTES {
            return finished;
        }
        self.catch_up()
    }

    /// Notes that the record in the reserved space is durable, and that it carries `finished`.
    #[inline]
    pub(in crate::log) fn finish(&self, slot: SlotWords<'_>, reserved: &Reserved, finished: u64) {
        if finished == reserved.from {
            self.control.finished().store(reserved.end, Ordering::Release);
        }
        slot.record.store(reserved.position | FINISHED, Ordering::Release);
    }

    /// Moves the finished position to the first record that is not finished.
    #[cold]
    pub(in crate::log) fn catch_up(&self) -> u64 {
        let control = &self.control;
        if self.has_hole() {
            return control.finished().load(Ordering::Acquire);
        }
        let head = control.head().load(Ordering::SeqCst);
        let slots = (0..SLOTS.div_ceil(64)).flat_map(|index| {
            let used = control.slots_used(index).load(Ordering::SeqCst);
            (0..64).filter(move |bit| used & 1 << bit != 0).map(move |bit| index * 64 + bit)
        });
        let unfinished = slots.filter_map(|number| control.slot(number).unfinished_from());
        let reached = unfinished.fold(head, u64::min);
        // Checked again after the slots: a slot that was free may have left a hole.
        if self.has_hole() {
            return control.finished().load(Ordering::Acquire);
        }
        control.finished().fetch_max(reached, Ordering::AcqRel).max(reached)
    }

    /// Returns whether a hole may lie between the tail and the head.
    fn has_hole(&self) -> bool {
        let control = &self.control;
        control.tail().load(Ordering::SeqCst) < control.holes_end().load(Ordering::SeqCst)
    }

    /// Notes that reserved space will have no record. The caller's slot must not be free yet.
    pub(in crate::log) fn note_hole(&self) {
        let head = self.control.head().load(Ordering::SeqCst);
        self.control.holes_end().fetch_max(head, Ordering::SeqCst);
    }
}
