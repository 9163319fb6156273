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
//! Where the pool shrinks, slots from [`slot_count`](Shard::slot_count) on *leave*
//! ([`leaving`]): none of them is taken any more.
//!
//! Invariants:
//! 1. A page that is *held* is not removed: a writer is writing over a dead slot of it. So a thread
//!    that removes a page finds all its older headers in the list of dead slots. A page of which a
//!    header may be durable that is in no list, for the memory failed, is *stuck*: it is never
//!    removed, and no write of it goes around the cache.
//! 2. A page with a member of a group that is not yet committed *waits* for it. It is not cleaned,
//!    and so not removed: all of its retained slots are dead by then.
//! 3. Versions of a shard only grow, also across opens.

mod leaving;
mod slots;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use smallvec::SmallVec;

use super::cleaner::Cleaner;
use super::cluster::Sharding;
use super::orders::Orders;
use crate::cache::policy::classes::{Admission, Classes};
use crate::cache::policy::cleaning::Load;
use crate::cache::policy::{MAX_SLOTS, ReplacementEntry};
use crate::cache::store::layout::{
    PAGES_MAX, PART_UNITS_MAX, SlotHeader, UNITS, can_split, parity, part_of, units_of, whole_slot,
};
use slots::Slots;
pub(in crate::cache) use slots::Spent;

/// The slot is live.
const LIVE: u64 = 1;
/// The backing does not have the bytes.
const DIRTY: u64 = 2;
/// The page is all zeroes and the slot has no data.
const ZERO: u64 = 4;
/// The data was not compared with its checksum since the pool was opened.
const UNVERIFIED: u64 = 8;
/// The slot holds a record: some lines of the page, the rest of which is the backing's.
const RECORD: u64 = 1 << 12;
/// The slot holds the page over which the newest version of its page, a record, lies.
const BASE: u64 = 1 << 11;
/// The page over which the record lies is damaged.
const LOST_BASE: u64 = 1 << 10;
/// The IO class of the page, in six bits.
const CLASS_SHIFT: u32 = 4;
const CLASS: u64 = 0x3F << CLASS_SHIFT;
/// The slot holds a member of a group that is not yet committed: the newest one that the page waits
/// for.
const MEMBER: u64 = 1 << 13;
/// The page has a member in the even group, or in the odd one, that is not yet committed.
const WAITS: [u64; 2] = [1 << 14, 1 << 15];
const WAITS_ANY: u64 = WAITS[0] | WAITS[1];
/// What decides under which counts of a shard a live slot comes.
const COUNTED: u64 = DIRTY | RECORD | CLASS;
const PAGE_SHIFT: u32 = 16;
const NONE: u64 = u64::MAX;
/// At most one slot in so many holds a page under a record.
const BASES_ONE_IN: u64 = 8;

/// A slot: 16 bytes.
#[derive(Clone, Copy)]
struct Slot {
    /// The page and flags.
    word: u64,
    /// The version; of a free slot the next free one.
    version: u64,
}

impl Slot {
    fn page(self) -> u64 {
        self.word >> PAGE_SHIFT
    }

    fn is(self, flag: u64) -> bool {
        self.word & flag != 0
    }

    fn class(self) -> u8 {
        u8::try_from((self.word & CLASS) >> CLASS_SHIFT).unwrap_or_default()
    }

    fn set_class(&mut self, class: u8) {
        self.word = self.word & !CLASS | u64::from(class) << CLASS_SHIFT;
    }

    /// It holds the newest version of its page, which is dirty.
    fn is_dirty(self) -> bool {
        self.is(LIVE) && self.is(DIRTY)
    }

    /// It holds the newest version of its page, which is dirty and waits for no commit.
    fn can_be_cleaned(self) -> bool {
        self.is_dirty() && !self.is(WAITS_ANY)
    }
}

/// Where the newest version of a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub(in crate::cache) struct Found {
    pub(in crate::cache) page: u64,
    /// The slot, numbered through all shards.
    pub(in crate::cache) slot: u32,
    pub(in crate::cache) version: u64,
    pub(in crate::cache) dirty: bool,
    pub(in crate::cache) zero: bool,
    /// Some lines of the page are in the slot.
    pub(in crate::cache) record: bool,
    /// The page over which a record lies; else its rest is the backing's.
    pub(in crate::cache) base: Option<Base>,
    pub(in crate::cache) verified: bool,
}

/// The page over which a record lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
pub(in crate::cache) struct Base {
    pub(in crate::cache) slot: u32,
    pub(in crate::cache) version: u64,
    /// The backing does not have it.
    pub(in crate::cache) dirty: bool,
    zero: bool,
    verified: bool,
    /// It is not there any more.
    pub(in crate::cache) is_lost: bool,
}

impl Found {
    /// The version in `slot` that `header` describes, not yet verified. A record lies over no page.
    pub(in crate::cache) fn of_header(slot: u32, header: &SlotHeader) -> Self {
        let SlotHeader { page, version, dirty, zero, .. } = *header;
        let (record, base) = (header.is_record(), None);
        Self { page, slot, version, dirty, zero, record, base, verified: false }
    }

