//! Neighbours of pages, in their clusters: what a read missed of them is read after the answer, and
//! what is dirty of them is cleaned along.

use std::ops::Range;

use super::fill::{BATCH_PAGES, Fill, Missing, WantedCluster};
use crate::cache::Core;
use crate::cache::pages::index::Found;
use crate::cache::store::layout::{PAGE, PAGE_BYTES};
use crate::device::{Operation, Request, Result};

/// Most pages of the clusters that are read at once.
const READ_PAGES_MAX: u64 = 256;

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
    pub(in crate::cache) fn offer_clusters(&self, pages: &Range<u64>, class: u8) {
        let cluster = self.sharding.cluster;
        if cluster.is_page() || pages.is_empty() {
            return;
        }
        let [first, last] = [pages.start, pages.end - 1].map(|page| cluster.number(page));
        for number in [first, last] {
            let all = cluster.pages_of(number);
            let is_whole = pages.start <= all.start && all.end <= pages.end;
            if !is_whole && self.fills.offer_cluster(WantedCluster { number, class }) {
                self.waker.wake_resting();
                self.wake_where_due(all.start);
            }
        }
    }

    /// Reads what the cache lacks of clusters that wait, by one request each, and stores it.
    pub(in crate::cache) fn fill_clusters(&self) -> Result<()> {
        let most = READ_PAGES_MAX / self.sharding.cluster.pages();
        let most = usize::try_from(most).unwrap_or_default();
        let Some(reading) = self.fills.take_clusters(most) else { return Ok(()) };
        let mut lacks: Vec<Lack> = reading.clusters.iter().map(|it| self.lack_of(*it)).collect();
        lacks.retain(|lack| !lack.missing.is_empty());
        let mut requests: Vec<_> = lacks.iter_mut().map(Lack::request).collect();
        self.backing.submit(&mut requests);
        // What cannot be read is left out: no client waits for it.
        let take = |it: &mut Request<'_>| it.take_result().unwrap_or(Ok(()));
        let results: Vec<Result<()>> = requests.iter_mut().map(take).collect();
        drop(requests);
        let mut fills = Vec::new();
        for (lack, read) in lacks.iter_mut().zip(results) {
            self.counters.count_core_read(lack.class, (lack.data.len() / PAGE) as u64, &read);
            if read.is_ok() {
                self.add_fills_of(lack, &mut fills);
            }
        }
        fills.chunks(BATCH_PAGES).try_for_each(|batch| self.keep_fills(batch))
    }

    fn lack_of(&self, WantedCluster { number, class }: WantedCluster) -> Lack {
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
        for missing in &lack.missing {
            let at = usize::try_from(missing.page - first).unwrap_or_default() * PAGE;
            let page = &mut lack.data[at..at + PAGE];
            // A record that is damaged, or replaced meanwhile, is met again by the next read.
            if self.put_record(missing, page).is_ok_and(|is_whole| is_whole) {
                fills.push(Fill { missing: *missing, data: (*page).into(), class: lack.class });
            }
        }
    }

    /// Adds up to `most` other dirty pages of their clusters to `pages`; the backing takes those
    /// that are neighbours as one request.
    pub(in crate::cache) fn add_clusters(&self, pages: &mut Vec<Found>, most: usize) {
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
