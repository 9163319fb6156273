//! The slots of a shard that can be taken, which are free or dead, the slots that leave the shard,
//! and those that a failure of the memory made useless.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::found::Taken;
use super::slot::{BASE, LIVE, NONE, Slot};
use super::slots::{Slots, Spent};
use crate::cache::pages::cluster::Sharding;
use crate::cache::policy::MAX_SLOTS;
use crate::cache::store::layout::{PART_UNITS_MAX, can_split, part_of, units_of};

/// The fields that every write changes, apart from fields that writes only read. Threads that write
/// to a shard in turn pass only these cache lines, and few others, from CPU to CPU.
#[derive(Default)]
#[repr(align(64))]
struct Stock {
    next_version: u64,
    first_free: u64,
    free: u32,
    /// Dead slots, by their numbers in the shard.
    dead: SmallVec<[u32; 8]>,
    /// Held pages, each as often as it is held.
    held: SmallVec<[u64; 2]>,
}

/// The slots of a shard, and their availability.
pub(in crate::cache) struct Allocator {
    stock: Stock,
    pub(super) slots: Slots,
    /// The number of the first slot that leaves the shard.
    usable: u32,
    /// Leaving slots whose headers are durably void.
    left: Vec<u32>,
    /// Leaving slots that are dead.
    left_dead: Vec<u32>,
    /// Number of pages that are being cleaned to leave the cache afterwards.
    pub(in crate::cache) departing: u32,
    /// Pages that are stuck.
    pub(super) stuck: BTreeSet<u64>,
    /// Number of slots that stay taken because the memory failed.
    pub(super) lost_slots: u32,
}

impl Allocator {
    /// Returns the `own` slots of shard `number` in `sharding`. All slots are free.
    pub(super) fn new(number: u32, sharding: Sharding, own: u32) -> Self {
        let next = |slot: u32| if slot == 0 { NONE } else { u64::from(slot) - 1 };
        let free = |slot| Slot { word: 0, version: next(slot) };
        let stock = Stock {
            next_version: 1,
            first_free: u64::from(own).checked_sub(1).unwrap_or(NONE),
            free: own,
            ..Stock::default()
        };
        Self {
            stock,
            slots: Slots::new(number, sharding, (0..own).map(free).collect()),
            usable: own,
            left: Vec::new(),
            left_dead: Vec::new(),
            departing: 0,
            stuck: BTreeSet::new(),
            lost_slots: 0,
        }
    }

    /// Returns the number of slots that can be taken.
    pub(in crate::cache) fn available(&self) -> u32 {
        self.stock.free + u32::try_from(self.stock.dead.len()).unwrap_or(u32::MAX)
    }

    /// Returns whether the shard needs free slots. If none can be taken, a writer may wait, so that
    /// another batch is prepared even while one is under way. Otherwise departing pages count as
    /// free.
    pub(in crate::cache) fn needs_slots(&self, reserve: u32) -> bool {
        let available = self.available();
        available == 0 && reserve > 0 || available.saturating_add(self.departing) < reserve
    }

    /// Returns the number of slots without those that leave.
    pub(in crate::cache) fn slot_count(&self) -> u32 {
        self.usable
    }

    /// Takes a slot for a page, or for a record of `lines` lines a part of a split slot, or of a
    /// slot that is to be split. Takes a whole slot only if more than `reserve` are available.
    pub(in crate::cache) fn take_for(&mut self, lines: u32, reserve: u32) -> Option<Taken> {
        let units = units_of(lines);
        if units > PART_UNITS_MAX {
            return self.take_beyond(reserve);
        }
        if let Some(taken) = self.take_part(units) {
            return Some(taken);
        }
        let taken = self.take_beyond(reserve)?;
        if !can_split(taken.slot) || self.slots.capacity() >= MAX_SLOTS / 4 {
            return Some(taken);
        }
        Some(Taken { slot: part_of(taken.slot, 0), units, splits: true, ..taken })
    }

