//! Counters of the requests to a region: the cost model that unit tests hold the engines to.

use std::ops::Sub;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::shard::{Shards, add};

/// The requests to a region since it was opened.
///
/// The counters count the caller's requests, in whatever way the durability domain serves them, so
/// that an engine has the same counts in every domain. Word loads are not counted: they must cost
/// no more than a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Counters<N = u64> {
    /// Calls that stored bytes, cached or streaming.
    pub stores: N,
    /// Bytes stored through the cache.
    pub bytes_stored: N,
    /// Bytes stored around the cache.
    pub bytes_streamed: N,
    /// Cache lines of 64 bytes that callers asked to write back.
    pub lines_written_back: N,
    /// Fences.
    pub fences: N,
    /// Bytes read by [`Region::read`](super::Region::read).
    pub bytes_read: N,
}

impl Counters {
    /// Combines each counter with its counterpart by `op`.
    fn combined<N>(self, other: &Counters<N>, op: impl Fn(u64, &N) -> u64) -> Self {
        Self {
            stores: op(self.stores, &other.stores),
            bytes_stored: op(self.bytes_stored, &other.bytes_stored),
            bytes_streamed: op(self.bytes_streamed, &other.bytes_streamed),
            lines_written_back: op(self.lines_written_back, &other.lines_written_back),
            fences: op(self.fences, &other.fences),
            bytes_read: op(self.bytes_read, &other.bytes_read),
        }
    }
}

impl Sub for Counters {
    type Output = Self;

    /// Subtracts an earlier snapshot, which leaves the requests between the two.
    fn sub(self, earlier: Self) -> Self {
        self.combined(&earlier, |later, earlier| later.wrapping_sub(*earlier))
    }
}

/// One thread's share of the counters.
type Shard = Counters<AtomicU64>;

/// The counters of a region, a shard per thread.
pub(super) struct Counting(Shards<Shard>);

impl Counting {
    pub(super) fn new() -> Self {
        Self(Shards::default())
    }

    #[inline]
    pub(super) fn stored(&self, bytes: u64) {
        let (shard, exclusive) = self.0.mine();
        add(&shard.stores, 1, exclusive);
        add(&shard.bytes_stored, bytes, exclusive);
    }

    #[inline]
    pub(super) fn streamed(&self, bytes: u64) {
        let (shard, exclusive) = self.0.mine();
        add(&shard.stores, 1, exclusive);
        add(&shard.bytes_streamed, bytes, exclusive);
    }

    #[inline]
    pub(super) fn written_back(&self, lines: u64) {
        let (shard, exclusive) = self.0.mine();
        add(&shard.lines_written_back, lines, exclusive);
    }

    #[inline]
    pub(super) fn fenced(&self) {
        let (shard, exclusive) = self.0.mine();
        add(&shard.fences, 1, exclusive);
    }

    #[inline]
    pub(super) fn read(&self, bytes: u64) {
        let (shard, exclusive) = self.0.mine();
        add(&shard.bytes_read, bytes, exclusive);
    }

    pub(super) fn snapshot(&self) -> Counters {
        let add = |sum: u64, cell: &AtomicU64| sum.wrapping_add(cell.load(Ordering::Relaxed));
        self.0.iter().fold(Counters::default(), |sum, shard| sum.combined(shard, add))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::shard::{CROWD, SEATS};

    #[test]
    fn no_count_is_lost_with_more_threads_than_seats() {
        const THREADS: usize = SEATS + 16;
        const ROUNDS: u64 = 500;
        let _alone = CROWD.lock();
        let counting = Counting::new();
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        counting.stored(8);
                        counting.streamed(64);
                        counting.written_back(3);
                        counting.fenced();
                        counting.read(5);
                    }
                });
            }
        });
        let calls = THREADS as u64 * ROUNDS;
        let expected = Counters {
            stores: 2 * calls,
            bytes_stored: 8 * calls,
            bytes_streamed: 64 * calls,
            lines_written_back: 3 * calls,
            fences: calls,
            bytes_read: 5 * calls,
        };
        assert_eq!(counting.snapshot(), expected);
    }

    #[test]
    fn difference_is_what_happened_between() {
        let counting = Counting::new();
        counting.stored(8);
        let before = counting.snapshot();
        counting.fenced();
        let expected = Counters { fences: 1, ..Counters::default() };
        assert_eq!(counting.snapshot() - before, expected);
    }
}
