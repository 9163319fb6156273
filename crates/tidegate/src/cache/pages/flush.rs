//! Flushes of the backing, after which pages are clean.

use super::Pages;
use super::index::Found;
use crate::cache::counters::Counter;
use crate::cache::store::layout::{VERDICT_OFFSET, clean_verdict, is_part};
use crate::device::{BlockDeviceExt, Result, waits};
use crate::tier::ledger::Failed;

impl Pages {
    /// Flushes the backing. Pages that were written through before the call are clean afterwards.
    pub(in crate::cache) fn flush_backing(&self) -> std::result::Result<(), Failed> {
        let written = std::mem::take(&mut *self.backing.written.lock());
        let epoch = self.backing.traffic.flush_begins();
        // Pages whose flush fails stay dirty, and are cleaned like all other dirty pages.
        let _waiting = waits::begin("a flush of the cache", "the backing");
        let flushed = self.backing.device.flush().inspect_err(|_| {
            // The backing may have lost writes whose data was read before. None of that data may be
            // kept, even though a later flush succeeds.
            self.backing.traffic.keep_nothing_read();
            self.counters.add(Counter::CoreWriteErrors, 1);
        });
        flushed.map_err(Failed::Below)?;
        self.backing.traffic.flush_succeeded(epoch);
        Ok(self.conclude_clean(&written)?)
    }

    /// Flushes the backing outside of a client's flush. If that fails and the backing may have lost
    /// acknowledged writes around the cache, the next client's flush fails too.
    pub(in crate::cache) fn flush_backing_recorded(&self) -> Result<()> {
        self.backing.apart_from_flushes(|| self.flush_backing())
    }

    /// Returns the number of pages that were written to the backing in mode wt and are not yet
    /// flushed. These are dirty until the flush.
    pub(in crate::cache) fn unflushed(&self) -> u64 {
        let written = self.backing.written.lock().clone();
        let is_dirty = |found: &&Found| {
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
