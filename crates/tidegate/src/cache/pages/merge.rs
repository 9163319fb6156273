//! Writes of parts of pages: a part is merged with the rest of its page, or kept as a record.
//!
//! Invariant: a part is merged with the page's content at the moment of the store. The store holds
//! the page's lock, under which a slot has the newest version's bytes. The backing's bytes were
//! read before, as no thread waits for the backing under the lock. So the store checks whether the
//! page entered the cache or was written to the backing since. If so, the backing is read again.

use super::index::Found;
use super::writer::Writer;
use crate::cache::backing::traffic::Seen;
use crate::cache::pages::read::damaged;
use crate::cache::span::{Part, parts};
use crate::cache::store::layout::{ALL_LINES, PAGE, PAGE_BYTES};
use crate::cache::store::record::Record;
use crate::cache::{Ask, Few};
use crate::device::{BlockDeviceExt, Result};
use crate::sync::Ordering;
use crate::tier::version_locks::Version;

/// Maximum lines of a record over a cached page. With more, a whole page costs less in the end.
pub(in crate::cache) const LINES_OVER_PAGE_MAX: u32 = 31;

/// A page to be stored, or a part of one.
#[derive(Clone, Copy)]
pub(in crate::cache) struct Entry<'a> {
    pub(in crate::cache) page: u64,
    /// Offset of the bytes in the page.
    pub(in crate::cache) from: usize,
    /// The bytes; `None` for a page of zeroes.
    pub(in crate::cache) data: Option<&'a [u8]>,
    /// Whether the backing lacks the bytes.
    pub(in crate::cache) dirty: bool,
    /// The IO class of the request.
    pub(in crate::cache) class: u8,
}

impl<'a> Entry<'a> {
    /// Returns an entry for all of `page`, with the bytes `data` or zeroes.
    pub(in crate::cache) fn whole(
        page: u64,
        data: Option<&'a [u8]>,
        dirty: bool,
        class: u8,
    ) -> Self {
        Self { page, from: 0, data, dirty, class }
    }

    /// Returns entries for `data` at `offset`. The first and the last one may be parts of pages.
    pub(in crate::cache) fn all(offset: u64, data: &'a [u8], class: u8) -> Few<Self> {
        let of = |it: Part| {
            let Part { page, from, at } = it;
            Self { page, from, data: Some(&data[at]), dirty: true, class }
        };
        parts(offset, data.len()).map(of).collect()
    }

    pub(in crate::cache) fn is_part(&self) -> bool {
        self.data.is_some_and(|data| data.len() < PAGE)
    }
}

/// How a write is to be stored.
#[derive(Debug, Clone, Copy)]
pub(in crate::cache) struct Demand<'a> {
    /// The IO class, and whether the write is FUA: durable by itself, even with atomic flush.
    pub(in crate::cache) ask: Ask<'a>,
    /// Makes no records: the slots hold whole pages afterwards.
    pub(in crate::cache) whole_pages: bool,
    /// Need not store bytes that the cache has already.
    pub(in crate::cache) by_content: bool,
}

/// The backing's bytes of a page.
pub(in crate::cache) struct Base {
    page: u64,
    /// The page's version before the read.
    version: Version,
    /// The state of the writes to the backing before the read.
    seen: Seen,
    data: Vec<u8>,
}

/// The part of an entry's page that is stored.
pub(in crate::cache) struct Payload<'a> {
    /// The bytes; `None` for zeroes.
    pub(in crate::cache) data: Option<&'a [u8]>,
    /// The lines of the page in `data`.
    pub(in crate::cache) lines: u64,
    /// The version of the page under a record, or 0 if the backing's bytes are under it.
    pub(in crate::cache) over: u64,
}

/// The result of merging a batch.
#[derive(Default)]
pub(in crate::cache) struct Merged {
    pages: Vec<(u64, Record, u64)>,
    /// The pages that do not change, in the order of the entries.
    unchanged: Vec<u64>,
    /// Index of the first entry that needs the backing's bytes.
    pub(in crate::cache) lacks_base: Option<usize>,
}

impl Merged {
    /// Returns whether the cache already has all bytes of `entry`.
    pub(in crate::cache) fn is_unchanged(&self, entry: &Entry<'_>) -> bool {
        self.unchanged.binary_search(&entry.page).is_ok()
    }

    /// Returns the part of its page to store for `entry`.
    pub(in crate::cache) fn data_of<'a>(&'a self, entry: &Entry<'a>) -> Payload<'a> {
        match self.pages.iter().find(|(page, ..)| *page == entry.page) {
            Some((_, Record { lines, bytes }, over)) => {
                Payload { data: Some(bytes), lines: *lines, over: *over }
            }
            None => Payload { data: entry.data, lines: ALL_LINES, over: 0 },
        }
    }
}

impl Writer {
    /// Reads `page` from the backing, to be merged with a part that a request of `class` writes.
    pub(in crate::cache) fn read_base(&self, page: u64, class: u8) -> Result<Base> {
        // Taken before the read, so that they reveal any later change.
        let (version, seen) =
            (self.pages.locks.version(page), self.pages.backing.traffic.see(page));
        let mut data = vec![0; PAGE];
        let _foreground = self.pages.backing.pace.foreground();
        let read = self.pages.backing.device.read(page * PAGE_BYTES, &mut data);
        self.pages.counters.count_core_read(class, 1, &read);
        read?;
        Ok(Base { page, version, seen, data })
    }

