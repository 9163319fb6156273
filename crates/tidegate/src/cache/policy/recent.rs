//! A bounded table of pages that were seen lately, with a count each.
//!
//! Pages are known by 22 bits of a hash within a set of eight, of which the oldest leaves first. A
//! page is taken for another one in about two of a million look-ups.

/// Pages of a set.
const WAYS: usize = 8;
/// Bits of an entry that count.
const COUNT_BITS: u32 = 10;
/// Largest count.
pub(super) const MAX_COUNT: u32 = (1 << COUNT_BITS) - 1;

/// The table; 4 bytes a page.
pub(super) struct RecentPages {
    /// The sets, each with its newest page first. An entry is a fingerprint above a count, which
    /// is 0 where no page is.
    sets: Box<[[u32; WAYS]]>,
}

impl RecentPages {
    /// The table of at least `pages` pages.
    pub(super) fn new(pages: u64) -> Self {
        let sets = usize::try_from(pages.div_ceil(WAYS as u64).max(1)).unwrap_or(usize::MAX);
        Self { sets: vec![[0; WAYS]; sets].into() }
    }

    /// Adds `page`, which is not there, with a count of 1; the oldest page of a full set leaves.
    pub(super) fn remember(&mut self, page: u64) {
        let (set, fingerprint) = self.find(page);
        let end = set.iter().position(|&it| it == 0).unwrap_or(WAYS - 1);
        set.copy_within(..end, 1);
        set[0] = fingerprint << COUNT_BITS | 1;
    }

    /// Counts `page` up, to [`MAX_COUNT`] at most; none where it is not there.
    pub(super) fn count_up(&mut self, page: u64) -> Option<u32> {
        let entry = self.entry(page)?;
        if *entry & MAX_COUNT < MAX_COUNT {
            *entry += 1;
        }
        Some(*entry & MAX_COUNT)
    }

    /// Removes `page`; returns whether it was there.
    pub(super) fn forget(&mut self, page: u64) -> bool {
        let entry = self.entry(page);
        let was_there = entry.is_some();
        if let Some(entry) = entry {
            *entry = 0;
        }
        was_there
    }

    /// Bytes of memory.
    #[cfg(all(test, not(feature = "loom")))]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.sets)
    }

    fn entry(&mut self, page: u64) -> Option<&mut u32> {
        let (set, fingerprint) = self.find(page);
        set.iter_mut().find(|it| **it >> COUNT_BITS == fingerprint && **it & MAX_COUNT > 0)
    }

    /// The set of `page`, and its fingerprint.
    fn find(&mut self, page: u64) -> (&mut [u32; WAYS], u32) {
        let hash = mix(page);
        let set = (u128::from(hash) * self.sets.len() as u128) >> 64;
        let fingerprint = hash & u64::from(u32::MAX >> COUNT_BITS);
        #[expect(clippy::cast_possible_truncation, reason = "below the number of sets; 22 bits")]
        (&mut self.sets[set as usize], fingerprint as u32)
    }
}

/// The finalizer of `SplitMix64`: every bit of the result depends on every bit of `page`.
fn mix(page: u64) -> u64 {
    let mixed = page.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_counted_until_it_is_forgotten() {
        let mut table = RecentPages::new(100);
        assert_eq!(table.count_up(7), None);
        table.remember(7);
        assert_eq!((table.count_up(7), table.count_up(7)), (Some(2), Some(3)));
        assert!(table.forget(7));
        assert!(!table.forget(7));
        assert_eq!(table.bytes(), 104 * 4);
    }

    #[test]
    fn counts_end_at_their_largest() {
        let mut table = RecentPages::new(1);
        table.remember(0);
        let last = (0..2 * MAX_COUNT).filter_map(|_| table.count_up(0)).last();
        assert_eq!(last, Some(MAX_COUNT));
    }

    #[test]
    fn the_oldest_page_of_a_set_leaves_first() {
        let mut table = RecentPages::new(WAYS as u64);
        (0..=WAYS as u64).for_each(|page| table.remember(page));
        assert_eq!(table.count_up(0), None);
        assert!((1..=WAYS as u64).all(|page| table.count_up(page) == Some(2)));
    }

    #[test]
    fn most_of_the_newest_pages_are_there_and_older_ones_are_not() {
        let mut table = RecentPages::new(8000);
        (0..80_000).for_each(|page| table.remember(page));
        let found = (76_000..80_000).filter(|&page| table.forget(page)).count();
        assert!(found > 3800, "{found} of the newest 4000 pages, half of what the table holds");
        let found = (0..40_000).filter(|&page| table.forget(page)).count();
        assert!(found < 40, "{found} of the oldest 40,000 pages");
    }
}