    fn take_beyond(&mut self, reserve: u32) -> Option<Taken> {
        (self.available() > reserve).then(|| self.take()).flatten()
    }

    fn take_part(&mut self, units: u32) -> Option<Taken> {
        let (own, dead_page) = self.slots.take(units, self.usable)?;
        if let Some(page) = dead_page {
            self.stock.held.push(page);
        }
        Some(Taken { units, ..self.taken(own, dead_page) })
    }

    /// Describes the taken slot `own`, with the next version.
    fn taken(&mut self, own: u32, dead_page: Option<u64>) -> Taken {
        let version = self.stock.next_version;
        self.stock.next_version += 1;
        Taken { slot: self.slots.number_of(own), version, dead_page, units: 0, splits: false }
    }

    /// Takes a slot, preferably a dead one.
    pub(in crate::cache) fn take(&mut self) -> Option<Taken> {
        let (own, dead_page) = match self.stock.dead.pop() {
            Some(own) => {
                let page = self.slots[own].page();
                // Until the slot's new header is durable, a crash may bring the old one back.
                self.stock.held.push(page);
                (own, Some(page))
            }
            None => (self.pop_free()?, None),
        };
        Some(self.taken(own, dead_page))
    }

    fn pop_free(&mut self) -> Option<u32> {
        let own = u32::try_from(self.stock.first_free).ok()?;
        self.stock.first_free = self.slots[own].version;
        self.stock.free -= 1;
        Some(own)
    }

    /// Frees `slot`, whose header is durably void.
    pub(in crate::cache) fn free(&mut self, slot: u32) {
        let (own, version) = (self.slots.own(slot), self.stock.first_free);
        if self.slots.part(own).is_some() {
            return self.slots.free(own, self.usable);
        }
        self.slots[own] = Slot { word: 0, version };
        if own >= self.usable {
            return self.left.push(own);
        }
        self.stock.first_free = own.into();
        self.stock.free += 1;
    }

    /// Marks slot `own` as dead.
    pub(super) fn die(&mut self, own: u32) {
        if self.slots.part(own).is_some() {
            return self.slots.die(own, self.usable);
        }
        if own < self.usable { self.stock.dead.push(own) } else { self.left_dead.push(own) }
    }

    /// Takes up to `n` split slots without a part in use. [`free_spent`](Self::free_spent) ends the
    /// hold of their pages.
    pub(in crate::cache) fn take_spent(&mut self, n: usize) -> Vec<Spent> {
        let spent = self.slots.take_spent(n);
        self.hold_pages_of(spent)
    }

    fn hold_pages_of(&mut self, spent: Vec<Spent>) -> Vec<Spent> {
        self.stock.held.extend(spent.iter().flat_map(|it| it.pages.iter().copied()));
        spent
    }

    /// Frees the slot of `spent`, whose header is durably void, and releases its pages.
    pub(in crate::cache) fn free_spent(&mut self, spent: &Spent) {
        for page in &spent.pages {
            self.drop_hold(Some(*page));
        }
        self.slots.unite(self.slots.own(spent.slot));
        self.free(spent.slot);
    }

    /// Keeps the slot of `spent` taken and makes its pages stuck, after voiding its header failed.
    pub(in crate::cache) fn leave_spent(&mut self, spent: &Spent) {
        self.stuck.extend(&spent.pages);
        self.lost_slots += 1;
    }

    pub(super) fn drop_hold(&mut self, page: Option<u64>) {
        let held = &mut self.stock.held;
        if let Some(at) = page.and_then(|page| held.iter().position(|it| *it == page)) {
            held.swap_remove(at);
        }
    }

    /// Returns whether `page` must not be removed now.
    pub(in crate::cache) fn is_held(&self, page: u64) -> bool {
        self.stock.held.contains(&page) || self.is_stuck(page)
    }

    /// Marks `page` as stuck.
    pub(in crate::cache) fn stick(&mut self, page: u64) {
        self.stuck.insert(page);
    }

    /// Returns whether `page` is stuck: a version may be durable in a slot that no list names.
    pub(in crate::cache) fn is_stuck(&self, page: u64) -> bool {
        self.stuck.contains(&page)
    }

