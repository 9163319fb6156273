//! From a page to the slot that holds its newest version, in DRAM: 8 bytes a slot.
//!
//! A hash table with linear probing that is half full at most. It holds slots only; which page a
//! slot holds is asked of the caller.

/// Slots by page.
pub(super) struct Table {
    /// A slot plus one; 0: none.
    cells: Box<[u32]>,
}

impl Table {
    /// For `slots` slots.
    pub(super) fn new(slots: u32) -> Self {
        Self { cells: vec![0; (2 * slots as usize).max(2)].into() }
    }

    /// The slot of `page`.
    pub(super) fn find(&self, page: u64, page_of: impl Fn(u32) -> u64) -> Option<u32> {
        self.probe(page, page_of).1
    }

    /// Puts `slot` in the place of the slot of `page`, which it returns, or adds it.
    pub(super) fn insert(
        &mut self,
        page: u64,
        slot: u32,
        page_of: impl Fn(u32) -> u64,
    ) -> Option<u32> {
        let (cell, old) = self.probe(page, page_of);
        self.cells[cell] = slot + 1;
        old
    }

    /// Removes the slot of `page`, which it returns.
    pub(super) fn remove(&mut self, page: u64, page_of: impl Fn(u32) -> u64) -> Option<u32> {
        let (mut hole, slot) = self.probe(page, &page_of);
        slot?;
        let mut cell = hole;
        loop {
            cell = self.next(cell);
            let Some(other) = self.cells[cell].checked_sub(1) else { break };
            // It moves into the hole unless its own first cell lies behind the hole.
            let home = self.home(page_of(other));
            let stays = if hole <= cell {
                hole < home && home <= cell
            } else {
                hole < home || home <= cell
            };
            if !stays {
                self.cells[hole] = other + 1;
                hole = cell;
            }
        }
        self.cells[hole] = 0;
        slot
    }

    /// The cell of `page`, or the free one where it would go; and its slot.
    fn probe(&self, page: u64, page_of: impl Fn(u32) -> u64) -> (usize, Option<u32>) {
        let mut cell = self.home(page);
        while let Some(slot) = self.cells[cell].checked_sub(1) {
            if page_of(slot) == page {
                return (cell, Some(slot));
            }
            cell = self.next(cell);
        }
        (cell, None)
    }

    fn home(&self, page: u64) -> usize {
        let spread = u128::from(hash(page)) * self.cells.len() as u128;
        usize::try_from(spread >> 64).unwrap_or_default()
    }

    fn next(&self, cell: usize) -> usize {
        if cell + 1 == self.cells.len() { 0 } else { cell + 1 }
    }
}

/// Spreads pages over all numbers (the finalizer of `MurmurHash3`).
pub(super) fn hash(page: u64) -> u64 {
    let mut word = page ^ page >> 33;
    word = word.wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    word ^= word >> 33;
    word = word.wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    word ^ word >> 33
}

#[cfg(all(test, not(feature = "loom")))]
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
