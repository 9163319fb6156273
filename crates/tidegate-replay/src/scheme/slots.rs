//! Persistent memory in slots of 4 KiB, each of which holds a page or 56 cache lines of any pages,
//! as AFCM lays them out (sections 3.2.1 and 3.2.2).
//!
//! The schemes differ in what a sync copies of a page: `sccm`, the paper's conventional one, all of
//! it to a slot; `sfcm` its dirty lines to slots of 56 lines; `afcm` what costs less space.
//!
//! - A page that DRAM gives up is written to flash where that does not have all of it, and leaves
//!   persistent memory: that keeps no page that DRAM does not have.
//! - A page that persistent memory gives up is written to flash out of DRAM, where it stays, clean,
//!   in its place in the order.
//!
//! A slot of lines begins with 512 bytes that say which lines it holds: a bitmap, a bitmap of
//! versions, and 8 bytes a line. What slots of pages hold is in global metadata pages: 8 bytes a
//! slot, 2 bits of state, and a bit of version.
//!
//! Pages leave in the order of their last sync: the core's [`Lrw`].
//!
//! Where the paper leaves a choice open:
//! - a page that has a slot of its own keeps it when a sync of it would rather be lines: these are
//!   stored in the slot;
//! - with atomic syncs nothing is stored over what counts, so that page is stored whole into
//!   another slot; lines that the sync does not cover stay where they are;
//! - space of older versions is released at the end of a sync, or where the log is full or nothing
//!   else is left to release.

use tidegate::cache::policy::{Replacement, lrw::Lrw};
use tidegate::tier::list::{Links, List};

use super::devices::{Devices, Source};
use super::hybrid::{Durable, Hybrid};
use super::page::{ALL_LINES, LINE_BYTES, PAGE_BYTES, bits};
use super::page_cache::PageCache;
use super::{Scheme, Sizes, tcow};
use crate::error::Result;

/// Lines of a slot that holds lines.
pub const FINE_LINES: u32 = 56;
/// What says which lines a slot holds.
pub const FINE_METADATA_BYTES: u64 = 512;
const ALL_FINE: u64 = (1 << FINE_LINES) - 1;
/// A place of a line is its slot's number times this, and its number in the slot.
const PLACES_A_SLOT: u32 = 64;
const MAX_SLOTS: u64 = (u32::MAX / PLACES_A_SLOT) as u64;
const NOWHERE: u32 = u32::MAX;
/// A word of a bitmap, of the global map, or an entry for a line.
const WORD_BYTES: u64 = 8;
/// Bits of the global map for a slot: what it holds, its state and its version.
const MAP_BITS: u64 = 64 + 2 + 1;
/// DRAM for a page that is kept: its key and first extent in a hash table, and its links.
const INDEX_PAGE_BYTES: u64 = 40;
/// DRAM for an extent: three numbers, and the next one.
const INDEX_EXTENT_BYTES: u64 = 32;

/// How a page is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Whole, in a slot of its own.
    Coarse,
    /// Its dirty lines, in slots with those of other pages.
    Fine,
}

/// What `afcm` chooses for a page with these dirty lines, by the paper's equations 1 and 2: fine
/// where the lines that are not stored are more than the share of metadata of those that are.
pub(super) fn cheaper(dirty: u64) -> Kind {
    let dirty = dirty.count_ones();
    let benefit = u64::from(64 - dirty) * LINE_BYTES;
    // Both sides times the lines of a slot.
    let is_fine = benefit * u64::from(FINE_LINES) > u64::from(dirty) * FINE_METADATA_BYTES;
    if is_fine { Kind::Fine } else { Kind::Coarse }
}

/// The scheme that stores a page as `kind_of` says of its dirty lines; `has_map` where that may be
/// whole.
pub fn hybrid(sizes: &Sizes, has_map: bool, kind_of: fn(u64) -> Kind) -> Box<dyn Scheme> {
    let dram = PageCache::new(sizes.dram_pages);
    let count = slots_of(sizes, has_map);
    let slots = Pmem::new(count, dram.capacity(), sizes.atomic, kind_of);
    Box::new(Hybrid::new(dram, slots))
}

/// What persistent memory has of a page in DRAM.
enum Held {
    Nothing,
    /// All of it, in this slot.
    Coarse(u32),
    Fine(Box<Lines>),
}

