//! Changes to the orders of a shard: moves of pages, and other slots, classes or policies.
//!
//! Slots leave a shard in three steps:
//! 1. [`Allocator::set_usable`](super::Allocator::set_usable) sets the first number that leaves.
//! 2. The pages in leaving slots are removed from the cache, and dead slots become void.
//! 3. When [`Allocator::leaving`](super::Allocator::leaving) is 0 and the pool has its new size,
//!    [`Shard::resize`] forgets the slots. Until then `set_usable` takes them back.

use std::sync::Arc;

use super::Shard;
use super::found::Found;
use crate::cache::pages::cleaner::Cleaner;
use crate::cache::policy::ReplacementEntry;
use crate::cache::policy::classes::{Admission, Classes};

impl Shard {
    /// Returns the slots of all pages in eviction order.
    fn order_of_all(&mut self) -> Vec<u32> {
        let mut order = Vec::new();
        self.orders.victims_of_each(usize::MAX, &mut order);
        order.into_iter().map(|dense| self.allocator.slots.of_dense(dense)).collect()
    }

    /// Rebuilds all tables with an entry for each slot, after the number of entries changed.
    /// `order` is the eviction order of the pages.
    fn reorder_all(&mut self, order: &[u32]) {
        let capacity = self.allocator.slots.capacity();
        self.orders.resize(self.allocator.slots.whole_count(), capacity);
        self.insert_all(order);
        self.allocator.slots.rebuild_table();
        let cleaner = self.cleaner.for_slots(capacity);
        self.set_cleaner(cleaner);
    }

    /// Puts the pages in the slots `order` into empty orders. `order` is the eviction order.
    pub(super) fn insert_all(&mut self, order: &[u32]) {
        for own in order {
            self.insert(*own);
        }
    }

    /// Puts the page in slot `own` into the order of its class.
    pub(super) fn insert(&mut self, own: u32) {
        let (slot, dense) = (self.allocator.slots[own], self.allocator.slots.dense(own));
        self.orders.of(slot.class()).insert(dense, slot.page());
    }

    /// Moves `page` from slot `old` to `own` in the orders, after a write.
    pub(super) fn reorder(&mut self, old: u32, own: u32, page: u64) {
        let [before, class] = [old, own].map(|it| self.allocator.slots[it].class());
        let [old, own] = [old, own].map(|it| self.allocator.slots.dense(it));
        if before == class {
            return self.orders.of(class).moved(old, own, page);
        }
        self.orders.of(before).remove(old, page);
        self.orders.of(class).insert(own, page);
    }

    /// Splits slot `whole`. Returns its first part, which has all its units.
    pub(super) fn split_whole(&mut self, whole: u32) -> u32 {
        if !self.allocator.slots.has_entry() {
            let order = self.order_of_all();
            self.allocator.slots.add_entries();
            self.reorder_all(&order);
        }
        self.allocator.slots.split(whole)
    }

    /// Sets the classes. Pages of a class that no longer exists get class 0, with `None` all pages.
    pub(in crate::cache) fn set_classes(&mut self, classes: Option<Arc<Classes>>) {
        let order = self.order_of_all();
        self.orders.set_classes(classes);
        for own in &order {
            let class = self.orders.known(self.allocator.slots[*own].class());
            self.change(*own, |slot| slot.set_class(class));
        }
        self.insert_all(&order);
    }

    /// Sets the replacement policy. It begins with the eviction order of the previous policy.
    pub(in crate::cache) fn set_replacement(&mut self, replacement: &'static ReplacementEntry) {
        let order = self.order_of_all();
        self.orders.set_replacement(replacement);
        self.insert_all(&order);
    }

    /// Sets the cleaner of the shard, and tells it the dirty pages, the oldest version first.
    pub(in crate::cache) fn set_cleaner(&mut self, cleaner: Cleaner) {
        self.cleaner = cleaner;
        if !self.cleaner.entry.hears {
            return;
        }
        let is_dirty = |own: &u32| self.allocator.slots[*own].is_dirty();
        let mut dirty: Vec<u32> = self.allocator.slots.numbers().filter(is_dirty).collect();
        dirty.sort_unstable_by_key(|own| self.allocator.slots[*own].version);
        for own in dirty {
            self.cleaner.dirtied(self.allocator.slots.dense(own), self.allocator.slots[own].page());
        }
    }

    /// Notes that a request of `class` used `found` by a read, or by a write that changed nothing.
    /// The page is of this class from now on.
    pub(in crate::cache) fn touch(&mut self, found: &Found, class: u8, is_write: bool) {
        let own = self.allocator.slots.own(found.slot);
        let (before, class) = (self.allocator.slots[own].class(), self.orders.known(class));
        let dense = self.allocator.slots.dense(own);
        if before == class {
            return self.orders.of(class).touch(dense, is_write);
        }
        self.orders.of(before).remove(dense, found.page);
        self.change(own, |slot| slot.set_class(class));
        self.orders.of(class).insert(dense, found.page);
    }

    /// Decides whether a request of `class` that misses `pages` pages may insert them here.
    /// Eviction keeps `reserve` slots free.
    pub(in crate::cache) fn admission(&self, class: u8, pages: u32, reserve: u32) -> Admission {
        self.orders.admission(class, pages, self.allocator.available() <= reserve)
    }

    /// Sets the number of slots to `count`, and makes all slots usable. Slots from this number on
    /// have left. The pages in the other slots keep their eviction order.
    pub(in crate::cache) fn resize(&mut self, count: u32) {
        let order = self.order_of_all();
        self.allocator.resize(count);
        self.reorder_all(&order);
    }
}
