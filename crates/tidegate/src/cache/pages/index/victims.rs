//! Chooses the next pages of a shard to evict, to clean, and to remove for a resize.

use super::Shard;
use super::found::Found;
use super::slot::{BASE, DIRTY, LIVE, RECORD, Slot};
use super::slots::Slots;
use crate::cache::pages::orders::Orders;
use crate::cache::policy::cleaning::{DirtySlots, Load};
use crate::cache::store::layout::UNITS;

impl Shard {
    /// Returns the next pages of `class` to evict that take `slots` slots together, or fewer if
    /// there are no more. The result is sorted by page.
    pub(in crate::cache) fn victims_of(&mut self, class: u8, slots: u32) -> Vec<Found> {
        let (mut victims, mut left_units) = (Vec::new(), slots * UNITS);
        // No more pages than if each were a record of one unit.
        while left_units > 0 && victims.len() < (slots * UNITS) as usize {
            let mut dense = Vec::new();
            self.orders.of(class).victims(left_units.div_ceil(UNITS) as usize, &mut dense);
            if dense.is_empty() {
                break;
            }
            let units = dense.iter().map(|at| self.units(self.allocator.slots.of_dense(*at)));
            left_units = left_units.saturating_sub(units.sum());
            self.add_found(dense, &mut victims);
        }
        each_once(&mut victims);
        victims
    }

    /// Appends up to `n` pages of each IO class to `out`.
    pub(in crate::cache) fn victims_of_each(&mut self, n: usize, out: &mut Vec<Found>) {
        let mut slots = Vec::new();
        self.orders.victims_of_each(n, &mut slots);
        self.add_found(slots, out);
    }

    /// Looks at the next `n` pages to evict, and adds those to `out` that make free slots. Sorts
    /// `out` by page, without duplicates. Returns how many pages it looked at.
    ///
    /// A split slot becomes free when all its parts are free, and each part costs a write to the
    /// backing as a page does. So its parts leave together, when each has come up for eviction.
    pub(in crate::cache) fn leaving_victims(&mut self, n: usize, out: &mut Vec<Found>) -> usize {
        let mut dense = Vec::with_capacity(n);
        self.orders.victims(n, &mut dense);
        for at in &dense {
            let own = self.allocator.slots.of_dense(*at);
            if self.allocator.slots.part(own).is_none() {
                out.push(self.found(own));
            } else if self.allocator.slots.offer(own) {
                out.extend(self.allocator.slots.live_beside(own).map(|own| self.found(own)));
            }
        }
        each_once(out);
        dense.len()
    }

    /// Returns at most one clean page from each of `parts` equal ranges of the slots.
    pub(in crate::cache) fn clean_samples(&self, parts: u32) -> Vec<Found> {
        let end =
            |part: u32| u64::from(self.allocator.slot_count()) * u64::from(part) / u64::from(parts);
        let is_clean = |(_, slot): &(u32, Slot)| slot.is(LIVE) && !slot.is(DIRTY | RECORD);
        let first = |part| self.allocator.slots.whole(end(part), end(part + 1)).find(is_clean);
        (0..parts).filter_map(first).map(|(own, _)| self.found(own)).collect()
    }

    /// Appends up to `n` dirty pages that can be cleaned to `out`, from slot number `from` of this
    /// shard on. Returns the next number, which stays valid when the shard is resized.
    pub(in crate::cache) fn dirty_from(&self, from: u32, n: usize, out: &mut Vec<Found>) -> u32 {
        let (found, next) = self.allocator.slots.from(from, n, Slot::can_be_cleaned);
        out.extend(found.into_iter().map(|own| self.found(own)));
        next
    }

    /// Appends up to `n` clean pages to `out`, from slot number `from` of this shard on. Returns
    /// the next number, which stays valid when the shard is resized.
    pub(in crate::cache) fn clean_from(&self, from: u32, n: usize, out: &mut Vec<Found>) -> u32 {
        let (found, next) = self.allocator.slots.from(from, n, |it| it.is(LIVE) && !it.is(DIRTY));
        out.extend(found.into_iter().map(|own| self.found(own)));
        next
    }

    /// Appends up to `n` pages in leaving slots from number `from` on to `out`. Returns the next
    /// number.
    pub(in crate::cache) fn leaving_from(&self, from: u32, n: usize, out: &mut Vec<Found>) -> u32 {
        let end = self.allocator.slots.whole_count();
        let mut own = from.max(self.allocator.slot_count());
        while own < end && out.len() < n {
            let slot = self.allocator.slots[own];
            if slot.is_split() {
                out.extend(self.allocator.slots.live_parts(own).map(|part| self.found(part)));
            } else {
                // The page under a record leaves with the record, which is the newest version.
                out.extend(self.find(slot.page()).filter(|_| slot.is(LIVE | BASE)));
            }
            own += 1;
        }
        own
    }

    /// Moves up to `n` dirty pages of zeroes from their list to `out`, if it has at least `least`.
    /// Pages that stay in the cache nevertheless are evicted in the normal order.
    pub(in crate::cache) fn zeroed(&mut self, least: usize, n: usize, out: &mut Vec<Found>) {
        if self.zeroed.len() < least {
            return;
        }
        for _ in 0..n {
            let Some(own) = self.zeroed.pop_first() else { return };
            out.push(self.found(own));
        }
    }

    /// Appends the pages that the cleaning policy names to `out`. Returns after how many
    /// nanoseconds to ask the policy again.
    pub(in crate::cache) fn next_to_clean(
        &mut self,
        now_ns: u64,
        last_request_ns: u64,
        out: &mut Vec<Found>,
    ) -> u64 {
        let (dirty_slots, slots) = (self.usage().cleanable(), self.allocator.slot_count().into());
        let load = Load { now_ns, last_request_ns, dirty_slots, slots };
        let mut named = Vec::new();
        let dirty = Dirty { slots: &self.allocator.slots, orders: &self.orders };
        let rest_ns = self.cleaner.policy.next(&load, &dirty, &mut named);
        self.add_found(named, out);
        rest_ns
    }
}

/// The dirty pages of a shard that can be cleaned, for its policy of cleaning.
struct Dirty<'a> {
    slots: &'a Slots,
    orders: &'a Orders,
}

impl DirtySlots for Dirty<'_> {
    fn of_page(&self, page: u64) -> Option<u32> {
        let own = self.slots.own_of_any(page)?;
        self.slots[own].can_be_cleaned().then(|| self.slots.dense(own))
    }

    fn coldest(&self, n: usize, out: &mut Vec<u32>) {
        let before = out.len();
        self.orders.coldest(n, out);
        let can_be_cleaned = |at: u32| self.slots[self.slots.of_dense(at)].can_be_cleaned();
        let dirty = out.split_off(before).into_iter().filter(|at| can_be_cleaned(*at));
        out.extend(dirty);
    }

    fn from(&self, from: u32, n: usize, out: &mut Vec<u32>) -> u32 {
        let (found, next) = self.slots.from(from, n, Slot::can_be_cleaned);
        out.extend(found.into_iter().map(|own| self.slots.dense(own)));
        next
    }
}

/// Sorts `victims` by page and removes duplicates, which occur if a short order was followed twice.
fn each_once(victims: &mut Vec<Found>) {
    victims.sort_unstable_by_key(|found| found.page);
    victims.dedup_by_key(|found| found.page);
}
