//! Writes of parts of pages: the rest comes from the page's slot, or from the backing.
//!
//! Invariant: what a part is merged with is the page's content at the moment of the store. The
//! store holds the page's lock; the bytes of a slot are its newest version's then. Those of the
//! backing were read without the lock, for nothing waits for the backing under it: so the store
//! looks whether the page entered the cache or was written to the backing since, and if so they are
//! read again.

use super::Core;
use super::layout::{PAGE, PAGE_BYTES};
use super::read::damaged;
use super::store::Entry;
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

/// Whole pages that parts became, by page.
#[derive(Default)]
pub(super) struct Merged {
    pages: Vec<(u64, Vec<u8>)>,
    /// Position of the entry that the backing's bytes are needed for.
    pub(super) lacks_base: Option<usize>,
}

impl Merged {
    /// The bytes of `entry` as they are stored; none for zeroes.
    pub(super) fn data_of<'a>(&'a self, entry: &Entry<'a>) -> Option<&'a [u8]> {
        let merged = self.pages.iter().find(|(page, _)| *page == entry.page);
        merged.map(|(_, data)| &data[..]).or(entry.data)
    }
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

    /// Merges the parts among `entries`, of which the caller holds the locks, with the rest of
    /// their pages; up to the first one for which `base` is needed and does not do.
    ///
    /// # Errors
    /// The rest of a page is damaged, and the backing's bytes are older ones.
    pub(super) fn merge(&self, entries: &[Entry<'_>], base: Option<&Base>) -> Result<Merged> {
        let mut merged = Merged::default();
        let parts = entries.iter().enumerate().filter(|(_, entry)| entry.is_part());
        for (at, entry) in parts {
            let Some(mut page) = self.rest_of(entry.page, base)? else {
                merged.lacks_base = Some(at);
                break;
            };
            let data = entry.data.unwrap_or_default();
            page[entry.from..entry.from + data.len()].copy_from_slice(data);
            merged.pages.push((entry.page, page));
        }
        Ok(merged)
    }

    /// The content of `page`, of which the caller holds the lock. None: only the backing has it.
    fn rest_of(&self, page: u64, base: Option<&Base>) -> Result<Option<Vec<u8>>> {
        if let Some(found) = self.find(page) {
            let mut data = vec![0; PAGE];
            if self.copy_out(&found, &mut data).inspect_err(|_| self.fallback.count())? {
                return Ok(Some(data));
            }
            if found.dirty {
                self.damaged.fetch_add(1, Ordering::Relaxed);
                self.fallback.count();
                return Err(damaged(&found));
            }
        }
        Ok(base.filter(|base| self.still_holds(page, base)).map(|base| base.data.clone()))
    }

    /// The backing has `page` as `base` says.
    fn still_holds(&self, page: u64, base: &Base) -> bool {
        base.page == page
            && self.locks.unchanged(page, base.version)
            && self.traffic.is_unchanged(page, base.seen)
    }
}
