//! Persistent memory in slots of 4 KiB, each with a page or with 56 cache lines of any pages, in
//! AFCM's layout (sections 3.2.1 and 3.2.2).
//!
//! A sync of a page differs by scheme. `sccm`, the paper's conventional scheme, copies the whole
//! page to a slot. `sfcm` copies its dirty lines to slots of 56 lines. `afcm` chooses the form that
//! costs less space.
//!
//! - A page that DRAM evicts is written to flash if flash does not have its newest version. It also
//!   leaves persistent memory, which keeps no page that DRAM does not have.
//! - A page that persistent memory evicts is written from DRAM to flash. It stays in DRAM, clean
//!   and with an unchanged position in the order.
//!
//! A slot of lines begins with 512 bytes of metadata about its lines: a bitmap, a bitmap of
//! versions, and 8 bytes per line. Global metadata pages describe the slots of pages: 8 bytes per
//! slot, 2 bits of state, and a version bit.
//!
//! Eviction is in the order of the last sync: the core's [`Lrw`].
//!
//! Choices that the paper leaves open:
//! - A page with its own slot keeps it when a sync would prefer lines: these are stored in the
//!   slot.
//! - With atomic syncs, no store overwrites the current version, so that such a page is stored
//!   whole in another slot. Lines that the sync does not cover stay where they are.
//! - Space of older versions is released at the end of a sync, or earlier if the log is full or no
//!   other space is left.

use tidegate::cache::policy::{Replacement, lrw::Lrw};
use tidegate::tier::list::{Links, List};

use super::devices::{Devices, Source};
use super::hybrid::{Durable, Hybrid};
use super::page::{ALL_LINES, LINE_BYTES, PAGE_BYTES, bits};
use super::page_cache::PageCache;
use super::{Scheme, Sizes, tcow};
use crate::error::Result;

/// Lines of a slot of lines.
pub const FINE_LINES: u32 = 56;
/// Metadata about the lines of a slot.
pub const FINE_METADATA_BYTES: u64 = 512;
const ALL_FINE: u64 = (1 << FINE_LINES) - 1;
/// Factor of the slot number in the `place` of a line; the rest is the line's number in the slot.
const PLACES_A_SLOT: u32 = 64;
const MAX_SLOTS: u64 = (u32::MAX / PLACES_A_SLOT) as u64;
const NOWHERE: u32 = u32::MAX;
/// Bytes of a word of a bitmap or of the global map, and of an entry for a line.
const WORD_BYTES: u64 = 8;
/// Bits of the global map per slot: content, state and version.
const MAP_BITS: u64 = 64 + 2 + 1;
/// DRAM for a stored page: its key and first extent in a hash table, and its links.
const INDEX_PAGE_BYTES: u64 = 40;
/// DRAM for an extent: three numbers, and the link to the next extent.
const INDEX_EXTENT_BYTES: u64 = 32;

/// The form of a stored page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The whole page, in its own slot.
    Coarse,
    /// The page's dirty lines, in slots with lines of other pages.
    Fine,
}

/// Returns the form that `afcm` chooses for a page with these dirty lines, by the paper's equations
/// 1 and 2: fine if the omitted lines are larger than the metadata of the stored lines.
pub(super) fn cheaper(dirty: u64) -> Kind {
    let dirty = dirty.count_ones();
    let benefit = u64::from(64 - dirty) * LINE_BYTES;
    // Both sides are multiplied by the lines of a slot.
    let is_fine = benefit * u64::from(FINE_LINES) > u64::from(dirty) * FINE_METADATA_BYTES;
    if is_fine { Kind::Fine } else { Kind::Coarse }
}

/// Returns the scheme that stores a page in the form that `kind_of` returns for its dirty lines;
/// `has_map` tells whether that can be [`Kind::Coarse`].
pub fn hybrid(sizes: &Sizes, has_map: bool, kind_of: fn(u64) -> Kind) -> Box<dyn Scheme> {
    let dram = PageCache::new(sizes.dram_pages);
    let count = slots_of(sizes, has_map);
    let slots = Pmem::new(count, dram.capacity(), sizes.atomic, kind_of);
    Box::new(Hybrid::new(dram, slots))
}

/// The stored part of a page in DRAM.
enum Held {
    Nothing,
    /// The whole page, in this slot.
    Coarse(u32),
    Fine(Box<Lines>),
}

/// Stored lines of a page.
struct Lines {
    stored: u64,
    /// Place of each line.
    places: [u32; 64],
}

impl Lines {
    const EMPTY: Self = Self { stored: 0, places: [NOWHERE; 64] };

    /// Returns the number of runs of neighbouring lines: extents of the paper's index.
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
    /// Mask of used lines; 0 for a slot that is free or holds a page.
    taken: u64,
    /// DRAM slots of the pages of used lines, by line.
    owners: Box<[u32]>,
}

