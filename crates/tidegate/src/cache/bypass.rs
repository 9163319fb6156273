//! Writes around the cache, to the backing.
//!
//! The cache gives up its copies first: a dirty one is cleaned, so that the only durable copy of a
//! write is never lost; a clean one is voided and fenced before the backing is written, so that no
//! crash brings it back. While such a write is under way its pages are neither cleaned nor kept.
//! It begins when no cleaner is in the middle of a write of them: a page may be clean by a flush
//! that came after it was written through, while a cleaner that found it dirty still writes it.

use std::ops::Range;

use super::backing::traffic::{Passage, Traffic};
use super::pages::index::Found;
use super::span::{Content, PIECE_PAGES, bytes_of, is_whole};
use super::store::layout::{PAGE, PAGE_BYTES};
use super::tier::Counter;
use super::{Ask, Core, Origin};
use crate::device::{Result, WriteFlags, ZeroFlags};

impl Core {
    /// Writes `content` to the backing, and removes its pages from the cache. With atomic flush it
    /// writes them into the cache: the backing never has a part of a group.
    pub(super) fn bypass(&self, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        if self.groups.is_some() {
            return self.write_whole_pages(content, ask, &mut |_| ());
        }
        for piece in content.pieces() {
            if !self.backing_takes(&piece.bytes) {
                // Two writes of parts of one block of the backing would take back each other's
                // bytes there: the cache orders them.
                self.write_through(&piece, ask)?;
                continue;
            }
            let passages = self.give_up(&piece.pages())?;
            let written = self.write_below(&piece, ask);
            for passage in &passages {
                self.traffic.end(passage);
            }
            written?;
        }
        Ok(())
    }

    /// `bytes` are whole blocks of the backing.
    pub(super) fn backing_takes(&self, bytes: &Range<u64>) -> bool {
        let block = u64::from(self.backing.geometry().block_bytes);
        bytes.start.is_multiple_of(block) && bytes.end.is_multiple_of(block)
    }

    /// Removes the copies of `pages`, and begins the write to the backing.
    fn give_up(&self, pages: &Range<u64>) -> Result<Vec<Passage>> {
        loop {
            self.clean_pages(pages)?;
            let clean: Vec<Found> = pages.clone().filter_map(|page| self.find(page)).collect();
            self.remove_clean(&clean)?;
            let locks = self.lock_pages(pages.clone());
            // A version of it may come back after a crash, over what is written now.
            if let Some(page) = pages.clone().find(|page| self.shard(*page).is_stuck(*page)) {
                let offset = page * PAGE_BYTES;
                let found = format!("the page at offset {offset} cannot be written to the backing");
                return Err(Self::stuck(&found));
            }
            let buckets = Traffic::buckets(pages.clone());
            let is_cached = pages.clone().any(|page| self.find(page).is_some());
            // After that look: a cleaner that begins later does not find the pages.
            if !is_cached && !self.traffic.is_cleaning(pages, &buckets) {
                // With the locks: a page that is written into the cache from now on is not cleaned
                // before this write has ended.
                return Ok(buckets.into_iter().map(|it| self.traffic.begin(it)).collect());
            }
            drop(locks);
            self.region.relax();
        }
    }

    /// Cleans the dirty ones of `pages`; not with atomic flush, which keeps some dirty. Each is
    /// clean, or not cached, at one moment: from then on the backing has all that was written to it
    /// before the call.
    ///
    /// A version that is replaced while it waits is not written: the one that replaces it is still
    /// dirty then, and has parts of the page that were written before.
    pub(super) fn clean_pages(&self, pages: &Range<u64>) -> Result<()> {
        let mut pages: Vec<u64> = pages.clone().collect();
        loop {
            let dirty = |page: &u64| self.find(*page).filter(|found| found.dirty);
            let dirty: Vec<Found> = pages.iter().filter_map(dirty).collect();
            if dirty.is_empty() {
                return Ok(());
            }
            pages = dirty.iter().map(|found| found.page).collect();
            self.clean_until_done(dirty)?;
        }
    }

