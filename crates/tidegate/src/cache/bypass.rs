//! Writes around the cache, to the backing.
//!
//! The cache gives up its copies first. A dirty copy is cleaned, so that the only durable copy of a
//! write is never lost. A clean copy is voided and fenced before the backing is written, so that no
//! crash brings it back. While such a write is under way, its pages are neither cleaned nor cached.
//! The write begins only when no cleaner is writing the pages: a page that was written through
//! becomes clean by a later flush, while a cleaner that found it dirty may still write it.

use std::ops::Range;

use super::backing::traffic::{Passage, Traffic};
use super::pages::Pages;
use super::pages::index::Found;
use super::span::{Content, PIECE_PAGES, bytes_of, is_whole};
use super::store::layout::{PAGE, PAGE_BYTES};
use super::{Ask, Core};
use crate::device::Result;

impl Core {
    /// Writes `content` to the backing, and removes its pages from the cache. With atomic flush it
    /// writes them into the cache, so that the backing never has a part of a group.
    pub(super) fn bypass(&self, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        if self.pages.groups.is_some() {
            return self.write_whole_pages(content, ask, &mut |_| ());
        }
        for piece in content.pieces() {
            if !self.backing.takes(&piece.bytes) {
                // Two writes of parts of one block of the backing would overwrite each other's
                // bytes there: the cache orders them.
                self.write_through(&piece, ask)?;
                continue;
            }
            let passages = self.give_up(&piece.pages())?;
            let written = self.backing.write(&piece, ask);
            for passage in &passages {
                self.backing.traffic.end(passage);
            }
            written?;
        }
        Ok(())
    }

    /// Removes the cached copies of `pages`, and announces the write to the backing.
    fn give_up(&self, pages: &Range<u64>) -> Result<Vec<Passage>> {
        loop {
            self.background.cleaners.clean_pages(pages)?;
            let clean: Vec<Found> =
                pages.clone().filter_map(|page| self.pages.find(page)).collect();
            self.pages.remove_clean(&clean)?;
            let locks = self.pages.lock_pages(pages.clone());
            // A durable version may come back after a crash, over the data that is written now.
            if let Some(page) =
                pages.clone().find(|page| self.pages.shard(*page).allocator.is_stuck(*page))
            {
                let offset = page * PAGE_BYTES;
                let found = format!("the page at offset {offset} cannot be written to the backing");
                return Err(Pages::stuck(&found));
            }
            let buckets = Traffic::buckets(pages.clone());
            let is_cached = pages.clone().any(|page| self.pages.find(page).is_some());
            // After that look: a cleaner that begins later does not find the pages.
            if !is_cached && !self.backing.traffic.is_cleaning(pages, &buckets) {
                // With the locks held: a page that is written into the cache from now on is not
                // cleaned before this write has ended.
                return Ok(buckets.into_iter().map(|it| self.backing.traffic.begin(it)).collect());
            }
            drop(locks);
            self.store.region.relax();
        }
    }

    /// Writes `content` to slots, durably, and to the backing. The pages are clean after the next
    /// flush of the backing.
    pub(super) fn write_through(&self, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        let ask = Ask { fua: false, ..ask };
        content.pieces().try_for_each(|piece| self.write_piece_through(&piece, ask))
    }

    fn write_piece_through(&self, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        let mut stored: Vec<Found> = Vec::new();
        self.write_whole_pages(content, ask, &mut |found| stored.push(found))?;
        let buckets = Traffic::buckets(content.pages());
        let passages: Vec<Passage> =
            buckets.into_iter().map(|it| self.backing.traffic.begin(it)).collect();
        // Before the write: a flush that fails from now on may lose it.
        let moment = self.backing.flushes.moment();
        let written = self.write_standing(content, ask, stored);
        let overlapped = passages.iter().filter(|it| !self.backing.traffic.end(it)).count();
        let written = written?;
        if overlapped == 0 {
            let written = written.into_iter().map(|found| (found, moment));
            self.backing.written.lock().extend(written);
        }
        Ok(())
    }

    /// Writes the pages of `stored` to the backing that are still the newest versions: a later
    /// write replaced the others, or they were cleaned and evicted. For a part of a page, it writes
    /// the whole page from its slot. Returns the written pages.
    fn write_standing(
        &self,
        content: &Content<'_>,
        ask: Ask<'_>,
        stored: Vec<Found>,
    ) -> Result<Vec<Found>> {
        let count = stored.len();
        let stands = |found: &Found| self.pages.shard(found.page).stands(found);
        let mut standing: Vec<Found> = stored.into_iter().filter(stands).collect();
        if !is_whole(&content.bytes) {
            let mut data = [0; PAGE];
            // After the copy: if the version still stands, the slot was its own until then.
            standing.retain(|found| {
                let copied = self.pages.copy_out(found, &mut data);
                copied.is_ok_and(|is_whole| is_whole) && stands(found)
            });
            for found in &standing {
                self.backing.write(&Content::of(found.page * PAGE_BYTES, &data), ask)?;
            }
            return Ok(standing);
        }
        if standing.len() == count {
            self.backing.write(content, ask)?;
            return Ok(standing);
        }
        for found in &standing {
            let page = bytes_of(&(found.page..found.page + 1));
            self.backing.write(&content.part(page), ask)?;
        }
        Ok(standing)
    }

    /// Makes many pages zero: cached ones in their slots, all others on the backing.
    pub(super) fn zero_many(&self, pages: &Range<u64>, ask: Ask<'_>) -> Result<()> {
        let mut first = pages.start;
        while first < pages.end {
            let piece = first..pages.end.min(first + PIECE_PAGES);
            let missing = self.pages.missing_runs(&piece);
            // By the same look: a page that enters or leaves the cache meanwhile is made zero too.
            let cached = piece.clone().filter(|page| !missing.iter().any(|run| run.contains(page)));
            self.zero_pages(cached, ask, &mut |_| ())?;
            for run in &missing {
                self.bypass(&Content { bytes: bytes_of(run), data: None }, ask)?;
            }
            first = piece.end;
        }
        // Durable before it is acknowledged, like all writes of these modes without atomic flush.
        if self.pages.groups.is_some() { Ok(()) } else { self.pages.flush_backing_recorded() }
    }

    /// Makes the cached ones of `pages` zero, and no others: a discard with atomic flush.
    pub(super) fn zero_cached(&self, pages: Range<u64>, ask: Ask<'_>) -> Result<()> {
        let cached: Vec<u64> = pages.filter(|page| self.pages.find(*page).is_some()).collect();
        self.zero_pages(cached.into_iter(), ask, &mut |_| ())
    }
}
