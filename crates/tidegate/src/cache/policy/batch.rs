//! How many pages are cleaned at once: as many as the backing takes in a while that a writer may
//! wait.
//!
//! A large batch is cheap for the backing, which flushes once for all of it and takes neighbours
//! together. But a writer that finds the cache full waits for it, and for a disk 512 pages in any
//! order may be a tenth of a second. So the batch that follows one that took too long is smaller in
//! proportion, and grows again by steps.

/// Most pages of a batch: from here on more of them make none cheaper.
pub const PAGES_MAX: usize = 512;
/// Fewest pages of a batch, however slow the backing is.
pub const PAGES_MIN: usize = 32;
/// What a batch may take, its flush included: a writer waits for two of them at most, the one that
/// is under way and its own.
const TARGET_NS: u64 = 20_000_000;

/// The size of batches, from the time of those before.
#[derive(Debug)]
pub struct BatchSize {
    pages: usize,
}

impl Default for BatchSize {
    fn default() -> Self {
        Self { pages: PAGES_MAX }
    }
}

impl BatchSize {
    /// Pages of the next batch, from [`PAGES_MIN`] to [`PAGES_MAX`].
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// A batch of `pages` pages took the backing `took_ns`.
    pub fn see(&mut self, pages: usize, took_ns: u64) {
        let fitting = (pages as u64).saturating_mul(TARGET_NS) / took_ns.max(1);
        let fitting = usize::try_from(fitting).unwrap_or(PAGES_MAX);
        let is_slow = took_ns > TARGET_NS;
        // A quick batch of few pages says nothing of larger ones.
        if is_slow || 2 * pages >= self.pages {
            let most = if is_slow { self.pages } else { 2 * self.pages };
            self.pages = fitting.min(most).clamp(PAGES_MIN, PAGES_MAX);
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MILLISECOND_NS: u64 = 1_000_000;

    #[test]
    fn a_slow_batch_is_followed_by_one_in_proportion() {
        let mut size = BatchSize::default();
        size.see(512, 15 * MILLISECOND_NS);
        assert_eq!(size.pages(), 512);
        size.see(512, 100 * MILLISECOND_NS);
        assert_eq!(size.pages(), 102);
        size.see(102, 18 * MILLISECOND_NS);
        assert_eq!(size.pages(), 113);
        size.see(113, 2 * MILLISECOND_NS);
        assert_eq!(size.pages(), 226, "by steps");
    }

    #[test]
    fn a_small_batch_says_little() {
        let mut size = BatchSize { pages: 200 };
        size.see(3, MILLISECOND_NS);
        assert_eq!(size.pages(), 200, "what 400 would take is not known");
        size.see(3, 30 * MILLISECOND_NS);
        assert_eq!(size.pages(), PAGES_MIN, "but if three take so long");
    }

    proptest! {
        /// Over a backing of which a flush and a page take their times, batches come to take the
        /// target, as far as their sizes can.
        #[test]
        fn batches_come_to_take_what_they_may(
            flush_ns in 0..30 * MILLISECOND_NS, page_ns in 1..3 * MILLISECOND_NS,
        ) {
            let mut size = BatchSize::default();
            let took_ns = |pages: usize| flush_ns + pages as u64 * page_ns;
            (0..200).for_each(|_| size.see(size.pages(), took_ns(size.pages())));
            let pages = size.pages();
            prop_assert!((PAGES_MIN..=PAGES_MAX).contains(&pages));
            prop_assert!(pages == PAGES_MIN || took_ns(pages) <= TARGET_NS + TARGET_NS / 4);
            prop_assert!(pages == PAGES_MAX || took_ns(2 * pages) >= TARGET_NS / 2);
        }

        #[test]
        fn no_time_panics(seen in prop::collection::vec((any::<u16>(), any::<u64>()), 0..50)) {
            let mut size = BatchSize::default();
            for (pages, took_ns) in seen {
                size.see(pages.into(), took_ns);
                prop_assert!((PAGES_MIN..=PAGES_MAX).contains(&size.pages()));
            }
        }
    }
}