/// Lines of a page.
struct Lines {
    stored: u64,
    /// By line: where it is.
    places: [u32; 64],
}

impl Lines {
    const EMPTY: Self = Self { stored: 0, places: [NOWHERE; 64] };

    /// Neighbours that lie together: extents of the paper's index.
    fn extents(&self) -> u64 {
        let follows = |line: usize| {
            let has = self.stored >> line & 1 != 0;
            let joins = line > 0 && self.stored >> (line - 1) & 1 != 0;
            has && !(joins && self.places[line] == self.places[line - 1].wrapping_add(1))
        };
        (0..64).filter(|line| follows(*line)).count() as u64
    }

    fn each(&self, lines: u64) -> impl Iterator<Item = u32> {
        bits(lines & self.stored).map(|line| self.places[line as usize])
    }
}

/// A slot of persistent memory.
#[derive(Clone)]
struct Slot {
    /// Its lines that are taken; none for a slot that is free or holds a page.
    taken: u64,
    /// By taken line: the DRAM slot of its page.
    owners: Box<[u32]>,
}

/// Persistent memory for synced pages.
pub struct Pmem {
    kind_of: fn(u64) -> Kind,
    /// How many slots there are, here and in DRAM: all tables are empty until the first sync.
    count: u32,
    dram_slots: u32,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slots of lines that are not full, and how many lines they have left.
    partial: List,
    links: Links,
    partial_lines: u64,
    /// By DRAM slot.
    held: Vec<Held>,
    order: Lrw,
    /// The DRAM slot that is being synced: in no order, and not given up.
    busy: u32,
    index_bytes: u64,
    index_bytes_peak: u64,
    /// With atomic syncs: what this sync replaced.
    replaced: Option<Replaced>,
    victims: Vec<u32>,
}

/// Space of older versions.
#[derive(Default)]
struct Replaced {
    slots: Vec<u32>,
    places: Vec<u32>,
    /// Entries of the log.
    pages: u64,
}

impl Pmem {
    fn new(count: u32, dram_slots: u32, is_atomic: bool, kind_of: fn(u64) -> Kind) -> Self {
        Self {
            kind_of,
            count,
            dram_slots,
            slots: Vec::new(),
            free: Vec::new(),
            partial: List::EMPTY,
            links: Links::new(0),
            partial_lines: 0,
            held: Vec::new(),
            order: Lrw::new(0),
            busy: NOWHERE,
            index_bytes: 0,
            index_bytes_peak: 0,
            replaced: is_atomic.then(Replaced::default),
            victims: Vec::new(),
        }
    }

    /// Makes the tables, unless a sync has made them: a trace without syncs needs none.
    fn make_tables(&mut self) {
        if self.held.is_empty() {
            self.slots = vec![Slot { taken: 0, owners: Box::default() }; self.count as usize];
            self.free = (0..self.count).rev().collect();
            self.links = Links::new(self.count);
            self.held = (0..self.dram_slots).map(|_| Held::Nothing).collect();
            self.order = Lrw::new(self.dram_slots);
        }
    }

    /// Stores the page of `slot` whole. False: there is no space for it.
    fn store_page(&mut self, slot: u32, dram: &mut PageCache, devices: &mut dyn Devices) -> bool {
        let page = dram.id(slot);
        if let Held::Coarse(_) = self.held[slot as usize]
            && self.replaced.is_none()
        {
            devices.pmem_store(page, ALL_LINES);
            devices.pmem_fence();
            return true;
        }
        self.begin_page(slot, devices);
        let Some(number) = self.take_slot(dram, devices) else { return false };
        devices.pmem_store(page, ALL_LINES);
        devices.pmem_fence();
        store_words(2, devices);
        let old = std::mem::replace(&mut self.held[slot as usize], Held::Coarse(number));
        self.give_up_old(old, devices);
        self.end_page(devices);
        true
    }