    /// It is the same version of the page, in the same slot.
    pub(in crate::cache) fn is_same(&self, other: &Self) -> bool {
        (self.page, self.slot, self.version) == (other.page, other.slot, other.version)
    }

    /// The page over which the record lies.
    pub(in crate::cache) fn under(&self) -> Option<Self> {
        let Base { slot, version, dirty, zero, verified, .. } = self.base?;
        let (page, record, base) = (self.page, false, None);
        Some(Self { page, slot, version, dirty, zero, record, base, verified })
    }
}

/// A slot to be filled.
#[derive(Debug, Clone, Copy)]
pub(in crate::cache) struct Taken {
    pub(in crate::cache) slot: u32,
    /// The version that goes into it.
    pub(in crate::cache) version: u64,
    /// The page of which the slot holds an older version.
    pub(in crate::cache) dead_page: Option<u64>,
    /// Units of a part; of a slot 0.
    pub(in crate::cache) units: u32,
    /// The slot is the first part of one that is to be split, and holds that version as a whole.
    pub(in crate::cache) splits: bool,
}

impl Taken {
    /// The slot that is to be split, or what was taken.
    pub(in crate::cache) fn whole(self) -> Self {
        let slot = if self.splits { whole_slot(self.slot) } else { self.slot };
        Self { slot, splits: false, ..self }
    }
}

/// What a slot was filled with.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::struct_excessive_bools)]
pub(in crate::cache) struct Stored {
    /// The backing does not have it.
    pub(in crate::cache) dirty: bool,
    /// The page reads as zeroes.
    pub(in crate::cache) zero: bool,
    /// Some lines of the page, the rest of which is the backing's.
    pub(in crate::cache) record: bool,
    /// Of a record: it lies over the page that it replaces, or that the replaced record lay over.
    pub(in crate::cache) over: bool,
    /// The group that it is a member of; 0: none.
    pub(in crate::cache) group: u64,
    /// Its IO class.
    pub(in crate::cache) class: u8,
}

/// Slots by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::cache) struct Usage {
    pub(in crate::cache) live: u64,
    pub(in crate::cache) dirty: u64,
    /// Pages that wait for the commit of a group; all of them are dirty.
    pub(in crate::cache) waiting: u64,
    pub(in crate::cache) retained: u64,
    /// Live slots that hold records.
    pub(in crate::cache) records: u64,
    /// Those of them that are parts.
    pub(in crate::cache) parts: u64,
    /// Slots that are split.
    pub(in crate::cache) splits: u64,
    /// What is dirty, in [`UNITS`] of slots.
    pub(in crate::cache) dirty_units: u64,
    /// Slots that hold pages over which records lie.
    pub(in crate::cache) bases: u64,
}

impl Usage {
    /// Slots that hold something.
    pub(in crate::cache) fn used_slots(self) -> u64 {
        self.live + self.splits - self.parts
    }

    /// Dirty slots that can be cleaned; the parts of one count together.
    fn cleanable(self) -> u64 {
        (self.dirty - self.waiting).min(self.dirty_units.div_ceil(UNITS.into()))
    }

    /// Both together.
    pub(in crate::cache) fn plus(self, other: Self) -> Self {
        Self {
            live: self.live + other.live,
            dirty: self.dirty + other.dirty,
            waiting: self.waiting + other.waiting,
            retained: self.retained + other.retained,
            records: self.records + other.records,
            parts: self.parts + other.parts,
            splits: self.splits + other.splits,
            dirty_units: self.dirty_units + other.dirty_units,
            bases: self.bases + other.bases,
        }
    }
}

/// A group of writes that is not yet committed.
#[derive(Default)]
struct OpenGroup {
    /// Its pages.
    pages: Vec<u64>,
    /// The slots that its members replaced, by their numbers in the shard.
    retained: Vec<u32>,
}

/// The slots that a shard can give out: what each write changes, apart from what writes only read.
/// So two threads that write to a shard in turn pass these lines from CPU to CPU, and few others.
#[derive(Default)]
#[repr(align(64))]
struct Stock {
    next_version: u64,
    first_free: u64,
    free: u32,
    /// Dead slots, by their numbers in the shard.
    dead: SmallVec<[u32; 8]>,
    /// Pages that are held, as often as they are.
    held: SmallVec<[u64; 2]>,
}

/// The pages and slots of one shard.
pub(in crate::cache) struct Shard {
    stock: Stock,
    slots: Slots,
    /// Slots from this number on leave.
    usable: u32,
    /// Leaving slots whose headers are durably void.
    left: Vec<u32>,
    /// Leaving slots that are dead.
    left_dead: Vec<u32>,
    /// The orders of eviction, by IO class. By dense numbers, as those of `cleaner` are.
    pub(in crate::cache) orders: Orders,
    pub(in crate::cache) cleaner: Cleaner,
    /// The groups that are not yet committed, by their parity.
    groups: [OpenGroup; 2],
    /// By the slot of a record: the slot of the page over which it lies.
    bases: HashMap<u32, u32>,
    /// Slots of dirty pages that are all zeroes.
    zeroed: BTreeSet<u32>,
    usage: Usage,
    /// Pages that are being cleaned, to leave the cache afterwards.
    pub(in crate::cache) departing: u32,
    /// Pages that are stuck.
    stuck: BTreeSet<u64>,
    /// Slots that stay taken, for the memory failed.
    lost_slots: u32,
}

