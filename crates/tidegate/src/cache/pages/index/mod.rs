//! The index of slots, in DRAM. A slot takes 32 bytes: 16 for its content, 6 in the table, and at
//! most 10 in the replacement policy, these for each IO class that has a page. A split slot
//! ([`slots`]) takes eight times that for its parts. All rules for slots here apply to parts too.
//!
//! Shards divide the pages by the hash of their clusters, and the slots by their numbers: a page
//! lives in slots of its own shard. No thread waits or touches persistent memory under a shard's
//! lock.
//!
//! - *retained*: it holds the version that counts until a group is committed. Then it is dead.
//!
//! When the pool shrinks, slots from [`Allocator::slot_count`] on *leave*
//! ([`Allocator::set_usable`]): they are no longer taken.
//!
//! Invariants:
//! 1. A page that is *held* is not removed: a writer is overwriting one of its dead slots. So a
//!    thread that removes a page finds all its older headers in the list of dead slots. If the
//!    memory failed, a header of a page may be durable in a slot that is in no list. Such a page is
//!    *stuck*: it is never removed, and its writes never go around the cache.
//! 2. A page with a member of an uncommitted group *waits* for the group. It is not cleaned, and so
//!    not removed: by the time of its removal all its retained slots are dead.
//! 3. Versions of a shard only grow, also when the pool is opened again.

mod allocator;
mod bases;
mod found;
mod groups;
mod order;
mod publish;
mod recover;
mod slot;
mod slots;
mod victims;

use std::collections::BTreeSet;

use super::cleaner::Cleaner;
use super::cluster::Sharding;
use super::orders::Orders;
use crate::cache::policy::ReplacementEntry;
use crate::cache::store::layout::{UNITS, whole_slot};
use allocator::Allocator;
use bases::Bases;
use groups::OpenGroups;
use slot::{COUNTED, DIRTY, LIVE, RECORD, Slot, UNVERIFIED, WAITS_ANY, ZERO};

pub(in crate::cache) use found::{Found, Stored, Taken, Usage};
pub(in crate::cache) use slots::Spent;

/// The pages and slots of one shard.
pub(in crate::cache) struct Shard {
    pub(in crate::cache) allocator: Allocator,
    /// The eviction orders, by IO class. They use dense numbers, as `cleaner` does.
    pub(in crate::cache) orders: Orders,
    pub(in crate::cache) cleaner: Cleaner,
    groups: OpenGroups,
    bases: Bases,
    /// Slots of dirty pages that are all zeroes.
    zeroed: BTreeSet<u32>,
    /// The counts, without the ones that `groups`, `bases` and the slots keep.
    usage: Usage,
}

/// Returns how many of `slots` slots belong to shard `number` of `shards`.
pub(in crate::cache) fn slots_of(number: u32, shards: u32, slots: u32) -> u32 {
    (slots - number).div_ceil(shards)
}

impl Shard {
    /// Returns shard `number` in `sharding`, with `slots` slots in all shards. All slots are free.
    pub(in crate::cache) fn new(
        number: u32,
        sharding: Sharding,
        slots: u32,
        replacement: &'static ReplacementEntry,
    ) -> Self {
        let own = slots_of(number, sharding.count, slots);
        Self {
            allocator: Allocator::new(number, sharding, own),
            orders: Orders::new(replacement, own),
            cleaner: Cleaner::none(),
            groups: OpenGroups::default(),
            bases: Bases::default(),
            zeroed: BTreeSet::new(),
            usage: Usage::default(),
        }
    }

    /// Appends the slots with the dense numbers `dense` to `out`.
    fn add_found(&self, dense: Vec<u32>, out: &mut Vec<Found>) {
        out.extend(dense.into_iter().map(|dense| self.found(self.allocator.slots.of_dense(dense))));
    }

    /// Calls `see` with the newest version of each page.
    pub(in crate::cache) fn each_live(&self, mut see: impl FnMut(Found)) {
        let live = self.allocator.slots.numbers().filter(|own| self.allocator.slots[*own].is(LIVE));
        live.for_each(|own| see(self.found(own)));
    }

    fn found(&self, own: u32) -> Found {
        let slot = self.allocator.slots[own];
        Found {
            page: slot.page(),
            slot: self.allocator.slots.number_of(own),
            version: slot.version,
            dirty: slot.is(DIRTY),
            zero: slot.is(ZERO),
            record: slot.is(RECORD),
            base: self.bases.of(&self.allocator.slots, own),
            verified: !slot.is(UNVERIFIED),
        }
    }

    /// Returns the newest version of `page`.
    pub(in crate::cache) fn find(&self, page: u64) -> Option<Found> {
        self.allocator.slots.own_of(page).map(|own| self.found(own))
    }

