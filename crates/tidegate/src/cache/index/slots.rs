//! The slots of a shard and the parts of those that are split, by numbers that never change.
//!
//! A slot has its number in the shard, whatever else there is; a part has [`PART`] in its number,
//! above its place among the entries of parts. Arrays that have one entry for each are indexed by
//! the [`dense`](Slots::dense) number: slots first, then parts. Entries of parts are made when
//! slots are split for the first time, eight for each slot.

use std::collections::BTreeSet;
use std::ops::{Index, IndexMut};

use smallvec::SmallVec;

use super::super::layout::Split;
use super::super::table::Table;
use super::{BASE, LIVE, LOST_BASE, NONE, Slot};

/// In the number of a part in its shard.
const PART: u32 = 1 << 31;
/// Entries of a split slot's parts.
const PARTS_STRIDE: u32 = 8;
/// Fewest split slots for which there are entries, where there are any.
const SPLITS_LEAST: u32 = 8;
/// The word of a slot that is split: no other slot has both flags without [`LIVE`].
const SPLIT: u64 = BASE | LOST_BASE;
/// No place in a list.
const NOWHERE: u32 = u32::MAX;

/// A slot that is split.
pub(super) struct SplitSlot {
    /// Its number in the shard.
    pub(super) slot: u32,
    pub(super) split: Split,
    /// Parts that are free, a bit each.
    free: u8,
    /// Parts that are dead.
    dead: u8,
    /// Parts that came up for eviction since they were written.
    offered: u8,
    /// Parts that stay taken, for the memory failed: none is taken any more.
    lost: u8,
    /// Its place in the list of those with parts to be taken.
    open_at: u32,
    /// It is in the list of those whose parts all were free or dead.
    is_listed: bool,
}

impl SplitSlot {
    /// A bit for each part.
    fn all(&self) -> u8 {
        u8::MAX >> (u8::BITS - self.split.parts())
    }

    fn can_be_taken(&self) -> u8 {
        self.free | self.dead
    }

    /// All parts are free or dead.
    fn is_spent(&self) -> bool {
        self.can_be_taken() == self.all()
    }

    fn has_part_for(&self, usable: u32) -> bool {
        self.can_be_taken() != 0 && self.lost == 0 && self.slot < usable
    }
}

/// A slot that is about to be whole again.
pub(in super::super) struct Spent {
    /// Its number in the shard.
    pub(super) slot: u32,
    /// The pages of which its dead parts hold older versions.
    pub(super) pages: SmallVec<[u64; Split::PARTS_MAX as usize]>,
}

/// The slots and parts of one shard.
#[derive(Default)]
pub(super) struct Slots {
    whole: Vec<Slot>,
    parts: Vec<Slot>,
    splits: Vec<SplitSlot>,
    /// Entries of `splits` that stand for none.
    unused: Vec<u32>,
    /// By [`Split::index`]: those with parts to be taken.
    open: [Vec<u32>; Split::COUNT],
    /// Those whose parts all were free or dead once.
    spent: Vec<u32>,
    /// Dead parts, by the page of which they hold an older version.
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

/// Where a part lies: its slot among `splits`, and its number there.
fn place_of(own: u32) -> (u32, u32) {
    let part = own & !PART;
    (part / PARTS_STRIDE, part % PARTS_STRIDE)
}

fn part_own(at: u32, index: u32) -> u32 {
    PART | (at * PARTS_STRIDE + index)
}

fn len_of<T>(all: &[T]) -> u32 {
    u32::try_from(all.len()).unwrap_or(u32::MAX)
}

impl Slots {
    pub(super) fn new(whole: Vec<Slot>) -> Self {
        Self { whole, ..Self::default() }
    }

    /// Number of slots.
    pub(super) fn whole_count(&self) -> u32 {
        len_of(&self.whole)
    }

    /// Slots `from` to `end`, by number.
    pub(super) fn whole(&self, from: u64, end: u64) -> impl Iterator<Item = (u32, Slot)> {
        let wanted = (0..).zip(&self.whole).skip(usize::try_from(from).unwrap_or(usize::MAX));
        let count = usize::try_from(end.saturating_sub(from)).unwrap_or(usize::MAX);
        wanted.take(count).map(|(own, slot)| (own, *slot))
    }

