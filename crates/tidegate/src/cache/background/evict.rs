//! Free slots: clean pages leave the cache.
//!
//! Two fences for a batch. First all older headers of the pages become void, then the newest ones:
//! if the newest went first, a crash between would bring an older version back (invariant 3 of the
//! cache).

use std::collections::BTreeSet;

use crate::cache::pages::index::{Found, Spent};
use crate::cache::policy::classes::CLASSES;
use crate::cache::store::layout::is_part;
use crate::cache::tier::Counter;
use crate::cache::{Core, PmemResult, Scratch};
use crate::device::waits;
use crate::device::{DeviceError, DeviceErrorKind, Result};

/// Most pages that leave the cache at once.
const BATCH_PAGES: u32 = 64;
/// Of a small shard one page in so many leaves at once, so that it does not lose pages in use.
const BATCH_ONE_IN: u32 = 50;
const BATCH_PAGES_LEAST: u32 = 4;
/// Most pages that are cleaned to make free slots.
const CLEAN_PAGES: u32 = 512;
/// Of a small shard one page in so many is cleaned, for the same reason.
const CLEAN_ONE_IN: u32 = 16;
/// Most pages of each IO class that are cleaned, where all classes give some up.
const PAGES_OF_CLASS: usize = CLEAN_PAGES as usize / CLASSES;

/// Most slots that are made whole again with one fence.
const UNITED_AT_ONCE: usize = 64;

/// Most pages of a shard of `slots` slots that leave the cache at once.
pub(in crate::cache) fn batch_pages(slots: u32) -> u32 {
    (slots / BATCH_ONE_IN).clamp(BATCH_PAGES_LEAST, BATCH_PAGES)
}

/// Most pages of a shard of `slots` slots that are cleaned, and then leave it, to make free slots.
fn clean_pages(slots: u32) -> u32 {
    (slots / CLEAN_ONE_IN).clamp(BATCH_PAGES_LEAST, CLEAN_PAGES)
}

/// Pages from the begin of the order of eviction.
struct Coldest {
    /// Those that can leave the cache: some that are clean, or all of them dirty.
    pages: Vec<Found>,
    is_clean: bool,
    /// How far the order was followed.
    looked_at: usize,
}

/// Pages that are being cleaned to leave their shards; dropping it says that they did, or could
/// not.
struct Departing<'a> {
    core: &'a Core,
    of: Vec<(usize, u32)>,
}

impl Departing<'_> {
    /// Adds `pages` of shard `number`.
    fn add(&mut self, number: usize, pages: &[Found]) {
        let count = u32::try_from(pages.len()).unwrap_or(u32::MAX);
        self.core.shards.lock(number).departing += count;
        self.of.push((number, count));
    }
}

impl Drop for Departing<'_> {
    fn drop(&mut self) {
        for (number, count) in &self.of {
            self.core.shards.lock(*number).departing -= *count;
        }
    }
}

impl Core {
    /// Makes free slots in shard `number`, and cleans the coldest pages where all of them are
    /// dirty. Returns how many slots became free.
    ///
    /// # Errors
    /// The backing did not take the dirty pages, or the memory failed.
    pub(in crate::cache) fn reclaim(&self, number: usize, scratch: &mut Scratch) -> Result<usize> {
        let united = self.unite_spent(number)?;
        if united > 0 {
            return Ok(united);
        }
        match self.reclaim_coldest(number, scratch) {
            // The class that is to give up slots cannot: others have to.
            Ok(0) | Err(_) if self.classes.table().is_some() => {
                self.reclaim_of_each_class(number, scratch)
            }
            freed => freed,
        }
    }

    /// Follows the order of shard `number`, at most once around, until pages leave the cache: those
    /// that wait for a commit cannot.
    fn reclaim_coldest(&self, number: usize, scratch: &mut Scratch) -> Result<usize> {
        let mut left = self.shards.lock(number).usage().live;
        while left > 0 {
            let Coldest { pages, is_clean, looked_at } =
                self.coldest(number, self.cleaners.batch_pages());
            let freed =
                if is_clean { self.evict(&pages)? } else { self.clean_and_evict(&pages, scratch)? };
            if freed > 0 || looked_at == 0 {
                return Ok(freed);
            }
            left = left.saturating_sub(looked_at as u64);
        }
        Ok(0)
    }

    /// The next pages of shard `number`: the clean ones of a batch that leaves the cache, or where
    /// all of it is dirty those of a larger batch that can be cleaned, `most` at most.
    ///
    /// Pages without data come before both, once a batch of them has come together. Most of them
    /// were discarded: no reader misses them, and the backing is told of them without a write.
    fn coldest(&self, number: usize, most: usize) -> Coldest {
        let mut pages = Vec::new();
        let mut shard = self.shards.lock(number);
        let slots = shard.slot_count();
        let most = most.min(clean_pages(slots) as usize);
        shard.zeroed(batch_pages(slots) as usize, most, &mut pages);
        if !pages.is_empty() {
            let looked_at = pages.len();
            pages.retain(|found| shard.can_be_cleaned(found));
            return Coldest { pages, is_clean: false, looked_at };
        }
        let first = most.min(batch_pages(slots) as usize);
        let mut looked_at = shard.leaving_victims(first, &mut pages);
        let is_clean = pages.iter().any(|found| !found.dirty && !shard.is_stuck(found.page));
        if !is_clean {
            looked_at += shard.leaving_victims(most - looked_at.min(most), &mut pages);
        }
        pages.retain(|found| {
            let can_leave = !found.dirty || !is_clean && shard.can_be_cleaned(found);
            can_leave && !shard.is_stuck(found.page)
        });
        Coldest { pages, is_clean, looked_at }
    }

