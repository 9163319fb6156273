//! Removal: clean pages leave the cache, durably.
//!
//! A batch takes two fences: the headers of all older versions become void before the newest ones.
//! In the other order a crash in between would bring an older version back (invariant 3 of the
//! cache).

use std::collections::BTreeSet;

use super::Pages;
use super::index::{Found, Spent};
use crate::cache::counters::Counter;
use crate::cache::store::layout::{PAGE, is_part, whole_slot};
use crate::device::{DeviceError, DeviceErrorKind, Result};

/// Maximum number of pages that leave the cache at once.
const BATCH_PAGES: u32 = 64;
/// In a small shard one page in this many leaves at once, so that it does not lose pages in use.
const BATCH_ONE_IN: u32 = 50;
pub(in crate::cache) const BATCH_PAGES_LEAST: u32 = 4;
/// Maximum number of split slots that are made whole again with one fence.
const UNITED_AT_ONCE: usize = 64;

/// Maximum number of pages that a purge removes at once: a reader of one page waits for all.
const PURGED_AT_ONCE: usize = 64;

/// Returns the maximum number of pages that leave a shard of `slots` slots at once.
pub(in crate::cache) fn batch_pages(slots: u32) -> u32 {
    (slots / BATCH_ONE_IN).clamp(BATCH_PAGES_LEAST, BATCH_PAGES)
}

impl Pages {
    pub(in crate::cache) fn purge_shard(&self, number: usize) -> Result<u64> {
        let (mut from, mut removed) = (0, 0);
        loop {
            let mut clean = Vec::new();
            from = self.shards.lock(number).clean_from(from, PURGED_AT_ONCE, &mut clean);
            if clean.is_empty() {
                break;
            }
            removed += self.remove_until_done(clean)?;
        }
        while self.unite_spent(number)? > 0 {}
        Ok(removed)
    }

    /// Voids the headers of older versions, so that they do not count as dirty once all pages are
    /// clean. Their slots stay dead.
    pub(in crate::cache) fn void_dead(&self) {
        for number in 0..self.shards.count() {
            let shard = self.shards.lock(number);
            for slot in shard.allocator.dead() {
                // A header that stays because its memory failed harms nothing.
                let _ = self.store.void(slot);
            }
        }
        let _ = self.store.region.fence();
    }

    /// Removes the pages among `pages` that stay clean. Waits for writers that hold one.
    fn remove_until_done(&self, mut pages: Vec<Found>) -> Result<u64> {
        let mut removed = 0;
        loop {
            removed += self.remove_and_unite(&pages)? as u64;
            pages.retain(|found| self.shard(found.page).can_leave(found));
            if pages.is_empty() {
                return Ok(removed);
            }
            self.store.region.relax();
        }
    }

    /// Evicts the clean pages among `pages`, and counts them. Returns how many were evicted.
    pub(in crate::cache) fn evict(&self, pages: &[Found]) -> Result<usize> {
        let evicted = self.remove_and_unite(pages)?;
        self.counters.add(Counter::Evictions, evicted as u64);
        Ok(evicted)
    }

    /// Removes the clean pages among `pages`, and makes split slots whole again if no part is in
    /// use any more. Returns how many pages it removed.
    pub(in crate::cache) fn remove_and_unite(&self, pages: &[Found]) -> Result<usize> {
        let removed = self.remove_clean(pages)?;
        let parts = pages.iter().filter(|found| is_part(found.slot));
        let shards: BTreeSet<usize> = parts.map(|found| self.shard_of_slot(found.slot)).collect();
        shards.into_iter().try_for_each(|number| self.unite_spent(number).map(drop))?;
        Ok(removed)
    }

