//! Makes free slots: clean pages leave the cache.
//!
//! A batch takes two fences: the headers of all older versions become void before the newest ones.
//! In the other order a crash in between would bring an older version back (invariant 3 of the
//! cache).

use super::clean::{Cleaners, Fruitless, Scratch};
use crate::cache::counters::Counter;
use crate::cache::pages::Pages;
use crate::cache::pages::index::Found;
use crate::cache::pages::remove::{BATCH_PAGES_LEAST, batch_pages};
use crate::cache::policy::classes::{Admission, CLASSES};
use crate::device::Result;
use crate::device::waits;
use crate::sync::Ordering;

/// Maximum number of pages cleaned to make free slots.
const CLEAN_PAGES: u32 = 512;
/// In a small shard one page in this many is cleaned, so that the shard does not lose pages in use.
const CLEAN_ONE_IN: u32 = 16;
/// Maximum number of pages of each IO class that are cleaned, when all classes give up some.
const PAGES_OF_CLASS: usize = CLEAN_PAGES as usize / CLASSES;

/// Returns how many pages of a shard of `slots` slots may be cleaned at once to make free slots.
fn clean_pages(slots: u32) -> u32 {
    (slots / CLEAN_ONE_IN).clamp(BATCH_PAGES_LEAST, CLEAN_PAGES)
}

/// The pages that come first in the order of eviction.
struct Coldest {
    /// The pages that can leave the cache: clean ones, or only dirty ones.
    pages: Vec<Found>,
    is_clean: bool,
    /// How many pages of the order were looked at.
    looked_at: usize,
}

/// Numbers of pages, by shard, that are being cleaned to leave the cache. Dropping it ends the
/// count, whether the pages left or could not.
struct Departing<'a> {
    pages: &'a Pages,
    of: Vec<(usize, u32)>,
}

impl Departing<'_> {
    /// Adds `pages` of shard `number`.
    fn add(&mut self, number: usize, pages: &[Found]) {
        let count = u32::try_from(pages.len()).unwrap_or(u32::MAX);
        self.pages.shards.lock(number).allocator.departing += count;
        self.of.push((number, count));
    }
}

impl Drop for Departing<'_> {
    fn drop(&mut self) {
        for (number, count) in &self.of {
            self.pages.shards.lock(*number).allocator.departing -= *count;
        }
    }
}

