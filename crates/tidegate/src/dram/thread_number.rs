//! Small numbers for the threads that live, so that counters can be by thread.
//!
//! A thread takes the lowest number that is free when it first asks, and gives it back when it
//! ends. What the one before stored under that number is seen by the next.

use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers below this belong to one thread at a time; it is itself the number of all further
/// threads together.
pub(super) const SHARED: usize = 31;

/// Numbers from 0 up to [`SHARED`] itself.
pub(super) const COUNT: usize = SHARED + 1;

/// A bit for each number that is taken.
static TAKEN: AtomicU64 = AtomicU64::new(0);

struct Number(usize);

thread_local! {
    static NUMBER: Number = Number::take();
}

/// The number of the calling thread.
pub(super) fn thread_number() -> usize {
    // A thread that is ending may have given its number back.
    NUMBER.try_with(|number| number.0).unwrap_or(SHARED)
}

impl Number {
    fn take() -> Self {
        let lowest = |taken: u64| taken.trailing_ones() as usize;
        let with_it = |taken| (lowest(taken) < SHARED).then(|| taken | 1 << lowest(taken));
        let before = TAKEN.fetch_update(Ordering::Acquire, Ordering::Relaxed, with_it);
        Self(before.map_or(SHARED, lowest))
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if self.0 < SHARED {
            TAKEN.fetch_and(!(1 << self.0), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn threads_that_live_at_once_share_no_number_but_the_last() {
        const THREADS: usize = 64;
        let all_have_one = Barrier::new(THREADS);
        for _ in 0..3 {
            let numbers: Vec<usize> = std::thread::scope(|scope| {
                let ask = || {
                    let number = thread_number();
                    all_have_one.wait();
                    assert_eq!(thread_number(), number);
                    number
                };
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(ask)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let own: Vec<_> = numbers.iter().filter(|&&number| number < SHARED).collect();
            assert_eq!(own.iter().collect::<HashSet<_>>().len(), own.len());
            assert!(numbers.iter().all(|&number| number <= SHARED) && !own.is_empty());
        }
    }
}
