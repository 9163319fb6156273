//! Free slots: clean pages leave the cache.
//!
//! Two fences for a batch. First all older headers of the pages become void, then the newest ones:
//! if the newest went first, a crash between would bring an older version back (invariant 3 of the
//! cache).

use super::Core;
use super::index::Found;
use super::policy::classes::CLASSES;
use super::tier::Counter;
use crate::device::Result;
use crate::pmem::PmemError;

/// Most pages that leave the cache at once.
const BATCH_PAGES: u32 = 64;
/// Of a small shard one page in so many leaves at once, so that it does not lose pages in use.
const BATCH_ONE_IN: u32 = 50;
const BATCH_PAGES_LEAST: u32 = 4;
/// Most pages that are cleaned to make free slots.
const CLEAN_PAGES: usize = 512;
/// Of those at most so many of each IO class, where all classes give some up.
const PAGES_OF_CLASS: usize = CLEAN_PAGES / CLASSES;

/// Most pages of a shard of `slots` slots that leave the cache at once.
pub(super) fn batch_pages(slots: u32) -> u32 {
    (slots / BATCH_ONE_IN).clamp(BATCH_PAGES_LEAST, BATCH_PAGES)
}

impl Core {
    /// Makes free slots in shard `number`, and cleans the coldest pages where all of them are
    /// dirty. Returns how many slots became free.
    ///
    /// # Errors
    /// The backing did not take the dirty pages, or the memory failed.
    pub(super) fn reclaim(&self, number: usize, scratch: &mut super::Scratch) -> Result<usize> {
        let freed = self.evict_clean(number)?;
        if freed > 0 {
            return Ok(freed);
        }
        let mut coldest = Vec::new();
        self.shards.lock(number).victims(CLEAN_PAGES, &mut coldest);
        coldest.retain(|found| found.dirty);
        match self.clean_and_evict(&coldest, scratch) {
            // The class that is to give up slots cannot: others have to.
            Ok(0) | Err(_) if self.classes.table().is_some() => {
                self.reclaim_of_each_class(number, scratch)
            }
            freed => freed,
        }
    }

    fn clean_and_evict(&self, dirty: &[Found], scratch: &mut super::Scratch) -> Result<usize> {
        self.clean(dirty.to_vec(), scratch)?;
        // These, for the policy offers them again only after all others.
        self.evict(dirty)
    }

    /// Makes free slots of the coldest pages of each IO class in shard `number`.
    fn reclaim_of_each_class(&self, number: usize, scratch: &mut super::Scratch) -> Result<usize> {
        let mut coldest = Vec::new();
        self.shards.lock(number).victims_of_each(PAGES_OF_CLASS, &mut coldest);
        let (dirty, clean): (Vec<_>, Vec<_>) = coldest.into_iter().partition(|found| found.dirty);
        Ok(self.evict(&clean)? + self.clean_and_evict(&dirty, scratch)?)
    }

    /// Evicts the clean ones of the coldest pages of shard `number`.
    pub(super) fn evict_clean(&self, number: usize) -> Result<usize> {
        let mut coldest = Vec::new();
        {
            let mut shard = self.shards.lock(number);
            let most = batch_pages(shard.slot_count());
            shard.victims(most as usize, &mut coldest);
        }
        coldest.retain(|found| !found.dirty);
        self.evict(&coldest)
    }

    /// Evicts those of `pages` that are clean, and counts them.
    pub(super) fn evict(&self, pages: &[Found]) -> Result<usize> {
        let evicted = self.remove_clean(pages)?;
        self.counters.add(Counter::Evictions, evicted as u64);
        Ok(evicted)
    }

    /// Removes those of `pages` that are still clean from the cache, durably. Returns how many.
    pub(super) fn remove_clean(&self, pages: &[Found]) -> Result<usize> {
        if pages.is_empty() {
            return Ok(0);
        }
        let locks = self.lock_pages(pages.iter().map(|found| found.page));
        let mut dead = Vec::new();
        let is_removable = |found: &&Found| {
            let mut shard = self.shard(found.page);
            let is_clean = shard.find(found.page).is_some_and(|now| {
                now.slot == found.slot && now.version == found.version && !now.dirty
            });
            let is_removable = is_clean && !shard.is_held(found.page);
            if is_removable {
                shard.take_older_of(found.page, &mut dead);
            }
            is_removable
        };
        let removed: Vec<&Found> = pages.iter().filter(is_removable).collect();
        self.void_pages(&dead, &removed).inspect_err(|_| self.note_lost_slot())?;
        for found in &removed {
            self.shard(found.page).remove(found);
        }
        // A reader that copied from one of the slots finds the version changed.
        drop(locks);
        let slots = removed.iter().map(|found| found.slot).chain(dead);
        for slot in slots {
            let mut shard = self.shards.lock(slot as usize % self.shards.count());
            shard.free(slot);
            shard.notify();
        }
        Ok(removed.len())
    }

    /// Voids the headers of `dead`, older versions, and then those of `removed`.
    fn void_pages(&self, dead: &[u32], removed: &[&Found]) -> std::result::Result<(), PmemError> {
        if !dead.is_empty() {
            dead.iter().try_for_each(|slot| self.void(*slot))?;
            // Invariant 3: an older version must be gone before the newest one goes.
            self.region.fence()?;
        }
        if !removed.is_empty() {
            removed.iter().try_for_each(|found| self.void(found.slot))?;
            // The slots are written over next: a header that counts must not outlive its data.
            self.region.fence()?;
        }
        Ok(())
    }

    /// Voids the header of `slot`, durably with the next fence: one atomic store of its checksums.
    pub(super) fn void(&self, slot: u32) -> std::result::Result<(), PmemError> {
        let at = self.places.header(slot);
        self.region.store_u64(at, 0)?;
        self.region.write_back(at, 8)
    }

    /// Returns when shard `number` may have a free slot.
    ///
    /// # Errors
    /// Cleaning failed meanwhile.
    pub(super) fn wait_for_slot(&self, number: usize) -> Result<()> {
        let failures = self.ledger.failures();
        if self.evict_clean(number)? > 0 {
            return Ok(());
        }
        self.counters.add(Counter::FullWaits, 1);
        if !self.waker.is_running() {
            let freed = match self.cleaning.try_lock() {
                Some(mut scratch) => self.reclaim(number, &mut scratch)?,
                None => 0,
            };
            if freed == 0 {
                // Other threads clean, or write the coldest pages to the backing.
                self.region.relax();
            }
            return Ok(());
        }
        // Also a thread that rests after a failure.
        self.waker.wake_all();
        let mut shard = self.shards.lock(number);
        while shard.available() == 0
            && self.waker.is_running()
            && self.ledger.failures() == failures
        {
            shard.wait();
        }
        drop(shard);
        if self.ledger.failures() == failures {
            return Ok(());
        }
        Err(self.ledger.blocked("the cache is full and cannot be written back"))
    }
}
