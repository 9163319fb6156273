//! Keeps pages that were read from the backing, after the answer to the client. Also reads and
//! keeps the rest of a read's first and last cluster ([`neighbours`](super::clusters)).

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::cache::pages::writer::Writer;
use crate::cache::pages::{Fill, Pages};
use crate::sync::{AtomicU32, Ordering};
use std::sync::Arc;

/// Maximum number of waiting pages; further ones are not kept.
const WAITING_MAX: usize = 256;
/// Wakes a resting worker when this many pages wait.
const WAITING_MANY: usize = WAITING_MAX / 4;
/// Maximum number of pages stored with one fence.
pub(in crate::cache) const BATCH_PAGES: usize = 64;
/// Maximum number of waiting clusters; further ones are not read.
const CLUSTERS_MAX: usize = 64;

/// A cluster that a read missed in part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cache) struct WantedCluster {
    pub(in crate::cache) number: u64,
    /// The IO class of the read.
    pub(in crate::cache) class: u8,
}

/// Pages that wait to be stored, and clusters that wait to be read.
pub(in crate::cache) struct Fills {
    pub(in crate::cache) pages: Arc<Pages>,
    pub(in crate::cache) writer: Arc<Writer>,
    queues: Mutex<Queues>,
    /// Number of entries that a worker can take, readable without the lock.
    count: AtomicU32,
}

#[derive(Default)]
struct Queues {
    pages: VecDeque<Fill>,
    clusters: VecDeque<WantedCluster>,
    /// A worker reads clusters. Only one does at a time, so that another one is left for writers.
    is_reading: bool,
}

/// The right to read clusters. Dropping it releases the right.
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
    /// Returns empty queues of fills for `pages`, which `writer` stores.
    pub(in crate::cache) fn new(pages: Arc<Pages>, writer: Arc<Writer>) -> Self {
        Self { pages, writer, queues: Mutex::default(), count: AtomicU32::new(0) }
    }

    /// Adds a page, unless too many wait. Returns whether so many wait that no worker may rest.
    pub(in crate::cache) fn offer(&self, fill: impl FnOnce() -> Fill) -> bool {
        let mut queues = self.queues.lock();
        if queues.pages.len() < WAITING_MAX {
            queues.pages.push_back(fill());
            self.publish(&queues);
        }
        queues.pages.len() == WAITING_MANY
    }

    /// Adds a cluster, unless it waits already or too many do. Returns whether it was added.
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

    /// Returns whether a worker can take pages or clusters.
    pub(in crate::cache) fn are_waiting(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// Takes a batch of waiting pages, at most one fill for each page.
    pub(in crate::cache) fn take(&self) -> Vec<Fill> {
        let mut queues = self.queues.lock();
        let count = queues.pages.len().min(BATCH_PAGES);
        let mut fills: Vec<_> = queues.pages.drain(..count).collect();
        self.publish(&queues);
        drop(queues);
        fills.sort_by_key(|fill| fill.missing.page);
        fills.dedup_by_key(|fill| fill.missing.page);
        fills
    }

    /// Takes up to `most` waiting clusters, or none while another worker reads some.
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

    /// Drops the waiting clusters, and waits until those that a worker reads are stored.
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
