//! Tracks pages in DRAM, in the order of their last use, and their dirty lines by file.
//!
//! The order is the core's list of slots, the least recently used slot first.

use std::collections::BTreeSet;
use std::ops::Range;

use tidegate::tier::list::{Links, List, MAX_SLOTS};

use super::page::{PAGE_BYTES, PageId};
use super::page_table::{PageTable, Position};
use crate::trace::FileId;

/// A page in DRAM.
struct Slot {
    id: PageId,
    position: Position,
    /// Lines that were written since their last sync or write to flash.
    dirty: u64,
}

/// The pages of a file in DRAM.
struct File {
    resident: List,
    dirty: List,
    /// End of the pages of the file that were in DRAM at any time.
    pages_end: u64,
    /// The least length of the file that the trace has shown.
    len_bytes: u64,
}

/// The pages in DRAM. A slot is a number below the capacity.
pub struct PageCache {
    capacity: u32,
    slots: Vec<Slot>,
    free: Vec<u32>,
    table: PageTable,
    order: List,
    order_links: Links,
    resident: Links,
    dirty: Links,
    files: Vec<File>,
    dirty_files: BTreeSet<u32>,
}

impl PageCache {
    /// Returns an empty cache for `pages` pages, limited to 1 and the maximum number of slots.
    pub fn new(pages: u64) -> Self {
        let capacity = u32::try_from(pages).unwrap_or(MAX_SLOTS).clamp(1, MAX_SLOTS);
        Self {
            capacity,
            slots: Vec::new(),
            free: Vec::new(),
            table: PageTable::default(),
            order: List::EMPTY,
            order_links: Links::new(0),
            resident: Links::new(0),
            dirty: Links::new(0),
            files: Vec::new(),
            dirty_files: BTreeSet::new(),
        }
    }

    /// Returns the number of slots.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns the slot of `id`, and marks it as most recently used.
    pub fn touch(&mut self, id: PageId) -> Option<u32> {
        let slot = self.table.get(id)?;
        self.order.move_last(&mut self.order_links, slot);
        Some(slot)
    }

    /// Returns the slot to evict before another page is inserted, or `None` if a slot is free.
    pub fn victim(&self) -> Option<u32> {
        if self.order.len() < self.capacity { None } else { self.order.first() }
    }

    /// Assigns a free slot to `id`, which has none.
    pub fn insert(&mut self, id: PageId) -> u32 {
        let next = u32::try_from(self.slots.len()).unwrap_or(MAX_SLOTS);
        let slot = self.free.pop().unwrap_or(next);
        let new = Slot { id, position: self.table.insert(id, slot), dirty: 0 };
        if slot == next {
            self.slots.push(new);
            self.order_links.add();
            self.resident.add();
            self.dirty.add();
        } else {
            self.slots[slot as usize] = new;
        }
        self.order.push_last(&mut self.order_links, slot);
        let file = file_of(&mut self.files, id.file);
        file.pages_end = file.pages_end.max(id.page.saturating_add(1));
        file.resident.push_last(&mut self.resident, slot);
        slot
    }

    /// Frees `slot`.
    pub fn remove(&mut self, slot: u32) {
        self.clean(slot);
        let Slot { id, position, .. } = self.slots[slot as usize];
        self.table.remove(id, position);
        self.order.remove(&mut self.order_links, slot);
        file_of(&mut self.files, id.file).resident.remove(&mut self.resident, slot);
        self.free.push(slot);
    }

    /// Returns the page in `slot`.
    pub fn id(&self, slot: u32) -> PageId {
        self.slots[slot as usize].id
    }

    /// Returns the lines of `slot` that were written since the last sync or write to flash.
    pub fn dirty_lines(&self, slot: u32) -> u64 {
        self.slots[slot as usize].dirty
    }

    /// Marks `lines` of `slot` as dirty.
    pub fn dirty(&mut self, slot: u32, lines: u64) {
        let Slot { id, dirty, .. } = &mut self.slots[slot as usize];
        let was_clean = *dirty == 0;
        *dirty |= lines;
        if was_clean && lines != 0 {
            let file = file_of(&mut self.files, id.file);
            if file.dirty.is_empty() {
                self.dirty_files.insert(id.file.0);
            }
            file.dirty.push_last(&mut self.dirty, slot);
        }
    }

    /// Marks `slot` as clean.
    pub fn clean(&mut self, slot: u32) {
        let Slot { id, dirty, .. } = &mut self.slots[slot as usize];
        if std::mem::take(dirty) != 0 {
            let file = file_of(&mut self.files, id.file);
            file.dirty.remove(&mut self.dirty, slot);
            if file.dirty.is_empty() {
                self.dirty_files.remove(&id.file.0);
            }
        }
    }