    /// Entries for slots and parts.
    pub(super) fn capacity(&self) -> u32 {
        self.whole_count() + len_of(&self.parts)
    }

    /// The place of slot or part `own` among all entries.
    #[inline]
    pub(super) fn dense(&self, own: u32) -> u32 {
        if is_part(own) { self.whole_count() + (own & !PART) } else { own }
    }

    /// The number of the entry at the place `dense`.
    #[inline]
    pub(super) fn of_dense(&self, dense: u32) -> u32 {
        match dense.checked_sub(self.whole_count()) {
            None => dense,
            Some(part) => PART | part,
        }
    }

    /// The numbers of all slots and parts.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> {
        let parts = len_of(&self.parts);
        (0..self.whole_count()).chain((0..parts).map(|part| PART | part))
    }

    /// The slot or part of `page` in `table`.
    pub(super) fn own_of(&self, table: &Table, page: u64) -> Option<u32> {
        table.find(page, |dense| self.page_at(dense)).map(|dense| self.of_dense(dense))
    }

    /// Has `table` name `own` for `page`; returns the slot or part that it named before.
    pub(super) fn place(&self, table: &mut Table, own: u32, page: u64) -> Option<u32> {
        let old = table.insert(page, self.dense(own), |dense| self.page_at(dense));
        old.map(|dense| self.of_dense(dense))
    }

    /// Has `table` forget `page`; returns its slot or part.
    pub(super) fn remove(&self, table: &mut Table, page: u64) -> Option<u32> {
        table.remove(page, |dense| self.page_at(dense)).map(|dense| self.of_dense(dense))
    }

    /// A table that names all that is live.
    pub(super) fn new_table(&self) -> Table {
        let mut table = Table::new(self.capacity());
        for own in self.numbers().filter(|own| self[*own].is(LIVE)) {
            table.insert(self[own].page(), self.dense(own), |dense| self.page_at(dense));
        }
        table
    }

    #[inline]
    fn page_at(&self, dense: u32) -> u64 {
        self[self.of_dense(dense)].page()
    }

    pub(super) fn get(&self, own: u32) -> Option<&Slot> {
        match own.checked_sub(PART) {
            None => self.whole.get(own as usize),
            Some(part) => self.parts.get(part as usize),
        }
    }

    /// Has `count` slots from now on.
    pub(super) fn resize(&mut self, count: u32) {
        self.whole.resize(count as usize, Slot { word: 0, version: NONE });
        self.whole.shrink_to_fit();
    }

    /// The slot of which `own` is a part, and where; None: it is a slot.
    #[inline]
    pub(super) fn part(&self, own: u32) -> Option<(&SplitSlot, u32)> {
        let (at, index) = place_of(own);
        is_part(own).then(|| (&self.splits[at as usize], index))
    }

    /// Part `index` of slot `whole`. A slot that is not split has none.
    pub(super) fn part_of(&self, whole: u32, index: u32) -> u32 {
        let slot = self.whole.get(whole as usize).filter(|slot| slot.is_split());
        let at = slot.and_then(|slot| u32::try_from(slot.version).ok());
        at.map_or(u32::MAX, |at| part_own(at, index))
    }

    /// The entry for one more split slot is there.
    pub(super) fn has_entry(&self) -> bool {
        !self.unused.is_empty() || self.splits.len() * (PARTS_STRIDE as usize) < self.parts.len()
    }

    /// Adds entries for as many split slots as there are, and a few.
    pub(super) fn add_entries(&mut self) {
        let splits = (2 * len_of(&self.splits)).max(SPLITS_LEAST);
        let free = Slot { word: 0, version: NONE };
        self.parts.resize((splits * PARTS_STRIDE) as usize, free);
    }

