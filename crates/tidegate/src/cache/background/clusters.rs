//! Neighbours of pages in their clusters: missing neighbours of a page that was read are read after
//! the answer, and dirty neighbours of a page are cleaned with it.

use std::ops::Range;

use super::fill::Fills;
use super::fill::{BATCH_PAGES, WantedCluster};
use crate::cache::pages::{Fill, Missing};
use crate::cache::router::admission::Admission;
use crate::cache::store::layout::{PAGE, PAGE_BYTES};
use crate::device::{Operation, Request, Result};

/// Maximum number of pages in the clusters that are read at once.
const READ_PAGES_MAX: u64 = 256;

/// The missing pages of a cluster, and the backing's bytes from the first to the last one.
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

impl Fills {
    /// Queues the pages of `run`, adjacent pages with the bytes `buf`, to be kept for `class` after
    /// the answer to the client. Also offers the rest of their clusters.
    pub(in crate::cache) fn keep_read(&self, run: &[Missing], buf: &[u8], class: u8) {
        let first = run.first().map_or(0, |missing| missing.page);
        for (missing, data) in run.iter().zip(buf.chunks(PAGE)) {
            let fill = || Fill { missing: *missing, data: data.into(), class };
            if self.offer(fill) {
                self.pages.waker.wake_resting();
            }
            self.wake_where_due(missing.page);
        }
        self.offer_clusters(&(first..first + run.len() as u64), class);
    }

    /// Queues the first and the last cluster of `pages` to be read and kept for `class`, unless
    /// `pages` contain the whole cluster. The caller has missed `pages`, and keeps these itself.
    pub(in crate::cache) fn offer_clusters(&self, pages: &Range<u64>, class: u8) {
        let cluster = self.pages.sharding.cluster;
        if cluster.is_page() || pages.is_empty() {
            return;
        }
        let [first, last] = [pages.start, pages.end - 1].map(|page| cluster.number(page));
        for number in [first, last] {
            let all = cluster.pages_of(number);
            let is_whole = pages.start <= all.start && all.end <= pages.end;
            if !is_whole && self.offer_cluster(WantedCluster { number, class }) {
                self.pages.waker.wake_resting();
                self.wake_where_due(all.start);
            }
        }
    }

    /// Reads and stores the missing pages of waiting clusters, with one request for each cluster.
    pub(in crate::cache) fn fill_clusters(&self, admission: &Admission) -> Result<()> {
        let most = READ_PAGES_MAX / self.pages.sharding.cluster.pages();
        let most = usize::try_from(most).unwrap_or_default();
        let Some(reading) = self.take_clusters(most) else { return Ok(()) };
        let mut lacks: Vec<Lack> = reading.clusters.iter().map(|it| self.lack_of(*it)).collect();
        lacks.retain(|lack| !lack.missing.is_empty());
        let mut requests: Vec<_> = lacks.iter_mut().map(Lack::request).collect();
        self.pages.backing.device.submit(&mut requests);
        // Pages that cannot be read are left out, since no client waits for the data.
        let take = |it: &mut Request<'_>| it.take_result().unwrap_or(Ok(()));
        let results: Vec<Result<()>> = requests.iter_mut().map(take).collect();
        drop(requests);
        let mut fills = Vec::new();
        for (lack, read) in lacks.iter_mut().zip(results) {
            self.pages.counters.count_core_read(lack.class, (lack.data.len() / PAGE) as u64, &read);
            if read.is_ok() {
                self.add_fills_of(lack, &mut fills);
            }
        }
        fills.chunks(BATCH_PAGES).try_for_each(|batch| self.keep_fills(batch, admission))
    }

    fn lack_of(&self, WantedCluster { number, class }: WantedCluster) -> Lack {
        let Range { start, end } = self.pages.sharding.cluster.pages_of(number);
        let end = end.min(self.pages.backing.geometry.size_bytes() / PAGE_BYTES);
        let missing: Vec<Missing> =
            (start..end).filter_map(|page| self.pages.missing(page)).collect();
        let pages = match (missing.first(), missing.last()) {
            (Some(first), Some(last)) => last.page - first.page + 1,
            _ => 0,
        };
        let data = vec![0; usize::try_from(pages).unwrap_or_default() * PAGE];
        Lack { missing, class, data }
    }

    /// Adds the pages of `lack`, whose data was read, to `fills`.
    fn add_fills_of(&self, lack: &mut Lack, fills: &mut Vec<Fill>) {
        let first = lack.first_page();
        for missing in &lack.missing {
            let at = usize::try_from(missing.page - first).unwrap_or_default() * PAGE;
            let page = &mut lack.data[at..at + PAGE];
            // The next read deals with a record that is damaged, or replaced meanwhile.
            if self.pages.put_record(missing, page).is_ok_and(|is_whole| is_whole) {
                fills.push(Fill { missing: *missing, data: (*page).into(), class: lack.class });
            }
        }
    }

    /// Wakes a worker if fills wait or the shard of `page` needs work.
    pub(in crate::cache) fn wake_where_due(&self, page: u64) {
        let is_due = || self.are_waiting() || self.pages.needs_worker(&self.pages.shard(page));
        if self.pages.waker.needs_call() && is_due() {
            self.pages.waker.wake();
        }
    }

    /// Stores a batch of the waiting pages, or reads and stores waiting clusters if no page waits.
    pub(in crate::cache) fn store_fills(&self, admission: &Admission) -> Result<()> {
        let fills = self.take();
        if fills.is_empty() {
            self.fill_clusters(admission)
        } else {
            self.keep_fills(&fills, admission)
        }
    }

    /// Stores the pages of `fills` that may be kept. The pages are distinct.
    pub(in crate::cache) fn keep_fills(&self, fills: &[Fill], admission: &Admission) -> Result<()> {
        self.writer.store_clean(fills)?;
        let pages = fills.iter().map(|fill| fill.missing.page);
        admission.note_cached(pages.filter(|page| self.pages.find(*page).is_some()));
        Ok(())
    }
}
