//! What is in which slot, in DRAM: 32 bytes a slot, 16 for what it holds, 6 of the table, and at
//! most 10 of the replacement policy: these for each IO class that has a page. A slot that is split
//! ([`slots`]) has eight times that for its parts. What is said of slots here holds for parts too.
//!
//! Pages and slots are divided among shards, by the hash of the page's cluster and by the number of
//! the slot: a page lives in slots of its own shard. A shard is behind one lock, under which
//! nothing waits and no persistent memory is touched.
//!
//! A slot is free, dead, taken or live:
//! - *free*: its header is durably void, or was never written;
//! - *dead*: it holds an older version of a page whose newer version is durable. Its header stays
//!   and is written over without being voided before. Dead slots are taken first, so they are few;
//! - *taken*: a writer fills it;
//! - *live*: it holds the newest version of its page, and the table names it for the page;
//! - *retained*: it holds the version that counts until a group is committed, and is dead then.
//!
//! Where the pool shrinks, slots from [`Allocator::slot_count`] on *leave*
//! ([`Allocator::set_usable`]): none of them is taken any more.
//!
//! Invariants:
//! 1. A page that is *held* is not removed: a writer is writing over a dead slot of it. So a thread
//!    that removes a page finds all its older headers in the list of dead slots. A page of which a
//!    header may be durable that is in no list, for the memory failed, is *stuck*: it is never
//!    removed, and no write of it goes around the cache.
//! 2. A page with a member of a group that is not yet committed *waits* for it. It is not cleaned,
//!    and so not removed: all of its retained slots are dead by then.
//! 3. Versions of a shard only grow, also across opens.

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
    /// The orders of eviction, by IO class. By dense numbers, as those of `cleaner` are.
    pub(in crate::cache) orders: Orders,
    pub(in crate::cache) cleaner: Cleaner,
    groups: OpenGroups,
    bases: Bases,
    /// Slots of dirty pages that are all zeroes.
    zeroed: BTreeSet<u32>,
    /// But for what `groups`, `bases` and the slots count.
    usage: Usage,
}

/// How many of `slots` slots are those of shard `number` among `shards`.
pub(in crate::cache) fn slots_of(number: u32, shards: u32, slots: u32) -> u32 {
    (slots - number).div_ceil(shards)
}

impl Shard {
    /// Returns shard `number` of all that `sharding` has, which have `slots` slots together: all
    /// free.
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

    /// Shows the newest version of each page to `see`.
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

    /// The newest version of `page`.
    pub(in crate::cache) fn find(&self, page: u64) -> Option<Found> {
        self.allocator.slots.own_of(page).map(|own| self.found(own))
    }

    /// The IO class of the page in the slot of `found`.
    pub(in crate::cache) fn class_of(&self, found: &Found) -> u8 {
        self.allocator
            .slots
            .get(self.allocator.slots.own(found.slot))
            .map_or(0, |slot| slot.class())
    }

    /// The live slot `own` begins to count, for its class too, or ceases to.
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

    /// Changes the live slot `own`, which counts as what it is then.
    fn change(&mut self, own: u32, change: impl FnOnce(&mut Slot)) {
        self.count(own, false);
        change(&mut self.allocator.slots[own]);
        self.count(own, true);
    }

    /// `found` is still the newest version of its page.
    pub(in crate::cache) fn stands(&self, found: &Found) -> bool {
        self.find(found.page).is_some_and(|now| now.is_same(found))
    }

    /// Entries of what has one for each slot and part.
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

    /// Groups that are not yet committed hold so many slots that writers may find none.
    pub(in crate::cache) fn is_pinned(&self) -> bool {
        let pinned = self.groups.waiting() + self.groups.retained() + self.bases.count();
        pinned * 8 >= u64::from(self.allocator.slot_count()) * 7
    }

    /// The live slot `own` counts from now on.
    fn enter(&mut self, own: u32) {
        self.count(own, true);
        self.note_dirty(own);
    }

    /// Slot `own` is live no more, and does not count.
    fn leave(&mut self, own: u32) {
        self.count(own, false);
        self.note_left(own);
        // At once: a look through all slots must not take it for the page's.
        self.allocator.slots[own].word &= !LIVE;
    }

    /// Slot `own` is live in place of `old`, which has the same page. Where both come under the
    /// same counts these do not change.
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

