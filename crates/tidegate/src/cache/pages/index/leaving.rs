//! A shard that gets more slots or fewer.
//!
//! Slots leave in three steps: [`Shard::set_usable`] says from which number on; then the pages in
//! them leave the cache, and dead ones become void; when [`Shard::have_left`] says so, and the pool
//! is of its new size, [`Shard::resize`] forgets them. Until then [`Shard::set_usable`] takes them
//! back.

use smallvec::SmallVec;

use super::{BASE, Found, LIVE, Shard, Spent};

impl Shard {
    /// Slots from number `usable` on leave, and those before it do not.
    pub(in crate::cache) fn set_usable(&mut self, usable: u32) {
        self.usable = usable.min(self.slots.whole_count());
        self.slots.set_usable(self.usable);
        let mut free = std::mem::take(&mut self.left);
        free.extend(std::iter::from_fn(|| self.pop_free()));
        free.sort_unstable();
        for own in free.into_iter().rev() {
            self.free(self.slots.number_of(own));
        }
        let dead = std::mem::take(&mut self.stock.dead);
        let left_dead = std::mem::take(&mut self.left_dead);
        for own in dead.into_iter().chain(left_dead) {
            self.die(own);
        }
    }

    /// Number of slots that are still to leave.
    pub(in crate::cache) fn leaving(&self) -> usize {
        (self.slots.whole_count() - self.usable) as usize - self.left.len()
    }

    /// Adds up to `n` pages that have leaving slots to `out`, from slot number `from` on, and
    /// returns where to go on.
    pub(in crate::cache) fn leaving_from(&self, from: u32, n: usize, out: &mut Vec<Found>) -> u32 {
        let end = self.slots.whole_count();
        let mut own = from.max(self.usable);
        while own < end && out.len() < n {
            let slot = self.slots[own];
            if slot.is_split() {
                out.extend(self.slots.live_parts(own).map(|part| self.found(part)));
            } else {
                // The page under a record leaves with the record, which is the newest version.
                out.extend(self.find(slot.page()).filter(|_| slot.is(LIVE | BASE)));
            }
            own += 1;
        }
        own
    }

    /// Up to `n` leaving slots that are dead. Their pages are held until
    /// [`free_spent`](Self::free_spent).
    pub(in crate::cache) fn take_left_dead(&mut self, n: usize) -> Vec<Spent> {
        let taken = self.left_dead.split_off(self.left_dead.len().saturating_sub(n));
        let spent = |own: u32| Spent {
            slot: self.slots.number_of(own),
            pages: SmallVec::from_slice(&[self.slots[own].page()]),
        };
        let taken = taken.into_iter().map(spent).collect();
        self.hold_pages_of(taken)
    }

    /// The shard has `count` slots from now on, all of them usable. Those that it had from this
    /// number on have left; the pages in the others keep the order of their eviction.
    pub(in crate::cache) fn resize(&mut self, count: u32) {
        debug_assert!(count >= self.slots.whole_count() || self.leaving() == 0);
        let order = self.order_of_all();
        let added = self.slots.whole_count()..count;
        self.left.clear();
        self.slots.resize(count);
        self.set_usable(count);
        for own in added.rev() {
            self.free(self.slots.number_of(own));
        }
        self.reorder_all(&order);
    }
}