    /// Slot `whole` is split from now on, all of its parts in use. Returns the first one. There is
    /// an entry for it.
    pub(super) fn split(&mut self, whole: u32, split: Split) -> u32 {
        let new = SplitSlot {
            slot: whole,
            split,
            free: 0,
            dead: 0,
            offered: 0,
            lost: 0,
            open_at: NOWHERE,
            is_listed: false,
        };
        let at = self.unused.pop().unwrap_or(len_of(&self.splits));
        match self.splits.get_mut(at as usize) {
            Some(unused) => *unused = new,
            None => self.splits.push(new),
        }
        self.whole[whole as usize] = Slot { word: SPLIT, version: at.into() };
        part_own(at, 0)
    }

    /// All parts of the slot of part `own` but this one are free.
    pub(super) fn free_others(&mut self, own: u32, usable: u32) {
        let (at, index) = place_of(own);
        for other in (0..self.splits[at as usize].split.parts()).filter(|it| *it != index) {
            self.free(part_own(at, other), usable);
        }
    }

    /// Part `own` is free; slots from `usable` on leave.
    pub(super) fn free(&mut self, own: u32, usable: u32) {
        self[own] = Slot { word: 0, version: NONE };
        let (at, index) = place_of(own);
        self.splits[at as usize].free |= 1 << index;
        self.can_be_taken_again(at, usable);
    }

    /// Part `own` is dead; slots from `usable` on leave.
    pub(super) fn die(&mut self, own: u32, usable: u32) {
        self.dead.insert((self[own].page(), own));
        let (at, index) = place_of(own);
        self.splits[at as usize].dead |= 1 << index;
        self.can_be_taken_again(at, usable);
    }

    fn can_be_taken_again(&mut self, at: u32, usable: u32) {
        let slot = &mut self.splits[at as usize];
        if slot.is_spent() && !std::mem::replace(&mut slot.is_listed, true) {
            self.spent.push(at);
        }
        self.set_open(at, usable);
    }

    /// Lists the split slot `at` where parts of it can be taken, and only there.
    fn set_open(&mut self, at: u32, usable: u32) {
        let slot = &self.splits[at as usize];
        let (list, open_at) = (slot.split.index(), slot.open_at);
        let is_open = slot.has_part_for(usable);
        if is_open && open_at == NOWHERE {
            self.splits[at as usize].open_at = len_of(&self.open[list]);
            self.open[list].push(at);
        } else if !is_open && open_at != NOWHERE {
            self.splits[at as usize].open_at = NOWHERE;
            self.open[list].swap_remove(open_at as usize);
            if let Some(moved) = self.open[list].get(open_at as usize) {
                self.splits[*moved as usize].open_at = open_at;
            }
        }
    }

    /// Slots from `usable` on leave: no part of them is taken.
    pub(super) fn set_usable(&mut self, usable: u32) {
        (0..len_of(&self.splits)).for_each(|at| self.set_open(at, usable));
    }

    /// Takes a part of a slot that is split by `split`, a dead one first. Returns it, and the page
    /// of which it holds an older version.
    pub(super) fn take(&mut self, split: Split, usable: u32) -> Option<(u32, Option<u64>)> {
        let at = *self.open[split.index()].last()?;
        let slot = &mut self.splits[at as usize];
        let is_dead = slot.dead != 0;
        let from = if is_dead { &mut slot.dead } else { &mut slot.free };
        let index = from.trailing_zeros();
        *from &= !(1 << index);
        slot.offered &= !(1 << index);
        let own = part_own(at, index);
        let page = is_dead.then(|| self[own].page());
        if let Some(page) = page {
            self.dead.remove(&(page, own));
        }
        self.set_open(at, usable);
        Some((own, page))
    }

    /// Takes dead parts with older versions of `page` away.
    pub(super) fn take_dead_of(&mut self, page: u64, mut see: impl FnMut(u32), usable: u32) {
        while let Some(entry) = self.dead.range((page, 0)..=(page, u32::MAX)).next().copied() {
            self.dead.remove(&entry);
            let (at, index) = place_of(entry.1);
            self.splits[at as usize].dead &= !(1 << index);
            self.set_open(at, usable);
            see(entry.1);
        }
    }