    /// Makes free slots in all shards that need some, and cleans the coldest pages of those that
    /// are all dirty in one batch. Returns how many slots became free.
    ///
    /// # Errors
    /// As for [`reclaim`](Self::reclaim).
    pub(in crate::cache) fn reclaim_where_needed(&self, scratch: &mut Scratch) -> Result<usize> {
        let needy = self.needy_shards();
        let share = self.cleaners.batch_pages() / needy.len().max(1);
        let mut departing = Departing { core: self, of: Vec::new() };
        let (mut freed, mut dirty) = (0, Vec::new());
        for number in &needy {
            let united = self.unite_spent(*number)?;
            freed += united;
            if united > 0 {
                continue;
            }
            let coldest = self.coldest(*number, share.max(BATCH_PAGES_LEAST as usize));
            if coldest.is_clean {
                freed += self.evict(&coldest.pages)?;
            } else {
                departing.add(*number, &coldest.pages);
                dirty.extend(coldest.pages);
            }
        }
        let done = self.clean_and_evict(&dirty, scratch);
        drop(departing);
        match done {
            Err(error) if self.classes.table().is_none() => return Err(error),
            Err(_) => {}
            Ok(more) => freed += more,
        }
        // Where none of these can leave, others may.
        let mut others = needy.into_iter();
        while freed == 0
            && let Some(number) = others.next()
        {
            freed = self.reclaim(number, scratch)?;
        }
        Ok(freed)
    }

    fn clean_and_evict(&self, dirty: &[Found], scratch: &mut Scratch) -> Result<usize> {
        let mut batch = dirty.to_vec();
        self.add_clusters(&mut batch, dirty.len());
        self.clean(batch, scratch)?;
        // These, for the policy offers them again only after all others.
        self.evict(dirty)
    }

    /// Makes free slots of the coldest pages of each IO class in shard `number`.
    fn reclaim_of_each_class(&self, number: usize, scratch: &mut Scratch) -> Result<usize> {
        let mut coldest = Vec::new();
        self.shards.lock(number).victims_of_each(PAGES_OF_CLASS, &mut coldest);
        let (dirty, clean): (Vec<_>, Vec<_>) = coldest.into_iter().partition(|found| found.dirty);
        Ok(self.evict(&clean)? + self.clean_and_evict(&dirty, scratch)?)
    }

    /// Evicts the clean ones of the coldest pages of shard `number`.
    pub(in crate::cache) fn evict_clean(&self, number: usize) -> Result<usize> {
        let united = self.unite_spent(number)?;
        if united > 0 {
            return Ok(united);
        }
        let mut coldest = Vec::new();
        {
            let mut shard = self.shards.lock(number);
            let most = batch_pages(shard.slot_count());
            shard.leaving_victims(most as usize, &mut coldest);
        }
        coldest.retain(|found| !found.dirty);
        self.evict(&coldest)
    }

    /// Evicts those of `pages` that are clean, and counts them.
    pub(in crate::cache) fn evict(&self, pages: &[Found]) -> Result<usize> {
        let evicted = self.remove_and_unite(pages)?;
        self.counters.add(Counter::Evictions, evicted as u64);
        Ok(evicted)
    }

    /// Removes those of `pages` that are clean, and makes slots whole again of which they were
    /// parts. Returns how many it removed.
    pub(in crate::cache) fn remove_and_unite(&self, pages: &[Found]) -> Result<usize> {
        let removed = self.remove_clean(pages)?;
        let parts = pages.iter().filter(|found| is_part(found.slot));
        let shards: BTreeSet<usize> = parts.map(|found| self.shard_of_slot(found.slot)).collect();
        shards.into_iter().try_for_each(|number| self.unite_spent(number).map(drop))?;
        Ok(removed)
    }

    /// Makes slots of shard `number` whole again of which no part holds a page: one store voids the
    /// headers of all parts, dead ones too. Returns how many.
    pub(in crate::cache) fn unite_spent(&self, number: usize) -> Result<usize> {
        let spent = self.shards.lock(number).take_spent(UNITED_AT_ONCE);
        // Before any of them is written over: what lies in a part must not be taken for its header.
        self.void_spent(number, &spent)
    }