    /// Stores the dirty lines of `slot`, whose page has no slot of its own. False: there is no
    /// space.
    fn store_lines(&mut self, slot: u32, dram: &mut PageCache, devices: &mut dyn Devices) -> bool {
        let lines = dram.dirty_lines(slot);
        let stored = if let Held::Fine(old) = &self.held[slot as usize] { old.stored } else { 0 };
        let new = if self.replaced.is_some() { lines } else { lines & !stored };
        self.begin_page(slot, devices);
        if !self.make_space(new.count_ones(), dram, devices) {
            return false;
        }
        let mut held = match std::mem::replace(&mut self.held[slot as usize], Held::Nothing) {
            Held::Fine(held) => held,
            _ => Box::new(Lines::EMPTY),
        };
        if let Some(replaced) = &mut self.replaced {
            replaced.places.extend(held.each(lines));
        }
        for line in bits(new) {
            held.places[line as usize] = self.take_place(slot, devices);
        }
        held.stored |= lines;
        devices.index_steps(lines.count_ones());
        devices.pmem_store(dram.id(slot), lines);
        devices.pmem_fence();
        Self::describe(held.each(new), devices);
        self.held[slot as usize] = Held::Fine(held);
        self.end_page(devices);
        true
    }

    /// Stores the entries of `places`, and then the bitmaps that make them count.
    fn describe(places: impl Iterator<Item = u32>, devices: &mut dyn Devices) {
        let mut numbers = slots_with(places);
        if numbers.is_empty() {
            return;
        }
        for same in numbers.chunk_by(|one, other| one == other) {
            devices.pmem_metadata(same.len() as u64 * WORD_BYTES);
        }
        devices.pmem_fence();
        numbers.dedup();
        store_words(numbers.len(), devices);
    }

    /// A slot that is free; pages leave for it. None: there is none.
    fn take_slot(&mut self, dram: &mut PageCache, devices: &mut dyn Devices) -> Option<u32> {
        while self.free.is_empty() {
            if let Some(victim) = self.victim() {
                self.evict_for_slot(victim, dram, devices);
            } else if !self.release_replaced(devices) {
                return None;
            }
        }
        self.free.pop()
    }

    /// Evicts `victim`, and if it is lines all pages with lines in the slot with most of them.
    fn evict_for_slot(&mut self, victim: u32, dram: &mut PageCache, devices: &mut dyn Devices) {
        let Held::Fine(lines) = &self.held[victim as usize] else {
            return self.evict(victim, dram, devices);
        };
        let most = slot_with_most(lines);
        let Slot { taken, owners } = &self.slots[most as usize];
        let mut pages: Vec<u32> = bits(*taken).map(|line| owners[line as usize]).collect();
        pages.sort_unstable();
        pages.dedup();
        // Replaced lines have no owner.
        pages.retain(|page| *page != self.busy && *page != NOWHERE);
        for page in pages {
            self.evict(page, dram, devices);
        }
    }

    /// Evicts pages until `lines` lines are free. False: there are not as many.
    fn make_space(&mut self, lines: u32, dram: &mut PageCache, devices: &mut dyn Devices) -> bool {
        let free =
            |this: &Self| this.partial_lines + this.free.len() as u64 * u64::from(FINE_LINES);
        while free(self) < u64::from(lines) {
            if let Some(victim) = self.victim() {
                self.evict(victim, dram, devices);
            } else if !self.release_replaced(devices) {
                return false;
            }
        }
        true
    }

    /// The page that was synced least recently.
    fn victim(&mut self) -> Option<u32> {
        self.victims.clear();
        self.order.victims(1, &mut self.victims);
        self.victims.first().copied()
    }

    /// Writes the page of `slot` to flash and gives it up.
    fn evict(&mut self, slot: u32, dram: &mut PageCache, devices: &mut dyn Devices) {
        devices.ssd_write(dram.id(slot), Source::Dram);
        devices.ssd_flush();
        dram.clean(slot);
        self.release(slot, devices);
        devices.pmem_forget(dram.id(slot));
    }

    /// A free place for a line of `owner`: there is one.
    fn take_place(&mut self, owner: u32, devices: &mut dyn Devices) -> u32 {
        let number = match self.partial.first() {
            Some(number) => number,
            None => self.begin_lines(devices),
        };
        let slot = &mut self.slots[number as usize];
        let line = (!slot.taken & ALL_FINE).trailing_zeros();
        slot.taken |= 1 << line;
        slot.owners[line as usize] = owner;
        self.partial_lines -= 1;
        if slot.taken == ALL_FINE {
            self.partial.remove(&mut self.links, number);
        }
        number * PLACES_A_SLOT + line
    }

