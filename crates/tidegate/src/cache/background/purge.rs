//! Purging: the cache gives up all of its clean pages, while requests go on.
//!
//! 1. All dirty pages are cleaned.
//! 2. What was read of the backing until now is kept no more.
//! 3. The clean pages leave, shard by shard, as [`evict`](super::evict) has them leave.
//!
//! Pages that requests write or read meanwhile may stay, and so do pages that wait for a commit:
//! they are dirty. A page that could not be written, or is stuck, stays.

use super::Background;
use crate::device::{DeviceErrorKind, Result};
use crate::sync::{Ordering, fence};

impl Background {
    /// Cleans all dirty pages, and has all clean ones leave the cache. Returns how many left.
    ///
    /// # Errors
    /// The backing failed, and nothing left; or a dirty page is damaged or the memory failed, and
    /// all pages left that could.
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

    /// Nothing that was read of the backing before the call comes into the cache after it.
    fn forget_fills(&self) {
        self.fills.drop_clusters(|| self.pages.store.region.relax());
        self.pages.backing.traffic.keep_nothing_read();
        // A worker locks its pages and then asks whether they may be kept: it is told so now, or
        // holds the locks here.
        fence(Ordering::SeqCst);
        self.pages.locks.await_holders(|| self.pages.store.region.relax());
    }
}
