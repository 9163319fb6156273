//! The number of pages that are cleaned at once: as many as the backing takes while a writer may
//! wait.
//!
//! A large batch is cheap for the backing, which flushes once for the whole batch and takes
//! neighbours together. But a writer that finds the cache full waits for the batch, and 512 pages
//! in any order may take a disk a tenth of a second. So the batch after one that took too long is
//! smaller in proportion, and later ones grow again by steps.
//!
//! The fixed cost of a flush does not count: smaller batches would only pay it more often. Two
//! batches of different sizes give an estimate of that cost.

/// Most pages of a batch: larger batches make no page cheaper.
pub const PAGES_MAX: usize = 512;
/// Fewest pages of a batch, however slow the backing is.
pub const PAGES_MIN: usize = 32;
/// Target time of a batch, without its fixed cost: a writer that finds the cache full waits for the
/// batch that is under way, and for its own.
const TARGET_NS: u64 = 20_000_000;

/// The size of batches, by the times of earlier ones.
#[derive(Debug)]
pub struct BatchSize {
    pages: usize,
    /// Pages and time of the last batch.
    last: Option<(u64, u64)>,
    /// Estimated time of a batch without pages.
    fixed_ns: u64,
}

impl Default for BatchSize {
    fn default() -> Self {
        Self { pages: PAGES_MAX, last: None, fixed_ns: 0 }
    }
}

impl BatchSize {
    /// Returns the number of pages of the next batch, from [`PAGES_MIN`] to [`PAGES_MAX`].
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Takes in a batch of `pages` pages that took the backing `took_ns`.
    pub fn see(&mut self, pages: usize, took_ns: u64) {
        self.estimate_fixed(pages as u64, took_ns);
        let beside_ns = took_ns.saturating_sub(self.fixed_ns);
        let fitting = (pages as u64).saturating_mul(TARGET_NS) / beside_ns.max(1);
        let fitting = usize::try_from(fitting).unwrap_or(PAGES_MAX);
        let is_slow = beside_ns > TARGET_NS;
        // A quick batch of few pages says nothing about larger ones.
        if is_slow || 2 * pages >= self.pages {
            let most = if is_slow { self.pages } else { 2 * self.pages };
            self.pages = fitting.min(most).clamp(PAGES_MIN, PAGES_MAX);
        }
    }

    /// Estimates the time of a batch without pages, from two batches of sizes a quarter apart.
    fn estimate_fixed(&mut self, pages: u64, took_ns: u64) {
        let Some((last_pages, last_ns)) = self.last.replace((pages, took_ns)) else { return };
        let (few, many) = ((pages, took_ns), (last_pages, last_ns));
        let (few, many) = if few.0 <= many.0 { (few, many) } else { (many, few) };
        if many.0 - few.0 < many.0.div_ceil(4) {
            return;
        }
        let page_ns = many.1.saturating_sub(few.1) / (many.0 - few.0);
        self.fixed_ns = few.1.min(many.1).saturating_sub(few.0.saturating_mul(page_ns));
    }
}

#[cfg(all(test, not(loom)))]
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
        let mut size = BatchSize { pages: 200, ..BatchSize::default() };
        size.see(3, MILLISECOND_NS);
        assert_eq!(size.pages(), 200, "what 400 would take is not known");
        size.see(3, 30 * MILLISECOND_NS);
        assert_eq!(size.pages(), PAGES_MIN, "but if three take so long");
    }

    #[test]
    fn a_slow_flush_is_not_paid_more_often() {
        let mut size = BatchSize::default();
        let took_ns = |pages: usize| 40 * MILLISECOND_NS + pages as u64 * 10_000;
        (0..20).for_each(|_| size.see(size.pages(), took_ns(size.pages())));
        assert_eq!(size.pages(), PAGES_MAX, "45 ms for 512 pages, and 40 ms for any number");
    }

    proptest! {
        /// Over a backing with a fixed time for a flush and for a page, batches come to take the
        /// target time, as far as their limits allow.
        #[test]
        fn batches_come_to_take_what_they_may(
            flush_ns in 0..30 * MILLISECOND_NS, page_ns in 1..3 * MILLISECOND_NS,
        ) {
            let mut size = BatchSize::default();
            let took_ns = |pages: usize| flush_ns + pages as u64 * page_ns;
            (0..200).for_each(|_| size.see(size.pages(), took_ns(size.pages())));
            let pages = size.pages();
            prop_assert!((PAGES_MIN..=PAGES_MAX).contains(&pages));
            prop_assert!(pages == PAGES_MIN || pages as u64 * page_ns <= TARGET_NS + TARGET_NS / 4);
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