    /// Merges the parts among `entries` with the content of their pages. The caller holds the locks
    /// of the pages. Stops at the first entry that needs the backing's bytes unless `base` has
    /// them. For each entry, `changed` has the changed lines if only these are to be stored.
    ///
    /// # Errors
    /// Fails if the cached bytes of a page are damaged and dirty.
    pub(in crate::cache) fn merge(
        &self,
        entries: &[Entry<'_>],
        base: Option<&Base>,
        demand: Demand<'_>,
        changed: &[Option<u64>],
    ) -> Result<Merged> {
        let mut merged = Merged::default();
        for (at, entry) in entries.iter().enumerate() {
            match changed.get(at).copied().flatten() {
                Some(0) => {
                    merged.unchanged.push(entry.page);
                    continue;
                }
                Some(lines) => {
                    if let Some((record, over)) = self.lay_changes(entry, lines, demand)? {
                        merged.pages.push((entry.page, record, over));
                        continue;
                    }
                }
                None => {}
            }
            if !entry.is_part() {
                continue;
            }
            let base = base.filter(|base| self.still_holds(entry.page, base));
            let part = Record::of_part(entry.from, entry.data.unwrap_or_default());
            let Some((whole, over)) = self.merge_part(entry.page, &part, base, demand)? else {
                merged.lacks_base = Some(at);
                break;
            };
            merged.pages.push((entry.page, whole, over));
        }
        Ok(merged)
    }

    /// Returns the changed `lines` of `entry` as a record, and the version of the cached page under
    /// it, or `None` if they cannot be a record over a cached page.
    fn lay_changes(
        &self,
        entry: &Entry<'_>,
        lines: u64,
        demand: Demand<'_>,
    ) -> Result<Option<(Record, u64)>> {
        let part = Record::of_part(entry.from, entry.data.unwrap_or_default()).only(lines);
        let merged = self.merge_part(entry.page, &part, None, demand)?;
        Ok(merged.filter(|(_, over)| *over > 0))
    }

    /// Returns `part` merged with the cached bytes of its page, and the version of the page under
    /// the result, or 0. Returns `None` if the rest is needed, and only the backing has it.
    fn merge_part(
        &self,
        page: u64,
        part: &Record,
        base: Option<&Base>,
        demand: Demand<'_>,
    ) -> Result<Option<(Record, u64)>> {
        let Some((found, older)) = self.find_sound(page)? else {
            let whole = base.map(|base| part.on_page(base.data.clone()));
            let alone = || (!demand.whole_pages).then(|| part.clone());
            return Ok(whole.or_else(alone).map(|record| (record, 0)));
        };
        let record = older.map_or_else(|| part.clone(), |older| part.over(&older));
        let under = if found.record { found.under() } else { Some(found) };
        let Some(under) = under else {
            // The backing has the rest.
            let whole = base.map(|base| record.on_page(base.data.clone()));
            return Ok(whole.or((!demand.whole_pages).then_some(record)).map(|it| (it, 0)));
        };
        let is_small = record.lines.count_ones() <= LINES_OVER_PAGE_MAX;
        let may_lay_over = found.record || self.pages.shard(page).may_lay_over();
        if !demand.whole_pages && is_small && may_lay_over {
            return Ok(Some((record, under.version)));
        }
        let mut rest = vec![0; PAGE];
        if !self.pages.copy_out(&under, &mut rest)? {
            return Err(damaged(&found));
        }
        Ok(Some((record.on_page(rest), 0)))
    }

    /// Returns the newest version of `page`, and the record if it is one. The caller holds the
    /// page's lock. A clean and damaged page counts as not cached: the backing has its bytes.
    ///
    /// # Errors
    /// Fails if the page is damaged and dirty.
    fn find_sound(&self, page: u64) -> Result<Option<(Found, Option<Record>)>> {
        let Some(found) = self.pages.find(page) else { return Ok(None) };
        let look = || -> Result<Option<Option<Record>>> {
            if !found.record {
                return Ok(self.pages.is_sound(Some(&found))?.then_some(None));
            }
            let is_sound = self.pages.is_sound(found.under().as_ref())?;
            Ok(self.pages.store.copy_record(&found)?.filter(|_| is_sound).map(Some))
        };
        if let Some(record) = look().inspect_err(|_| self.pages.failures.count())? {
            return Ok(Some((found, record)));
        }
        self.pages.damaged.fetch_add(1, Ordering::Relaxed);
        self.pages.failures.count();
        if found.dirty { Err(damaged(&found)) } else { Ok(None) }
    }

    /// Returns whether `base` is of `page`, and cache and backing have not changed since the read.
    fn still_holds(&self, page: u64, base: &Base) -> bool {
        base.page == page
            && self.pages.locks.unchanged(page, base.version)
            && self.pages.backing.traffic.is_unchanged(page, base.seen)
    }
}
