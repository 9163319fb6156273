//! A bounded table of pages that were seen lately.
//!
//! A page is known by a part of its hash, in a set of eight pages; the oldest one leaves first.

/// Pages of a set.
const WAYS: usize = 8;
/// Bits of a [`Counted`] for its count.
const COUNT_BITS: u32 = 10;
/// Largest count.
pub(super) const MAX_COUNT: u32 = (1 << COUNT_BITS) - 1;

/// The memory of a page in a table; the default stands for no page.
pub(super) trait Entry: Copy + Default + PartialEq {
    /// Returns the entry of a page with this hash.
    fn of(hash: u64) -> Self;

    /// Returns whether this is the entry of a page with this hash.
    fn is_of(self, hash: u64) -> bool;
}

/// A page that was seen: 2 bytes. A page is taken for another one in about one of 8000 look-ups.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Seen(u16);

/// A count of a page's occurrences: 4 bytes, 22 bits of the hash above the count. A page is taken
/// for another one in about two of a million look-ups.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Counted(u32);

impl Entry for Seen {
    fn of(hash: u64) -> Self {
        let bits = u16::try_from(hash & u64::from(u16::MAX)).unwrap_or_default();
        Self(bits.max(1))
    }

    fn is_of(self, hash: u64) -> bool {
        self == Self::of(hash)
    }
}

impl Entry for Counted {
    fn of(hash: u64) -> Self {
        let bits = u32::try_from(hash & u64::from(u32::MAX >> COUNT_BITS)).unwrap_or_default();
        Self(bits << COUNT_BITS | 1)
    }

    fn is_of(self, hash: u64) -> bool {
        self.0 & MAX_COUNT > 0 && self.0 >> COUNT_BITS == Self::of(hash).0 >> COUNT_BITS
    }
}

/// The table.
pub(super) struct RecentPages<E> {
    /// The sets, each with its newest page first.
    sets: Box<[[E; WAYS]]>,
}

impl<E: Entry> RecentPages<E> {
    /// Creates a table of at least `pages` pages.
    pub(super) fn new(pages: u64) -> Self {
        let sets = usize::try_from(pages.div_ceil(WAYS as u64).max(1)).unwrap_or(usize::MAX);
        Self { sets: vec![[E::default(); WAYS]; sets].into() }
    }

    /// Adds `page`, which is not in the table, as seen once. The oldest page of a full set leaves.
    pub(super) fn remember(&mut self, page: u64) {
        let (set, hash) = self.find(page);
        let end = set.iter().position(|it| *it == E::default()).unwrap_or(WAYS - 1);
        set.copy_within(..end, 1);
        set[0] = E::of(hash);
    }

    /// Removes `page`, and returns whether it was there.
    pub(super) fn forget(&mut self, page: u64) -> bool {
        let entry = self.entry(page);
        let was_there = entry.is_some();
        if let Some(entry) = entry {
            *entry = E::default();
        }
        was_there
    }

    /// Returns the bytes of memory.
    #[cfg(all(test, not(loom)))]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.sets)
    }

    fn entry(&mut self, page: u64) -> Option<&mut E> {
        let (set, hash) = self.find(page);
        set.iter_mut().find(|it| it.is_of(hash))
    }

    /// Returns the set of `page`, and its hash.
    fn find(&mut self, page: u64) -> (&mut [E; WAYS], u64) {
        let hash = mix(page);
        let set = (u128::from(hash) * self.sets.len() as u128) >> 64;
        #[expect(clippy::cast_possible_truncation, reason = "below the number of sets")]
        (&mut self.sets[set as usize], hash)
    }
}

impl RecentPages<Counted> {
    /// Counts `page` up, to [`MAX_COUNT`] at most. Returns `None` if it is not in the table.
    pub(super) fn count_up(&mut self, page: u64) -> Option<u32> {
        let entry = self.entry(page)?;
        if entry.0 & MAX_COUNT < MAX_COUNT {
            entry.0 += 1;
        }
        Some(entry.0 & MAX_COUNT)
    }
}

/// Mixes `page` as `SplitMix64` does: every bit of the result depends on every bit of `page`.
fn mix(page: u64) -> u64 {
    let mixed = page.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_counted_until_it_is_forgotten() {
        let mut table = RecentPages::<Counted>::new(100);
        assert_eq!(table.count_up(7), None);
        table.remember(7);
        assert_eq!((table.count_up(7), table.count_up(7)), (Some(2), Some(3)));
        assert!(table.forget(7));
        assert!(!table.forget(7));
        assert_eq!(table.bytes(), 104 * 4);
    }

    #[test]
    fn counts_end_at_their_largest() {
        let mut table = RecentPages::<Counted>::new(1);
        table.remember(0);
        let last = (0..2 * MAX_COUNT).filter_map(|_| table.count_up(0)).last();
        assert_eq!(last, Some(MAX_COUNT));
    }

    #[test]
    fn the_oldest_page_of_a_set_leaves_first() {
        let mut table = RecentPages::<Counted>::new(WAYS as u64);
        (0..=WAYS as u64).for_each(|page| table.remember(page));
        assert_eq!(table.count_up(0), None);
        assert!((1..=WAYS as u64).all(|page| table.count_up(page) == Some(2)));
    }

    fn most_of_the_newest_are_there<E: Entry>() {
        let mut table = RecentPages::<E>::new(8000);
        (0..80_000).for_each(|page| table.remember(page));
        let found = (76_000..80_000).filter(|&page| table.forget(page)).count();
        assert!(found > 3800, "{found} of the newest 4000 pages, half of what the table holds");
        let found = (0..40_000).filter(|&page| table.forget(page)).count();
        assert!(found < 40, "{found} of the oldest 40,000 pages");
    }

    #[test]
    fn most_of_the_newest_pages_are_there_and_older_ones_are_not() {
        most_of_the_newest_are_there::<Counted>();
        most_of_the_newest_are_there::<Seen>();
    }
}
