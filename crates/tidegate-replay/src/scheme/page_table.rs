//! Maps pages to slots, by chunks of neighbouring pages: a run of pages costs one look-up per
//! chunk, and the removal of a page costs none.
//!
//! Invariants: a chunk in the map has at least one page; `last`, if any, is a chunk in the map.

use rustc_hash::FxHashMap;

use super::page::PageId;
use crate::trace::FileId;

/// Pages of a chunk.
const CHUNK_PAGES: usize = 16;
const CHUNK_BITS: u32 = CHUNK_PAGES.trailing_zeros();
/// A value that stands for no slot.
const NONE: u32 = u32::MAX;

/// A file and the number of a chunk in the file.
type Key = (FileId, u64);

/// Index of the chunk of a page, valid until the page is removed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Position(u32);

#[derive(Clone)]
struct Chunk {
    slots: [u32; CHUNK_PAGES],
    /// Number of pages with a slot.
    pages: u32,
}

impl Chunk {
    const EMPTY: Self = Self { slots: [NONE; CHUNK_PAGES], pages: 0 };
}

/// Slots by page.
#[derive(Default)]
pub(super) struct PageTable {
    map: FxHashMap<Key, u32>,
    chunks: Vec<Chunk>,
    free: Vec<u32>,
    /// The chunk that was looked up last.
    last: Option<(Key, u32)>,
}

impl PageTable {
    /// Returns the slot of `id`.
    pub(super) fn get(&mut self, id: PageId) -> Option<u32> {
        let chunk = self.find(key_of(id))?;
        let slot = self.chunks[chunk as usize].slots[at_of(id)];
        (slot != NONE).then_some(slot)
    }

    /// Maps `id`, which has no slot, to `slot`.
    pub(super) fn insert(&mut self, id: PageId, slot: u32) -> Position {
        let key = key_of(id);
        let number = self.find(key).unwrap_or_else(|| self.add(key));
        let chunk = &mut self.chunks[number as usize];
        chunk.slots[at_of(id)] = slot;
        chunk.pages += 1;
        Position(number)
    }

    /// Removes `id`, which is at `position`, from the table.
    pub(super) fn remove(&mut self, id: PageId, Position(number): Position) {
        let chunk = &mut self.chunks[number as usize];
        chunk.slots[at_of(id)] = NONE;
        chunk.pages -= 1;
        if chunk.pages == 0 {
            let key = key_of(id);
            self.map.remove(&key);
            self.last = self.last.filter(|(last, _)| *last != key);
            self.free.push(number);
        }
    }

    fn find(&mut self, key: Key) -> Option<u32> {
        if let Some((last, number)) = self.last
            && last == key
        {
            return Some(number);
        }
        let number = *self.map.get(&key)?;
        self.last = Some((key, number));
        Some(number)
    }

    fn add(&mut self, key: Key) -> u32 {
        let next = u32::try_from(self.chunks.len()).unwrap_or(NONE);
        let number = self.free.pop().unwrap_or(next);
        if number == next {
            self.chunks.push(Chunk::EMPTY);
        }
        self.map.insert(key, number);
        self.last = Some((key, number));
        number
    }
}

fn key_of(id: PageId) -> Key {
    (id.file, id.page >> CHUNK_BITS)
}

fn at_of(id: PageId) -> usize {
    usize::try_from(id.page).unwrap_or(usize::MAX) % CHUNK_PAGES
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The table equals a map of pages after any insertions and removals.
        #[test]
        fn pages_are_found_where_they_were_put(
            steps in prop::collection::vec((0..3_u32, 0..40_u64), 0..400)
        ) {
            let (mut table, mut model) = (PageTable::default(), HashMap::new());
            for (slot, (file, page)) in (0..).zip(steps) {
                let id = PageId { file: FileId(file), page };
                match model.remove(&id) {
                    Some((_, position)) => table.remove(id, position),
                    None => drop(model.insert(id, (slot, table.insert(id, slot)))),
                }
                prop_assert_eq!(table.get(id), model.get(&id).map(|(slot, _)| *slot));
            }
            for (id, (slot, _)) in &model {
                prop_assert_eq!(table.get(*id), Some(*slot));
            }
            prop_assert_eq!(table.map.len() + table.free.len(), table.chunks.len());
        }
    }
}
