//! The slot headers of one set and its index from lba to slot.

use std::ops::Range;

use super::super::slots::NO_SLOT;

/// The state of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Holds no block.
    Free,
    /// A write is copying data into it.
    Filling,
    /// Holds a block newer than the one below.
    Dirty,
    /// Its block is being written back.
    Writing,
    /// Holds a copy of the block below.
    Clean,
}

/// One slot's header.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    pub(super) lba: u64,
    /// Epoch of its oldest write not written back.
    pub(super) epoch: u64,
    /// Next slot in its bucket.
    chain: u32,
    pub(super) state: State,
    /// Whether the last write-back of its block failed.
    pub(super) failed: bool,
    /// Whether a flush waits for its write-back: no write may change it before.
    pub(super) awaited: bool,
}

impl Header {
    const FREE: Self = Self {
        lba: u64::MAX,
        epoch: 0,
        chain: NO_SLOT,
        state: State::Free,
        failed: false,
        awaited: false,
    };
}

/// Headers and index.
pub(super) struct Table {
    headers: Box<[Header]>,
    /// First slot of each bucket.
    buckets: Box<[u32]>,
}

impl Table {
    /// Makes a table of `slots` free slots.
    pub(super) fn new(slots: u32) -> Self {
        let buckets = (slots as usize).next_power_of_two();
        Self {
            headers: vec![Header::FREE; slots as usize].into(),
            buckets: vec![NO_SLOT; buckets].into(),
        }
    }

    /// Returns the number of slots.
    pub(super) fn slots(&self) -> u32 {
        u32::try_from(self.headers.len()).unwrap_or(NO_SLOT)
    }

    /// Returns the bytes of headers and buckets.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.headers) + size_of_val(&*self.buckets)
    }

    pub(super) fn get(&self, slot: u32) -> &Header {
        &self.headers[slot as usize]
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Header {
        &mut self.headers[slot as usize]
    }

    pub(super) fn state(&self, slot: u32) -> State {
        self.get(slot).state
    }

    /// Returns the slot that holds `lba`.
    pub(super) fn find(&self, lba: u64) -> Option<u32> {
        let mut slot = self.buckets[self.bucket(lba)];
        while slot != NO_SLOT {
            let header = self.get(slot);
            if header.lba == lba {
                return Some(slot);
            }
            slot = header.chain;
        }
        None
    }

    /// Assigns `slot`, which is free, to `lba`, which no slot holds.
    pub(super) fn insert(&mut self, slot: u32, lba: u64, epoch: u64) {
        let bucket = self.bucket(lba);
        let chain = self.buckets[bucket];
        *self.get_mut(slot) = Header { lba, epoch, chain, state: State::Filling, ..Header::FREE };
        self.buckets[bucket] = slot;
    }

    /// Frees `slot`.
    pub(super) fn remove(&mut self, slot: u32) {
        let Header { lba, chain: after, .. } = *self.get(slot);
        let bucket = self.bucket(lba);
        let mut at = self.buckets[bucket];
        if at == slot {
            self.buckets[bucket] = after;
        } else {
            while self.get(at).chain != slot {
                at = self.get(at).chain;
            }
            self.get_mut(at).chain = after;
        }
        *self.get_mut(slot) = Header::FREE;
    }

    /// Returns the cached lbas of `range`, in no order.
    pub(super) fn cached_in(&self, range: &Range<u64>) -> Vec<u64> {
        if range.end.saturating_sub(range.start) < self.headers.len() as u64 {
            return range.clone().filter(|&lba| self.find(lba).is_some()).collect();
        }
        let cached = self.headers.iter().filter(|header| header.state != State::Free);
        cached.map(|header| header.lba).filter(|lba| range.contains(lba)).collect()
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "the mask leaves fewer bits than a usize has"
    )]
    fn bucket(&self, lba: u64) -> usize {
        mix(lba) as usize & (self.buckets.len() - 1)
    }
}

/// Spreads the bits of `value`: the finalizer of `MurmurHash3` (Appleby 2011).
pub(super) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    let value = (value ^ (value >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    value ^ (value >> 33)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_index_is_a_map(steps in prop::collection::vec((any::<bool>(), 0_u64..24), 1..200)) {
            let (mut table, mut model) = (Table::new(5), BTreeMap::new());
            for (insert, lba) in steps {
                let free = (0..5).find(|&slot| table.state(slot) == State::Free);
                match (insert, model.get(&lba).copied(), free) {
                    (true, None, Some(slot)) => {
                        table.insert(slot, lba, 0);
                        model.insert(lba, slot);
                    }
                    (false, Some(slot), _) => {
                        table.remove(slot);
                        model.remove(&lba);
                    }
                    _ => {}
                }
                for lba in 0..24 {
                    prop_assert_eq!(table.find(lba), model.get(&lba).copied());
                }
                for range in [3..7_u64, 3..17] {
                    let mut cached = table.cached_in(&range);
                    cached.sort_unstable();
                    let expected: Vec<u64> = model.range(range).map(|(&lba, _)| lba).collect();
                    prop_assert_eq!(cached, expected);
                }
            }
        }
    }

    #[test]
    fn a_header_is_24_bytes() {
        assert_eq!(size_of::<Header>(), 24);
    }
}