    /// Part `own` comes up for eviction. Returns whether all parts did by now that hold something.
    pub(super) fn offer(&mut self, own: u32) -> bool {
        let (at, index) = place_of(own);
        let slot = &mut self.splits[at as usize];
        slot.offered |= 1 << index;
        slot.offered | slot.can_be_taken() | slot.lost == slot.all()
    }

    /// Part `own` stays taken, and none beside it is taken any more. Returns whether it is the
    /// first of its slot.
    pub(super) fn lose(&mut self, own: u32) -> bool {
        let (at, index) = place_of(own);
        let slot = &mut self.splits[at as usize];
        let is_first = slot.lost == 0;
        slot.lost |= 1 << index;
        self.set_open(at, 0);
        is_first
    }

    /// The memory failed in a part beside `own`, or in it.
    pub(super) fn is_lost(&self, own: u32) -> bool {
        self.part(own).is_some_and(|(slot, _)| slot.lost != 0)
    }

    /// The first number of a slot or part from `own` on.
    pub(super) fn number_from(&self, own: u32) -> Option<u32> {
        let own = if own >= self.whole_count() { own.max(PART) } else { own };
        self.get(own).map(|_| own)
    }

    /// Live parts of the slot of part `own`.
    pub(super) fn live_beside(&self, own: u32) -> impl Iterator<Item = u32> {
        let split = self.part(own).map(|(slot, _)| slot.split);
        let parts = split.map_or(0, Split::parts);
        let all = (0..parts).map(move |index| part_own(place_of(own).0, index));
        all.filter(|part| self[*part].is(LIVE))
    }

    /// Live parts of slot `whole`.
    pub(super) fn live_parts(&self, whole: u32) -> impl Iterator<Item = u32> {
        let first = Some(self.part_of(whole, 0)).filter(|first| *first != u32::MAX);
        first.into_iter().flat_map(|first| self.live_beside(first))
    }

    /// Takes up to `n` slots of which all parts are free or dead: nobody takes a part of them from
    /// now on.
    pub(super) fn take_spent(&mut self, n: usize) -> Vec<Spent> {
        let mut taken = Vec::new();
        while taken.len() < n
            && let Some(at) = self.spent.pop()
        {
            let slot = &mut self.splits[at as usize];
            slot.is_listed = false;
            // It may have been used again since.
            if slot.is_spent() {
                taken.push(self.withdraw(at));
            }
        }
        taken
    }

    fn withdraw(&mut self, at: u32) -> Spent {
        let slot = &self.splits[at as usize];
        let (whole, dead) = (slot.slot, slot.dead);
        let dead = (0..PARTS_STRIDE).filter(|index| dead & 1 << index != 0);
        let dead = dead.map(|index| part_own(at, index));
        let pages = dead.map(|own| (self[own].page(), own)).collect::<SmallVec<[_; 8]>>();
        for entry in &pages {
            self.dead.remove(entry);
        }
        let slot = &mut self.splits[at as usize];
        (slot.free, slot.dead) = (0, 0);
        self.set_open(at, 0);
        Spent { slot: whole, pages: pages.into_iter().map(|(page, _)| page).collect() }
    }

    /// Slot `whole`, of which the parts were withdrawn, is whole again.
    pub(super) fn unite(&mut self, whole: u32) {
        self.unused.extend(u32::try_from(self.whole[whole as usize].version));
    }

    /// At opening: frees all parts that hold nothing.
    pub(super) fn free_unused_parts(&mut self, usable: u32) {
        for at in 0..len_of(&self.splits) {
            for index in 0..self.splits[at as usize].split.parts() {
                let own = part_own(at, index);
                if !self[own].is(LIVE) {
                    self.free(own, usable);
                }
            }
        }
    }

    /// Number of slots that are split.
    pub(super) fn split_count(&self) -> u32 {
        len_of(&self.splits) - len_of(&self.unused)
    }

    /// Bytes of memory.
    #[cfg(all(test, not(feature = "loom")))]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.whole) + size_of_val(&*self.parts)
    }
}
