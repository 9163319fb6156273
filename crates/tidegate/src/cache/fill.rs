//! Keeping what was read from the backing: after the answer, in the background.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::Core;
use super::traffic::Seen;
use crate::device::Result;
use crate::sync::{AtomicU32, Ordering};
use crate::tier::version_locks::Version;

/// Most pages that wait; more are not kept.
const WAITING_MAX: usize = 256;
/// Pages at which the rest of the worker ends.
const WAITING_MANY: usize = WAITING_MAX / 4;
/// Most pages that are stored with one fence.
const BATCH_PAGES: usize = 64;

/// A page as it was read from the backing.
pub(super) struct Fill {
    pub(super) page: u64,
    /// The page's version before it was looked for in the cache.
    pub(super) version: Version,
    /// The writes to the backing at that moment.
    pub(super) seen: Seen,
    pub(super) data: Box<[u8]>,
    /// The IO class of the request that read it.
    pub(super) class: u8,
}

/// Pages that wait to be stored.
#[derive(Default)]
pub(super) struct Fills {
    queue: Mutex<VecDeque<Fill>>,
    /// Number of them, for a look without the lock.
    count: AtomicU32,
}

impl Fills {
    /// Adds a page, unless too many wait. True: many wait now, and a worker must not rest.
    pub(super) fn offer(&self, fill: impl FnOnce() -> Fill) -> bool {
        let mut queue = self.queue.lock();
        if queue.len() < WAITING_MAX {
            queue.push_back(fill());
            self.publish(&queue);
        }
        queue.len() == WAITING_MANY
    }

    /// Pages wait.
    pub(super) fn are_waiting(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// A batch of different pages.
    fn take(&self) -> Vec<Fill> {
        let mut queue = self.queue.lock();
        let count = queue.len().min(BATCH_PAGES);
        let mut fills: Vec<_> = queue.drain(..count).collect();
        self.publish(&queue);
        drop(queue);
        fills.sort_by_key(|fill| fill.page);
        fills.dedup_by_key(|fill| fill.page);
        fills
    }

    fn publish(&self, queue: &VecDeque<Fill>) {
        self.count.store(u32::try_from(queue.len()).unwrap_or(u32::MAX), Ordering::SeqCst);
    }
}

impl Core {
    /// Stores a batch of the pages that wait.
    pub(super) fn store_fills(&self) -> Result<()> {
        let fills = self.fills.take();
        if fills.is_empty() {
            return Ok(());
        }
        self.store_clean(&fills)?;
        let pages = fills.iter().map(|fill| fill.page);
        self.note_cached(pages.filter(|page| self.find(*page).is_some()));
        Ok(())
    }

    /// What was read is still the page's content, and the backing will not lose it: whether it is
    /// kept as a dirty page. None: it is not kept. With the page's lock.
    ///
    /// A record that the cache has was put over what was read: the version says that it is still
    /// the same one. It may become clean meanwhile; a page that is called dirty then is only
    /// written once more.
    pub(super) fn is_kept_dirty(&self, fill: &Fill) -> Option<bool> {
        let stands = self.locks.unchanged(fill.page, fill.version)
            && self.traffic.may_fill(fill.page, fill.seen);
        let shard = self.shard(fill.page);
        match shard.find(fill.page).filter(|_| stands) {
            Some(found) => {
                let is_kept = found.record && found.base.is_none() && !shard.waits(fill.page);
                is_kept.then_some(found.dirty)
            }
            None => stands.then_some(false),
        }
    }
}
