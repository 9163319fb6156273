//! The location of each block's newest version.
//!
//! Invariants:
//! 1. A version replaces only older ones, in whatever order they arrive.
//! 2. Versions before the tail are not in the log any more, even if the index has them.
//! 3. No lock of the index is held during an access to the log or the backing.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use parking_lot::RwLock;

use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::sync::{AtomicU64, Ordering};

const SHARDS: usize = 64;

/// The place to read a block from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Location {
    /// In the log, its first byte at this position.
    Log(u64),
    /// None: the log says that the block is zero.
    Zero,
    /// In the backing.
    Backing,
}

/// The index of a device.
pub(super) struct Index {
    /// Position of each block's bytes in the log.
    shards: Box<[RwLock<Blocks>]>,
    /// Ranges of zeroes by first block: the block behind, and the record's position. They do not
    /// overlap.
    zeroes: RwLock<BTreeMap<u64, (u64, u64)>>,
    /// Number of these ranges, so that a look-up takes no lock if there are none.
    zero_ranges: AtomicU64,
}

type Blocks = HashMap<u64, u64, BuildHasherDefault<Mixed>>;

/// A hasher with one multiplication: no attacker chooses block numbers to slow look-ups down.
#[derive(Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Index {
    pub(super) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
            zeroes: RwLock::default(),
            zero_ranges: AtomicU64::new(0),
        }
    }

    /// Returns the shard of a block. Neighbours differ, so that sequential writers share no lock.
    fn shard(&self, lba: u64) -> &RwLock<Blocks> {
        &self.shards[usize::try_from(lba % SHARDS as u64).unwrap_or(0)]
    }

    /// Notes that the record at `position` has `count` blocks from `first` on.
    pub(super) fn wrote(&self, first: u64, count: u64, position: u64, block_bytes: u64) {
        let at =
            (position + RECORD_ALIGN_BYTES..).step_by(usize::try_from(block_bytes).unwrap_or(1));
        for (lba, at) in (first..first + count).zip(at) {
            let mut shard = self.shard(lba).write();
            let newest = shard.entry(lba).or_insert(at);
            *newest = at.max(*newest);
        }
    }

    /// Notes that the record at `position` makes `blocks` zero.
    pub(super) fn zeroed(&self, blocks: Range<u64>, position: u64) {
        let mut zeroes = self.zeroes.write();
        let mut first = blocks.start;
        for (start, (end, newest)) in cut_out(&mut zeroes, &blocks) {
            if newest < position {
                continue;
            }
            zeroes.insert(start, (end, newest));
            if first < start {
                zeroes.insert(first, (start, position));
            }
            first = end;
        }
        if first < blocks.end {
            zeroes.insert(first, (blocks.end, position));
        }
        self.count(&zeroes);
    }

    fn count(&self, zeroes: &BTreeMap<u64, (u64, u64)>) {
        self.zero_ranges.store(zeroes.len() as u64, Ordering::Release);
    }

    /// Returns the location of block `lba`, without regard to records before `tail`.
    pub(super) fn find(&self, lba: u64, tail: u64) -> Location {
        let written = self.shard(lba).read().get(&lba).copied().filter(|at| *at >= tail);
        let zeroed = self.zero_at(lba).filter(|position| *position >= tail);
        match (written, zeroed) {
            (Some(at), zeroed) if zeroed.is_none_or(|zero| zero < at) => Location::Log(at),
            (_, Some(_)) => Location::Zero,
            _ => Location::Backing,
        }
    }

    fn zero_at(&self, lba: u64) -> Option<u64> {
        if self.zero_ranges.load(Ordering::Acquire) == 0 {
            return None;
        }
        let zeroes = self.zeroes.read();
        let (_, (end, position)) = zeroes.range(..=lba).next_back()?;
        (lba < *end).then_some(*position)
    }

    /// Returns the parts of `blocks` that the record at `position`, and no later record, made zero.
    pub(super) fn zeroes_of(&self, blocks: &Range<u64>, position: u64) -> Vec<Range<u64>> {
        let zeroes = self.zeroes.read();
        let before = zeroes.range(..blocks.start).next_back();
        let inside = zeroes.range(blocks.clone());
        let of = before.into_iter().chain(inside).filter(|(_, (_, newest))| *newest == position);
        of.map(|(start, (end, _))| (*start).max(blocks.start)..(*end).min(blocks.end))
            .filter(|part| part.start < part.end)
            .collect()
    }

    /// Returns whether the log has a record of `blocks` from `tail` on.
    pub(super) fn touches(&self, blocks: &Range<u64>, tail: u64) -> bool {
        if blocks.end - blocks.start <= SHARDS as u64 {
            return blocks.clone().any(|lba| self.find(lba, tail) != Location::Backing);
        }
        let written = |shard: &RwLock<Blocks>| {
            shard.read().iter().any(|(lba, at)| blocks.contains(lba) && *at >= tail)
        };
        let zeroes = self.zeroes.read();
        zeroes.range(..blocks.end).any(|(_, (end, at))| *end > blocks.start && *at >= tail)
            || self.shards.iter().any(written)
    }

    /// Forgets block `lba` if its position is before `tail`.
    pub(super) fn forget(&self, lba: u64, tail: u64) {
        let mut shard = self.shard(lba).write();
        if shard.get(&lba).is_some_and(|at| *at < tail) {
            shard.remove(&lba);
        }
    }

    /// Forgets the zeroes before `tail`.
    pub(super) fn forget_zeroes(&self, tail: u64) {
        if self.zero_ranges.load(Ordering::Acquire) > 0 {
            let mut zeroes = self.zeroes.write();
            zeroes.retain(|_, (_, position)| *position >= tail);
            self.count(&zeroes);
        }
    }
}