    /// Voids the headers of `spent`, slots of shard `number`, which then are free or have left.
    /// Returns how many.
    pub(in crate::cache) fn void_spent(&self, number: usize, spent: &[Spent]) -> Result<usize> {
        if spent.is_empty() {
            return Ok(0);
        }
        let void = spent.iter().try_for_each(|it| self.void(it.slot));
        let void = void.and_then(|()| self.region.fence());
        let mut shard = self.shards.lock(number);
        if let Err(error) = void {
            self.note_lost_slot();
            for it in spent {
                shard.leave_spent(it);
            }
            return Err(error.into());
        }
        for it in spent {
            shard.free_spent(it);
        }
        shard.notify();
        Ok(spent.len())
    }

    /// Removes those of `pages` that are still clean from the cache, durably. Returns how many.
    pub(in crate::cache) fn remove_clean(&self, pages: &[Found]) -> Result<usize> {
        if pages.is_empty() {
            return Ok(0);
        }
        let locks = self.lock_pages(pages.iter().map(|found| found.page));
        let mut dead = Vec::new();
        let is_removable = |found: &&Found| {
            let mut shard = self.shard(found.page);
            let is_removable = shard.can_leave(found) && !shard.is_held(found.page);
            if is_removable {
                shard.take_older_of(found.page, &mut dead);
            }
            is_removable
        };
        let removed: Vec<&Found> = pages.iter().filter(is_removable).collect();
        self.void_pages(&dead, &removed).inspect_err(|_| self.leave_stuck(&dead, &removed))?;
        for found in &removed {
            self.shard(found.page).remove(found);
        }
        // A reader that copied from one of the slots finds the version changed.
        drop(locks);
        let slots = removed.iter().map(|found| found.slot).chain(dead);
        for slot in slots {
            let mut shard = self.shards.lock(self.shard_of_slot(slot));
            shard.free(slot);
            shard.notify();
        }
        Ok(removed.len())
    }

    /// Voids the headers of `dead`, older versions, and then those of `removed`.
    fn void_pages(&self, dead: &[u32], removed: &[&Found]) -> PmemResult {
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

    /// The memory failed while the headers of `dead` were voided, older versions of `pages`, or
    /// those of `pages`, which stay in the cache: their older versions may be on the medium.
    fn leave_stuck(&self, dead: &[u32], pages: &[&Found]) {
        self.note_lost_slot();
        for found in pages {
            self.shard(found.page).stick(found.page);
        }
        for slot in dead {
            self.shards.lock(self.shard_of_slot(*slot)).lose(*slot);
        }
    }

    /// The error of a request that the memory keeps from its end, for it failed before.
    pub(in crate::cache) fn stuck(found: &str) -> DeviceError {
        let message = format!(
            "{found}, because the memory of the cache failed before: stop the server and serve \
             the pool again"
        );
        DeviceError::new(DeviceErrorKind::Io, message)
    }

    /// Voids the header of `slot`, durably with the next fence: one atomic store of its checksums.
    pub(in crate::cache) fn void(&self, slot: u32) -> PmemResult {
        let at = self.places.header(slot);
        self.region.store_u64(at, 0)?;
        self.region.write_back(at, 8)
    }

    /// Returns when shard `number` may have a free slot.
    ///
    /// # Errors
    /// Cleaning failed meanwhile.
    pub(in crate::cache) fn wait_for_slot(&self, number: usize) -> Result<()> {
        if self.groups.is_some() && self.shards.lock(number).keeps_slots() {
            // The group may hold all that are left.
            self.counters.add(Counter::GroupsCommittedEarly, 1);
            self.commit_groups()?;
        }
        if !self.waker.is_running() {
            return self.reclaim_or_wait(number);
        }
        let failures = self.ledger.failures();
        if self.evict_clean(number)? > 0 {
            return Ok(());
        }
        self.counters.add(Counter::FullWaits, 1);
        let _waiting = waits::begin("a write to the cache", "a free slot");
        // Also a thread that rests after a failure.
        self.waker.wake_all();
        let mut shard = self.shards.lock(number);
        while shard.available() == 0
            && !shard.is_exhausted()
            && self.waker.is_running()
            && self.ledger.failures() == failures
        {
            shard.wait();
        }
        let is_exhausted = shard.is_exhausted();
        drop(shard);
        if is_exhausted {
            return Err(Self::stuck("the cache has no slot for the write"));
        }
        if self.ledger.failures() == failures {
            return Ok(());
        }
        Err(self.ledger.blocked("the cache is full and cannot be written back"))
    }

    /// Makes free slots in shard `number` where no thread does, unless another request is at it.
    fn reclaim_or_wait(&self, number: usize) -> Result<()> {
        self.counters.add(Counter::FullWaits, 1);
        let freed = match self.cleaners.try_lock() {
            Some(mut scratch) => self.reclaim(number, &mut scratch)?,
            None => 0,
        };
        if freed == 0 {
            if self.shards.lock(number).is_exhausted() {
                return Err(Self::stuck("the cache has no slot for the write"));
            }
            // Other threads clean, or write the coldest pages to the backing.
            self.region.relax();
        }
        Ok(())
    }
}