    /// Returns the IO class of the page in the slot of `found`.
    pub(in crate::cache) fn class_of(&self, found: &Found) -> u8 {
        self.allocator
            .slots
            .get(self.allocator.slots.own(found.slot))
            .map_or(0, |slot| slot.class())
    }

    /// Adds the live slot `own` to the counts of the shard and of its class, or subtracts it.
    fn count(&mut self, own: u32, begins: bool) {
        let (slot, units) = (self.allocator.slots[own], u64::from(self.units(own)));
        let dirty_units = if slot.is(DIRTY) { units } else { 0 };
        let (usage, of_class) =
            (&mut self.usage, &mut self.orders.usage[usize::from(slot.class())]);
        for (count, change) in [
            (&mut usage.live, 1),
            (&mut usage.records, slot.is(RECORD).into()),
            (&mut usage.parts, (units < UNITS.into()).into()),
            (&mut usage.dirty, slot.is(DIRTY).into()),
            (&mut usage.dirty_units, dirty_units),
            (&mut of_class.live_units, units),
            (&mut of_class.dirty_units, dirty_units),
        ] {
            if begins { *count += change } else { *count -= change }
        }
    }

    /// Changes the live slot `own`, and the counts accordingly.
    fn change(&mut self, own: u32, change: impl FnOnce(&mut Slot)) {
        self.count(own, false);
        change(&mut self.allocator.slots[own]);
        self.count(own, true);
    }

    /// Returns whether `found` is still the newest version of its page.
    pub(in crate::cache) fn stands(&self, found: &Found) -> bool {
        self.find(found.page).is_some_and(|now| now.is_same(found))
    }

    /// Returns the number of entries of a table with one entry for each slot and part.
    pub(in crate::cache) fn capacity(&self) -> u32 {
        self.allocator.slots.capacity()
    }

    pub(in crate::cache) fn usage(&self) -> Usage {
        Usage {
            splits: self.allocator.slots.split_count().into(),
            waiting: self.groups.waiting(),
            retained: self.groups.retained(),
            bases: self.bases.count(),
            ..self.usage
        }
    }

    /// Returns whether members, retained versions and pages under records leave writers few slots.
    pub(in crate::cache) fn is_pinned(&self) -> bool {
        let pinned = self.groups.waiting() + self.groups.retained() + self.bases.count();
        pinned * 8 >= u64::from(self.allocator.slot_count()) * 7
    }

    /// Adds the slot `own`, which became live, to the counts, and tells the cleaner if it is dirty.
    fn enter(&mut self, own: u32) {
        self.count(own, true);
        self.note_dirty(own);
    }

    /// Makes slot `own` no longer live, and subtracts it from the counts.
    fn leave(&mut self, own: u32) {
        self.count(own, false);
        self.note_left(own);
        // At once, so that a scan of all slots does not take the slot for the page's.
        self.allocator.slots[own].word &= !LIVE;
    }

    /// Makes slot `own` live in place of `old`, which has the same page. The counts do not change
    /// if both slots count equally.
    fn exchange(&mut self, old: u32, own: u32) {
        let [before, now] =
            [old, own].map(|it| (self.allocator.slots[it].word & COUNTED, self.units(it)));
        if before != now {
            self.enter(own);
            return self.leave(old);
        }
        self.note_dirty(own);
        self.note_left(old);
        self.allocator.slots[old].word &= !LIVE;
    }

    /// Returns the number of units of slot or part `own`.
    #[inline]
    fn units(&self, own: u32) -> u32 {
        self.allocator.slots.part(own).map_or(UNITS, |(it, unit)| it.units(unit))
    }

    /// Tells the cleaner that slot `own` became live, if it is dirty.
    fn note_dirty(&mut self, own: u32) {
        let slot = self.allocator.slots[own];
        if slot.is(DIRTY) {
            self.cleaner.dirtied(self.allocator.slots.dense(own), slot.page());
            if slot.is(ZERO) {
                self.zeroed.insert(own);
            }
        }
    }

    /// Tells the cleaner that slot `own` is no longer live, if it was dirty.
    fn note_left(&mut self, own: u32) {
        let slot = self.allocator.slots[own];
        if slot.is(ZERO) {
            self.zeroed.remove(&own);
        }
        if slot.is(DIRTY) {
            self.cleaner.cleaned(self.allocator.slots.dense(own), slot.page());
        }
    }

