//! Purging: the cache gives up all of its clean pages, while requests go on.
//!
//! 1. All dirty pages are cleaned.
//! 2. What was read of the backing until now is kept no more.
//! 3. The clean pages leave, shard by shard, as [`evict`](super::evict) has them leave.
//!
//! Pages that requests write or read meanwhile may stay, and so do pages that wait for a commit:
//! they are dirty. A page that could not be written, or is stuck, stays.

use crate::cache::Core;
use crate::cache::pages::index::Found;
use crate::device::{DeviceErrorKind, Result};
use crate::sync::{Ordering, fence};

/// Most pages that leave at once: a reader of one of them waits for all.
const BATCH_PAGES: usize = 64;

impl Core {
    /// Cleans all dirty pages, and has all clean ones leave the cache. Returns how many left.
    ///
    /// # Errors
    /// The backing failed, and nothing left; or a dirty page is damaged or the memory failed, and
    /// all pages left that could.
    pub(in crate::cache) fn purge(&self) -> Result<u64> {
        let cleaned = self.clean_all();
        if cleaned.as_ref().is_err_and(|error| error.kind() != DeviceErrorKind::Corrupt) {
            return cleaned.map(|()| 0);
        }
        self.forget_fills();
        let shards = 0..self.shards.count();
        let removed = shards.map(|number| self.purge_shard(number)).sum::<Result<u64>>()?;
        cleaned.map(|()| removed)
    }

    /// Nothing that was read of the backing before the call comes into the cache after it.
    fn forget_fills(&self) {
        self.fills.drop_clusters(|| self.region.relax());
        self.traffic.keep_nothing_read();
        // A worker locks its pages and then asks whether they may be kept: it is told so now, or
        // holds the locks here.
        fence(Ordering::SeqCst);
        self.locks.await_holders(|| self.region.relax());
    }

    fn purge_shard(&self, number: usize) -> Result<u64> {
        let (mut from, mut removed) = (0, 0);
        loop {
            let mut clean = Vec::new();
            from = self.shards.lock(number).clean_from(from, BATCH_PAGES, &mut clean);
            if clean.is_empty() {
                break;
            }
            removed += self.remove_until_done(clean)?;
        }
        while self.unite_spent(number)? > 0 {}
        Ok(removed)
    }

    /// Removes those of `pages` that stay clean, and waits for writers that hold one.
    fn remove_until_done(&self, mut pages: Vec<Found>) -> Result<u64> {
        let mut removed = 0;
        loop {
            removed += self.remove_and_unite(&pages)? as u64;
            pages.retain(|found| self.shard(found.page).can_leave(found));
            if pages.is_empty() {
                return Ok(removed);
            }
            self.region.relax();
        }
    }
}
