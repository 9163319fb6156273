//! Changes to a shard after a write has filled a slot, and after a group is committed.

use super::Shard;
use super::found::{Stored, Taken};
use super::slot::{CLASS_SHIFT, DIRTY, LIVE, PAGE_SHIFT, RECORD, Slot, ZERO, flag};
use crate::cache::store::layout::whole_slot;

impl Shard {
    /// Makes the slot `taken`, which is durable, the live slot of `page`. The slots of the version
    /// before and of the page under it become dead, or retained if the write is in a group: lookups
    /// no longer return these slots. Returns whether the page had a version before.
    ///
    /// The page under the new version is not replaced.
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

    /// Notes that no record lies over the page in slot `under` any more. The slot is retained until
    /// `group` is committed, or dead if `group` is 0.
    fn drop_base(&mut self, under: u32, group: u64) {
        self.bases.forget(&mut self.allocator.slots, under);
        if group == 0 { self.allocator.die(under) } else { self.groups.retain(under, group) }
    }

    /// Makes up to `n` slots dead that members of the committed `group` replaced. After the last of
    /// these, up to `n` pages stop waiting for the group. Returns `false` after the last page.
    pub(in crate::cache) fn release(&mut self, group: u64, n: usize) -> bool {
        for own in self.groups.take_retained(group, n) {
            self.allocator.die(own);
        }
        self.groups.release(&mut self.allocator.slots, group, n)
    }
}
