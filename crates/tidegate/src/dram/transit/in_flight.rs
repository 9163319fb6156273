//! Counts the requests in flight, by thread, so that requests share no word.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::sync::shard::Shards;

/// A count of requests.
#[derive(Default)]
pub(super) struct InFlight {
    by_thread: Shards<AtomicU32>,
}

/// A counted request; dropping this ends it.
pub(super) struct Entered<'a> {
    count: &'a AtomicU32,
    /// Whether no other thread changes the count.
    is_own: bool,
}

impl InFlight {
    /// Counts a request of the calling thread. Later `SeqCst` loads of the thread come after the
    /// count.
    pub(super) fn enter(&self) -> Entered<'_> {
        let (count, is_own) = self.by_thread.mine();
        count.fetch_add(1, Ordering::SeqCst);
        Entered { count, is_own }
    }

    /// Returns the number of counted requests. It reads the threads' counts one after the other.
    pub(super) fn count(&self) -> u32 {
        self.by_thread.iter().map(|count| count.load(Ordering::SeqCst)).sum()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.is_own {
            // A locked instruction would wait for the stores of the request, which may miss the
            // CPU's cache.
            let left = self.count.load(Ordering::Relaxed) - 1;
            self.count.store(left, Ordering::Release);
        } else {
            self.count.fetch_sub(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_until_they_end_on_any_thread() {
        let in_flight = InFlight::default();
        let outer = in_flight.enter();
        drop(in_flight.enter());
        std::thread::scope(|scope| {
            for _ in 0..100 {
                scope.spawn(|| {
                    let _entered = in_flight.enter();
                    assert!(in_flight.count() >= 2);
                });
            }
        });
        assert_eq!(in_flight.count(), 1);
        drop(outer);
        assert_eq!(in_flight.count(), 0);
    }
}
