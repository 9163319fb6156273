//! Pages over which records lie: such a page stays in its slot, under the record in another one.

use std::collections::HashMap;

use super::found::Base;
use super::slot::{BASE, DIRTY, LIVE, LOST_BASE, RECORD, UNVERIFIED, ZERO};
use super::slots::Slots;

/// At most one slot in so many holds a page under a record.
const BASES_ONE_IN: u64 = 8;

/// The pages of a shard over which records lie.
#[derive(Default)]
pub(super) struct Bases {
    /// By the slot of a record: the slot of the page over which it lies.
    under: HashMap<u32, u32>,
    /// Slots that hold such pages.
    count: u64,
}

impl Bases {
    /// Number of slots that hold pages over which records lie.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the slot of the page over which the record in slot `own` lies.
    pub(super) fn under(&self, own: u32) -> Option<u32> {
        self.under.get(&own).copied()
    }

    /// Returns the page over which the record in slot `own` lies.
    pub(super) fn of(&self, slots: &Slots, own: u32) -> Option<Base> {
        let record = slots[own];
        if !record.is(RECORD) {
            return None;
        }
        // A lost one has no slot: the record's stands for it, and is not looked at.
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

    /// The record in slot `own` lies over the page in slot `under`.
    pub(super) fn lay_over(&mut self, slots: &mut Slots, own: u32, under: u32) {
        let slot = &mut slots[under];
        self.count += u64::from(!slot.is(BASE));
        slot.word = slot.word & !LIVE | BASE;
        self.under.insert(own, under);
    }

    /// Forgets over which page the record in slot `own` lies, and returns its slot, which
    /// [`forget`](Self::forget) or [`lay_over`](Self::lay_over) is told next.
    pub(super) fn lift(&mut self, own: u32) -> Option<u32> {
        self.under.remove(&own)
    }

    /// No record lies over the page in slot `under` any more.
    pub(super) fn forget(&mut self, slots: &mut Slots, under: u32) {
        slots[under].word &= !BASE;
        self.count -= 1;
    }

    /// Returns whether one more page of a shard of `slots` slots may be kept under a record: they
    /// take two slots, so there are few of them.
    pub(super) fn may_grow(&self, slots: u32) -> bool {
        self.count * BASES_ONE_IN < u64::from(slots)
    }
}
