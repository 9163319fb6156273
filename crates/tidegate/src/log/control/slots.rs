//! Slots: the state of operations in progress.

use super::owner::owner;
use super::{Control, SLOT_BYTES, SLOTS, SLOTS_AT, SLOTS_USED_AT};
use crate::sync::{AtomicU64, Ordering};

/// Bit of [`SlotWords::record`]: space from here on may be reserved for a record to come.
pub(in crate::log) const RESERVING: u64 = 1;
/// Bit of [`SlotWords::record`]: the record is durable.
pub(in crate::log) const FINISHED: u64 = 2;

/// The words of a slot.
#[derive(Clone, Copy)]
pub(in crate::log) struct SlotWords<'a> {
    /// Process and thread that hold the slot; 0: free.
    pub(in crate::log) owner: &'a AtomicU64,
    /// Positions from here on must not be retired; 0: the holder depends on none yet.
    pub(in crate::log) bound: &'a AtomicU64,
    /// Position of the record in progress, with [`RESERVING`] or [`FINISHED`]; 0: none yet.
    pub(in crate::log) record: &'a AtomicU64,
    /// Number of the file's entry plus 1, 0: none.
    pub(in crate::log) file: &'a AtomicU64,
}

impl SlotWords<'_> {
    /// Returns the position of the holder's record, finished or not; 0 without reserved space.
    pub(in crate::log) fn record_position(&self) -> u64 {
        let word = self.record.load(Ordering::Acquire);
        if word & RESERVING == 0 { word & !FINISHED } else { 0 }
    }

    /// Returns the lowest position of a record whose operation the kernel may not have done.
    pub(in crate::log) fn in_the_middle_from(&self) -> Option<u64> {
        let word = self.record.load(Ordering::Acquire);
        (word != 0).then_some(word & !(RESERVING | FINISHED))
    }

    /// Returns the lowest position at which the holder may have space whose record is not finished.
    pub(in crate::log) fn unfinished_from(&self) -> Option<u64> {
        let word = self.record.load(Ordering::Acquire);
        (word != 0 && word & FINISHED == 0).then_some(word & !RESERVING)
    }
}

impl Control {
    /// Returns a bit for each slot that was ever taken, for the 64 slots from `64 * index` on.
    pub(in crate::log) fn slots_used(&self, index: u64) -> &AtomicU64 {
        self.word(SLOTS_USED_AT + index * 8)
    }

    /// Returns slot `number`, below [`SLOTS`].
    pub(in crate::log) fn slot(&self, number: u64) -> SlotWords<'_> {
        let at = SLOTS_AT + number * SLOT_BYTES;
        SlotWords {
            owner: self.word(at),
            bound: self.word(at + 8),
            record: self.word(at + 16),
            file: self.word(at + 24),
        }
    }

    /// Returns counter `which`, below 4, of a slot. Only the slot's holder changes it.
    #[inline]
    pub(in crate::log) fn slot_counter(&self, number: u64, which: u64) -> &AtomicU64 {
        self.word(SLOTS_AT + number * SLOT_BYTES + 32 + which * 8)
    }

    /// Takes a free slot, if any, near a hash of the thread, so that threads seldom contend.
    pub(in crate::log) fn take_slot(&self) -> Option<(u64, SlotWords<'_>)> {
        let owner = owner();
        let first = owner.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        (0..SLOTS).find_map(|step| {
            let number = (first + step) % SLOTS;
            let slot = self.slot(number);
            let take =
                || slot.owner.compare_exchange(0, owner, Ordering::SeqCst, Ordering::Relaxed);
            let taken = slot.owner.load(Ordering::Relaxed) == 0 && take().is_ok();
            if taken {
                self.note_used(number);
            }
            taken.then_some((number, slot))
        })
    }

    /// Notes that slot `number` may have a record from now on.
    #[inline]
    fn note_used(&self, number: u64) {
        let (used, bit) = (self.slots_used(number / 64), 1 << (number % 64));
        if used.load(Ordering::Relaxed) & bit == 0 {
            used.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// Returns the position below which the kernel has done the operations of all records.
    pub(in crate::log) fn done_position(&self) -> u64 {
        let head = self.head().load(Ordering::SeqCst);
        let slots = (0..SLOTS).map(|number| self.slot(number));
        slots.filter_map(|slot| slot.in_the_middle_from()).fold(head, u64::min)
    }
}

/// Frees a slot. Clears the owner last: the next owner must find the other words clear.
pub(in crate::log) fn release(slot: SlotWords<'_>) {
    slot.file.store(0, Ordering::Relaxed);
    slot.record.store(0, Ordering::Release);
    slot.bound.store(0, Ordering::Release);
    slot.owner.store(0, Ordering::Release);
}
