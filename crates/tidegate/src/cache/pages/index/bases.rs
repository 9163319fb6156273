//! Pages under records. Such a page stays in its slot, and the record is in another one.

use std::collections::HashMap;

use super::found::Base;
use super::slot::{BASE, DIRTY, LIVE, LOST_BASE, RECORD, UNVERIFIED, ZERO};
use super::slots::Slots;

/// At most one slot in this many holds a page under a record.
const BASES_ONE_IN: u64 = 8;

/// The pages under records in a shard.
#[derive(Default)]
pub(super) struct Bases {
    /// The slot of the page under a record, by the record's slot.
    under: HashMap<u32, u32>,
    /// Number of slots that hold such pages.
    count: u64,
}

impl Bases {
    /// Returns the number of slots that hold pages under records.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the slot of the page under the record in slot `own`.
    pub(super) fn under(&self, own: u32) -> Option<u32> {
        self.under.get(&own).copied()
    }

    /// Returns the page under the record in slot `own`.
    pub(super) fn of(&self, slots: &Slots, own: u32) -> Option<Base> {
        let record = slots[own];
        if !record.is(RECORD) {
            return None;
        }
        // A lost page has no slot. The record's slot stands in for the page, and is not read.
        let is_lost = record.is(LOST_BASE);
        let base = if is_lost { own } else { self.under(own)? };
        let slot = slots[base];
        Some(Base {
            slot: slots.number_of(base),
            version: slot.version,
            dirty: slot.is(DIRTY),
            zero: slot.is(ZERO),
            verified: !slot.is(UNVERIFIED),
            is_lost,
        })
    }

    /// Notes that the record in slot `own` lies over the page in slot `under`.
    pub(super) fn lay_over(&mut self, slots: &mut Slots, own: u32, under: u32) {
        let slot = &mut slots[under];
        self.count += u64::from(!slot.is(BASE));
        slot.word = slot.word & !LIVE | BASE;
        self.under.insert(own, under);
    }

    /// Forgets which page is under the record in slot `own`, and returns that page's slot. The
    /// caller then passes that slot to [`forget`](Self::forget) or [`lay_over`](Self::lay_over).
    pub(super) fn lift(&mut self, own: u32) -> Option<u32> {
        self.under.remove(&own)
    }

    /// Notes that no record lies over the page in slot `under` any more.
    pub(super) fn forget(&mut self, slots: &mut Slots, under: u32) {
        slots[under].word &= !BASE;
        self.count -= 1;
    }

    /// Returns whether one more page of a shard of `slots` slots may be kept under a record. Such a
    /// page takes two slots, so their number is limited.
    pub(super) fn may_grow(&self, slots: u32) -> bool {
        self.count * BASES_ONE_IN < u64::from(slots)
    }
}