    /// Makes a free slot, of which there is one, one of lines.
    fn begin_lines(&mut self, devices: &mut dyn Devices) -> u32 {
        let number = self.free.pop().unwrap_or_default();
        self.slots[number as usize].owners = [NOWHERE; FINE_LINES as usize].into();
        self.partial.push_last(&mut self.links, number);
        self.partial_lines += u64::from(FINE_LINES);
        devices.pmem_metadata(WORD_BYTES);
        number
    }

    fn free_place(&mut self, place: u32) {
        let (number, line) = (place / PLACES_A_SLOT, place % PLACES_A_SLOT);
        let slot = &mut self.slots[number as usize];
        if slot.taken == ALL_FINE {
            self.partial.push_last(&mut self.links, number);
        }
        slot.taken &= !(1 << line);
        self.partial_lines += 1;
        if slot.taken == 0 {
            slot.owners = Box::default();
            self.partial.remove(&mut self.links, number);
            self.partial_lines -= u64::from(FINE_LINES);
            self.free.push(number);
        }
    }

    /// Releases `places`, each slot's by one store of its bitmap.
    fn free_places(&mut self, places: &[u32], devices: &mut dyn Devices) {
        let mut numbers = slots_with(places.iter().copied());
        numbers.dedup();
        for place in places {
            self.free_place(*place);
        }
        store_words(numbers.len(), devices);
    }

    /// Releases what a page that is stored whole had before, or keeps it until the sync ends.
    fn give_up_old(&mut self, old: Held, devices: &mut dyn Devices) {
        match (old, &mut self.replaced) {
            (Held::Nothing, _) => {}
            (Held::Coarse(number), Some(replaced)) => replaced.slots.push(number),
            (Held::Fine(lines), Some(replaced)) => replaced.places.extend(lines.each(ALL_LINES)),
            (old, None) => self.release_held(&old, devices),
        }
    }

    fn release_held(&mut self, held: &Held, devices: &mut dyn Devices) {
        match held {
            Held::Nothing => {}
            Held::Coarse(number) => {
                self.free.push(*number);
                store_words(1, devices);
            }
            Held::Fine(lines) => {
                let places: Vec<u32> = lines.each(ALL_LINES).collect();
                self.free_places(&places, devices);
            }
        }
    }

    fn begin_page(&self, slot: u32, devices: &mut dyn Devices) {
        if self.replaced.is_some() {
            tcow::begin_page(!matches!(self.held[slot as usize], Held::Nothing), devices);
        }
    }

    fn end_page(&mut self, devices: &mut dyn Devices) {
        let Some(replaced) = &mut self.replaced else { return };
        replaced.pages += 1;
        let is_full = replaced.pages == tcow::ENTRIES;
        // Nobody owns what was replaced: it leaves with the sync, not with its page.
        for place in &replaced.places {
            let slot = &mut self.slots[(place / PLACES_A_SLOT) as usize];
            slot.owners[(place % PLACES_A_SLOT) as usize] = NOWHERE;
        }
        tcow::end_page(devices);
        if is_full {
            self.release_replaced(devices);
        }
    }

    /// Releases what atomic syncs replaced, and so ends the log. False: there is nothing.
    fn release_replaced(&mut self, devices: &mut dyn Devices) -> bool {
        let Some(replaced) = &mut self.replaced else { return false };
        let Replaced { slots, places, pages } = std::mem::take(replaced);
        if pages > 0 {
            tcow::end_sync(devices);
        }
        for number in &slots {
            self.release_held(&Held::Coarse(*number), devices);
        }
        if !places.is_empty() {
            self.free_places(&places, devices);
        }
        !(slots.is_empty() && places.is_empty())
    }

    fn index_bytes_of(&self, slot: u32) -> u64 {
        match &self.held[slot as usize] {
            Held::Nothing => 0,
            Held::Coarse(_) => INDEX_PAGE_BYTES + INDEX_EXTENT_BYTES,
            Held::Fine(lines) => INDEX_PAGE_BYTES + lines.extents() * INDEX_EXTENT_BYTES,
        }
    }

    /// The page of `slot` is kept here, and flash does not have all of it.
    fn holds(&self, slot: u32) -> bool {
        self.held.get(slot as usize).is_some_and(|held| !matches!(held, Held::Nothing))
    }