/// Persistent memory for synced pages.
pub struct Pmem {
    kind_of: fn(u64) -> Kind,
    /// Numbers of slots, here and in DRAM: all tables are empty until the first sync.
    count: u32,
    dram_slots: u32,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slots of lines that are not full, and their number of free lines.
    partial: List,
    links: Links,
    partial_lines: u64,
    /// Stored parts, by DRAM slot.
    held: Vec<Held>,
    order: Lrw,
    /// The DRAM slot that is being synced: it is in no order, and is not evicted.
    busy: u32,
    index_bytes: u64,
    index_bytes_peak: u64,
    /// Versions that this sync replaced, if syncs are atomic.
    replaced: Option<Replaced>,
    victims: Vec<u32>,
}

/// Space of older versions.
#[derive(Default)]
struct Replaced {
    slots: Vec<u32>,
    places: Vec<u32>,
    /// Number of entries in the log.
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

    /// Allocates the tables at the first sync: a trace without syncs needs none.
    fn make_tables(&mut self) {
        if self.held.is_empty() {
            self.slots = vec![Slot { taken: 0, owners: Box::default() }; self.count as usize];
            self.free = (0..self.count).rev().collect();
            self.links = Links::new(self.count);
            self.held = (0..self.dram_slots).map(|_| Held::Nothing).collect();
            self.order = Lrw::new(self.dram_slots);
        }
    }

    /// Stores the whole page of `slot`. Returns `false` if there is no space.
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

    /// Stores the dirty lines of `slot`, whose page has no slot of its own. Returns `false` if
    /// there is no space.
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

    /// Stores the entries of `places`, and then the bitmaps that make the entries valid.
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

    /// Returns a free slot; evicts pages if necessary. Returns `None` if there is no space.
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

    /// Evicts `victim`. If it has lines, evicts all pages in the slot that has most of its lines.
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

    /// Evicts pages until `lines` lines are free. Returns `false` if that is impossible.
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

    /// Returns the page that was synced least recently.
    fn victim(&mut self) -> Option<u32> {
        self.victims.clear();
        self.order.victims(1, &mut self.victims);
        self.victims.first().copied()
    }

    /// Writes the page of `slot` to flash, and drops it from persistent memory.
    fn evict(&mut self, slot: u32, dram: &mut PageCache, devices: &mut dyn Devices) {
        devices.ssd_write(dram.id(slot), Source::Dram);
        devices.ssd_flush();
        dram.clean(slot);
        self.release(slot, devices);
        devices.pmem_forget(dram.id(slot));
    }

    /// Takes a free place for a line of `owner`. The caller has made space.
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

    /// Turns a free slot, which must exist, into a slot of lines.
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

    /// Releases `places` with one store per slot's bitmap.
    fn free_places(&mut self, places: &[u32], devices: &mut dyn Devices) {
        let mut numbers = slots_with(places.iter().copied());
        numbers.dedup();
        for place in places {
            self.free_place(*place);
        }
        store_words(numbers.len(), devices);
    }

    /// Releases the former version of a page, or keeps it until the sync ends.
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
        // Replaced versions have no owner: they are released with the sync, not with their page.
        for place in &replaced.places {
            let slot = &mut self.slots[(place / PLACES_A_SLOT) as usize];
            slot.owners[(place % PLACES_A_SLOT) as usize] = NOWHERE;
        }
        tcow::end_page(devices);
        if is_full {
            self.release_replaced(devices);
        }
    }

    /// Releases the versions that syncs replaced, and ends the log; returns whether any was freed.
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

    /// Returns whether the page of `slot` is stored here, so that flash lacks its newest version.
    fn holds(&self, slot: u32) -> bool {
        self.held.get(slot as usize).is_some_and(|held| !matches!(held, Held::Nothing))
    }

    /// Drops the page of `slot`.
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

/// Stores `count` separate words, with one fence.
fn store_words(count: usize, devices: &mut dyn Devices) {
    for _ in 0..count {
        devices.pmem_metadata(WORD_BYTES);
    }
    devices.pmem_fence();
}

/// Returns the slot of each of `places`, sorted.
fn slots_with(places: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut numbers: Vec<u32> = places.map(|place| place / PLACES_A_SLOT).collect();
    numbers.sort_unstable();
    numbers
}

/// Returns the slot with most of `lines`.
fn slot_with_most(lines: &Lines) -> u32 {
    let numbers = slots_with(lines.each(ALL_LINES));
    let most = numbers.chunk_by(|one, other| one == other).max_by_key(|same| same.len());
    most.map_or(0, |same| same[0])
}

/// Returns the number of slots, behind the global metadata pages if slots hold pages, and behind
/// the log of atomic syncs.
fn slots_of(sizes: &Sizes, has_map: bool) -> u32 {
    let log_bytes = if sizes.atomic { tcow::LOG_BYTES } else { 0 };
    let pages = sizes.pmem_bytes.saturating_sub(log_bytes) / PAGE_BYTES;
    let map_pages = pages.saturating_mul(MAP_BITS).div_ceil(8 * PAGE_BYTES);
    let slots = if has_map { pages.saturating_sub(map_pages) } else { pages };
    // The useful maximum: every page whole, as lines, and as an older version.
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