    /// Returns whether no slot can become free any more: each is lost, or holds a stuck page.
    pub(in crate::cache) fn is_exhausted(&self) -> bool {
        if self.allocator.lost_slots == 0 && self.allocator.stuck.is_empty()
            || self.allocator.available() > 0
        {
            return false;
        }
        let stuck = self.allocator.stuck.iter().filter_map(|page| self.find(*page));
        let slots_of = |found: Found| {
            let slots = [Some(found.slot), found.base.map(|base| base.slot)];
            slots
                .into_iter()
                .flatten()
                .filter(|slot| !self.allocator.slots.is_lost(self.allocator.slots.own(*slot)))
        };
        let slots: BTreeSet<u32> = stuck.flat_map(slots_of).map(whole_slot).collect();
        self.allocator.lost_slots as usize + slots.len() >= self.allocator.slot_count() as usize
    }

    /// Removes all slots with older versions of `page` from the index, and appends them to `out`
    /// for the caller to void: dead slots, and the slot of the page under a record. The page is
    /// clean, so the backing has the bytes under the record.
    pub(in crate::cache) fn take_older_of(&mut self, page: u64, out: &mut Vec<u32>) {
        if let Some(under) = self.allocator.slots.own_of(page).and_then(|own| self.bases.lift(own))
        {
            self.bases.forget(&mut self.allocator.slots, under);
            out.push(self.allocator.slots.number_of(under));
        }
        self.allocator.take_dead_of(page, out);
    }

    /// Removes `found`, whose header is durably void. The slot then belongs to the caller.
    pub(in crate::cache) fn remove(&mut self, found: &Found) {
        if let Some(own) = self.allocator.slots.remove(found.page) {
            let (class, dense) =
                (self.allocator.slots[own].class(), self.allocator.slots.dense(own));
            self.orders.of(class).remove(dense, found.page);
            self.leave(own);
        }
    }

    /// Marks `found` as clean if it is still the newest version: the backing has flushed its bytes.
    pub(in crate::cache) fn cleaned(&mut self, found: &Found) {
        let own = self.allocator.slots.own(found.slot);
        if self.stands(found) && self.allocator.slots[own].is(DIRTY) {
            self.change(own, |slot| slot.word &= !DIRTY);
            self.zeroed.remove(&own);
            if let Some(under) = self.bases.under(own) {
                self.allocator.slots[under].word &= !DIRTY;
            }
            self.cleaner.cleaned(self.allocator.slots.dense(own), found.page);
        }
    }

    /// Returns whether `found` is the newest version of its page, dirty, and waits for no commit.
    pub(in crate::cache) fn can_be_cleaned(&self, found: &Found) -> bool {
        self.stands(found)
            && self.allocator.slots[self.allocator.slots.own(found.slot)].can_be_cleaned()
    }

    /// Marks `found` as verified: its data matches its checksum.
    pub(in crate::cache) fn verified(&mut self, found: &Found) {
        if self.stands(found) {
            let own = self.allocator.slots.own(found.slot);
            self.allocator.slots[own].word &= !UNVERIFIED;
        }
    }

    /// Returns whether `found` is the newest version of its page, is clean, and is not stuck. It
    /// can leave the cache as soon as its page is not held.
    pub(in crate::cache) fn can_leave(&self, found: &Found) -> bool {
        self.stands(found)
            && !self.allocator.slots[self.allocator.slots.own(found.slot)].is(DIRTY)
            && !self.allocator.is_stuck(found.page)
    }

    /// Puts `found`, which could not be cleaned, behind all other pages, if it is still dirty.
    pub(in crate::cache) fn put_off(&mut self, found: &Found) {
        let own = self.allocator.slots.own(found.slot);
        if self.stands(found) && self.allocator.slots[own].is(DIRTY) {
            let (class, dense) =
                (self.allocator.slots[own].class(), self.allocator.slots.dense(own));
            self.cleaner.put_off(dense);
            self.orders.of(class).remove(dense, found.page);
            self.orders.of(class).insert(dense, found.page);
        }
    }

    /// Returns whether to ask the cleaning policy at `now_ns`.
    pub(in crate::cache) fn wants_cleaning(&self, now_ns: u64) -> bool {
        self.cleaner.is_due(now_ns, self.usage().cleanable(), self.allocator.slot_count().into())
    }

    /// Reads only the first cell that a lookup of `page` probes.
    pub(in crate::cache) fn look_up_ahead(&self, page: u64) -> u32 {
        self.allocator.slots.look_up_ahead(page)
    }

    /// Returns the size of the index in bytes, without the replacement policy.
    #[cfg(all(test, not(loom)))]
    pub(in crate::cache) fn bytes(&self) -> usize {
        self.allocator.slots.bytes()
    }

    /// Returns whether `page` has a member of an uncommitted group.
    pub(in crate::cache) fn waits(&self, page: u64) -> bool {
        self.allocator.slots.own_of(page).is_some_and(|own| self.allocator.slots[own].is(WAITS_ANY))
    }

    /// Returns whether a page may be kept under a record.
    pub(in crate::cache) fn may_lay_over(&self) -> bool {
        self.bases.may_grow(self.allocator.slot_count())
    }
}