    /// Gives the page of `slot` up.
    fn release(&mut self, slot: u32, devices: &mut dyn Devices) {
        self.index_bytes -= self.index_bytes_of(slot);
        let held = std::mem::replace(&mut self.held[slot as usize], Held::Nothing);
        self.order.remove(slot, 0);
        self.release_held(&held, devices);
    }
}

impl Durable for Pmem {
    fn sync_page(&mut self, slot: u32, dram: &mut PageCache, devices: &mut dyn Devices) {
        self.make_tables();
        let (page, lines) = (dram.id(slot), dram.dirty_lines(slot));
        self.index_bytes -= self.index_bytes_of(slot);
        self.order.remove(slot, page.page);
        self.busy = slot;
        let is_fine = (self.kind_of)(lines) == Kind::Fine;
        let is_kept = match &self.held[slot as usize] {
            Held::Coarse(_) if is_fine && self.replaced.is_none() => {
                devices.pmem_store(page, lines);
                devices.pmem_fence();
                true
            }
            Held::Nothing | Held::Fine(_) if is_fine => self.store_lines(slot, dram, devices),
            _ => self.store_page(slot, dram, devices),
        };
        self.busy = NOWHERE;
        self.index_bytes += self.index_bytes_of(slot);
        self.index_bytes_peak = self.index_bytes_peak.max(self.index_bytes);
        if is_kept {
            self.order.insert(slot, page.page);
        } else {
            self.evict(slot, dram, devices);
        }
    }

    fn make_way(&mut self, slot: u32, dram: &PageCache, devices: &mut dyn Devices) -> Result<()> {
        let is_held = self.holds(slot);
        if is_held || dram.dirty_lines(slot) != 0 {
            devices.ssd_write(dram.id(slot), Source::Dram);
        }
        if is_held {
            devices.ssd_flush();
        }
        Ok(())
    }

    fn leave(&mut self, slot: u32, dram: &PageCache, devices: &mut dyn Devices) {
        let page = dram.id(slot);
        if self.holds(slot) {
            self.release(slot, devices);
            devices.pmem_forget(page);
        }
        devices.dram_forget(page);
    }

    fn end_sync(&mut self, devices: &mut dyn Devices) -> Result<()> {
        self.release_replaced(devices);
        Ok(())
    }

    fn index_bytes_peak(&self) -> u64 {
        self.index_bytes_peak
    }
}

/// Stores words that lie apart.
fn store_words(count: usize, devices: &mut dyn Devices) {
    for _ in 0..count {
        devices.pmem_metadata(WORD_BYTES);
    }
    devices.pmem_fence();
}

/// The slot of each of `places`, in order.
fn slots_with(places: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut numbers: Vec<u32> = places.map(|place| place / PLACES_A_SLOT).collect();
    numbers.sort_unstable();
    numbers
}

/// The slot in which most of `lines` are.
fn slot_with_most(lines: &Lines) -> u32 {
    let numbers = slots_with(lines.each(ALL_LINES));
    let most = numbers.chunk_by(|one, other| one == other).max_by_key(|same| same.len());
    most.map_or(0, |same| same[0])
}

/// How many slots there are, behind the global metadata pages where slots hold pages, and the log
/// of atomic syncs.
fn slots_of(sizes: &Sizes, has_map: bool) -> u32 {
    let log_bytes = if sizes.atomic { tcow::LOG_BYTES } else { 0 };
    let pages = sizes.pmem_bytes.saturating_sub(log_bytes) / PAGE_BYTES;
    let map_pages = pages.saturating_mul(MAP_BITS).div_ceil(8 * PAGE_BYTES);
    let slots = if has_map { pages.saturating_sub(map_pages) } else { pages };
    // What cannot be used: every page whole and as lines, and as an older version of them.
    let useful = sizes.footprint_pages.saturating_mul(3).saturating_add(2 * tcow::ENTRIES);
    u32::try_from(slots.min(useful).min(MAX_SLOTS)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_to_55_dirty_lines_are_fine() {
        let of = |count: u32| cheaper((1 << count) - 1);
        assert_eq!(
            [of(1), of(55), of(56), of(63)],
            [Kind::Fine, Kind::Fine, Kind::Coarse, Kind::Coarse]
        );
        assert_eq!(cheaper(u64::MAX), Kind::Coarse);
    }
}