/// How many of `slots` slots are those of shard `number` among `shards`.
pub(in crate::cache) fn slots_of(number: u32, shards: u32, slots: u32) -> u32 {
    (slots - number).div_ceil(shards)
}

impl Shard {
    /// Shard `number` of all that `sharding` has, which have `slots` slots together: all free.
    pub(in crate::cache) fn new(
        number: u32,
        sharding: Sharding,
        slots: u32,
        replacement: &'static ReplacementEntry,
    ) -> Self {
        let own = slots_of(number, sharding.count, slots);
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
            orders: Orders::new(replacement, own),
            cleaner: Cleaner::none(),
            groups: Default::default(),
            bases: HashMap::new(),
            zeroed: BTreeSet::new(),
            usage: Usage::default(),
            departing: 0,
            stuck: BTreeSet::new(),
            lost_slots: 0,
        }
    }

    /// Appends the slots with the dense numbers `dense` to `out`.
    fn add_found(&self, dense: Vec<u32>, out: &mut Vec<Found>) {
        out.extend(dense.into_iter().map(|dense| self.found(self.slots.of_dense(dense))));
    }

    /// Shows the newest version of each page to `see`.
    pub(in crate::cache) fn each_live(&self, mut see: impl FnMut(Found)) {
        let live = self.slots.numbers().filter(|own| self.slots[*own].is(LIVE));
        live.for_each(|own| see(self.found(own)));
    }

    /// At most one clean page of each of `parts` parts of the slots.
    pub(in crate::cache) fn clean_samples(&self, parts: u32) -> Vec<Found> {
        let end = |part: u32| u64::from(self.slot_count()) * u64::from(part) / u64::from(parts);
        let is_clean = |(_, slot): &(u32, Slot)| slot.is(LIVE) && !slot.is(DIRTY | RECORD);
        let first = |part| self.slots.whole(end(part), end(part + 1)).find(is_clean);
        (0..parts).filter_map(first).map(|(own, _)| self.found(own)).collect()
    }

    fn found(&self, own: u32) -> Found {
        let slot = self.slots[own];
        Found {
            page: slot.page(),
            slot: self.slots.number_of(own),
            version: slot.version,
            dirty: slot.is(DIRTY),
            zero: slot.is(ZERO),
            record: slot.is(RECORD),
            base: self.base_of(own),
            verified: !slot.is(UNVERIFIED),
        }
    }

    /// The page over which the record in slot `own` lies.
    fn base_of(&self, own: u32) -> Option<Base> {
        let record = self.slots[own];
        if !record.is(RECORD) {
            return None;
        }
        // A lost one has no slot: the record's stands for it, and is not looked at.
        let is_lost = record.is(LOST_BASE);
        let base = if is_lost { own } else { *self.bases.get(&own)? };
        let slot = self.slots[base];
        Some(Base {
            slot: self.slots.number_of(base),
            version: slot.version,
            dirty: slot.is(DIRTY),
            zero: slot.is(ZERO),
            verified: !slot.is(UNVERIFIED),
            is_lost,
        })
    }

    /// The newest version of `page`.
    pub(in crate::cache) fn find(&self, page: u64) -> Option<Found> {
        self.slots.own_of(page).map(|own| self.found(own))
    }

    /// A request of `class` used `found`, which is of this class from now on: a read, or a write
    /// that changed nothing.
    pub(in crate::cache) fn touch(&mut self, found: &Found, class: u8, is_write: bool) {
        let own = self.slots.own(found.slot);
        let (before, class) = (self.slots[own].class(), self.orders.known(class));
        let dense = self.slots.dense(own);
        if before == class {
            return self.orders.of(class).touch(dense, is_write);
        }
        self.orders.of(before).remove(dense, found.page);
        self.change(own, |slot| slot.set_class(class));
        self.orders.of(class).insert(dense, found.page);
    }

    /// The IO class of the page in the slot of `found`.
    pub(in crate::cache) fn class_of(&self, found: &Found) -> u8 {
        self.slots.get(self.slots.own(found.slot)).map_or(0, |slot| slot.class())
    }

    /// The live slot `own` begins to count, for its class too, or ceases to.
    fn count(&mut self, own: u32, begins: bool) {
        let (slot, units) = (self.slots[own], u64::from(self.units(own)));
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
        change(&mut self.slots[own]);
        self.count(own, true);
    }

    /// What a request of `class` that misses `pages` pages may do here, where eviction keeps
    /// `reserve` slots.
    pub(in crate::cache) fn admission(&self, class: u8, pages: u32, reserve: u32) -> Admission {
        self.orders.admission(class, pages, self.available() <= reserve)
    }

    /// The next pages of `class` to evict that take `slots` slots together, as far as there are, in
    /// the order of pages.
    pub(in crate::cache) fn victims_of(&mut self, class: u8, slots: u32) -> Vec<Found> {
        let (mut victims, mut left_units) = (Vec::new(), slots * UNITS);
        // As often as where all of them are records of a unit.
        while left_units > 0 && victims.len() < (slots * UNITS) as usize {
            let mut dense = Vec::new();
            self.orders.of(class).victims(left_units.div_ceil(UNITS) as usize, &mut dense);
            if dense.is_empty() {
                break;
            }
            let units = dense.iter().map(|at| self.units(self.slots.of_dense(*at)));
            left_units = left_units.saturating_sub(units.sum());
            self.add_found(dense, &mut victims);
        }
        each_once(&mut victims);
        victims
    }

    /// Has `classes` decide from now on; none: all pages are of class 0. So are pages of a class
    /// that is no more.
    pub(in crate::cache) fn set_classes(&mut self, classes: Option<Arc<Classes>>) {
        let order = self.order_of_all();
        self.orders.set_classes(classes);
        for own in &order {
            let class = self.orders.known(self.slots[*own].class());
            self.change(*own, |slot| slot.set_class(class));
        }
        self.insert_all(&order);
    }

    /// `found` is still the newest version of its page.
    pub(in crate::cache) fn stands(&self, found: &Found) -> bool {
        self.find(found.page).is_some_and(|now| now.is_same(found))
    }

    /// Slots that can be taken.
    pub(in crate::cache) fn available(&self) -> u32 {
        self.stock.free + u32::try_from(self.stock.dead.len()).unwrap_or(u32::MAX)
    }

    /// Less than `reserve` slots can be taken, also when those are free that are on their way; or
    /// none, for then a writer may wait, and another batch is prepared while one is under way.
    pub(in crate::cache) fn needs_slots(&self, reserve: u32) -> bool {
        let available = self.available();
        available == 0 && reserve > 0 || available.saturating_add(self.departing) < reserve
    }

    /// Number of slots, but for those that leave.
    pub(in crate::cache) fn slot_count(&self) -> u32 {
        self.usable
    }

    /// Entries of what has one for each slot and part.
    pub(in crate::cache) fn capacity(&self) -> u32 {
        self.slots.capacity()
    }

    /// Slot `own` is dead.
    fn die(&mut self, own: u32) {
        if self.slots.part(own).is_some() {
            return self.slots.die(own, self.usable);
        }
        if own < self.usable { self.stock.dead.push(own) } else { self.left_dead.push(own) }
    }

    pub(in crate::cache) fn usage(&self) -> Usage {
        Usage { splits: self.slots.split_count().into(), ..self.usage }
    }

    /// Takes a slot for a record of `lines` lines or for a page, where there are more than
    /// `reserve`; or a part of one that is split, or is to be.
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

    /// Slot `own` gets the next version.
    fn taken(&mut self, own: u32, dead_page: Option<u64>) -> Taken {
        let version = self.stock.next_version;
        self.stock.next_version += 1;
        Taken { slot: self.slots.number_of(own), version, dead_page, units: 0, splits: false }
    }

    /// Slot `whole` is split, none of its units free; returns its first part.
    fn split_whole(&mut self, whole: u32) -> u32 {
        if !self.slots.has_entry() {
            let order = self.order_of_all();
            self.slots.add_entries();
            self.reorder_all(&order);
        }
        self.slots.split(whole)
    }

    /// All pages, the first to be evicted first.
    fn order_of_all(&mut self) -> Vec<u32> {
        let mut order = Vec::new();
        self.orders.victims_of_each(usize::MAX, &mut order);
        order.into_iter().map(|dense| self.slots.of_dense(dense)).collect()
    }

    /// There are other slots: what has an entry for each is made anew, and evicts in `order`.
    fn reorder_all(&mut self, order: &[u32]) {
        let capacity = self.slots.capacity();
        self.orders.resize(self.slots.whole_count(), capacity);
        self.insert_all(order);
        self.slots.rebuild_table();
        let cleaner = self.cleaner.for_slots(capacity);
        self.set_cleaner(cleaner);
    }

    /// Up to `n` slots of which no part is in use. Their pages are held until
    /// [`free_spent`](Self::free_spent).
    pub(in crate::cache) fn take_spent(&mut self, n: usize) -> Vec<Spent> {
        let spent = self.slots.take_spent(n);
        self.hold_pages_of(spent)
    }

    fn hold_pages_of(&mut self, spent: Vec<Spent>) -> Vec<Spent> {
        self.stock.held.extend(spent.iter().flat_map(|it| it.pages.iter().copied()));
        spent
    }

    /// The header of the slot of `spent` is durably void.
    pub(in crate::cache) fn free_spent(&mut self, spent: &Spent) {
        for page in &spent.pages {
            self.drop_hold(Some(*page));
        }
        self.slots.unite(self.slots.own(spent.slot));
        self.free(spent.slot);
    }

    /// The memory failed while the header of the slot of `spent` was voided.
    pub(in crate::cache) fn leave_spent(&mut self, spent: &Spent) {
        self.stuck.extend(&spent.pages);
        self.lost_slots += 1;
    }

    /// Adds those of the next `n` pages to evict to `out` that make free slots, and has all of
    /// `out` in the order of pages, each once. Returns at how many it looked.
    ///
    /// A slot that is split is free when all its parts are, and each of them costs a write to the
    /// backing as a page does. So all leave together, when each of them has come up.
    pub(in crate::cache) fn leaving_victims(&mut self, n: usize, out: &mut Vec<Found>) -> usize {
        let mut dense = Vec::with_capacity(n);
        self.orders.victims(n, &mut dense);
        for at in &dense {
            let own = self.slots.of_dense(*at);
            if self.slots.part(own).is_none() {
                out.push(self.found(own));
            } else if self.slots.offer(own) {
                out.extend(self.slots.live_beside(own).map(|own| self.found(own)));
            }
        }
        each_once(out);
        dense.len()
    }

    /// Takes a slot, a dead one first.
    pub(in crate::cache) fn take(&mut self) -> Option<Taken> {
        let (own, dead_page) = match self.stock.dead.pop() {
            Some(own) => {
                let page = self.slots[own].page();
                // Until the slot's new header is durable, the old one may come back.
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

    /// A taken slot is durable, and holds `page` from now on. The slots before are dead unless they
    /// are retained: that of the newest version, and that of the page over which it lay. No reader
    /// that looks from now on uses them. Returns whether the page had a version before.
    ///
    /// A page over which the new version lies is not replaced.
    pub(in crate::cache) fn publish(&mut self, page: u64, taken: &Taken, stored: Stored) -> bool {
        self.drop_hold(taken.dead_page);
        let own = if taken.splits {
            self.split_whole(self.slots.own(whole_slot(taken.slot)))
        } else {
            self.slots.own(taken.slot)
        };
        if taken.units > 0 {
            self.slots.fill(own, taken.units, self.usable);
        }
        let Stored { dirty, zero, record, over, group, class } = stored;
        let class = self.orders.known(class);
        let flags = flag(dirty, DIRTY) | flag(zero, ZERO) | flag(record, RECORD);
        let word = page << PAGE_SHIFT | LIVE | flags | u64::from(class) << CLASS_SHIFT;
        let Some(old) = self.slots.place(own, Slot { word, version: taken.version }) else {
            self.enter(own);
            self.insert(own);
            self.join_group(own, None, group);
            return false;
        };
        self.exchange(old, own);
        self.reorder(old, own, page);
        let is_record = self.slots[old].is(RECORD);
        let under = if is_record { self.bases.remove(&old) } else { None };
        if over {
            self.lay_over(own, under.unwrap_or(old));
        } else if let Some(under) = under {
            self.drop_base(under, group);
        }
        if over && under.is_none() {
            let before = self.slots[old].word;
            self.wait_for_group(own, before, group);
        } else if !self.join_group(own, Some(old), group) {
            self.die(old);
        }
        true
    }

    /// The record in slot `own` lies over the page in slot `under`.
    fn lay_over(&mut self, own: u32, under: u32) {
        let slot = self.slots[under];
        self.usage.bases += u64::from(!slot.is(BASE));
        self.slots[under].word = self.slots[under].word & !LIVE | BASE;
        self.bases.insert(own, under);
    }

    /// No record lies over the page in slot `under` any more. It counts until `group` is committed,
    /// or with group 0 is dead.
    fn drop_base(&mut self, under: u32, group: u64) {
        self.forget_base(under);
        if group == 0 {
            return self.die(under);
        }
        self.groups[parity(group)].retained.push(under);
        self.usage.retained += 1;
    }

    fn forget_base(&mut self, under: u32) {
        self.slots[under].word &= !BASE;
        self.usage.bases -= 1;
    }

    /// A page may be kept under a record: they take two slots, so there are few of them.
    pub(in crate::cache) fn may_lay_over(&self) -> bool {
        self.usage.bases * BASES_ONE_IN < u64::from(self.slot_count())
    }

    /// A write put `page`, which was in `old`, into `own`.
    fn reorder(&mut self, old: u32, own: u32, page: u64) {
        let [before, class] = [old, own].map(|it| self.slots[it].class());
        let [old, own] = [old, own].map(|it| self.slots.dense(it));
        if before == class {
            return self.orders.of(class).moved(old, own, page);
        }
        self.orders.of(before).remove(old, page);
        self.orders.of(class).insert(own, page);
    }

    /// The version in slot `own` replaces that in `old`, as a member of `group` unless 0. True:
    /// `old` is retained until the commit.
    fn join_group(&mut self, own: u32, old: Option<u32>, group: u64) -> bool {
        let before = old.map_or(0, |old| self.slots[old].word);
        self.wait_for_group(own, before, group);
        let is_member = |parity: usize| before & MEMBER != 0 && before & WAITS[parity] != 0;
        let Some(old) = old.filter(|_| group > 0 && !is_member(parity(group))) else {
            return false;
        };
        self.groups[parity(group)].retained.push(old);
        self.usage.retained += 1;
        true
    }

    /// The page of slot `own`, the version before of which has the flags `before`, waits for
    /// `group` unless 0, and for what it waited for before.
    fn wait_for_group(&mut self, own: u32, before: u64, group: u64) {
        self.slots[own].word |= before & WAITS_ANY;
        if group == 0 {
            return;
        }
        let (parity, page) = (parity(group), self.slots[own].page());
        if before & WAITS_ANY == 0 {
            self.usage.waiting += 1;
        }
        if before & WAITS[parity] == 0 {
            self.groups[parity].pages.push(page);
        }
        self.slots[own].word |= WAITS[parity] | MEMBER;
    }

    /// `group` is committed: up to `n` of the slots that its members replaced are dead, and when
    /// all are, up to `n` of its pages stop to wait for it. False: these were the last.
    pub(in crate::cache) fn release(&mut self, group: u64, n: usize) -> bool {
        let parity = parity(group);
        let retained = &mut self.groups[parity].retained;
        let dead = retained.split_off(retained.len().saturating_sub(n));
        self.usage.retained -= dead.len() as u64;
        for own in dead {
            self.die(own);
        }
        if !self.groups[parity].retained.is_empty() {
            return true;
        }
        // Not before: a page that waits no longer may leave the cache, which finds dead slots only.
        let pages = &mut self.groups[parity].pages;
        let released = pages.split_off(pages.len().saturating_sub(n));
        for page in released {
            self.stop_waiting(page, parity);
        }
        !self.groups[parity].pages.is_empty()
    }

    fn stop_waiting(&mut self, page: u64, parity: usize) {
        let Some(own) = self.slots.own_of(page) else { return };
        let slot = &mut self.slots[own];
        slot.word &= !WAITS[parity];
        if slot.word & WAITS_ANY == 0 {
            slot.word &= !MEMBER;
            self.usage.waiting -= 1;
        }
    }

    /// `page` has a member of a group that is not yet committed.
    pub(in crate::cache) fn waits(&self, page: u64) -> bool {
        self.slots.own_of(page).is_some_and(|own| self.slots[own].is(WAITS_ANY))
    }

    /// Groups that are not yet committed hold so many slots that writers may find none.
    pub(in crate::cache) fn is_pinned(&self) -> bool {
        let pinned = self.usage.waiting + self.usage.retained + self.usage.bases;
        pinned * 8 >= u64::from(self.slot_count()) * 7
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
        self.slots[own].word &= !LIVE;
    }

    /// Slot `own` is live in place of `old`, which has the same page. Where both come under the
    /// same counts these do not change.
    fn exchange(&mut self, old: u32, own: u32) {
        let [before, now] = [old, own].map(|it| (self.slots[it].word & COUNTED, self.units(it)));
        if before != now {
            self.enter(own);
            return self.leave(old);
        }
        self.note_dirty(own);
        self.note_left(old);
        self.slots[old].word &= !LIVE;
    }

    /// How many units slot or part `own` has.
    #[inline]
    fn units(&self, own: u32) -> u32 {
        self.slots.part(own).map_or(UNITS, |(it, unit)| it.units(unit))
    }

    /// Tells of the slot `own`, which became live, where it is dirty.
    fn note_dirty(&mut self, own: u32) {
        let slot = self.slots[own];
        if slot.is(DIRTY) {
            self.cleaner.dirtied(self.slots.dense(own), slot.page());
            if slot.is(ZERO) {
                self.zeroed.insert(own);
            }
        }
    }

    /// Tells of the slot `own`, which is live no more, where it was dirty.
    fn note_left(&mut self, own: u32) {
        let slot = self.slots[own];
        if slot.is(ZERO) {
            self.zeroed.remove(&own);
        }
        if slot.is(DIRTY) {
            self.cleaner.cleaned(self.slots.dense(own), slot.page());
        }
    }

    fn drop_hold(&mut self, page: Option<u64>) {
        let held = &mut self.stock.held;
        if let Some(at) = page.and_then(|page| held.iter().position(|it| *it == page)) {
            held.swap_remove(at);
        }
    }

    /// `page` may not be removed now.
    pub(in crate::cache) fn is_held(&self, page: u64) -> bool {
        self.stock.held.contains(&page) || self.is_stuck(page)
    }

    /// `page` is stuck from now on.
    pub(in crate::cache) fn stick(&mut self, page: u64) {
        self.stuck.insert(page);
    }

    /// A version of `page` may be durable that no slot here tells of.
    pub(in crate::cache) fn is_stuck(&self, page: u64) -> bool {
        self.stuck.contains(&page)
    }

    /// The memory failed while the slot `taken` was filled for `page`. It is free where its header
    /// is durably void and its data `is_whole`, and stays taken elsewhere.
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

    /// `slot` stays taken, and where it is a part no other one of its slot is taken any more.
    pub(in crate::cache) fn lose(&mut self, slot: u32) {
        let own = self.slots.own(slot);
        let is_first = self.slots.part(own).is_none() || self.slots.lose(own);
        self.lost_slots += u32::from(is_first);
    }

    /// Some slots cannot become free, for the memory failed.
    pub(in crate::cache) fn keeps_slots(&self) -> bool {
        self.lost_slots > 0 || !self.stuck.is_empty()
    }

    /// No slot can be taken any more: each is lost, or holds a page that is stuck.
    pub(in crate::cache) fn is_exhausted(&self) -> bool {
        if self.lost_slots == 0 && self.stuck.is_empty() || self.available() > 0 {
            return false;
        }
        let stuck = self.stuck.iter().filter_map(|page| self.find(*page));
        let slots_of = |found: Found| {
            let slots = [Some(found.slot), found.base.map(|base| base.slot)];
            slots.into_iter().flatten().filter(|slot| !self.slots.is_lost(self.slots.own(*slot)))
        };
        let slots: BTreeSet<u32> = stuck.flat_map(slots_of).map(whole_slot).collect();
        self.lost_slots as usize + slots.len() >= self.slot_count() as usize
    }

    /// Takes all older slots of `page` away, for the caller to void: dead ones, and that of the
    /// page over which a record lies. The page is clean, so the backing has what is under the
    /// record.
    pub(in crate::cache) fn take_older_of(&mut self, page: u64, out: &mut Vec<u32>) {
        if let Some(under) = self.slots.own_of(page).and_then(|own| self.bases.remove(&own)) {
            self.forget_base(under);
            out.push(self.slots.number_of(under));
        }
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

    /// Removes `found`, whose header is durably void; the slot is the caller's.
    pub(in crate::cache) fn remove(&mut self, found: &Found) {
        if let Some(own) = self.slots.remove(found.page) {
            let (class, dense) = (self.slots[own].class(), self.slots.dense(own));
            self.orders.of(class).remove(dense, found.page);
            self.leave(own);
        }
    }

    /// `slot`, whose header is durably void, is free.
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

    /// The backing has flushed the bytes of `found`, which may be replaced by now.
    pub(in crate::cache) fn cleaned(&mut self, found: &Found) {
        let own = self.slots.own(found.slot);
        if self.stands(found) && self.slots[own].is(DIRTY) {
            self.change(own, |slot| slot.word &= !DIRTY);
            self.zeroed.remove(&own);
            if let Some(under) = self.bases.get(&own) {
                self.slots[*under].word &= !DIRTY;
            }
            self.cleaner.cleaned(self.slots.dense(own), found.page);
        }
    }

    /// `found` is the newest version of its page, dirty, and waits for no commit.
    pub(in crate::cache) fn can_be_cleaned(&self, found: &Found) -> bool {
        self.stands(found) && self.slots[self.slots.own(found.slot)].can_be_cleaned()
    }

    /// The data of `found` is as its checksum says.
    pub(in crate::cache) fn verified(&mut self, found: &Found) {
        if self.stands(found) {
            let own = self.slots.own(found.slot);
            self.slots[own].word &= !UNVERIFIED;
        }
    }

    /// Adds up to `n` dirty pages that are all zeroes to `out`, where there are at least `least`,
    /// and forgets that they are: those that stay are evicted in their order.
    pub(in crate::cache) fn zeroed(&mut self, least: usize, n: usize, out: &mut Vec<Found>) {
        if self.zeroed.len() < least {
            return;
        }
        for _ in 0..n {
            let Some(own) = self.zeroed.pop_first() else { return };
            out.push(self.found(own));
        }
    }

    /// Adds up to `n` pages of each IO class to `out`.
    pub(in crate::cache) fn victims_of_each(&mut self, n: usize, out: &mut Vec<Found>) {
        let mut slots = Vec::new();
        self.orders.victims_of_each(n, &mut slots);
        self.add_found(slots, out);
    }

    /// Adds up to `n` dirty pages that can be cleaned to `out`, from the slot with the number
    /// `from` in this shard on, and returns where to go on, also where the shard gets another size.
    pub(in crate::cache) fn dirty_from(&self, from: u32, n: usize, out: &mut Vec<Found>) -> u32 {
        let (found, next) = self.slots.from(from, n, Slot::can_be_cleaned);
        out.extend(found.into_iter().map(|own| self.found(own)));
        next
    }

    /// Adds up to `n` clean pages to `out`, from the slot with the number `from` in this shard on,
    /// and returns where to go on, also where the shard gets another size.
    pub(in crate::cache) fn clean_from(&self, from: u32, n: usize, out: &mut Vec<Found>) -> u32 {
        let (found, next) = self.slots.from(from, n, |it| it.is(LIVE) && !it.is(DIRTY));
        out.extend(found.into_iter().map(|own| self.found(own)));
        next
    }

    /// `found` is the newest version of its page, clean, and leaves the cache once no writer holds
    /// its page.
    pub(in crate::cache) fn can_leave(&self, found: &Found) -> bool {
        self.stands(found)
            && !self.slots[self.slots.own(found.slot)].is(DIRTY)
            && !self.is_stuck(found.page)
    }

    /// Adds the pages that the policy of cleaning names to `out`. Returns after how many
    /// nanoseconds to ask it again.
    pub(in crate::cache) fn next_to_clean(
        &mut self,
        now_ns: u64,
        last_request_ns: u64,
        out: &mut Vec<Found>,
    ) -> u64 {
        let (dirty_slots, slots) = (self.usage.cleanable(), self.slot_count().into());
        let load = Load { now_ns, last_request_ns, dirty_slots, slots };
        let mut named = Vec::new();
        let rest_ns = self.cleaner.policy.next(&load, &self.slots, &mut named);
        self.add_found(named, out);
        rest_ns
    }

    /// `found` could not be cleaned, if it is still dirty.
    pub(in crate::cache) fn put_off(&mut self, found: &Found) {
        let own = self.slots.own(found.slot);
        if self.stands(found) && self.slots[own].is(DIRTY) {
            self.cleaner.put_off(self.slots.dense(own));
        }
    }

    /// Has `cleaner` clean the shard from now on; it hears of the dirty pages, the oldest version
    /// first.
    pub(in crate::cache) fn set_cleaner(&mut self, cleaner: Cleaner) {
        self.cleaner = cleaner;
        if !self.cleaner.entry.hears {
            return;
        }
        let is_dirty = |own: &u32| self.slots[*own].is_dirty();
        let mut dirty: Vec<u32> = self.slots.numbers().filter(is_dirty).collect();
        dirty.sort_unstable_by_key(|own| self.slots[*own].version);
        for own in dirty {
            self.cleaner.dirtied(self.slots.dense(own), self.slots[own].page());
        }
    }

    /// The policy is to be asked at `now_ns`.
    pub(in crate::cache) fn wants_cleaning(&self, now_ns: u64) -> bool {
        self.cleaner.is_due(now_ns, self.usage.cleanable(), self.slot_count().into())
    }

    /// Reads where `page` is looked for, and nothing else.
    pub(in crate::cache) fn look_up_ahead(&self, page: u64) -> u32 {
        self.slots.look_up_ahead(page)
    }

    /// At opening: `slot` holds a header of `page`. Returns the version that it replaces, or
    /// itself where a newer one is here. [`recovered`](Self::recovered) gives the pages an order.
    pub(in crate::cache) fn recover(&mut self, found: Found) -> Option<Found> {
        debug_assert!(found.page < PAGES_MAX);
        let known = self.find(found.page);
        if known.is_some_and(|known| known.version >= found.version) {
            return Some(found);
        }
        if let Some(known) = &known {
            self.remove(known);
        }
        let flags = LIVE
            | flag(found.dirty, DIRTY)
            | flag(found.zero, ZERO)
            | flag(found.record, RECORD)
            | flag(!found.verified, UNVERIFIED);
        let own = self.slots.own(found.slot);
        self.slots
            .place(own, Slot { word: found.page << PAGE_SHIFT | flags, version: found.version });
        self.enter(own);
        known
    }

    /// At opening: `slot` is split. None of its parts is taken before all headers were seen.
    pub(in crate::cache) fn recover_split(&mut self, slot: u32) {
        let first = self.split_whole(self.slots.own(slot));
        self.slots.fill(first, 0, 0);
    }

    /// At opening: the part `slot` has a header, of a record of `lines` lines.
    pub(in crate::cache) fn recover_part(&mut self, slot: u32, lines: u32) {
        let own = self.slots.own(slot);
        self.slots.fill(own, units_of(lines), 0);
    }

    /// At opening: the record in the slot of `found` lies over the page in slot `under`, or over
    /// one that is damaged.
    pub(in crate::cache) fn recover_base(&mut self, found: &Found, under: Option<&Found>) {
        let own = self.slots.own(found.slot);
        let Some(under) = under else {
            self.slots[own].word |= LOST_BASE;
            return;
        };
        let flags = flag(under.dirty, DIRTY) | flag(under.zero, ZERO) | UNVERIFIED;
        let word = under.page << PAGE_SHIFT | flags;
        let base = self.slots.own(under.slot);
        self.slots[base] = Slot { word, version: under.version };
        self.lay_over(own, base);
    }

    /// At opening, when all headers were seen: all slots that hold no page are free, versions go on
    /// behind `newest`, and the pages get their order, the oldest version first.
    pub(in crate::cache) fn recovered(&mut self, newest: u64) {
        self.stock.next_version = newest + 1;
        (self.stock.first_free, self.stock.free) = (NONE, 0);
        for own in (0..self.slot_count()).rev() {
            if !self.slots[own].is(LIVE | BASE) {
                self.free(self.slots.number_of(own));
            }
        }
        self.slots.free_unused_parts(self.usable);
        let is_live = |own: &u32| self.slots[*own].is(LIVE);
        let mut live: Vec<u32> = self.slots.numbers().filter(is_live).collect();
        live.sort_unstable_by_key(|own| self.slots[*own].version);
        self.insert_all(&live);
    }

    /// Has `replacement` order the pages from now on. It begins with the order in which they would
    /// have been evicted.
    pub(in crate::cache) fn set_replacement(&mut self, replacement: &'static ReplacementEntry) {
        let order = self.order_of_all();
        self.orders.set_replacement(replacement);
        self.insert_all(&order);
    }

    /// Puts the pages in the slots `order` into empty orders, the first to be evicted first.
    fn insert_all(&mut self, order: &[u32]) {
        for own in order {
            self.insert(*own);
        }
    }

    /// Puts the page in slot `own` into its order.
    fn insert(&mut self, own: u32) {
        let (slot, dense) = (self.slots[own], self.slots.dense(own));
        self.orders.of(slot.class()).insert(dense, slot.page());
    }

    /// Bytes of memory but for those of the replacement policy.
    #[cfg(all(test, not(loom)))]
    pub(in crate::cache) fn bytes(&self) -> usize {
        self.slots.bytes()
    }
}

/// Has `victims` in the order of pages, each once: a short order was gone through twice.
fn each_once(victims: &mut Vec<Found>) {
    victims.sort_unstable_by_key(|found| found.page);
    victims.dedup_by_key(|found| found.page);
}

/// `flag` where it is so.
fn flag(is: bool, flag: u64) -> u64 {
    if is { flag } else { 0 }
}