    /// Writes to the backing; a flush is needed afterwards unless `ask.fua`.
    pub(super) fn write_below(&self, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        let Ask { fua, keeps_space, fast_only, from: Origin { class, .. }, .. } = ask;
        let (Range { start, end }, pages) = (content.bytes.clone(), content.pages());
        let _foreground = self.pace.foreground();
        let written = if let Some(data) = content.data {
            self.backing.write(start, data, WriteFlags { fua })
        } else {
            let flags = ZeroFlags { fua, may_unmap: !keeps_space, fast_only };
            self.backing.write_zeroes(start, end - start, flags)
        };
        match &written {
            Ok(()) => self.counters.add_of(class, Counter::CoreWrites, pages.end - pages.start),
            Err(_) => self.counters.add(Counter::CoreWriteErrors, 1),
        }
        // Also after a failure: a part may have been written. With FUA it is flushed, but a flush
        // says so to the fills too.
        for bucket in Traffic::buckets(pages) {
            self.traffic.bypassed(bucket);
        }
        written
    }

    /// Writes `content` to slots, durably, and through to the backing. The pages are clean after
    /// the next flush of the backing.
    pub(super) fn write_through(&self, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        let ask = Ask { fua: false, ..ask };
        content.pieces().try_for_each(|piece| self.write_piece_through(&piece, ask))
    }

    fn write_piece_through(&self, content: &Content<'_>, ask: Ask<'_>) -> Result<()> {
        let mut stored: Vec<Found> = Vec::new();
        self.write_whole_pages(content, ask, &mut |found| stored.push(found))?;
        let buckets = Traffic::buckets(content.pages());
        let passages: Vec<Passage> = buckets.into_iter().map(|it| self.traffic.begin(it)).collect();
        let written = self.write_standing(content, ask, stored);
        let overlapped = passages.iter().filter(|it| !self.traffic.end(it)).count();
        let written = written?;
        if overlapped == 0 {
            self.written.lock().extend(written);
        }
        Ok(())
    }

    /// Writes those of `stored` to the backing that are still the newest versions: a later write
    /// has replaced any other, or it was cleaned and evicted. Of a part of a page it writes all of
    /// the page, as its slot has it. Returns what it wrote.
    fn write_standing(
        &self,
        content: &Content<'_>,
        ask: Ask<'_>,
        stored: Vec<Found>,
    ) -> Result<Vec<Found>> {
        let count = stored.len();
        let stands = |found: &Found| self.shard(found.page).stands(found);
        let mut standing: Vec<Found> = stored.into_iter().filter(stands).collect();
        if !is_whole(&content.bytes) {
            let mut data = [0; PAGE];
            // After the copy: until then the slot was this version's.
            standing.retain(|found| {
                let copied = self.copy_out(found, &mut data);
                copied.is_ok_and(|is_whole| is_whole) && stands(found)
            });
            for found in &standing {
                self.write_below(&Content::of(found.page * PAGE_BYTES, &data), ask)?;
            }
            return Ok(standing);
        }
        if standing.len() == count {
            self.write_below(content, ask)?;
            return Ok(standing);
        }
        for found in &standing {
            let page = bytes_of(&(found.page..found.page + 1));
            self.write_below(&content.part(page), ask)?;
        }
        Ok(standing)
    }

    /// Zeroes for many pages: those that are cached in their slots, all others in the backing.
    pub(super) fn zero_many(&self, pages: &Range<u64>, ask: Ask<'_>) -> Result<()> {
        let mut first = pages.start;
        while first < pages.end {
            let piece = first..pages.end.min(first + PIECE_PAGES);
            let missing = self.missing_runs(&piece);
            // By the same look: a page that enters or leaves the cache meanwhile is made zero too.
            let cached = piece.clone().filter(|page| !missing.iter().any(|run| run.contains(page)));
            self.zero_pages(cached, ask, &mut |_| ())?;
            for run in &missing {
                self.bypass(&Content { bytes: bytes_of(run), data: None }, ask)?;
            }
            first = piece.end;
        }
        // Durable before it is acknowledged, as all writes of these modes without atomic flush.
        if self.groups.is_some() { Ok(()) } else { self.flush_backing_recorded() }
    }

    /// Discard with atomic flush: pages that are cached are zeroes, all others stay as they are.
    pub(super) fn zero_cached(&self, pages: Range<u64>, ask: Ask<'_>) -> Result<()> {
        let cached: Vec<u64> = pages.filter(|page| self.find(*page).is_some()).collect();
        self.zero_pages(cached.into_iter(), ask, &mut |_| ())
    }

    /// The runs of `pages` that the cache does not have.
    fn missing_runs(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for page in pages.clone().filter(|page| self.find(*page).is_none()) {
            match runs.last_mut() {
                Some(run) if run.end == page => run.end += 1,
                _ => runs.push(page..page + 1),
            }
        }
        runs
    }

    /// All of `pages` are cached.
    pub(super) fn has_all(&self, pages: &Range<u64>) -> bool {
        pages.clone().all(|page| self.find(page).is_some())
    }
}
