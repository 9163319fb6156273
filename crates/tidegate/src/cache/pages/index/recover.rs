//! Changes to a shard while its pool is opened.

use super::Shard;
use super::found::Found;
use super::slot::{DIRTY, LIVE, LOST_BASE, PAGE_SHIFT, RECORD, Slot, UNVERIFIED, ZERO, flag};
use crate::cache::store::layout::{PAGES_MAX, units_of};

impl Shard {
    /// Adds `found`, as read from its header. Returns the version that it replaces, or itself if a
    /// newer one is here. [`recovered`](Self::recovered) later gives the pages an order.
    pub(in crate::cache) fn recover(&mut self, found: Found) -> Option<Found> {
        debug_assert!(found.page < PAGES_MAX);
        let known = self.find(found.page);
        if known.is_some_and(|known| known.version >= found.version) {
            return Some(found);
        }
        if let Some(known) = &known {
            self.remove(known);
        }
        let flags = LIVE
            | flag(found.dirty, DIRTY)
            | flag(found.zero, ZERO)
            | flag(found.record, RECORD)
            | flag(!found.verified, UNVERIFIED);
        let own = self.allocator.slots.own(found.slot);
        self.allocator
            .slots
            .place(own, Slot { word: found.page << PAGE_SHIFT | flags, version: found.version });
        self.enter(own);
        known
    }

    /// Splits `slot`, as its header says. No part can be taken before all headers were seen.
    pub(in crate::cache) fn recover_split(&mut self, slot: u32) {
        let first = self.split_whole(self.allocator.slots.own(slot));
        self.allocator.slots.fill(first, 0, 0);
    }

    /// Gives the part `slot` the units of its record, which has `lines` lines.
    pub(in crate::cache) fn recover_part(&mut self, slot: u32, lines: u32) {
        let own = self.allocator.slots.own(slot);
        self.allocator.slots.fill(own, units_of(lines), 0);
    }

    /// Puts the record in the slot of `found` over the page `under`, or a damaged page if `None`.
    pub(in crate::cache) fn recover_base(&mut self, found: &Found, under: Option<&Found>) {
        let own = self.allocator.slots.own(found.slot);
        let Some(under) = under else {
            self.allocator.slots[own].word |= LOST_BASE;
            return;
        };
        let flags = flag(under.dirty, DIRTY) | flag(under.zero, ZERO) | UNVERIFIED;
        let word = under.page << PAGE_SHIFT | flags;
        let base = self.allocator.slots.own(under.slot);
        self.allocator.slots[base] = Slot { word, version: under.version };
        self.bases.lay_over(&mut self.allocator.slots, own, base);
    }

    /// Ends recovery, after all headers were seen: frees all slots that hold no page, continues
    /// versions behind `newest`, and puts the pages in order, the oldest version first.
    pub(in crate::cache) fn recovered(&mut self, newest: u64) {
        self.allocator.recovered(newest);
        let is_live = |own: &u32| self.allocator.slots[*own].is(LIVE);
        let mut live: Vec<u32> = self.allocator.slots.numbers().filter(is_live).collect();
        live.sort_unstable_by_key(|own| self.allocator.slots[*own].version);
        self.insert_all(&live);
    }
}
