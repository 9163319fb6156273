//! `acp`: dirty pages are cleaned without rest, in the order of the backing (Open CAS's aggressive
//! cleaning policy).
//!
//! The backing is divided into chunks of 100 MiB. Eleven buckets keep the chunks by their share of
//! dirty pages: none, up to 10 %, ... up to 100 %. The chunk that was in the fullest bucket for
//! longest is cleaned from its first page to its last one, a batch at a time.

use super::{Cleaning, DirtySlots, Load, MILLISECOND_NS};
use crate::cache::policy::settings::{Settings, Spec, Unit};
use crate::tier::list::{Links, List};

const WAKE_UP: usize = 0;
const MAX_BUFFERS: usize = 1;

/// The settings; ranges and defaults are from Open CAS.
pub const SPECS: &[Spec] = &[
    Spec::number("acp.wake-up-ms", Unit::Milliseconds, 0..=10_000, 10)
        .about("rest between two batches"),
    Spec::number("acp.flush-max-buffers", Unit::Count, 1..=10_000, 128)
        .about("slots cleaned at a time"),
];

/// Pages of a chunk: 100 MiB, as in Open CAS.
const CHUNK_PAGES: u64 = (100 << 20) / 4096;
/// Most chunks, 12 bytes each; over a backing above 25 TiB they are larger.
const MAX_CHUNKS: u64 = 1 << 18;
/// Buckets of chunks, as in Open CAS.
const BUCKETS: usize = 11;
/// Rest while nothing is dirty, as in Open CAS.
const BACKOFF_NS: u64 = 1000 * MILLISECOND_NS;

/// Chunks of the backing with their dirty pages.
pub struct Acp {
    settings: Settings,
    chunk_pages: u64,
    /// Dirty pages of each chunk.
    dirty: Box<[u32]>,
    links: Links,
    /// The chunks by their share of dirty pages, the cleanest bucket first.
    buckets: [List; BUCKETS],
    cleaned: Option<Cleaned>,
}

/// Progress in the chunk that is being cleaned.
#[derive(Debug, Clone, Copy)]
struct Cleaned {
    chunk: u32,
    next_page: u64,
}

impl Acp {
    /// Returns the policy for a backing of `pages` pages.
    pub fn new(pages: u64) -> Self {
        let chunk_pages = pages.div_ceil(MAX_CHUNKS).max(CHUNK_PAGES);
        let chunks = u32::try_from(pages.div_ceil(chunk_pages).max(1)).unwrap_or(u32::MAX);
        let (mut links, mut buckets) = (Links::new(chunks), [List::EMPTY; BUCKETS]);
        (0..chunks).for_each(|chunk| buckets[0].push_last(&mut links, chunk));
        let dirty = vec![0; chunks as usize].into();
        Self { settings: Settings::new(SPECS), chunk_pages, dirty, links, buckets, cleaned: None }
    }

    /// Returns the chunk of `page`; pages beyond the backing belong to the last one.
    fn chunk_of(&self, page: u64) -> u32 {
        let last = self.dirty.len() - 1;
        let chunk = usize::try_from(page / self.chunk_pages).map_or(last, |chunk| chunk.min(last));
        u32::try_from(chunk).unwrap_or(u32::MAX)
    }

    /// Returns the bucket of a chunk with `dirty` dirty pages.
    fn bucket_of(&self, dirty: u32) -> usize {
        let tenths = (u64::from(dirty) * 10).div_ceil(self.chunk_pages);
        usize::try_from(tenths).map_or(BUCKETS - 1, |tenths| tenths.min(BUCKETS - 1))
    }

    fn count(&mut self, page: u64, change: impl FnOnce(u32) -> u32) {
        let chunk = self.chunk_of(page);
        let dirty = self.dirty[chunk as usize];
        let changed = change(dirty);
        self.dirty[chunk as usize] = changed;
        let (from, to) = (self.bucket_of(dirty), self.bucket_of(changed));
        if from != to {
            self.buckets[from].remove(&mut self.links, chunk);
            self.buckets[to].push_last(&mut self.links, chunk);
        }
    }

    /// Returns the chunk to clean, from its first page: the first chunk of the fullest bucket.
    fn choose(&self) -> Option<Cleaned> {
        let fullest = self.buckets[1..].iter().rev().find_map(List::first)?;
        Some(Cleaned { chunk: fullest, next_page: u64::from(fullest) * self.chunk_pages })
    }

    /// Ends the cleaning of `chunk`. Pages that are still dirty wait for the rest of its bucket.
    fn finish(&mut self, chunk: u32) {
        let bucket = self.bucket_of(self.dirty[chunk as usize]);
        self.buckets[bucket].move_last(&mut self.links, chunk);
        self.cleaned = None;
    }
}

impl Cleaning for Acp {
    fn dirtied(&mut self, _slot: u32, page: u64, _now_ns: u64) {
        self.count(page, |dirty| dirty.saturating_add(1));
    }

    fn cleaned(&mut self, _slot: u32, page: u64) {
        self.count(page, |dirty| dirty.saturating_sub(1));
    }

    fn next(&mut self, _load: &Load, dirty: &dyn DirtySlots, out: &mut Vec<u32>) -> u64 {
        let Some(Cleaned { chunk, next_page }) = self.cleaned.or_else(|| self.choose()) else {
            return BACKOFF_NS;
        };
        let end = (u64::from(chunk) + 1) * self.chunk_pages;
        let mut left = self.settings.get(MAX_BUFFERS);
        let mut page = next_page;
        while page < end && left > 0 {
            if let Some(slot) = dirty.of_page(page) {
                out.push(slot);
                left -= 1;
            }
            page += 1;
        }
        self.cleaned = Some(Cleaned { chunk, next_page: page });
        if page == end {
            self.finish(chunk);
        }
        self.settings.get(WAKE_UP) * MILLISECOND_NS
    }

