//! Maps each page to the slot with its newest version, in DRAM, with 6 bytes for each slot.
//!
//! A hash table with linear probing, at most two thirds full. A cell holds a slot and, in the bits
//! that slot numbers leave, a tag of its page, which spares most looks at the slots of other pages.
//! The caller's `page_of` returns the page that a slot holds.

/// Slots by page.
#[derive(Default)]
pub(in crate::cache) struct Table {
    /// A slot plus one, with a tag in the bits above; 0 for an empty cell.
    cells: Box<[u32]>,
    /// Mask of the bits of a cell that hold the tag.
    tag_bits: u32,
}

impl Table {
    /// Returns an empty table for `slots` slots, fewer than 2^31.
    pub(in crate::cache) fn new(slots: u32) -> Self {
        let cells = (slots as usize + slots as usize / 2).max(slots as usize + 1);
        let slot_bits = u32::MAX.checked_shr(slots.leading_zeros()).unwrap_or(0);
        Self { cells: vec![0; cells].into(), tag_bits: !slot_bits }
    }

    /// Returns the slot of `page`.
    pub(in crate::cache) fn find(&self, page: u64, page_of: impl Fn(u32) -> u64) -> Option<u32> {
        self.probe(page, page_of).1
    }

    /// Reads the first cell that a lookup of `page` probes.
    pub(in crate::cache) fn look_up_ahead(&self, page: u64) -> u32 {
        self.cells[self.home(hash(page))]
    }

    /// Makes `slot` the slot of `page`. Returns the previous slot of the page.
    pub(in crate::cache) fn insert(
        &mut self,
        page: u64,
        slot: u32,
        page_of: impl Fn(u32) -> u64,
    ) -> Option<u32> {
        let (cell, old) = self.probe(page, page_of);
        self.cells[cell] = self.tag(hash(page)) | (slot + 1);
        old
    }

    /// Removes and returns the slot of `page`.
    pub(in crate::cache) fn remove(
        &mut self,
        page: u64,
        page_of: impl Fn(u32) -> u64,
    ) -> Option<u32> {
        let (mut hole, slot) = self.probe(page, &page_of);
        slot?;
        let mut cell = hole;
        loop {
            cell = self.next(cell);
            let Some(other) = self.slot_in(cell) else { break };
            // The entry moves into the hole unless its home cell lies behind the hole.
            let home = self.home(hash(page_of(other)));
            let stays = if hole <= cell {
                hole < home && home <= cell
            } else {
                hole < home || home <= cell
            };
            if !stays {
                self.cells[hole] = self.cells[cell];
                hole = cell;
            }
        }
        self.cells[hole] = 0;
        slot
    }

    /// Returns the size of the table in bytes.
    #[cfg(all(test, not(loom)))]
    pub(in crate::cache) fn bytes(&self) -> usize {
        size_of_val(&*self.cells)
    }

    /// Returns the cell of `page` and its slot, or the empty cell where the page would go.
    fn probe(&self, page: u64, page_of: impl Fn(u32) -> u64) -> (usize, Option<u32>) {
        let hash = hash(page);
        let (mut cell, tag) = (self.home(hash), self.tag(hash));
        while let Some(slot) = self.slot_in(cell) {
            if self.cells[cell] & self.tag_bits == tag && page_of(slot) == page {
                return (cell, Some(slot));
            }
            cell = self.next(cell);
        }
        (cell, None)
    }

    fn slot_in(&self, cell: usize) -> Option<u32> {
        (self.cells[cell] & !self.tag_bits).checked_sub(1)
    }

    fn home(&self, hash: u64) -> usize {
        let spread = u128::from(hash) * self.cells.len() as u128;
        usize::try_from(spread >> 64).unwrap_or_default()
    }

    /// Returns the tag of a page with this hash. It takes the middle bits, since the upper ones
    /// choose the home cell and the lower ones the shard.
    fn tag(&self, hash: u64) -> u32 {
        let bits = u32::try_from(hash >> 24 & u64::from(u32::MAX)).unwrap_or_default();
        bits << self.tag_bits.trailing_zeros() & self.tag_bits
    }

    fn next(&self, cell: usize) -> usize {
        if cell + 1 == self.cells.len() { 0 } else { cell + 1 }
    }
}

/// Spreads pages over all numbers (the finalizer of `MurmurHash3`).
pub(in crate::cache) fn hash(page: u64) -> u64 {
    let mut word = page ^ page >> 33;
    word = word.wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    word ^= word >> 33;
    word = word.wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    word ^ word >> 33
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_map(steps in prop::collection::vec((0_u64..24, any::<bool>()), 0..200)) {
            let (mut table, mut model) = (Table::new(16), BTreeMap::new());
            let mut pages = [0; 16];
            for (page, adds) in steps {
                let free = (0..16).find(|slot| !model.values().any(|used| used == slot));
                if let (true, Some(slot)) = (adds, free) {
                    let old = table.insert(page, slot, |slot| pages[slot as usize]);
                    pages[slot as usize] = page;
                    prop_assert_eq!(old, model.insert(page, slot));
                } else {
                    let old = table.remove(page, |slot| pages[slot as usize]);
                    prop_assert_eq!(old, model.remove(&page));
                }
                for page in 0..24 {
                    let found = table.find(page, |slot| pages[slot as usize]);
                    prop_assert_eq!(found, model.get(&page).copied());
                }
            }
        }
    }
}