/// Removes the parts of all ranges that lie inside `blocks`. Returns them in order.
fn cut_out(zeroes: &mut BTreeMap<u64, (u64, u64)>, blocks: &Range<u64>) -> Vec<(u64, (u64, u64))> {
    let before = zeroes.range(..blocks.start).next_back().map(|(start, _)| *start);
    let inside = zeroes.range(blocks.clone()).map(|(start, _)| *start);
    let starts: Vec<_> = before.into_iter().chain(inside).collect();
    let mut inner = Vec::new();
    for start in starts {
        let Some((end, position)) = zeroes.remove(&start) else { continue };
        if start < blocks.start {
            zeroes.insert(start, (end.min(blocks.start), position));
        }
        if end > blocks.end {
            zeroes.insert(blocks.end, (end, position));
        }
        let part = start.max(blocks.start)..end.min(blocks.end);
        if part.start < part.end {
            inner.push((part.start, (part.end, position)));
        }
    }
    inner
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares the index with a plain list of the last record of each block.
        #[test]
        fn the_newest_record_of_a_block_wins(
            ops in proptest::collection::vec((any::<bool>(), 0..40_u64, 1..20_u64, 1..50_u64), 1..60),
            tail in 0..60_u64,
        ) {
            let index = Index::new();
            let mut newest: Vec<Option<(u64, bool)>> = vec![None; 64];
            let mut used = std::collections::HashSet::new();
            for (is_zero, first, count, order) in ops {
                // Far apart, and each position once.
                let position = order << 20;
                if !used.insert(order) {
                    continue;
                }
                for lba in first..first + count {
                    let slot = &mut newest[usize::try_from(lba).unwrap()];
                    *slot = (*slot).max(Some((position, is_zero)));
                }
                if is_zero {
                    index.zeroed(first..first + count, position);
                } else {
                    index.wrote(first, count, position, 512);
                }
            }
            let tail = tail << 20;
            for (lba, newest) in (0..).zip(&newest) {
                let expected = newest.filter(|(position, _)| *position >= tail);
                let found = index.find(lba, tail);
                match expected {
                    None => prop_assert_eq!(found, Location::Backing),
                    Some((_, true)) => prop_assert_eq!(found, Location::Zero),
                    Some((position, false)) => {
                        let Location::Log(at) = found else { panic!("{found:?} of {lba}") };
                        prop_assert_eq!(at >> 20 << 20, position);
                    }
                }
                let zero = expected.filter(|(_, is_zero)| *is_zero);
                if let Some((position, _)) = zero {
                    prop_assert_eq!(index.zeroes_of(&(lba..lba + 1), position), vec![lba..lba + 1]);
                }
                prop_assert_eq!(index.touches(&(lba..lba + 1), tail), expected.is_some());
            }
        }
    }
}
