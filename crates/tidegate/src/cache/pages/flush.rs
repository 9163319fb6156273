//! Flushes of the backing, after which pages are clean.

use parking_lot::{Mutex, MutexGuard};

use super::Pages;
use super::index::Found;
use crate::cache::backing::flushes::Moment;
use crate::cache::backing::{Backing, Caller, Failure};
use crate::cache::store::layout::{VERDICT_OFFSET, clean_verdict, is_part};
use crate::device::{Result, waits};

impl Pages {
    /// Flushes the backing for `caller`. Pages that were written through before the call are clean
    /// afterwards.
    pub(in crate::cache) fn flush_backing(
        &self,
        caller: Caller,
    ) -> std::result::Result<(), Failure> {
        self.flush_backing_since(self.backing.flushes.moment(), caller)
    }

    /// Flushes the backing like [`flush_backing`](Self::flush_backing), and fails if any flush has
    /// failed since the moment `since`: the backing may have lost writes that began after it.
    pub(in crate::cache) fn flush_backing_since(
        &self,
        since: Moment,
        caller: Caller,
    ) -> std::result::Result<(), Failure> {
        let Backing { traffic, flushes, written, .. } = &*self.backing;
        let mut written = std::mem::take(&mut *written.lock());
        let (epoch, call) = (traffic.flush_begins(), flushes.call());
        // Pages whose flush fails stay dirty, and are cleaned like all other dirty pages.
        let _waiting = waits::begin("a flush of the cache", "the backing");
        let last = self.lock_slow(&flushes.last);
        self.backing.flush(last, (since, call), caller).map_err(Failure::Flush)?;
        traffic.flush_succeeded(epoch);
        // None has failed between `since` and this flush. An earlier one may have lost the others.
        written.retain(|(_, before)| *before == since);
        let written: Vec<Found> = written.into_iter().map(|(found, _)| found).collect();
        Ok(self.conclude_clean(&written)?)
    }

    /// Flushes the backing outside of a client's flush.
    pub(in crate::cache) fn flush_backing_recorded(&self) -> Result<()> {
        self.backing.apart_from_flushes(|| self.flush_backing(Caller::Other))
    }

    /// Locks `lock`, which threads hold while the backing works.
    pub(in crate::cache) fn lock_slow<'a, T>(&self, lock: &'a Mutex<T>) -> MutexGuard<'a, T> {
        loop {
            if self.waker.is_running() && !self.shards.is_driven() {
                return lock.lock();
            }
            // Without worker threads, a simulator has to run the lock's holder meanwhile.
            match lock.try_lock() {
                Some(guard) => return guard,
                None => self.store.region.relax(),
            }
        }
    }

    /// Returns the number of pages that were written to the backing in mode wt and are not yet
    /// flushed. These are dirty until the flush.
    pub(in crate::cache) fn unflushed(&self) -> u64 {
        let written = self.backing.written.lock().clone();
        let is_dirty = |(found, _): &&(Found, Moment)| {
            self.find(found.page).is_some_and(|now| now.dirty && now.is_same(found))
        };
        written.iter().filter(is_dirty).count() as u64
    }

    /// Stores the clean verdicts of the pages among `pages` that are still the newest versions,
    /// after the backing has flushed them.
    ///
    /// A slot may be taken for another version meanwhile. The verdict means nothing for that
    /// version, nor for a slot that was split.
    pub(in crate::cache) fn conclude_clean(&self, pages: &[Found]) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        // A part may hold another page's data as soon as its own page is in another slot.
        let are_parts = |found: &&Found| is_part(found.slot);
        let _locks = self.lock_pages(pages.iter().filter(are_parts).map(|found| found.page));
        let stands = |found: &&Found| self.shard(found.page).stands(found);
        let standing: Vec<&Found> = pages.iter().filter(stands).collect();
        for found in &standing {
            let at = self.store.places.header(found.slot) + VERDICT_OFFSET;
            let verdict = clean_verdict(self.store.salt, found.slot, found.version);
            self.store.region.store_u64(at, verdict)?;
            self.store.region.write_back(at, 8)?;
        }
        if !standing.is_empty() {
            self.store.region.fence()?;
        }
        // Only after the fence: a page under a clean record leaves the cache before the record,
        // which must not be dirty on the medium then.
        for found in standing {
            self.shard(found.page).cleaned(found);
        }
        Ok(())
    }
}