    /// How many units slot or part `own` has.
    #[inline]
    fn units(&self, own: u32) -> u32 {
        self.allocator.slots.part(own).map_or(UNITS, |(it, unit)| it.units(unit))
    }

    /// Tells of the slot `own`, which became live, where it is dirty.
    fn note_dirty(&mut self, own: u32) {
        let slot = self.allocator.slots[own];
        if slot.is(DIRTY) {
            self.cleaner.dirtied(self.allocator.slots.dense(own), slot.page());
            if slot.is(ZERO) {
                self.zeroed.insert(own);
            }
        }
    }

    /// Tells of the slot `own`, which is live no more, where it was dirty.
    fn note_left(&mut self, own: u32) {
        let slot = self.allocator.slots[own];
        if slot.is(ZERO) {
            self.zeroed.remove(&own);
        }
        if slot.is(DIRTY) {
            self.cleaner.cleaned(self.allocator.slots.dense(own), slot.page());
        }
    }

    /// No slot can be taken any more: each is lost, or holds a page that is stuck.
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

    /// Takes all older slots of `page` away, for the caller to void: dead ones, and that of the
    /// page over which a record lies. The page is clean, so the backing has what is under the
    /// record.
    pub(in crate::cache) fn take_older_of(&mut self, page: u64, out: &mut Vec<u32>) {
        if let Some(under) = self.allocator.slots.own_of(page).and_then(|own| self.bases.lift(own))
        {
            self.bases.forget(&mut self.allocator.slots, under);
            out.push(self.allocator.slots.number_of(under));
        }
        self.allocator.take_dead_of(page, out);
    }

    /// Removes `found`, whose header is durably void; the slot is the caller's.
    pub(in crate::cache) fn remove(&mut self, found: &Found) {
        if let Some(own) = self.allocator.slots.remove(found.page) {
            let (class, dense) =
                (self.allocator.slots[own].class(), self.allocator.slots.dense(own));
            self.orders.of(class).remove(dense, found.page);
            self.leave(own);
        }
    }

    /// The backing has flushed the bytes of `found`, which may be replaced by now.
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

    /// `found` is the newest version of its page, dirty, and waits for no commit.
    pub(in crate::cache) fn can_be_cleaned(&self, found: &Found) -> bool {
        self.stands(found)
            && self.allocator.slots[self.allocator.slots.own(found.slot)].can_be_cleaned()
    }

    /// The data of `found` is as its checksum says.
    pub(in crate::cache) fn verified(&mut self, found: &Found) {
        if self.stands(found) {
            let own = self.allocator.slots.own(found.slot);
            self.allocator.slots[own].word &= !UNVERIFIED;
        }
    }

    /// `found` is the newest version of its page, clean, and leaves the cache once no writer holds
    /// its page.
    pub(in crate::cache) fn can_leave(&self, found: &Found) -> bool {
        self.stands(found)
            && !self.allocator.slots[self.allocator.slots.own(found.slot)].is(DIRTY)
            && !self.allocator.is_stuck(found.page)
    }

    /// `found` could not be cleaned, if it is still dirty.
    pub(in crate::cache) fn put_off(&mut self, found: &Found) {
        let own = self.allocator.slots.own(found.slot);
        if self.stands(found) && self.allocator.slots[own].is(DIRTY) {
            self.cleaner.put_off(self.allocator.slots.dense(own));
        }
    }

    /// The policy is to be asked at `now_ns`.
    pub(in crate::cache) fn wants_cleaning(&self, now_ns: u64) -> bool {
        self.cleaner.is_due(now_ns, self.usage().cleanable(), self.allocator.slot_count().into())
    }

    /// Reads where `page` is looked for, and nothing else.
    pub(in crate::cache) fn look_up_ahead(&self, page: u64) -> u32 {
        self.allocator.slots.look_up_ahead(page)
    }

    /// Bytes of memory but for those of the replacement policy.
    #[cfg(all(test, not(loom)))]
    pub(in crate::cache) fn bytes(&self) -> usize {
        self.allocator.slots.bytes()
    }

    /// `page` has a member of a group that is not yet committed.
    pub(in crate::cache) fn waits(&self, page: u64) -> bool {
        self.allocator.slots.own_of(page).is_some_and(|own| self.allocator.slots[own].is(WAITS_ANY))
    }

    /// Returns whether a page may be kept under a record.
    pub(in crate::cache) fn may_lay_over(&self) -> bool {
        self.bases.may_grow(self.allocator.slot_count())
    }
}
