//! The slot headers and the hash index of all sets, as flat arrays.
//!
//! A header belongs to the set that holds its slot, a bucket to the set whose number is in the
//! bucket's high bits. Only the holder of that set's lock accesses them. A slot moves between sets
//! through the free set, which orders the old owner's writes before the new owner's reads. So
//! relaxed atomics serve as plain cells that several sets may share without `unsafe`.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use strum::FromRepr;

use super::super::slots::NO_SLOT;

/// The state of a slot (the Caiti paper, section 4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromRepr)]
#[repr(u8)]
pub(super) enum State {
    /// In the free set.
    Free,
    /// Data is being copied into it.
    Pending,
    /// Holds a complete block that is not written back.
    Valid,
    /// Its block is being written back.
    Evicting,
}

/// The list of its set that holds a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromRepr)]
#[repr(u8)]
pub(super) enum Home {
    /// Valid and next to be written back: the write-back queue.
    Queue,
    /// Pending, Evicting, or Valid behind an older version that is not written back yet.
    Waiting,
    /// Valid, and its last write-back failed.
    Failed,
}

/// One slot's header. `NO_SLOT` in a link means none.
#[derive(Default)]
struct Header {
    lba: AtomicU64,
    /// Epoch of its oldest write not written back.
    epoch: AtomicU64,
    previous: AtomicU32,
    next: AtomicU32,
    /// The slot with the previous version, until that is written back.
    older: AtomicU32,
    /// Next slot in the bucket.
    chain: AtomicU32,
    state: AtomicU8,
    home: AtomicU8,
}

// With the lock, the free set's link and at most eight bytes of buckets: 60 bytes a slot.
const _: () = assert!(size_of::<Header>() == 40);

/// Headers and index.
pub(super) struct Table {
    headers: Box<[Header]>,
    /// First slot of each bucket.
    buckets: Box<[AtomicU32]>,
    sets_log2: u32,
    buckets_a_set_log2: u32,
    run_log2: u32,
}

impl Table {
    /// Makes a table for `slots` slots in `1 << sets_log2` sets. Aligned runs of `1 << run_log2`
    /// lbas share a set.
    pub(super) fn new(slots: u32, sets_log2: u32, run_log2: u32) -> Self {
        // One to two buckets for each slot: most look-ups of an absent lba touch no header.
        let buckets_log2 = (slots.ilog2() + 1).max(sets_log2);
        Self {
            headers: (0..slots).map(|_| Header::default()).collect(),
            buckets: (0..1_u64 << buckets_log2).map(|_| AtomicU32::new(NO_SLOT)).collect(),
            sets_log2,
            buckets_a_set_log2: buckets_log2 - sets_log2,
            run_log2,
        }
    }

    /// Returns the number of sets.
    pub(super) fn sets(&self) -> usize {
        1 << self.sets_log2
    }

    /// Returns the number of lbas of an aligned run, which shares a set.
    pub(super) fn run_blocks(&self) -> u64 {
        1 << self.run_log2
    }

    /// Returns the set of `lba`.
    pub(super) fn set_of(&self, lba: u64) -> usize {
        high_bits(mix(lba >> self.run_log2), self.sets_log2)
    }

