//! A shard where a write has filled a slot, and where a group is committed.

use super::Shard;
use super::found::{Stored, Taken};
use super::slot::{CLASS_SHIFT, DIRTY, LIVE, PAGE_SHIFT, RECORD, Slot, ZERO, flag};
use crate::cache::store::layout::whole_slot;

impl Shard {
    /// A taken slot is durable, and holds `page` from now on. The slots before are dead unless they
    /// are retained: that of the newest version, and that of the page over which it lay. No reader
    /// that looks from now on uses them. Returns whether the page had a version before.
    ///
    /// A page over which the new version lies is not replaced.
    pub(in crate::cache) fn publish(&mut self, page: u64, taken: &Taken, stored: Stored) -> bool {
        self.allocator.drop_hold(taken.dead_page);
        let own = if taken.splits {
            self.split_whole(self.allocator.slots.own(whole_slot(taken.slot)))
        } else {
            self.allocator.slots.own(taken.slot)
        };
        if taken.units > 0 {
            self.allocator.slots.fill(own, taken.units, self.allocator.slot_count());
        }
        let Stored { dirty, zero, record, over, group, class } = stored;
        let class = self.orders.known(class);
        let flags = flag(dirty, DIRTY) | flag(zero, ZERO) | flag(record, RECORD);
        let word = page << PAGE_SHIFT | LIVE | flags | u64::from(class) << CLASS_SHIFT;
        let Some(old) = self.allocator.slots.place(own, Slot { word, version: taken.version })
        else {
            self.enter(own);
            self.insert(own);
            self.groups.join(&mut self.allocator.slots[own], None, group);
            return false;
        };
        self.exchange(old, own);
        self.reorder(old, own, page);
        let before = self.allocator.slots[old];
        let under = if before.is(RECORD) { self.bases.lift(old) } else { None };
        if over {
            self.bases.lay_over(&mut self.allocator.slots, own, under.unwrap_or(old));
        } else if let Some(under) = under {
            self.drop_base(under, group);
        }
        if over && under.is_none() {
            let before = self.allocator.slots[old].word;
            self.groups.wait_for(&mut self.allocator.slots[own], before, group);
        } else if !self.groups.join(&mut self.allocator.slots[own], Some((old, before)), group) {
            self.allocator.die(old);
        }
        true
    }

    /// No record lies over the page in slot `under` any more. It counts until `group` is committed,
    /// or with group 0 is dead.
    fn drop_base(&mut self, under: u32, group: u64) {
        self.bases.forget(&mut self.allocator.slots, under);
        if group == 0 { self.allocator.die(under) } else { self.groups.retain(under, group) }
    }

    /// `group` is committed: up to `n` of the slots that its members replaced are dead, and when
    /// all are, up to `n` of its pages stop to wait for it. Returns `false` after the last.
    pub(in crate::cache) fn release(&mut self, group: u64, n: usize) -> bool {
        for own in self.groups.take_retained(group, n) {
            self.allocator.die(own);
        }
        self.groups.release(&mut self.allocator.slots, group, n)
    }
}
