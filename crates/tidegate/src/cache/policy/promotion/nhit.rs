//! `nhit`: a page is cached at its n-th miss, once the cache is nearly full (Open CAS).
//!
//! Below the trigger every page is cached and none is counted. A request is admitted if each of its
//! pages has missed often enough, or if one is cached already (as in Open CAS, which would have to
//! invalidate that page otherwise).
//!
//! Counts are kept in a bounded table of twice as many pages as the cache has slots, 8 bytes a
//! slot. A page that leaves the table counts from 1 again.

use std::ops::Range;

use super::Promotion;
use crate::cache::policy::Occupancy;
use crate::cache::policy::recent::{Counted, MAX_COUNT, RecentPages};
use crate::cache::policy::settings::{Settings, Spec, Unit};

const THRESHOLD: usize = 0;
const TRIGGER: usize = 1;

/// The settings; ranges and defaults are from Open CAS.
pub const SPECS: &[Spec] = &[
    Spec::number("nhit.threshold", Unit::Count, 2..=1000, 3)
        .about("misses of a page, with the one that caches it"),
    Spec::number("nhit.trigger-pct", Unit::Percent, 0..=100, 80)
        .about("share of the cache in use from which misses are counted"),
];

// A count has to be able to reach every threshold.
const _: () = assert!(MAX_COUNT >= 1000);

/// Pages counted for each slot of the cache, as in Open CAS.
const PAGES_PER_SLOT: u64 = 2;

/// The policy and its counts.
pub struct Nhit {
    settings: Settings,
    misses: RecentPages<Counted>,
}

impl Nhit {
    /// Returns the policy for a cache of `slots` slots.
    pub fn new(slots: u32) -> Self {
        Self {
            settings: Settings::new(SPECS),
            misses: RecentPages::new(PAGES_PER_SLOT * u64::from(slots)),
        }
    }

    /// Counts a miss of `page`, and returns its number of misses.
    fn count(&mut self, page: u64) -> u64 {
        self.misses.count_up(page).map_or_else(
            || {
                self.misses.remember(page);
                1
            },
            u64::from,
        )
    }
}

impl Promotion for Nhit {
    fn admits(&mut self, pages: Range<u64>, is_partly_cached: bool, occupancy: Occupancy) -> bool {
        if !occupancy.is_at_least_pct(self.settings.get(TRIGGER)) {
            return true;
        }
        let threshold = self.settings.get(THRESHOLD);
        // Each page is counted, even after one that missed too rarely.
        let rare = pages.filter(|&page| self.count(page) < threshold).count();
        rare == 0 || is_partly_cached
    }

    fn cached(&mut self, page: u64) {
        self.misses.forget(page);
    }

    fn set_settings(&mut self, settings: &Settings) {
        self.settings.clone_from(settings);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashMap;

    use proptest::collection::vec;
    use proptest::prelude::any;
    use proptest::{prop_assert_eq, proptest};

    use super::*;

    const FULL: Occupancy = Occupancy { used_slots: 80, slots: 100 };

    #[test]
    fn the_third_miss_is_cached_and_counts_begin_anew_after_it() {
        let mut nhit = Nhit::new(100);
        let mut admits = || nhit.admits(5..6, false, FULL);
        assert_eq!([admits(), admits(), admits(), admits()], [false, false, true, true]);
        nhit.cached(5);
        assert!(!nhit.admits(5..6, false, FULL));
    }

    #[test]
    fn below_the_trigger_all_is_cached_and_nothing_counted() {
        let mut nhit = Nhit::new(100);
        let emptier = Occupancy { used_slots: 79, ..FULL };
        assert!((0..9).all(|_| nhit.admits(5..6, false, emptier)));
        assert!(!nhit.admits(5..6, false, FULL));
        nhit.settings.set("nhit.trigger-pct", "79").unwrap();
        assert!(!nhit.admits(5..6, false, emptier));
    }

    #[test]
    fn a_request_waits_for_its_rarest_page_unless_one_is_cached() {
        let mut nhit = Nhit::new(100);
        nhit.settings.set("nhit.threshold", "2").unwrap();
        assert!(!nhit.admits(0..2, false, FULL));
        assert!(!nhit.admits(0..3, false, FULL), "page 2 missed once");
        assert!(nhit.admits(0..3, false, FULL));
        assert!(nhit.admits(90..91, true, FULL));
    }

    #[test]
    fn the_table_is_bounded() {
        let mut nhit = Nhit::new(1000);
        let bytes = nhit.misses.bytes();
        assert!(bytes <= 8 * 1000, "{bytes} bytes for 1000 slots");
        nhit.admits(0..1_000_000, false, FULL);
        assert_eq!(nhit.misses.bytes(), bytes);
    }

    proptest! {
        #[test]
        fn counts_are_those_of_a_map(requests in vec((0..8_u64, 0..4_u64, any::<bool>()), 0..100), threshold in 2..6_u64) {
            let mut nhit = Nhit::new(1000);
            nhit.settings.set("nhit.threshold", &threshold.to_string()).unwrap();
            let mut counts = HashMap::new();
            for (first, len, partly) in requests {
                let pages = first..first + len;
                let mut expected = true;
                for page in pages.clone() {
                    let count = counts.entry(page).or_insert(0);
                    *count += 1;
                    expected &= *count >= threshold;
                }
                let admitted = nhit.admits(pages.clone(), partly, FULL);
                prop_assert_eq!(admitted, expected || partly);
                if admitted {
                    for page in pages {
                        counts.remove(&page);
                        nhit.cached(page);
                    }
                }
            }
        }
    }
}
