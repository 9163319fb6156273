//! Clusters: 1 to 16 neighbouring pages of the backing, which are filled together by a read that
//! misses and written together by cleaning (Open CAS's cache lines of 4 to 64 KiB).
//!
//! Each page of a cluster has its own slot and is evicted by itself, so clusters do not affect
//! which bytes a write makes durable. All pages of a cluster are in one shard. In newer pools that
//! holds for all pages of a *neighbourhood*, so that a large write locks a shard for many pages.

use std::ops::Range;

use super::table::hash;
use crate::cache::store::layout::{PAGE_BYTES, whole_slot};

/// The size of clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::cache) struct Cluster {
    pages_log2: u32,
}

/// Pages of a neighbourhood: as many as of the largest cluster.
const NEIGHBOURHOOD_PAGES: u64 = 16;

/// How pages and slots are divided among shards.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cache) struct Sharding {
    /// Number of shards.
    pub(in crate::cache) count: u32,
    pub(in crate::cache) cluster: Cluster,
    /// Whether all pages of a neighbourhood are in one shard, not only those of a cluster.
    pub(in crate::cache) by_neighbourhood: bool,
}

impl Cluster {
    /// All cluster sizes in bytes.
    pub(in crate::cache) const SIZES_BYTES: [u32; 5] =
        [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];

    /// Returns clusters of `bytes` bytes, or `None` if that is not one of
    /// [`SIZES_BYTES`](Self::SIZES_BYTES).
    pub(in crate::cache) fn of_bytes(bytes: u32) -> Option<Self> {
        let log2 = Self::SIZES_BYTES.iter().position(|size| *size == bytes)?;
        Some(Self { pages_log2: u32::try_from(log2).ok()? })
    }

    pub(in crate::cache) fn bytes(self) -> u64 {
        PAGE_BYTES << self.pages_log2
    }

    /// Returns the number of pages of a cluster.
    pub(in crate::cache) fn pages(self) -> u64 {
        1 << self.pages_log2
    }

    /// Returns whether a cluster is a single page.
    pub(in crate::cache) fn is_page(self) -> bool {
        self.pages_log2 == 0
    }

    /// Returns the number of the cluster of `page`.
    pub(in crate::cache) fn number(self, page: u64) -> u64 {
        page >> self.pages_log2
    }

    /// Returns the pages of cluster `number`. The last one may extend beyond the backing's end.
    pub(in crate::cache) fn pages_of(self, number: u64) -> Range<u64> {
        number << self.pages_log2..(number + 1) << self.pages_log2
    }
}

impl Sharding {
    /// Returns the shard of `page`, which has all pages of its neighbourhood or cluster.
    ///
    /// As many neighbourhoods in a row as there are shards are in a shard each, so that a file of
    /// any size fills all shards equally. The first one's shard is random, so that no regular
    /// distance between pages leads to one shard.
    pub(in crate::cache) fn shard_of(self, page: u64) -> usize {
        // The table takes the upper bits, so the shard is chosen by the lower ones.
        let spread = |number: u64| hash(number) & u64::from(u32::MAX);
        let count = u64::from(self.count);
        let number = if self.by_neighbourhood {
            let neighbourhood = page / NEIGHBOURHOOD_PAGES;
            neighbourhood + spread(neighbourhood / count)
        } else {
            spread(self.cluster.number(page))
        };
        usize::try_from(number % count).unwrap_or_default()
    }

    /// Returns whether `slot` is of the shard of `page`.
    pub(in crate::cache) fn is_home(self, slot: u32, page: u64) -> bool {
        (whole_slot(slot) % self.count) as usize == self.shard_of(page)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_open_cas_and_no_others() {
        for bytes in Cluster::SIZES_BYTES {
            assert_eq!(Cluster::of_bytes(bytes).unwrap().bytes(), u64::from(bytes));
        }
        for bytes in [0, 512, 4095, 12 << 10, 128 << 10, u32::MAX] {
            assert_eq!(Cluster::of_bytes(bytes), None);
        }
    }

    #[test]
    fn a_cluster_is_its_pages_and_lies_in_one_shard() {
        for bytes in Cluster::SIZES_BYTES {
            let cluster = Cluster::of_bytes(bytes).unwrap();
            for by_neighbourhood in [false, true] {
                let sharding = Sharding { count: 7, cluster, by_neighbourhood };
                for page in 0..100 {
                    let pages = cluster.pages_of(cluster.number(page));
                    assert!(pages.contains(&page) && pages.end - pages.start == cluster.pages());
                    let mut shards = pages.map(|page| sharding.shard_of(page));
                    assert!(shards.all(|shard| shard == sharding.shard_of(page)));
                }
            }
        }
    }

    #[test]
    fn neighbourhoods_fill_all_shards_equally_in_order_and_at_any_distance() {
        for count in [1, 2, 7, 16] {
            let sharding = Sharding { count, by_neighbourhood: true, ..Sharding::default() };
            let pages_of_all = NEIGHBOURHOOD_PAGES * u64::from(count);
            let count = usize::try_from(count).unwrap();
            for first in (0..50).map(|number| number * pages_of_all) {
                let mut pages = vec![0; count];
                (first..first + pages_of_all).for_each(|page| pages[sharding.shard_of(page)] += 1);
                assert_eq!(pages, vec![NEIGHBOURHOOD_PAGES; count]);
            }
            for distance in [pages_of_all, 256, 4096, 32768] {
                let mut pages = vec![0_usize; count];
                (0..1600).for_each(|number| pages[sharding.shard_of(number * distance)] += 1);
                let even = 1600 / count;
                let is_even = |pages: &usize| (even / 2..=even * 3 / 2).contains(pages);
                assert!(pages.iter().all(is_even), "{count} shards, every {distance}: {pages:?}");
            }
        }
    }
}