    /// Returns the bytes of headers and buckets.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.headers) + size_of_val(&*self.buckets)
    }

    /// Returns the slot of the newest version of `lba`.
    pub(super) fn find(&self, lba: u64) -> Option<u32> {
        let mut slot = self.bucket(lba).load(Ordering::Relaxed);
        while slot != NO_SLOT {
            if self.lba(slot) == lba {
                return Some(slot);
            }
            slot = self.header(slot).chain.load(Ordering::Relaxed);
        }
        None
    }

    /// Makes `slot` the newest version of its lba, in place of `old` if given.
    pub(super) fn insert(&self, slot: u32, old: Option<u32>) {
        let bucket = self.bucket(self.lba(slot));
        if let Some(old) = old {
            self.remove(old);
        }
        self.header(slot).chain.store(bucket.load(Ordering::Relaxed), Ordering::Relaxed);
        bucket.store(slot, Ordering::Relaxed);
    }

    /// Removes `slot`, which is in the index, from the index.
    pub(super) fn remove(&self, slot: u32) {
        let mut link = self.bucket(self.lba(slot));
        while link.load(Ordering::Relaxed) != slot {
            link = &self.header(link.load(Ordering::Relaxed)).chain;
        }
        link.store(self.header(slot).chain.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn bucket(&self, lba: u64) -> &AtomicU32 {
        let within = low_bits(mix(lba), self.buckets_a_set_log2);
        &self.buckets[(self.set_of(lba) << self.buckets_a_set_log2) | within]
    }

    fn header(&self, slot: u32) -> &Header {
        &self.headers[slot as usize]
    }

    pub(super) fn lba(&self, slot: u32) -> u64 {
        self.header(slot).lba.load(Ordering::Relaxed)
    }

    pub(super) fn set_lba(&self, slot: u32, lba: u64) {
        self.header(slot).lba.store(lba, Ordering::Relaxed);
    }

    pub(super) fn epoch(&self, slot: u32) -> u64 {
        self.header(slot).epoch.load(Ordering::Relaxed)
    }

    pub(super) fn set_epoch(&self, slot: u32, epoch: u64) {
        self.header(slot).epoch.store(epoch, Ordering::Relaxed);
    }

    pub(super) fn older(&self, slot: u32) -> Option<u32> {
        some(self.header(slot).older.load(Ordering::Relaxed))
    }

    pub(super) fn set_older(&self, slot: u32, older: Option<u32>) {
        self.header(slot).older.store(older.unwrap_or(NO_SLOT), Ordering::Relaxed);
    }

    pub(super) fn previous(&self, slot: u32) -> u32 {
        self.header(slot).previous.load(Ordering::Relaxed)
    }

    pub(super) fn set_previous(&self, slot: u32, previous: u32) {
        self.header(slot).previous.store(previous, Ordering::Relaxed);
    }

    pub(super) fn next(&self, slot: u32) -> u32 {
        self.header(slot).next.load(Ordering::Relaxed)
    }

    pub(super) fn set_next(&self, slot: u32, next: u32) {
        self.header(slot).next.store(next, Ordering::Relaxed);
    }

    pub(super) fn state(&self, slot: u32) -> State {
        let state = self.header(slot).state.load(Ordering::Relaxed);
        State::from_repr(state).expect("a state that was stored")
    }

    pub(super) fn set_state(&self, slot: u32, state: State) {
        self.header(slot).state.store(state as u8, Ordering::Relaxed);
    }

    pub(super) fn home(&self, slot: u32) -> Home {
        let home = self.header(slot).home.load(Ordering::Relaxed);
        Home::from_repr(home).expect("a home that was stored")
    }

    pub(super) fn set_home(&self, slot: u32, home: Home) {
        self.header(slot).home.store(home as u8, Ordering::Relaxed);
    }
}

/// Returns `slot`, or `None` for `NO_SLOT`.
pub(super) fn some(slot: u32) -> Option<u32> {
    (slot != NO_SLOT).then_some(slot)
}

/// Spreads an lba over 64 bits, so that no stride of a workload falls into few sets or buckets (the
/// finalizer of the splitmix64 generator).
fn mix(lba: u64) -> u64 {
    let mixed = (lba ^ lba >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

fn high_bits(value: u64, bits: u32) -> usize {
    // In two steps, because a shift by 64 overflows.
    (value >> 1 >> (63 - bits)) as usize
}

#[expect(clippy::cast_possible_truncation, reason = "fewer than 32 bits are kept")]
fn low_bits(value: u64, bits: u32) -> usize {
    (value & ((1 << bits) - 1)) as usize
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_index_finds_the_newest_version_of_each_lba() {
        let table = Table::new(64, 2, 0);
        for slot in 0..60 {
            table.set_lba(slot, u64::from(slot) * 1000);
            table.insert(slot, None);
        }
        table.set_lba(60, 7000);
        table.insert(60, Some(7));
        assert_eq!(table.find(7000), Some(60));
        for slot in (0..60).filter(|&slot| slot != 7) {
            assert_eq!(table.find(u64::from(slot) * 1000), Some(slot));
            table.remove(slot);
            assert_eq!(table.find(u64::from(slot) * 1000), None);
        }
        assert_eq!(table.find(7000), Some(60));
    }

    #[test]
    fn strides_spread_over_sets_and_runs_share_one() {
        for stride_log2 in [0, 3, 8, 16, 30] {
            let table = Table::new(1 << 16, 8, 0);
            let mut used = [0_u32; 256];
            (0..25_600_u64).for_each(|i| used[table.set_of(i << stride_log2)] += 1);
            assert!(used.iter().all(|&count| (40..180).contains(&count)), "{used:?}");
        }
        let table = Table::new(1 << 16, 8, 3);
        assert!((0..8).all(|lba| table.set_of(lba) == table.set_of(0)));
        assert!((8..64).any(|lba| table.set_of(lba) != table.set_of(0)));
    }
}
