//! One value per thread, without locks: the basis of counters and of modelled delays.
//!
//! Invariant: a seat below [`SEATS`] belongs to one live thread at a time, and taking it happens
//! after all actions of its former owner. So its owner may update a shard by plain load and store.
//! Threads beyond the seats share the last shard and must use read-modify-write operations.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

/// Number of threads that get their own shard.
pub(crate) const SEATS: usize = 64;
const NONE: usize = usize::MAX;

/// A bit for each seat, set if it is taken.
static TAKEN: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static SEAT: Cell<usize> = const { Cell::new(NONE) };
    static RETURN: ReturnSeat = const { ReturnSeat };
}

/// Gives the thread's seat back when the thread ends.
struct ReturnSeat;

impl Drop for ReturnSeat {
    fn drop(&mut self) {
        let seat = SEAT.replace(SEATS);
        if seat < SEATS {
            TAKEN.fetch_and(!(1 << seat), Ordering::Release);
        }
    }
}

/// Returns the calling thread's seat: its own below [`SEATS`], or [`SEATS`], the shared one.
#[inline]
pub(crate) fn seat() -> usize {
    let seat = SEAT.get();
    if seat == NONE { take_seat() } else { seat }
}

#[cold]
fn take_seat() -> usize {
    // A thread whose locals are being destroyed could not give a seat back: it shares.
    let seat = RETURN.try_with(|_| free_seat()).unwrap_or(SEATS);
    SEAT.set(seat);
    seat
}

fn free_seat() -> usize {
    let taken = TAKEN.fetch_update(Ordering::Acquire, Ordering::Relaxed, |taken| {
        (taken != u64::MAX).then(|| taken | (taken + 1))
    });
    taken.map_or(SEATS, |before| before.trailing_ones() as usize)
}

/// Adds `count` to a counter. Uses a plain load and store if the calling thread is its only writer.
#[inline]
pub(crate) fn add(cell: &AtomicU64, count: u64, exclusive: bool) {
    if exclusive {
        cell.store(cell.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    } else {
        cell.fetch_add(count, Ordering::Relaxed);
    }
}

/// A `T` for each seat, each on its own cache lines.
pub(crate) struct Shards<T>(Box<[CachePadded<T>]>);

impl<T: Default> Default for Shards<T> {
    fn default() -> Self {
        Self((0..=SEATS).map(|_| CachePadded::default()).collect())
    }
}

impl<T> Shards<T> {
    /// Returns the calling thread's shard, and whether no other thread updates it.
    #[inline]
    pub(crate) fn mine(&self) -> (&T, bool) {
        let seat = seat();
        (&self.0[seat], seat < SEATS)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|padded| &**padded)
    }
}

/// Held by tests that take so many seats that other tests could lack some.
#[cfg(test)]
pub(crate) static CROWD: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn seats_are_exclusive_and_given_back() {
        const THREADS: usize = 24;
        let _alone = CROWD.lock();
        for _ in 0..8 {
            let all_seated = Barrier::new(THREADS);
            let mut seats: Vec<usize> = std::thread::scope(|scope| {
                let sit = || {
                    let mine = seat();
                    all_seated.wait();
                    assert_eq!(seat(), mine, "a thread keeps its seat");
                    mine
                };
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(sit)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            // Eight rounds of 24 threads only fit into 64 seats if they are given back.
            seats.retain(|&seat| seat < SEATS);
            assert!(seats.len() > THREADS / 2, "seats were not given back");
            seats.sort_unstable();
            assert!(
                seats.windows(2).all(|pair| pair[0] != pair[1]),
                "a seat was shared: {seats:?}"
            );
        }
    }

    #[test]
    fn only_threads_beyond_the_seats_share_a_shard_and_know_it() {
        const THREADS: usize = SEATS + 8;
        let _alone = CROWD.lock();
        let shards = Shards::<AtomicU64>::default();
        let all_seated = Barrier::new(THREADS);
        let mut exclusive: Vec<usize> = std::thread::scope(|scope| {
            let sit = || {
                let (shard, exclusive) = shards.mine();
                all_seated.wait();
                exclusive.then(|| std::ptr::from_ref(shard).addr())
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(sit)).collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert!(exclusive.len() <= SEATS, "{} threads think they are alone", exclusive.len());
        exclusive.sort_unstable();
        assert!(exclusive.windows(2).all(|pair| pair[0] != pair[1]), "a shard was shared");
    }
}