    /// Returns the slot of `file` that has been dirty for the longest time.
    pub fn first_dirty(&self, file: FileId) -> Option<u32> {
        self.files.get(file.0 as usize)?.dirty.first()
    }

    /// Returns the file with dirty pages that has the lowest number.
    pub fn first_dirty_file(&self) -> Option<FileId> {
        self.dirty_files.first().copied().map(FileId)
    }

    /// Truncates `file` to `len_bytes`. Appends the slots of pages that begin at or behind the new
    /// end to `out`.
    pub fn cut(&mut self, file: FileId, len_bytes: u64, out: &mut Vec<u32>) {
        let Some(file) = self.files.get_mut(file.0 as usize) else { return };
        file.len_bytes = file.len_bytes.min(len_bytes);
        let end = len_bytes.div_ceil(PAGE_BYTES);
        if end < file.pages_end {
            let slots = file.resident.iter(&self.resident);
            out.extend(slots.filter(|slot| self.slots[*slot as usize].id.page >= end));
            file.pages_end = end;
        }
    }

    /// Extends the known length of the file to `bytes` of `id`; returns whether the file had other
    /// bytes in this page before.
    pub fn note_extent(&mut self, id: PageId, bytes: &Range<u64>) -> bool {
        let file = file_of(&mut self.files, id.file);
        let start = id.page.saturating_mul(PAGE_BYTES);
        let known = start..file.len_bytes.min(start.saturating_add(PAGE_BYTES));
        file.len_bytes = file.len_bytes.max(start.saturating_add(bytes.end));
        known.start < known.end && (bytes.start > 0 || start + bytes.end < known.end)
    }
}

fn file_of(files: &mut Vec<File>, file: FileId) -> &mut File {
    let at = file.0 as usize;
    while files.len() <= at {
        let file = File { resident: List::EMPTY, dirty: List::EMPTY, pages_end: 0, len_bytes: 0 };
        files.push(file);
    }
    &mut files[at]
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn id(file: u32, page: u64) -> PageId {
        PageId { file: FileId(file), page }
    }

    #[test]
    fn the_page_that_was_used_least_recently_is_the_victim() {
        let mut cache = PageCache::new(2);
        let first = cache.insert(id(0, 0));
        assert_eq!(cache.victim(), None);
        let second = cache.insert(id(0, 1));
        assert_eq!(cache.touch(id(0, 0)), Some(first));
        assert_eq!(cache.victim(), Some(second));
        cache.remove(second);
        assert_eq!((cache.touch(id(0, 1)), cache.victim()), (None, None));
    }

    #[test]
    fn dirty_pages_are_listed_by_file_in_the_order_of_their_first_write() {
        let mut cache = PageCache::new(4);
        let slots = [id(0, 5), id(1, 0), id(0, 3)].map(|id| cache.insert(id));
        for slot in slots {
            cache.dirty(slot, 1);
            cache.dirty(slot, 2);
        }
        assert_eq!(
            (cache.first_dirty(FileId(0)), cache.dirty_lines(slots[0])),
            (Some(slots[0]), 3)
        );
        cache.clean(slots[0]);
        assert_eq!(cache.first_dirty(FileId(0)), Some(slots[2]));
        cache.remove(slots[2]);
        assert_eq!(cache.first_dirty_file(), Some(FileId(1)));
        cache.clean(slots[1]);
        assert_eq!((cache.first_dirty_file(), cache.first_dirty(FileId(9))), (None, None));
    }

    #[test]
    fn what_lies_behind_the_end_of_a_file_is_cut() {
        let (mut cache, mut cut) = (PageCache::new(4), Vec::new());
        let slots = [id(0, 0), id(0, 1), id(0, 2), id(1, 2)].map(|id| cache.insert(id));
        cache.cut(FileId(0), 4097, &mut cut);
        assert_eq!(cut, [slots[2]]);
        cache.cut(FileId(7), 0, &mut cut);
        assert_eq!(cut.len(), 1);
    }

    #[test]
    fn only_what_is_known_to_lie_in_a_file_has_to_be_read() {
        let mut cache = PageCache::new(1);
        assert!(!cache.note_extent(id(0, 0), &(0..100)), "a new file");
        assert!(!cache.note_extent(id(0, 0), &(0..200)), "all of it");
        assert!(cache.note_extent(id(0, 0), &(0..100)), "half of it");
        assert!(cache.note_extent(id(0, 0), &(200..300)), "an append");
        assert!(!cache.note_extent(id(0, 1), &(7..9)), "a page behind the end");
        cache.cut(FileId(0), 0, &mut Vec::new());
        assert!(!cache.note_extent(id(0, 0), &(5..6)), "nothing is left");
    }
}