    /// Takes back the slot `taken`, after the memory failed while it was filled for `page`. It is
    /// free if its header is durably void and its data `is_whole`. Otherwise it stays taken.
    pub(in crate::cache) fn take_back(
        &mut self,
        page: u64,
        taken: &Taken,
        is_void: bool,
        is_whole: bool,
    ) {
        if is_void {
            self.drop_hold(taken.dead_page);
        } else {
            self.stuck.extend(taken.dead_page);
            self.stick(page);
        }
        if is_void && is_whole { self.free(taken.slot) } else { self.lose(taken.slot) }
    }

    /// Keeps `slot` taken for good. If it is a part, no other part of its slot is taken again.
    pub(in crate::cache) fn lose(&mut self, slot: u32) {
        let own = self.slots.own(slot);
        let is_first = self.slots.part(own).is_none() || self.slots.lose(own);
        self.lost_slots += u32::from(is_first);
    }

    /// Returns whether some slots cannot become free because the memory failed.
    pub(in crate::cache) fn keeps_slots(&self) -> bool {
        self.lost_slots > 0 || !self.stuck.is_empty()
    }

    /// Makes slots from number `usable` on leave, and takes back leaving slots below it.
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

    /// Returns the number of slots that are still to leave.
    pub(in crate::cache) fn leaving(&self) -> usize {
        (self.slots.whole_count() - self.usable) as usize - self.left.len()
    }

    /// Takes up to `n` dead slots that leave. [`free_spent`](Self::free_spent) ends the hold of
    /// their pages.
    pub(in crate::cache) fn take_left_dead(&mut self, n: usize) -> Vec<Spent> {
        let taken = self.left_dead.split_off(self.left_dead.len().saturating_sub(n));
        let spent = |own: u32| Spent {
            slot: self.slots.number_of(own),
            pages: SmallVec::from_slice(&[self.slots[own].page()]),
        };
        let taken = taken.into_iter().map(spent).collect();
        self.hold_pages_of(taken)
    }

    /// Returns all dead slots and parts. Nobody takes them while the shard is locked.
    pub(in crate::cache) fn dead(&self) -> impl Iterator<Item = u32> {
        let slots = self.stock.dead.iter().chain(&self.left_dead).copied();
        slots.chain(self.slots.dead_parts()).map(|own| self.slots.number_of(own))
    }

    /// Moves all dead slots with older versions of `page` to `out`, for the caller to void.
    pub(super) fn take_dead_of(&mut self, page: u64, out: &mut Vec<u32>) {
        let mut older = SmallVec::<[u32; 8]>::new();
        let mut stays = |own: &mut u32| {
            let is_of_page = self.slots[*own].page() == page;
            if is_of_page {
                older.push(*own);
            }
            !is_of_page
        };
        self.stock.dead.retain(&mut stays);
        self.left_dead.retain_mut(stays);
        self.slots.take_dead_of(page, |own| older.push(own), self.usable);
        out.extend(older.into_iter().map(|own| self.slots.number_of(own)));
    }

    /// Sets the number of slots to `count`, all usable. Slots from this number on have left.
    pub(super) fn resize(&mut self, count: u32) {
        debug_assert!(count >= self.slots.whole_count() || self.leaving() == 0);
        let added = self.slots.whole_count()..count;
        self.left.clear();
        self.slots.resize(count);
        self.set_usable(count);
        for own in added.rev() {
            self.free(self.slots.number_of(own));
        }
    }

    /// Ends recovery: frees all slots that hold no page, and continues versions behind `newest`.
    pub(super) fn recovered(&mut self, newest: u64) {
        self.stock.next_version = newest + 1;
        (self.stock.first_free, self.stock.free) = (NONE, 0);
        for own in (0..self.usable).rev() {
            if !self.slots[own].is(LIVE | BASE) {
                self.free(self.slots.number_of(own));
            }
        }
        self.slots.free_unused_parts(self.usable);
    }
}
