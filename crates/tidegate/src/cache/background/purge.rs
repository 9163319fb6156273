//! Purging: removes all clean pages from the cache, while requests go on.
//!
//! 1. All dirty pages are cleaned.
//! 2. Pages that were read from the backing until now are no longer kept.
//! 3. The clean pages are removed, shard by shard ([`remove`](crate::cache::pages::remove)).
//!
//! Pages that requests write or read meanwhile may stay, and so do pages that wait for a commit,
//! which are dirty. A page stays if it could not be written to the backing, or is stuck.

use super::Background;
use crate::device::{DeviceErrorKind, Result};
use crate::sync::{Ordering, fence};

impl Background {
    /// Cleans all dirty pages, and removes all clean ones from the cache. Returns how many left.
    ///
    /// # Errors
    /// If the backing failed, no page was removed. If a dirty page is damaged or the memory failed,
    /// all pages that could be removed were.
    pub(in crate::cache) fn purge(&self) -> Result<u64> {
        let cleaned = self.cleaners.clean_all();
        if cleaned.as_ref().is_err_and(|error| error.kind() != DeviceErrorKind::Corrupt) {
            return cleaned.map(|()| 0);
        }
        self.forget_fills();
        let shards = 0..self.pages.shards.count();
        let removed = shards.map(|number| self.pages.purge_shard(number)).sum::<Result<u64>>()?;
        cleaned.map(|()| removed)
    }

    /// Prevents that data read from the backing before the call enters the cache after it.
    fn forget_fills(&self) {
        self.fills.drop_clusters(|| self.pages.store.region.relax());
        self.pages.backing.traffic.keep_nothing_read();
        // A worker locks its pages before it asks whether they may be kept. So it either gets the
        // new answer, or holds its locks here and is waited for.
        fence(Ordering::SeqCst);
        self.pages.locks.await_holders(|| self.pages.store.region.relax());
    }
}
