//! Writes of parts of pages: merged with the rest of the page, or kept as a record.
//!
//! Invariant: what a part is merged with is the page's content at the moment of the store. The
//! store holds the page's lock; the bytes of a slot are its newest version's then. Those of the
//! backing were read without the lock, for nothing waits for the backing under it: so the store
//! looks whether the page entered the cache or was written to the backing since, and if so they are
//! read again.

use super::Core;
use super::layout::{ALL_LINES, PAGE, PAGE_BYTES};
use super::read::damaged;
use super::record::Record;
use super::store::{Demand, Entry};
use super::traffic::Seen;
use crate::device::Result;
use crate::sync::Ordering;
use crate::tier::version_locks::Version;

/// A page as the backing has it.
pub(super) struct Base {
    page: u64,
    /// The page's version before it was read.
    version: Version,
    /// The writes to the backing at that moment.
    seen: Seen,
    data: Vec<u8>,
}

/// What parts became, by page.
#[derive(Default)]
pub(super) struct Merged {
    pages: Vec<(u64, Record)>,
    /// Position of the entry that the backing's bytes are needed for.
    pub(super) lacks_base: Option<usize>,
}

impl Merged {
    /// The bytes of `entry` as they are stored, none for zeroes; and which lines they are.
    pub(super) fn data_of<'a>(&'a self, entry: &Entry<'a>) -> (Option<&'a [u8]>, u64) {
        let merged = self.pages.iter().find(|(page, _)| *page == entry.page);
        let merged = merged.map(|(_, record)| (Some(&record.bytes[..]), record.lines));
        merged.unwrap_or((entry.data, ALL_LINES))
    }
}

/// What the cache has of a page.
enum Cached {
    Nothing,
    Page(Vec<u8>),
    Record(Record),
}

impl Core {
    /// Reads `page` from the backing, for parts of it.
    pub(super) fn read_base(&self, page: u64) -> Result<Base> {
        // Before the read: a change after it is seen by them.
        let (version, seen) = (self.locks.version(page), self.traffic.see(page));
        let mut data = vec![0; PAGE];
        let _foreground = self.pace.foreground();
        self.backing.read(page * PAGE_BYTES, &mut data)?;
        Ok(Base { page, version, seen, data })
    }

    /// Merges the parts among `entries`, of which the caller holds the locks, with what there is of
    /// their pages; up to the first one for which `base` is needed and does not do.
    ///
    /// # Errors
    /// What the cache has of a page is damaged, and the backing's bytes are older ones.
    pub(super) fn merge(
        &self,
        entries: &[Entry<'_>],
        base: Option<&Base>,
        demand: Demand,
    ) -> Result<Merged> {
        let mut merged = Merged::default();
        let parts = entries.iter().enumerate().filter(|(_, entry)| entry.is_part());
        for (at, entry) in parts {
            let base = base.filter(|base| self.still_holds(entry.page, base));
            let part = Record::of_part(entry.from, entry.data.unwrap_or_default());
            let Some(whole) = self.merge_part(entry.page, &part, base, demand)? else {
                merged.lacks_base = Some(at);
                break;
            };
            merged.pages.push((entry.page, whole));
        }
        Ok(merged)
    }

    /// `part` and what there is of its page. None: the rest is only in the backing, and needed.
    fn merge_part(
        &self,
        page: u64,
        part: &Record,
        base: Option<&Base>,
        demand: Demand,
    ) -> Result<Option<Record>> {
        let (mut rest, record) = match self.cached(page)? {
            Cached::Page(rest) => (rest, None),
            Cached::Record(older) if demand.whole_pages => match base {
                Some(base) => (base.data.clone(), Some(older)),
                None => return Ok(None),
            },
            Cached::Record(older) => return Ok(Some(part.over(&older))),
            Cached::Nothing => match base {
                Some(base) => (base.data.clone(), None),
                None => return Ok((!demand.whole_pages).then(|| part.clone())),
            },
        };
        if let Some(older) = record {
            older.put_into(&mut rest);
        }
        part.put_into(&mut rest);
        Ok(Some(Record { lines: ALL_LINES, bytes: rest }))
    }

    /// What the cache has of `page`, of which the caller holds the lock.
    fn cached(&self, page: u64) -> Result<Cached> {
        let Some(found) = self.find(page) else { return Ok(Cached::Nothing) };
        let copy = || -> Result<Option<Cached>> {
            if found.record {
                return Ok(self.copy_record(&found)?.map(Cached::Record));
            }
            let mut data = vec![0; PAGE];
            Ok(self.copy_out(&found, &mut data)?.then_some(Cached::Page(data)))
        };
        if let Some(cached) = copy().inspect_err(|_| self.fallback.count())? {
            return Ok(cached);
        }
        self.damaged.fetch_add(1, Ordering::Relaxed);
        self.fallback.count();
        // The backing has what a clean one had.
        if found.dirty { Err(damaged(&found)) } else { Ok(Cached::Nothing) }
    }

    /// The backing has `page` as `base` says.
    fn still_holds(&self, page: u64, base: &Base) -> bool {
        base.page == page
            && self.locks.unchanged(page, base.version)
            && self.traffic.is_unchanged(page, base.seen)
    }
}
