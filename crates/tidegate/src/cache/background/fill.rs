//! Keeping what was read from the backing: after the answer, in the background. So is what was not
//! read of the clusters that a read began or ended in ([`neighbours`](super::clusters)).

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::cache::Core;
use crate::cache::backing::traffic::Seen;
use crate::cache::pages::index::Found;
use crate::device::Result;
use crate::sync::{AtomicU32, Ordering};
use crate::tier::version_locks::Version;

/// Most pages that wait; more are not kept.
const WAITING_MAX: usize = 256;
/// Pages at which the rest of the worker ends.
const WAITING_MANY: usize = WAITING_MAX / 4;
/// Most pages that are stored with one fence.
pub(in crate::cache) const BATCH_PAGES: usize = 64;
/// Most clusters that wait; more are not read.
const CLUSTERS_MAX: usize = 64;

/// A page that the cache did not have when it was looked for, or not all of it.
#[derive(Clone, Copy)]
pub(in crate::cache) struct Missing {
    pub(in crate::cache) page: u64,
    /// The record that the cache has of it.
    pub(in crate::cache) record: Option<Found>,
    /// The page's version before it was looked for in the cache.
    pub(in crate::cache) version: Version,
    /// The writes to the backing at that moment.
    pub(in crate::cache) seen: Seen,
}

/// A page as it was read from the backing.
pub(in crate::cache) struct Fill {
    pub(in crate::cache) missing: Missing,
    pub(in crate::cache) data: Box<[u8]>,
    /// The IO class of the request that read it.
    pub(in crate::cache) class: u8,
}

/// A cluster of which a read missed a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cache) struct WantedCluster {
    pub(in crate::cache) number: u64,
    /// The IO class of the read.
    pub(in crate::cache) class: u8,
}

/// Pages that wait to be stored, and clusters that wait to be read.
#[derive(Default)]
pub(in crate::cache) struct Fills {
    queues: Mutex<Queues>,
    /// How many of them a worker can take, for a look without the lock.
    count: AtomicU32,
}

#[derive(Default)]
struct Queues {
    pages: VecDeque<Fill>,
    clusters: VecDeque<WantedCluster>,
    /// A worker reads clusters: no other one takes any, so that one is left for writers.
    is_reading: bool,
}

/// The right to read clusters; dropping it passes it on.
pub(in crate::cache) struct Reading<'a> {
    fills: &'a Fills,
    pub(in crate::cache) clusters: Vec<WantedCluster>,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut queues = self.fills.queues.lock();
        queues.is_reading = false;
        self.fills.publish(&queues);
    }
}

impl Fills {
    /// Adds a page, unless too many wait. True: many wait now, and a worker must not rest.
    pub(in crate::cache) fn offer(&self, fill: impl FnOnce() -> Fill) -> bool {
        let mut queues = self.queues.lock();
        if queues.pages.len() < WAITING_MAX {
            queues.pages.push_back(fill());
            self.publish(&queues);
        }
        queues.pages.len() == WAITING_MANY
    }

    /// Adds a cluster, unless it waits already or too many do. True: it waits now.
    pub(in crate::cache) fn offer_cluster(&self, wanted: WantedCluster) -> bool {
        let mut queues = self.queues.lock();
        let waits = queues.clusters.iter().any(|it| it.number == wanted.number);
        if waits || queues.clusters.len() == CLUSTERS_MAX {
            return false;
        }
        queues.clusters.push_back(wanted);
        self.publish(&queues);
        true
    }

    /// Pages or clusters wait.
    pub(in crate::cache) fn are_waiting(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// A batch of different pages.
    fn take(&self) -> Vec<Fill> {
        let mut queues = self.queues.lock();
        let count = queues.pages.len().min(BATCH_PAGES);
        let mut fills: Vec<_> = queues.pages.drain(..count).collect();
        self.publish(&queues);
        drop(queues);
        fills.sort_by_key(|fill| fill.missing.page);
        fills.dedup_by_key(|fill| fill.missing.page);
        fills
    }

    /// Up to `most` clusters, unless another worker reads some.
    pub(in crate::cache) fn take_clusters(&self, most: usize) -> Option<Reading<'_>> {
        let mut queues = self.queues.lock();
        if queues.is_reading || queues.clusters.is_empty() {
            return None;
        }
        queues.is_reading = true;
        let count = queues.clusters.len().min(most);
        let clusters = queues.clusters.drain(..count).collect();
        self.publish(&queues);
        Some(Reading { fills: self, clusters })
    }

    /// Drops the clusters that wait, and returns when those that are being read are stored.
    pub(in crate::cache) fn drop_clusters(&self, relax: impl Fn()) {
        loop {
            let mut queues = self.queues.lock();
            queues.clusters.clear();
            self.publish(&queues);
            if !queues.is_reading {
                return;
            }
            drop(queues);
            relax();
        }
    }

    fn publish(&self, queues: &Queues) {
        let clusters = if queues.is_reading { 0 } else { queues.clusters.len() };
        let count = u32::try_from(queues.pages.len() + clusters).unwrap_or(u32::MAX);
        self.count.store(count, Ordering::SeqCst);
    }
}

impl Core {
    /// Stores a batch of the pages that wait, or of clusters where none do.
    pub(in crate::cache) fn store_fills(&self) -> Result<()> {
        let fills = self.fills.take();
        if fills.is_empty() { self.fill_clusters() } else { self.keep_fills(&fills) }
    }

    /// Stores those of `fills`, different pages, that may be kept.
    pub(in crate::cache) fn keep_fills(&self, fills: &[Fill]) -> Result<()> {
        self.store_clean(fills)?;
        let pages = fills.iter().map(|fill| fill.missing.page);
        self.note_cached(pages.filter(|page| self.find(*page).is_some()));
        Ok(())
    }

    /// What was read is still the page's content, and the backing will not lose it: whether it is
    /// kept as a dirty page. None: it is not kept. With the page's lock.
    ///
    /// A record that the cache has was put over what was read: the version says that it is still
    /// the same one. It may become clean meanwhile; a page that is called dirty then is only
    /// written once more.
    pub(in crate::cache) fn is_kept_dirty(&self, fill: &Fill) -> Option<bool> {
        let Missing { page, version, seen, .. } = fill.missing;
        let stands = self.locks.unchanged(page, version) && self.traffic.may_fill(page, seen);
        let shard = self.shard(page);
        match shard.find(page).filter(|_| stands) {
            Some(found) => {
                let is_kept = found.record && found.base.is_none() && !shard.waits(page);
                is_kept.then_some(found.dirty)
            }
            None => stands.then_some(false),
        }
    }
}