    /// Makes split slots of shard `number` whole again if no part holds a page: one store voids the
    /// headers of all parts, including dead ones. Returns how many slots became whole.
    pub(in crate::cache) fn unite_spent(&self, number: usize) -> Result<usize> {
        let spent = self.shards.lock(number).allocator.take_spent(UNITED_AT_ONCE);
        // Void before any slot is overwritten: bytes of a part must not count as the slot's header.
        self.void_spent(number, &spent)
    }

    /// Voids the headers of `spent`, slots of shard `number`, which then are free or have left the
    /// shard. Returns how many slots that were.
    pub(in crate::cache) fn void_spent(&self, number: usize, spent: &[Spent]) -> Result<usize> {
        if spent.is_empty() {
            return Ok(0);
        }
        let void = spent.iter().try_for_each(|it| self.store.void(it.slot));
        let void = void.and_then(|()| self.store.region.fence());
        let mut shard = self.shards.lock(number);
        if let Err(error) = void {
            self.store.note_lost_slot();
            for it in spent {
                shard.allocator.leave_spent(it);
            }
            return Err(error.into());
        }
        for it in spent {
            shard.allocator.free_spent(it);
        }
        shard.notify();
        Ok(spent.len())
    }

    /// Removes the pages among `pages` that are still clean from the cache, durably. Skips held and
    /// stuck pages. Returns how many it removed.
    pub(in crate::cache) fn remove_clean(&self, pages: &[Found]) -> Result<usize> {
        if pages.is_empty() {
            return Ok(0);
        }
        let locks = self.lock_pages(pages.iter().map(|found| found.page));
        let mut dead = Vec::new();
        let is_removable = |found: &&Found| {
            let mut shard = self.shard(found.page);
            let is_removable = shard.can_leave(found) && !shard.allocator.is_held(found.page);
            if is_removable {
                shard.take_older_of(found.page, &mut dead);
            }
            is_removable
        };
        let removed: Vec<&Found> = pages.iter().filter(is_removable).collect();
        self.store
            .void_pages(&dead, &removed)
            .inspect_err(|_| self.leave_stuck(&dead, &removed))?;
        for found in &removed {
            self.shard(found.page).remove(found);
        }
        // Changes the versions of the pages, so a reader that copied from a slot notices.
        drop(locks);
        let slots = removed.iter().map(|found| found.slot).chain(dead);
        slots.for_each(|slot| self.free_slot(slot));
        Ok(removed.len())
    }

    /// Frees `slot`, whose header is durably void; or keeps it taken, if its memory failed.
    fn free_slot(&self, slot: u32) {
        let is_whole = self.has_whole_memory(slot);
        let mut shard = self.shards.lock(self.shard_of_slot(slot));
        if is_whole {
            shard.allocator.free(slot);
        } else {
            self.store.note_lost_slot();
            shard.allocator.lose(slot);
        }
        shard.notify();
    }

    /// Returns whether the memory of the data of `slot` can be read.
    fn has_whole_memory(&self, slot: u32) -> bool {
        let data = self.store.places.data(whole_slot(slot));
        !self.store.region.has_failed_pages()
            || self.store.region.read(data, &mut [0; PAGE]).is_ok()
    }

    /// Marks `pages` as stuck and the slots `dead` as lost: the memory failed while the headers of
    /// `pages`, or of their older versions in `dead`, were voided. The pages stay in the cache,
    /// since their older versions may still be on the medium.
    fn leave_stuck(&self, dead: &[u32], pages: &[&Found]) {
        self.store.note_lost_slot();
        for found in pages {
            self.shard(found.page).allocator.stick(found.page);
        }
        for slot in dead {
            self.shards.lock(self.shard_of_slot(*slot)).allocator.lose(*slot);
        }
    }

    /// Returns the error for a request that cannot be completed because the memory failed before.
    pub(in crate::cache) fn stuck(found: &str) -> DeviceError {
        let message = format!(
            "{found}, because the memory of the cache failed before: stop the server and serve \
             the pool again"
        );
        DeviceError::new(DeviceErrorKind::Io, message)
    }
}
