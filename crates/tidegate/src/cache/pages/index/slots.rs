//! The slots of a shard and the parts of split slots, by numbers that never change.
//!
//! A slot has its number in the shard. The number of a part is [`PART`] plus the part's index among
//! the entries of parts. Arrays with one entry for each slot and part are indexed by the
//! [`dense`](Slots::dense) number: slots first, then parts. Entries of parts are created when slots
//! are split, eight for each split slot.

use std::collections::BTreeSet;
use std::ops::{Index, IndexMut};

use smallvec::SmallVec;

use super::slot::{BASE, LIVE, LOST_BASE, NONE, Slot};
use crate::cache::pages::cluster::Sharding;
use crate::cache::pages::table::Table;
use crate::cache::store::layout::{UNITS, part_number, part_of};

/// Flag in the number of a part in its shard.
const PART: u32 = 1 << 31;
/// Number of entries for the parts of a split slot, indexed by first unit.
const PARTS_STRIDE: u32 = 8;
/// A bit for each unit.
const ALL_UNITS: u8 = u8::MAX >> (u8::BITS - UNITS);
/// Minimum number of split slots to create entries for.
const SPLITS_LEAST: u32 = 8;
/// The word of a split slot. No other slot has both flags without [`LIVE`].
const SPLIT: u64 = BASE | LOST_BASE;

/// A split slot. In bitmaps by unit, a part is represented by the bit of its first unit.
#[derive(Default)]
pub(super) struct SplitSlot {
    /// The number of the slot in the shard.
    pub(super) slot: u32,
    /// Number of units of the part that begins with each unit, or 0.
    units: [u8; PARTS_STRIDE as usize],
    /// Units in no part.
    free: u8,
    /// Dead parts.
    dead: u8,
    /// Parts that came up for eviction since they were written.
    offered: u8,
    /// Parts that stay taken because the memory failed. Then no part of the slot is taken any more.
    lost: u8,
    /// The most units that a part can get. The slot is in the list for this number.
    open_for: u32,
    /// The index of the slot in that list.
    open_at: u32,
    /// The slot is in the list of slots whose parts all were free or dead.
    is_listed: bool,
}

impl SplitSlot {
    /// Returns slot `slot` with one part that has all units.
    fn new(slot: u32) -> Self {
        let mut new = Self { slot, ..Self::default() };
        new.set_units(0, UNITS);
        new
    }

    /// Returns the number of units of the part that begins with `unit`.
    pub(super) fn units(&self, unit: u32) -> u32 {
        self.units[unit as usize].into()
    }

    /// Returns the units of the part that begins with `unit`, as bits.
    fn extent(&self, unit: u32) -> u8 {
        run_of(unit, self.units(unit))
    }

    /// Returns the parts that are neither free nor dead, as bits.
    fn in_use(&self) -> u8 {
        let begins = |unit: &u32| self.units(*unit) > 0;
        let parts = (0..UNITS).filter(begins).fold(0, |all, unit| all | 1 << unit);
        parts & !self.dead
    }

    /// Returns whether all parts are free or dead.
    fn is_spent(&self) -> bool {
        self.in_use() == 0
    }

    /// Returns how many units a part that begins with `unit` can get: the units of a dead part
    /// there, whose header it replaces, and the free units behind.
    fn space_at(&self, unit: u32) -> u32 {
        let dead = if self.dead & 1 << unit != 0 { self.units(unit) } else { 0 };
        dead + (self.free >> (unit + dead)).trailing_ones()
    }

    /// Returns the unit where a part of `units` units can begin: over a dead part if possible, and
    /// in the smallest space that suffices.
    fn place_for(&self, units: u32) -> Option<u32> {
        let behind_free = self.free & self.free << 1;
        let begins = (0..UNITS).filter(|unit| behind_free & 1 << unit == 0);
        let fits = begins.filter(|unit| self.space_at(*unit) >= units);
        fits.min_by_key(|unit| (self.dead & 1 << unit == 0, self.space_at(*unit)))
    }

    /// Returns the most units that a part can get; 0 if the slot leaves or has lost parts.
    fn space_max(&self, usable: u32) -> u32 {
        let is_open = self.lost == 0 && self.slot < usable;
        (0..UNITS).map(|unit| self.space_at(unit)).max().filter(|_| is_open).unwrap_or_default()
    }

    /// Sets the length of the part that begins with `unit`. Units that it gives up become free.
    fn set_units(&mut self, unit: u32, units: u32) {
        self.free |= self.extent(unit);
        self.units[unit as usize] = u8::try_from(units).unwrap_or_default();
        self.free &= !self.extent(unit);
    }
}

