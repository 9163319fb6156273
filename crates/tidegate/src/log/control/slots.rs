//! Slots: what an operation that is in the middle says of itself.

use super::owner::owner;
use super::{Control, SLOT_BYTES, SLOTS, SLOTS_AT, SLOTS_USED_AT};
use crate::sync::{AtomicU64, Ordering};

/// Bit of [`SlotWords::record`]: space from this position on may be reserved, for a record that is
/// not there yet.
pub(in crate::log) const RESERVING: u64 = 1;
/// Bit of [`SlotWords::record`]: the record is durable.
pub(in crate::log) const FINISHED: u64 = 2;

/// The words of a slot.
#[derive(Clone, Copy)]
pub(in crate::log) struct SlotWords<'a> {
    /// Process and thread that hold it, 0: nobody.
    pub(in crate::log) owner: &'a AtomicU64,
    /// No position below this may be retired; 0: nothing is depended on yet.
    pub(in crate::log) bound: &'a AtomicU64,
    /// Position of the record that is being written, 0: none yet; with [`RESERVING`] or
    /// [`FINISHED`].
    pub(in crate::log) record: &'a AtomicU64,
    /// Number of the file's entry plus 1, 0: none.
    pub(in crate::log) file: &'a AtomicU64,
}

impl SlotWords<'_> {
    /// Position of the record for which the holder has space, finished or not; 0: none.
    pub(in crate::log) fn record_position(&self) -> u64 {
        let word = self.record.load(Ordering::Acquire);
        if word & RESERVING == 0 { word & !FINISHED } else { 0 }
    }

    /// The position from which on the holder may have a record whose operation the kernel has not
    /// done.
    pub(in crate::log) fn in_the_middle_from(&self) -> Option<u64> {
        let word = self.record.load(Ordering::Acquire);
        (word != 0).then_some(word & !(RESERVING | FINISHED))
    }

    /// The position from which on the holder may have space with a record that is not finished.
    pub(in crate::log) fn unfinished_from(&self) -> Option<u64> {
        let word = self.record.load(Ordering::Acquire);
        (word != 0 && word & FINISHED == 0).then_some(word & !RESERVING)
    }
}

impl Control {
    /// Slots that were ever taken: those with numbers from `64 * index` on, a bit each.
    pub(in crate::log) fn slots_used(&self, index: u64) -> &AtomicU64 {
        self.word(SLOTS_USED_AT + index * 8)
    }

    /// Slot `number`, below [`SLOTS`].
    pub(in crate::log) fn slot(&self, number: u64) -> SlotWords<'_> {
        let at = SLOTS_AT + number * SLOT_BYTES;
        SlotWords {
            owner: self.word(at),
            bound: self.word(at + 8),
            record: self.word(at + 16),
            file: self.word(at + 24),
        }
    }

    /// What holders of a slot have counted, `which` below 4. Changed by the slot's holder
    /// alone.
    #[inline]
    pub(in crate::log) fn slot_counter(&self, number: u64, which: u64) -> &AtomicU64 {
        self.word(SLOTS_AT + number * SLOT_BYTES + 32 + which * 8)
    }

    /// Takes a free slot: near the thread's last one, so that threads seldom meet.
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

    /// The slot with this number may have a record from now on.
    #[inline]
    fn note_used(&self, number: u64) {
        let (used, bit) = (self.slots_used(number / 64), 1 << (number % 64));
        if used.load(Ordering::Relaxed) & bit == 0 {
            used.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// The position below which the kernel has done the operations of all records.
    pub(in crate::log) fn done_position(&self) -> u64 {
        let head = self.head().load(Ordering::SeqCst);
        let slots = (0..SLOTS).map(|number| self.slot(number));
        slots.filter_map(|slot| slot.in_the_middle_from()).fold(head, u64::min)
    }
}

/// Frees a slot. The owner last: a free slot's other words mean nothing.
pub(in crate::log) fn release(slot: SlotWords<'_>) {
    slot.file.store(0, Ordering::Relaxed);
    slot.record.store(0, Ordering::Release);
    slot.bound.store(0, Ordering::Release);
    slot.owner.store(0, Ordering::Release);
}
