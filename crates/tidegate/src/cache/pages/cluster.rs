//! Clusters: 1 to 16 neighbouring pages of the backing, which are filled together by a read that
//! misses and written together by cleaning (Open CAS's cache lines of 4 to 64 KiB).
//!
//! Each page of a cluster has its own slot and is evicted by itself, so clusters do not affect
//! which bytes a write makes durable. All pages of a cluster are in one shard.

use std::ops::Range;

use super::table::hash;
use crate::cache::store::layout::PAGE_BYTES;

/// The size of clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::cache) struct Cluster {
    pages_log2: u32,
}

/// How pages and slots are divided among shards.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cache) struct Sharding {
    /// Number of shards.
    pub(in crate::cache) count: u32,
    pub(in crate::cache) cluster: Cluster,
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
    /// Returns the shard of `page`, which is the shard of its cluster.
    pub(in crate::cache) fn shard_of(self, page: u64) -> usize {
        // The table takes the upper bits, so the shard is chosen by the lower ones.
        let spread = hash(self.cluster.number(page)) & u64::from(u32::MAX);
        usize::try_from(spread % u64::from(self.count)).unwrap_or_default()
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
            let sharding = Sharding { count: 7, cluster };
            for page in 0..100 {
                let pages = cluster.pages_of(cluster.number(page));
                assert!(pages.contains(&page) && pages.end - pages.start == cluster.pages());
                let shards: Vec<_> = pages.map(|page| sharding.shard_of(page)).collect();
                assert!(shards.iter().all(|shard| *shard == sharding.shard_of(page)));
            }
        }
    }
}