/// Returns the bits of `units` units from `unit` on.
fn run_of(unit: u32, units: u32) -> u8 {
    let bits = ((1_u32 << units) - 1) << unit;
    u8::try_from(bits & u32::from(ALL_UNITS)).unwrap_or(ALL_UNITS)
}

/// A slot that becomes free or leaves once its header, or the header that splits it, is void.
pub(in crate::cache) struct Spent {
    /// The slot, numbered through all shards.
    pub(in crate::cache) slot: u32,
    /// The pages that have older versions in the slot, or in its dead parts.
    pub(super) pages: SmallVec<[u64; UNITS as usize]>,
}

/// The slots and parts of one shard, and the table from pages to these.
#[derive(Default)]
pub(super) struct Slots {
    /// The number of the shard.
    number: u32,
    sharding: Sharding,
    /// The table of pages, by dense numbers. It is rebuilt when the number of entries changes.
    table: Table,
    whole: Vec<Slot>,
    parts: Vec<Slot>,
    splits: Vec<SplitSlot>,
    /// Unused entries of `splits`.
    unused: Vec<u32>,
    /// Entries of `splits` that have space for a part, by the most units that the part can get.
    open: [Vec<u32>; PARTS_STRIDE as usize],
    /// Entries of `splits` whose parts all were free or dead at some time.
    spent: Vec<u32>,
    /// Dead parts, by the page of their older version.
    dead: BTreeSet<(u64, u32)>,
}

impl Index<u32> for Slots {
    type Output = Slot;

    #[inline]
    fn index(&self, own: u32) -> &Slot {
        match own.checked_sub(PART) {
            None => &self.whole[own as usize],
            Some(part) => &self.parts[part as usize],
        }
    }
}

impl IndexMut<u32> for Slots {
    #[inline]
    fn index_mut(&mut self, own: u32) -> &mut Slot {
        match own.checked_sub(PART) {
            None => &mut self.whole[own as usize],
            Some(part) => &mut self.parts[part as usize],
        }
    }
}

impl Slot {
    pub(super) fn is_split(self) -> bool {
        self.word & (SPLIT | LIVE) == SPLIT
    }
}

fn is_part(own: u32) -> bool {
    own & PART != 0
}

/// Returns the index of a part's slot in `splits`, and the part's first unit.
fn place_of(own: u32) -> (u32, u32) {
    let part = own & !PART;
    (part / PARTS_STRIDE, part % PARTS_STRIDE)
}

fn part_own(at: u32, index: u32) -> u32 {
    PART | (at * PARTS_STRIDE + index)
}

/// Returns the page in the entry with the dense number `dense`.
#[inline]
fn page_at(whole: &[Slot], parts: &[Slot], dense: u32) -> u64 {
    let at = dense as usize;
    at.checked_sub(whole.len()).map_or_else(|| whole[at], |part| parts[part]).page()
}

fn len_of<T>(all: &[T]) -> u32 {
    u32::try_from(all.len()).unwrap_or(u32::MAX)
}

impl Slots {
    /// Returns the slots `whole` of shard `number` in `sharding`. None of the slots holds a page.
    pub(super) fn new(number: u32, sharding: Sharding, whole: Vec<Slot>) -> Self {
        Self { number, sharding, table: Table::new(len_of(&whole)), whole, ..Self::default() }
    }

    /// Returns the number of slot or part `own` through all shards.
    pub(super) fn number_of(&self, own: u32) -> u32 {
        match self.part(own) {
            None => own * self.sharding.count + self.number,
            Some((it, unit)) => part_of(self.number_of(it.slot), unit),
        }
    }

    /// Returns the number of `slot` in this shard. A part of a slot that is no longer split has no
    /// number: the result then stands for no slot.
    pub(super) fn own(&self, slot: u32) -> u32 {
        match part_number(slot) {
            None => slot / self.sharding.count,
            Some(part) => self.part_of(part.slot / self.sharding.count, part.unit),
        }
    }

    /// Returns the number of slots.
    pub(super) fn whole_count(&self) -> u32 {
        len_of(&self.whole)
    }

    /// Returns the slots `from` to `end` with their numbers.
    pub(super) fn whole(&self, from: u64, end: u64) -> impl Iterator<Item = (u32, Slot)> {
        let wanted = (0..).zip(&self.whole).skip(usize::try_from(from).unwrap_or(usize::MAX));
        let count = usize::try_from(end.saturating_sub(from)).unwrap_or(usize::MAX);
        wanted.take(count).map(|(own, slot)| (own, *slot))
    }