    fn set_settings(&mut self, settings: &Settings) {
        self.settings.clone_from(settings);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;
    use std::collections::BTreeMap;

    use proptest::collection::vec;
    use proptest::prelude::any;
    use proptest::{prop_assert, prop_assert_eq, proptest};

    use super::super::ByPage;
    use super::*;

    const LOAD: Load = Load { now_ns: 0, last_request_ns: 0, dirty_slots: 0, slots: 0 };

    /// A policy and the dirty pages, each in a slot of its own.
    struct Fixture {
        acp: Acp,
        dirty: BTreeMap<u64, u32>,
    }

    impl Fixture {
        fn new(pages: u64) -> Self {
            Self { acp: Acp::new(pages), dirty: BTreeMap::new() }
        }

        fn dirty(&mut self, page: u64) {
            let slot = u32::try_from(self.dirty.len()).unwrap();
            if let std::collections::btree_map::Entry::Vacant(entry) = self.dirty.entry(page) {
                self.acp.dirtied(slot, page, 0);
                entry.insert(slot);
            }
        }

        /// Cleans the next batch. Returns its pages, and the rest after it.
        fn clean(&mut self) -> (Vec<u64>, u64) {
            let mut slots = Vec::new();
            let rest_ns =
                self.acp.next(&LOAD, &ByPage(|page| self.dirty.get(&page).copied()), &mut slots);
            let page_of = |slot| self.dirty.iter().find(|it| *it.1 == slot).map(|it| *it.0);
            let pages: Vec<_> = slots.into_iter().filter_map(page_of).collect();
            for page in &pages {
                self.dirty.remove(page);
                self.acp.cleaned(0, *page);
            }
            (pages, rest_ns)
        }
    }

    #[test]
    fn the_fullest_chunk_is_cleaned_first_in_order_and_in_batches() {
        let mut fixture = Fixture::new(10 * CHUNK_PAGES);
        fixture.dirty(7 * CHUNK_PAGES);
        (0..3000).rev().for_each(|page| fixture.dirty(3 * CHUNK_PAGES + page));
        let batches: Vec<_> = (0..24).map(|_| fixture.clean()).collect();
        assert!(batches.iter().all(|it| it.1 == 10 * MILLISECOND_NS));
        let first = 3 * CHUNK_PAGES;
        assert_eq!(batches[0].0, (first..first + 128).collect::<Vec<_>>());
        let pages: Vec<_> = batches.iter().flat_map(|it| &it.0).copied().collect();
        assert_eq!(pages, (first..first + 3000).collect::<Vec<_>>());
        assert_eq!(fixture.clean().0, [7 * CHUNK_PAGES]);
        assert_eq!(fixture.clean(), (vec![], BACKOFF_NS));
    }

    #[test]
    fn chunks_that_stay_dirty_take_turns() {
        let mut acp = Acp::new(3 * CHUNK_PAGES);
        (0..3).for_each(|chunk| acp.dirtied(0, chunk * CHUNK_PAGES, 0));
        let mut turns = Vec::new();
        for _ in 0..6 {
            let asked = Cell::new(None);
            let ask = |page| {
                asked.set(asked.get().or(Some(page)));
                None
            };
            acp.next(&LOAD, &ByPage(ask), &mut Vec::new());
            turns.push(asked.get().unwrap() / CHUNK_PAGES);
        }
        assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn buckets_are_tenths() {
        let acp = Acp::new(1);
        let tenth = u32::try_from(CHUNK_PAGES / 10).unwrap();
        let found = [0, 1, tenth, tenth + 1, 10 * tenth, u32::MAX].map(|it| acp.bucket_of(it));
        assert_eq!(found, [0, 1, 1, 2, 10, 10]);
    }

    #[test]
    fn the_largest_backing_takes_bounded_memory() {
        let mut acp = Acp::new(1 << 48);
        assert_eq!(acp.dirty.len(), 1 << 18);
        acp.dirtied(0, u64::MAX, 0);
        assert_eq!(acp.dirty[(1 << 18) - 1], 1);
    }

    proptest! {
        #[test]
        fn all_dirty_pages_are_cleaned_once_and_then_none(
            pages in vec(0..4 * CHUNK_PAGES, 0..300), at_once in 1..200_u32
        ) {
            let mut fixture = Fixture::new(4 * CHUNK_PAGES);
            let value = at_once.to_string();
            fixture.acp.settings.set("acp.flush-max-buffers", &value).unwrap();
            for page in pages {
                fixture.dirty(page);
            }
            let mut expected: Vec<_> = fixture.dirty.keys().copied().collect();
            let mut found = Vec::new();
            loop {
                let (batch, rest_ns) = fixture.clean();
                prop_assert!(batch.len() <= at_once as usize);
                prop_assert!(batch.is_sorted());
                if rest_ns == BACKOFF_NS {
                    break;
                }
                found.extend(batch);
            }
            found.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(found, expected);
            prop_assert!(fixture.acp.dirty.iter().all(|&dirty| dirty == 0));
        }

        #[test]
        fn no_sequence_of_calls_panics(calls in vec((any::<u64>(), any::<bool>()), 0..100)) {
            let mut acp = Acp::new(2 * CHUNK_PAGES);
            for (page, is_dirty) in calls {
                if is_dirty { acp.dirtied(0, page, 0) } else { acp.cleaned(0, page) }
            }
            acp.next(&LOAD, &ByPage(|_| None), &mut Vec::new());
        }
    }
}
