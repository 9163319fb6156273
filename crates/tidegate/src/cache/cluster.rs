//! Clusters: neighbouring pages of the backing, 1 to 16 of them, which a read that misses fills and
//! cleaning writes together (Open CAS's cache lines of 4 to 64 KiB).
//!
//! Each page of a cluster has a slot of its own and is evicted by itself, so a cluster changes
//! nothing of what one write makes durable. All pages of a cluster are in one shard.

use std::ops::Range;

use super::Core;
use super::fill::{BATCH_PAGES, Fill};
use super::index::Found;
use super::layout::{PAGE, PAGE_BYTES};
use super::read::Missing;
use super::table::hash;
use super::tier::Counter;
use crate::device::{Operation, Request, Result};

/// Most pages of the clusters that are read at once.
const READ_PAGES_MAX: u64 = 256;

/// The size of clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Cluster {
    pages_log2: u32,
}

/// How pages and slots are divided among shards.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sharding {
    /// Number of shards.
    pub(super) count: u32,
    pub(super) cluster: Cluster,
}

impl Cluster {
    /// All sizes in bytes.
    pub(super) const SIZES_BYTES: [u32; 5] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];

    /// Clusters of `bytes` bytes, one of [`SIZES_BYTES`](Self::SIZES_BYTES).
    pub(super) fn of_bytes(bytes: u32) -> Option<Self> {
        let log2 = Self::SIZES_BYTES.iter().position(|size| *size == bytes)?;
        Some(Self { pages_log2: u32::try_from(log2).ok()? })
    }

    pub(super) fn bytes(self) -> u64 {
        PAGE_BYTES << self.pages_log2
    }

    /// Pages of a cluster.
    pub(super) fn pages(self) -> u64 {
        1 << self.pages_log2
    }

    /// A cluster is a page.
    pub(super) fn is_page(self) -> bool {
        self.pages_log2 == 0
    }

    /// The number of the cluster of `page`.
    pub(super) fn number(self, page: u64) -> u64 {
        page >> self.pages_log2
    }

    /// The pages of cluster `number`; the last one of a backing may end behind it.
    pub(super) fn pages_of(self, number: u64) -> Range<u64> {
        number << self.pages_log2..(number + 1) << self.pages_log2
    }
}

impl Sharding {
    /// The shard of `page`: that of its cluster.
    pub(super) fn shard_of(self, page: u64) -> usize {
        // Other bits than the table's, which takes the upper ones.
        let spread = hash(self.cluster.number(page)) & u64::from(u32::MAX);
        usize::try_from(spread % u64::from(self.count)).unwrap_or_default()
    }
}

/// A cluster of which a read missed a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) number: u64,
    /// The IO class of the read.
    class: u8,
}

/// What the cache lacks of a cluster, and the backing's bytes from the first of these pages to the
/// last one.
struct Lack {
    missing: Vec<Missing>,
    class: u8,
    data: Vec<u8>,
}

impl Lack {
    fn first_page(&self) -> u64 {
        self.missing.first().map_or(0, |first| first.page)
    }

    fn request(&mut self) -> Request<'_> {
        let offset = self.first_page() * PAGE_BYTES;
        Request::new(Operation::Read { offset, buf: &mut self.data })
    }
}

impl Core {
    /// A read that missed `pages` is answered, and they are kept for `class`: has the rest of the
    /// clusters in which they begin and end read, too.
    pub(super) fn offer_clusters(&self, pages: &Range<u64>, class: u8) {
        let cluster = self.sharding.cluster;
        if cluster.is_page() || pages.is_empty() {
            return;
        }
        let [first, last] = [pages.start, pages.end - 1].map(|page| cluster.number(page));
        for number in [first, last] {
            let all = cluster.pages_of(number);
            let is_whole = pages.start <= all.start && all.end <= pages.end;
            if !is_whole && self.fills.offer_cluster(Wanted { number, class }) {
                self.waker.wake_resting();
                self.wake_where_due(all.start);
            }
        }
    }

    /// Reads what the cache lacks of clusters that wait, by one request each, and stores it.
    pub(super) fn fill_clusters(&self) -> Result<()> {
        let most = READ_PAGES_MAX / self.sharding.cluster.pages();
        let most = usize::try_from(most).unwrap_or_default();
        let Some(reading) = self.fills.take_clusters(most) else { return Ok(()) };
        let mut lacks: Vec<Lack> = reading.clusters.iter().map(|it| self.lack_of(*it)).collect();
        lacks.retain(|lack| !lack.missing.is_empty());
        let mut requests: Vec<_> = lacks.iter_mut().map(Lack::request).collect();
        self.backing.submit(&mut requests);
        // What cannot be read is left out: no client waits for it.
        let is_read = |it: &mut Request<'_>| it.take_result().is_none_or(|result| result.is_ok());
        let are_read: Vec<bool> = requests.iter_mut().map(is_read).collect();
        drop(requests);
        let mut fills = Vec::new();
        for (lack, _) in lacks.iter_mut().zip(are_read).filter(|(_, is_read)| *is_read) {
            self.add_fills_of(lack, &mut fills);
        }
        fills.chunks(BATCH_PAGES).try_for_each(|batch| self.keep_fills(batch))
    }

    fn lack_of(&self, Wanted { number, class }: Wanted) -> Lack {
        let Range { start, end } = self.sharding.cluster.pages_of(number);
        let end = end.min(self.geometry.size_bytes() / PAGE_BYTES);
        let missing: Vec<Missing> = (start..end).filter_map(|page| self.missing(page)).collect();
        let pages = match (missing.first(), missing.last()) {
            (Some(first), Some(last)) => last.page - first.page + 1,
            _ => 0,
        };
        let data = vec![0; usize::try_from(pages).unwrap_or_default() * PAGE];
        Lack { missing, class, data }
    }

    /// Adds the pages of `lack`, which was read, to `fills`.
    fn add_fills_of(&self, lack: &mut Lack, fills: &mut Vec<Fill>) {
        let first = lack.first_page();
        self.counters.add_of(lack.class, Counter::CoreReads, lack.missing.len() as u64);
        for missing in &lack.missing {
            let at = usize::try_from(missing.page - first).unwrap_or_default() * PAGE;
            let page = &mut lack.data[at..at + PAGE];
            // A record that is damaged, or replaced meanwhile, is met again by the next read.
            if self.put_record(missing, page).is_ok_and(|is_whole| is_whole) {
                fills.push(missing.fill(page, lack.class));
            }
        }
    }

    /// Adds to `pages` the dirty pages of their clusters, `most` at most: neighbours that the
    /// backing takes as one request.
    pub(super) fn add_clusters(&self, pages: &mut Vec<Found>, most: usize) {
        let cluster = self.sharding.cluster;
        if cluster.is_page() {
            return;
        }
        pages.sort_unstable_by_key(|found| found.page);
        let mut numbers: Vec<u64> = pages.iter().map(|found| cluster.number(found.page)).collect();
        numbers.dedup();
        let is_named = |page: &u64| pages.binary_search_by_key(page, |found| found.page).is_ok();
        let others = numbers.into_iter().flat_map(|number| cluster.pages_of(number));
        let others = others.filter(|page| !is_named(page));
        let dirty = others.filter_map(|page| {
            let shard = self.shard(page);
            shard.find(page).filter(|found| shard.can_be_cleaned(found))
        });
        let dirty: Vec<Found> = dirty.take(most).collect();
        pages.extend(dirty);
    }
}

#[cfg(all(test, not(feature = "loom")))]
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