    /// Returns the number of entries for slots and parts.
    pub(super) fn capacity(&self) -> u32 {
        self.whole_count() + len_of(&self.parts)
    }

    /// Returns the dense number of slot or part `own`.
    #[inline]
    pub(super) fn dense(&self, own: u32) -> u32 {
        if is_part(own) { self.whole_count() + (own & !PART) } else { own }
    }

    /// Returns the number of the slot or part with the dense number `dense`.
    #[inline]
    pub(super) fn of_dense(&self, dense: u32) -> u32 {
        match dense.checked_sub(self.whole_count()) {
            None => dense,
            Some(part) => PART | part,
        }
    }

    /// Returns the numbers of all slots and parts.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> {
        let parts = len_of(&self.parts);
        (0..self.whole_count()).chain((0..parts).map(|part| PART | part))
    }

    /// Returns the slot or part of `page`, which may belong to another shard.
    pub(super) fn own_of_any(&self, page: u64) -> Option<u32> {
        if self.sharding.shard_of(page) == self.number as usize { self.own_of(page) } else { None }
    }

    /// Returns the slot or part of `page`.
    pub(super) fn own_of(&self, page: u64) -> Option<u32> {
        let found = self.table.find(page, |dense| page_at(&self.whole, &self.parts, dense));
        found.map(|dense| self.of_dense(dense))
    }

    /// Stores `slot` in `own`, which becomes the page's slot. Returns the page's previous slot.
    pub(super) fn place(&mut self, own: u32, slot: Slot) -> Option<u32> {
        let (dense, Self { table, whole, parts, .. }) = (self.dense(own), &mut *self);
        let old = table.insert(slot.page(), dense, |dense| page_at(whole, parts, dense));
        self[own] = slot;
        old.map(|dense| self.of_dense(dense))
    }

    /// Removes `page` from the table. Returns its slot or part.
    pub(super) fn remove(&mut self, page: u64) -> Option<u32> {
        let Self { table, whole, parts, .. } = self;
        let found = table.remove(page, |dense| page_at(whole, parts, dense));
        found.map(|dense| self.of_dense(dense))
    }

    /// Rebuilds the table from all live entries, after the number of entries changed.
    pub(super) fn rebuild_table(&mut self) {
        self.table = Table::new(self.capacity());
        for own in 0..self.capacity() {
            let slot = self[self.of_dense(own)];
            if slot.is(LIVE) {
                self.place(self.of_dense(own), slot);
            }
        }
    }

    /// Reads only the first cell that a lookup of `page` probes.
    pub(super) fn look_up_ahead(&self, page: u64) -> u32 {
        self.table.look_up_ahead(page)
    }

    pub(super) fn get(&self, own: u32) -> Option<&Slot> {
        match own.checked_sub(PART) {
            None => self.whole.get(own as usize),
            Some(part) => self.parts.get(part as usize),
        }
    }

    /// Sets the number of slots to `count`.
    pub(super) fn resize(&mut self, count: u32) {
        self.whole.resize(count as usize, Slot { word: 0, version: NONE });
        self.whole.shrink_to_fit();
    }

    /// Returns the split slot and the first unit of the part `own`, or `None` for a whole slot.
    #[inline]
    pub(super) fn part(&self, own: u32) -> Option<(&SplitSlot, u32)> {
        let (at, index) = place_of(own);
        is_part(own).then(|| (&self.splits[at as usize], index))
    }

    /// Returns the part of slot `whole` that begins with `unit`, or `u32::MAX` if it is not split.
    pub(super) fn part_of(&self, whole: u32, unit: u32) -> u32 {
        let slot = self.whole.get(whole as usize).filter(|slot| slot.is_split());
        let at = slot.and_then(|slot| u32::try_from(slot.version).ok());
        at.map_or(u32::MAX, |at| part_own(at, unit))
    }

    /// Returns whether there is an entry for one more split slot.
    pub(super) fn has_entry(&self) -> bool {
        !self.unused.is_empty() || self.splits.len() * (PARTS_STRIDE as usize) < self.parts.len()
    }

    /// Adds entries for as many split slots as there are, at least for [`SPLITS_LEAST`] altogether.
    pub(super) fn add_entries(&mut self) {
        let splits = (2 * len_of(&self.splits)).max(SPLITS_LEAST);
        let free = Slot { word: 0, version: NONE };
        self.parts.resize((splits * PARTS_STRIDE) as usize, free);
    }

    /// Splits slot `whole` into one part with all units, which it returns. Needs an unused entry.
    pub(super) fn split(&mut self, whole: u32) -> u32 {
        let new = SplitSlot::new(whole);
        let at = self.unused.pop().unwrap_or(len_of(&self.splits));
        match self.splits.get_mut(at as usize) {
            Some(unused) => *unused = new,
            None => self.splits.push(new),
        }
        self.whole[whole as usize] = Slot { word: SPLIT, version: at.into() };
        part_own(at, 0)
    }

    /// Limits part `own` to the `units` that its durable record needs. Slots from `usable` leave.
    ///
    /// Frees the other units only now: before, a dead part's header may have named them too.
    pub(super) fn fill(&mut self, own: u32, units: u32, usable: u32) {
        let (at, unit) = place_of(own);
        self.splits[at as usize].set_units(unit, units);
        self.set_open(at, usable);
    }

    /// Frees part `own`. Slots from `usable` on leave.
    pub(super) fn free(&mut self, own: u32, usable: u32) {
        self[own] = Slot { word: 0, version: NONE };
        let (at, unit) = place_of(own);
        self.splits[at as usize].set_units(unit, 0);
        self.can_be_taken_again(at, usable);
    }

    /// Marks part `own` as dead. Slots from `usable` on leave.
    pub(super) fn die(&mut self, own: u32, usable: u32) {
        self.dead.insert((self[own].page(), own));
        let (at, unit) = place_of(own);
        self.splits[at as usize].dead |= 1 << unit;
        self.can_be_taken_again(at, usable);
    }

    fn can_be_taken_again(&mut self, at: u32, usable: u32) {
        let slot = &mut self.splits[at as usize];
        if slot.is_spent() && !std::mem::replace(&mut slot.is_listed, true) {
            self.spent.push(at);
        }
        self.set_open(at, usable);
    }

    /// Moves the split slot `at` to the list for the most units that a part can get there.
    fn set_open(&mut self, at: u32, usable: u32) {
        let slot = &self.splits[at as usize];
        let (before, now, open_at) = (slot.open_for, slot.space_max(usable), slot.open_at);
        if before == now {
            return;
        }
        if before > 0 {
            let list = &mut self.open[before as usize];
            list.swap_remove(open_at as usize);
            if let Some(moved) = list.get(open_at as usize) {
                self.splits[*moved as usize].open_at = open_at;
            }
        }
        self.splits[at as usize].open_for = now;
        if now > 0 {
            let list = &mut self.open[now as usize];
            self.splits[at as usize].open_at = len_of(list);
            list.push(at);
        }
    }

    /// Makes slots from `usable` on leave: their parts are no longer taken.
    pub(super) fn set_usable(&mut self, usable: u32) {
        (0..len_of(&self.splits)).for_each(|at| self.set_open(at, usable));
    }

    /// Takes a part of `units` units from a slot with little space left. Returns the part, and the
    /// page that has an older version in it.
    pub(super) fn take(&mut self, units: u32, usable: u32) -> Option<(u32, Option<u64>)> {
        let at = *self.open.get(units as usize..)?.iter().find_map(|list| list.last())?;
        let slot = &mut self.splits[at as usize];
        let unit = slot.place_for(units)?;
        let is_dead = slot.dead & 1 << unit != 0;
        slot.dead &= !(1 << unit);
        slot.offered &= !(1 << unit);
        // A dead part keeps all its units until it is filled.
        slot.set_units(unit, units.max(slot.units(unit)));
        let own = part_own(at, unit);
        let page = is_dead.then(|| self[own].page());
        if let Some(page) = page {
            self.dead.remove(&(page, own));
        }
        self.set_open(at, usable);
        Some((own, page))
    }

    /// Returns all dead parts.
    pub(super) fn dead_parts(&self) -> impl Iterator<Item = u32> {
        self.dead.iter().map(|(_, own)| *own)
    }

    /// Takes dead parts with older versions of `page` from the lists, and calls `see` with each.
    pub(super) fn take_dead_of(&mut self, page: u64, mut see: impl FnMut(u32), usable: u32) {
        while let Some(entry) = self.dead.range((page, 0)..=(page, u32::MAX)).next().copied() {
            self.dead.remove(&entry);
            let (at, unit) = place_of(entry.1);
            self.splits[at as usize].dead &= !(1 << unit);
            self.set_open(at, usable);
            see(entry.1);
        }
    }

    /// Notes that part `own` came up for eviction. Returns whether all parts of its slot that are
    /// in use, and not lost, have come up by now.
    pub(super) fn offer(&mut self, own: u32) -> bool {
        let (at, unit) = place_of(own);
        let slot = &mut self.splits[at as usize];
        slot.offered |= 1 << unit;
        slot.in_use() & !(slot.offered | slot.lost) == 0
    }

    /// Keeps part `own` taken for good, and takes no other part of its slot any more. Returns
    /// whether it is the first lost part of its slot.
    pub(super) fn lose(&mut self, own: u32) -> bool {
        let (at, unit) = place_of(own);
        let slot = &mut self.splits[at as usize];
        let is_first = slot.lost == 0;
        slot.lost |= 1 << unit;
        self.set_open(at, 0);
        is_first
    }

    /// Returns whether the memory failed in part `own` or in another part of its slot.
    pub(super) fn is_lost(&self, own: u32) -> bool {
        self.part(own).is_some_and(|(slot, _)| slot.lost != 0)
    }

    /// Returns up to `n` slots and parts that are `wanted`, from number `from` on, and the number
    /// to continue with. A resize keeps these numbers, but not the dense numbers of parts.
    pub(super) fn from(
        &self,
        from: u32,
        n: usize,
        wanted: impl Fn(Slot) -> bool,
    ) -> (Vec<u32>, u32) {
        let (mut found, mut next) = (Vec::new(), from);
        while found.len() < n {
            let own = if next >= self.whole_count() { next.max(PART) } else { next };
            let Some(slot) = self.get(own) else { break };
            if wanted(*slot) {
                found.push(own);
            }
            next = own + 1;
        }
        (found, next)
    }

    /// Returns the live parts of the slot that contains part `own`.
    pub(super) fn live_beside(&self, own: u32) -> impl Iterator<Item = u32> {
        let units = if is_part(own) { UNITS } else { 0 };
        let all = (0..units).map(move |unit| part_own(place_of(own).0, unit));
        all.filter(|part| self[*part].is(LIVE))
    }

    /// Returns the live parts of slot `whole`.
    pub(super) fn live_parts(&self, whole: u32) -> impl Iterator<Item = u32> {
        let first = Some(self.part_of(whole, 0)).filter(|first| *first != u32::MAX);
        first.into_iter().flat_map(|first| self.live_beside(first))
    }

    /// Takes up to `n` split slots whose parts are all free or dead, and no longer can be taken.
    pub(super) fn take_spent(&mut self, n: usize) -> Vec<Spent> {
        let mut taken = Vec::new();
        while taken.len() < n
            && let Some(at) = self.spent.pop()
        {
            let slot = &mut self.splits[at as usize];
            slot.is_listed = false;
            // The slot may be in use again since it was listed.
            if slot.is_spent() {
                taken.push(self.withdraw(at));
            }
        }
        taken
    }

    fn withdraw(&mut self, at: u32) -> Spent {
        let slot = &self.splits[at as usize];
        let (whole, dead) = (slot.slot, slot.dead);
        let dead = (0..UNITS).filter(|unit| dead & 1 << unit != 0);
        let dead = dead.map(|unit| part_own(at, unit));
        let pages = dead.map(|own| (self[own].page(), own)).collect::<SmallVec<[_; 8]>>();
        for entry in &pages {
            self.dead.remove(entry);
        }
        let slot = &mut self.splits[at as usize];
        (slot.free, slot.dead) = (0, 0);
        self.set_open(at, 0);
        Spent {
            slot: self.number_of(whole),
            pages: pages.into_iter().map(|(page, _)| page).collect(),
        }
    }

    /// Makes slot `whole` whole again if it was split. Its parts were withdrawn before.
    pub(super) fn unite(&mut self, whole: u32) {
        let slot = self.whole[whole as usize];
        if slot.is_split() {
            self.unused.extend(u32::try_from(slot.version));
        }
    }

    /// Frees all parts that are not live. Called at the end of recovery.
    pub(super) fn free_unused_parts(&mut self, usable: u32) {
        for at in 0..len_of(&self.splits) {
            for own in (0..UNITS).map(|unit| part_own(at, unit)) {
                if !self[own].is(LIVE) {
                    self.free(own, usable);
                }
            }
        }
    }

    /// Returns the number of split slots.
    pub(super) fn split_count(&self) -> u32 {
        len_of(&self.splits) - len_of(&self.unused)
    }

    /// Returns the size of slots, parts and table in bytes.
    #[cfg(all(test, not(loom)))]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.whole) + size_of_val(&*self.parts) + self.table.bytes()
    }
}