impl Cleaners {
    /// Returns whether a request of `class` finds slots for the pages `missing`. If the class is
    /// full, evicts some of its pages. A write also has pages cleaned, and waits for the backing.
    ///
    /// # Errors
    /// Pages of the class could not be cleaned.
    pub(in crate::cache) fn has_space_of_class(
        &self,
        missing: &[u64],
        class: u8,
        is_write: bool,
    ) -> Result<bool> {
        let mut pages = vec![0; self.pages.shards.count()];
        for page in missing {
            pages[self.pages.shard_of(*page)] += 1;
        }
        for (number, pages) in pages.into_iter().enumerate().filter(|(_, pages)| *pages > 0) {
            if !self.makes_space_of_class(number, pages, class, is_write)? {
                self.pages.counters.add(Counter::ClassFull, 1);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Makes space for `pages` pages of `class` in shard `number`. Returns whether there is space.
    fn makes_space_of_class(
        &self,
        number: usize,
        pages: u32,
        class: u8,
        is_write: bool,
    ) -> Result<bool> {
        Ok(match self.pages.class_admission(number, pages, class) {
            Admission::Insert => true,
            Admission::Bypass => false,
            Admission::ReplaceOwn => {
                self.evict_of_class(number, pages, class, is_write)?;
                self.pages.class_admission(number, pages, class) == Admission::Insert
            }
        })
    }

    /// Evicts the coldest pages of `class` in shard `number`, from at least `pages` slots if it has
    /// so many. With `cleans`, also cleans and evicts dirty ones if the clean ones do not suffice.
    fn evict_of_class(&self, number: usize, pages: u32, class: u8, cleans: bool) -> Result<()> {
        let mut shard = self.pages.shards.lock(number);
        let most =
            pages.max(batch_pages(shard.allocator.slot_count()).min(shard.orders.share(class) / 8));
        let coldest = shard.victims_of(class, most);
        drop(shard);
        let (dirty, clean): (Vec<_>, Vec<_>) = coldest.into_iter().partition(|found| found.dirty);
        self.pages.evict(&clean)?;
        if cleans
            && self.pages.class_admission(number, pages, class) == Admission::ReplaceOwn
            && let Some(mut scratch) = self.try_lock()
        {
            self.clean(dirty.clone(), &mut scratch)?;
            drop(scratch);
            self.pages.evict(&dirty)?;
        }
        Ok(())
    }

    /// Makes free slots in shard `number`. If the coldest pages are all dirty, cleans them first.
    /// Returns how many slots became free.
    ///
    /// # Errors
    /// Fails if the backing does not take the dirty pages, or the memory fails.
    pub(in crate::cache) fn reclaim(&self, number: usize, scratch: &mut Scratch) -> Result<usize> {
        let united = self.pages.unite_spent(number)?;
        if united > 0 {
            return Ok(united);
        }
        match self.reclaim_coldest(number, scratch) {
            // The class that should give up slots cannot, so the other classes have to.
            Ok(0) | Err(_) if self.pages.counters.has_classes() => {
                self.reclaim_of_each_class(number, scratch)
            }
            freed => freed,
        }
    }

    /// Follows the eviction order of shard `number`, at most once around, until pages leave the
    /// cache. Pages that wait for a commit cannot leave, and pages that the backing refuses.
    /// Returns how many left.
    ///
    /// # Errors
    /// None left, and some could not be cleaned.
    fn reclaim_coldest(&self, number: usize, scratch: &mut Scratch) -> Result<usize> {
        let mut left = self.pages.shards.lock(number).usage().live;
        let (mut failed, mut fruitless) = (Ok(0), Fruitless::new(0));
        while left > 0 && !fruitless.are_too_many() {
            let Coldest { pages, is_clean, looked_at } = self.coldest(number, self.batch_pages());
            if is_clean {
                let freed = self.pages.evict(&pages)?;
                if freed > 0 {
                    return Ok(freed);
                }
            } else {
                let clean = || self.clean_and_evict(&pages, scratch);
                match fruitless.watch(clean, Result::is_err) {
                    Ok(0) => {}
                    Ok(freed) => return Ok(freed),
                    error => failed = error,
                }
            }
            if looked_at == 0 {
                break;
            }
            left = left.saturating_sub(looked_at as u64);
        }
        failed
    }

    /// Returns the next pages to leave shard `number`: the clean pages of a small batch, or, if all
    /// of that batch is dirty, the pages of a larger batch (`most` at most) that can be cleaned.
    ///
    /// Pages of zeroes come before both, once there are enough for a batch. Most were discarded: no
    /// reader misses them, and the backing takes them without a write of data.
    fn coldest(&self, number: usize, most: usize) -> Coldest {
        let mut pages = Vec::new();
        let mut shard = self.pages.shards.lock(number);
        let slots = shard.allocator.slot_count();
        let most = most.min(clean_pages(slots) as usize);
        shard.zeroed(batch_pages(slots) as usize, most, &mut pages);
        if !pages.is_empty() {
            let looked_at = pages.len();
            pages.retain(|found| shard.can_be_cleaned(found));
            return Coldest { pages, is_clean: false, looked_at };
        }
        let first = most.min(batch_pages(slots) as usize);
        let mut looked_at = shard.leaving_victims(first, &mut pages);
        let is_clean =
            pages.iter().any(|found| !found.dirty && !shard.allocator.is_stuck(found.page));
        if !is_clean {
            looked_at += shard.leaving_victims(most - looked_at.min(most), &mut pages);
        }
        pages.retain(|found| {
            let can_leave = !found.dirty || !is_clean && shard.can_be_cleaned(found);
            can_leave && !shard.allocator.is_stuck(found.page)
        });
        Coldest { pages, is_clean, looked_at }
    }

    /// Makes free slots in all shards that need some. The coldest pages of shards where these are
    /// all dirty are cleaned in one batch. Returns how many slots became free.
    ///
    /// # Errors
    /// Fails if the backing does not take the dirty pages, or the memory fails.
    pub(in crate::cache) fn reclaim_where_needed(&self, scratch: &mut Scratch) -> Result<usize> {
        let needy = self.pages.needy_shards();
        let share = self.batch_pages() / needy.len().max(1);
        let mut departing = Departing { pages: &self.pages, of: Vec::new() };
        let (mut freed, mut dirty) = (0, Vec::new());
        for number in &needy {
            let united = self.pages.unite_spent(*number)?;
            freed += united;
            if united > 0 {
                continue;
            }
            let coldest = self.coldest(*number, share.max(BATCH_PAGES_LEAST as usize));
            if coldest.is_clean {
                freed += self.pages.evict(&coldest.pages)?;
            } else {
                departing.add(*number, &coldest.pages);
                dirty.extend(coldest.pages);
            }
        }
        let mut fruitless = Fruitless::new(0);
        let done = fruitless.watch(|| self.clean_and_evict(&dirty, scratch), Result::is_err);
        drop(departing);
        let mut failed = done.map(|more| freed += more);
        // If none of these pages can leave, other pages of the shards may.
        let mut others = needy.into_iter();
        while freed == 0
            && !fruitless.are_too_many()
            && let Some(number) = others.next()
        {
            let done = fruitless.watch(|| self.reclaim(number, scratch), Result::is_err);
            failed = failed.and(done.map(|more| freed += more));
        }
        if freed > 0 { Ok(freed) } else { failed.map(|()| 0) }
    }

    fn clean_and_evict(&self, dirty: &[Found], scratch: &mut Scratch) -> Result<usize> {
        let mut batch = dirty.to_vec();
        self.add_clusters(&mut batch, dirty.len());
        self.clean(batch, scratch)?;
        // Evicts them now, because the policy offers them again only after all others.
        self.pages.evict(dirty)
    }

    /// Evicts the coldest pages of each IO class from shard `number`. Dirty ones are cleaned first.
    fn reclaim_of_each_class(&self, number: usize, scratch: &mut Scratch) -> Result<usize> {
        let mut coldest = Vec::new();
        self.pages.shards.lock(number).victims_of_each(PAGES_OF_CLASS, &mut coldest);
        let (dirty, clean): (Vec<_>, Vec<_>) = coldest.into_iter().partition(|found| found.dirty);
        Ok(self.pages.evict(&clean)? + self.clean_and_evict(&dirty, scratch)?)
    }

    /// Evicts the clean pages among the coldest of shard `number`. Returns how many slots it freed.
    pub(in crate::cache) fn evict_clean(&self, number: usize) -> Result<usize> {
        let united = self.pages.unite_spent(number)?;
        if united > 0 {
            return Ok(united);
        }
        let mut coldest = Vec::new();
        {
            let mut shard = self.pages.shards.lock(number);
            let most = batch_pages(shard.allocator.slot_count());
            shard.leaving_victims(most as usize, &mut coldest);
        }
        coldest.retain(|found| !found.dirty);
        self.pages.evict(&coldest)
    }

    /// Notes that no slot could be freed because cleaning failed. Waiting writers fail once they
    /// are notified.
    pub(in crate::cache) fn note_stall(&self) {
        self.stalls.fetch_add(1, Ordering::SeqCst);
    }

    fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::SeqCst)
    }

    /// Waits until shard `number` may have a free slot.
    ///
    /// # Errors
    /// Fails if workers could free no slot because cleaning failed, or no slot can become free.
    pub(in crate::cache) fn wait_for_slot(&self, number: usize) -> Result<()> {
        if self.pages.groups.is_some() && self.pages.shards.lock(number).allocator.keeps_slots() {
            // The open group may hold all slots that are left.
            self.pages.counters.add(Counter::GroupsCommittedEarly, 1);
            self.pages.commit_groups()?;
        }
        if !self.pages.waker.is_running() {
            return self.reclaim_or_wait(number);
        }
        let stalls = self.stalls();
        if self.evict_clean(number)? > 0 {
            return Ok(());
        }
        self.pages.counters.add(Counter::FullWaits, 1);
        let _waiting = waits::begin("a write to the cache", "a free slot");
        // This also wakes a thread that rests after a failure.
        self.pages.waker.wake_all();
        let mut shard = self.pages.shards.lock(number);
        while shard.allocator.available() == 0
            && !shard.is_exhausted()
            && self.pages.waker.is_running()
            && self.stalls() == stalls
        {
            shard.wait();
        }
        let is_exhausted = shard.is_exhausted();
        drop(shard);
        if is_exhausted {
            return Err(Pages::stuck("the cache has no slot for the write"));
        }
        if self.stalls() == stalls {
            return Ok(());
        }
        Err(self.pages.backing.ledger.blocked("the cache is full and cannot be written back"))
    }

    /// Makes free slots in shard `number` of a cache without workers, unless another request does.
    fn reclaim_or_wait(&self, number: usize) -> Result<()> {
        self.pages.counters.add(Counter::FullWaits, 1);
        let freed = match self.try_lock() {
            Some(mut scratch) => self.reclaim(number, &mut scratch)?,
            None => 0,
        };
        if freed == 0 {
            if self.pages.shards.lock(number).is_exhausted() {
                return Err(Pages::stuck("the cache has no slot for the write"));
            }
            // Other threads clean, or are writing the coldest pages to the backing.
            self.pages.store.region.relax();
        }
        Ok(())
    }
}
