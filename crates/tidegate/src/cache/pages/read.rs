//! Reads pages from their slots, and compares the checksum at the first read.

use super::index::Found;
use super::{Missing, Pages};
use crate::cache::span::Part;
use crate::cache::store::layout::{Decoded, HEADER, PAGE, PAGE_BYTES, SlotHeader, data_check};
use crate::device::{DeviceError, DeviceErrorKind, Result};
use crate::sync::Ordering;

/// The result of a copy from a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cache) enum Copied {
    /// All requested bytes were copied.
    Whole,
    /// The slot has a record that lacks some of the requested bytes.
    Lacks,
    /// The data does not match its checksum, or the slot holds another version by now.
    Damaged,
}

impl Pages {
    /// Puts the cache's records over `run`, adjacent pages that were read from the backing into
    /// `buf`. Returns how many leading pages did not change meanwhile.
    pub(in crate::cache) fn standing(&self, run: &[Missing], buf: &mut [u8]) -> Result<usize> {
        for (stood, (missing, page)) in run.iter().zip(buf.chunks_mut(PAGE)).enumerate() {
            let is_whole = self.put_record(missing, page)?;
            if !is_whole || !self.locks.unchanged(missing.page, missing.version) {
                return Ok(stood);
            }
        }
        Ok(run.len())
    }

    /// Puts the cache's record of `missing` over `page`, the backing's bytes. Returns `false` if
    /// the record is damaged or its slot holds another version by now.
    pub(in crate::cache) fn put_record(&self, missing: &Missing, page: &mut [u8]) -> Result<bool> {
        let Some(found) = &missing.record else { return Ok(true) };
        let record = self.store.copy_record(found)?;
        if let Some(record) = &record {
            record.put_into(page);
        }
        Ok(record.is_some())
    }

    /// Reads `part` from the slot of its page. Returns `false` if the page has no slot, has only a
    /// record that lacks some of the part, or was clean and damaged.
    pub(in crate::cache) fn read_hit(
        &self,
        part: &Part,
        buf: &mut [u8],
        class: u8,
    ) -> Result<bool> {
        let page = part.page;
        loop {
            let version = self.locks.version(page);
            let found = {
                let mut shard = self.shard(page);
                let Some(found) = shard.find(page) else { return Ok(false) };
                shard.touch(&found, class, false);
                found
            };
            let copied = self.copy_part(&found, part, buf);
            let copied = copied.inspect_err(|_| self.failures.count())?;
            if !self.locks.unchanged(page, version) {
                self.store.region.relax();
                continue;
            }
            match copied {
                Copied::Whole => return Ok(true),
                Copied::Lacks => return Ok(false),
                Copied::Damaged => {}
            }
            if let Some(found) = self.still_damaged(&found)? {
                self.damaged_page(&found)?;
                return Ok(false);
            }
        }
    }

    /// Checks `found`, whose data and header did not match, again under the page's lock. Without
    /// the lock, a thread that removes the page may have voided the header. Returns the page if it
    /// is still the newest version, and damaged.
    fn still_damaged(&self, found: &Found) -> Result<Option<Found>> {
        let _lock = self.lock_pages(std::iter::once(found.page));
        match self.find(found.page).filter(|now| now.is_same(found)) {
            Some(now) if self.is_damaged(&now)? => Ok(Some(now)),
            _ => Ok(None),
        }
    }

    /// Returns whether `found`, or the page under it, is damaged. The caller holds the page's lock.
    fn is_damaged(&self, found: &Found) -> Result<bool> {
        if found.record && self.store.copy_record(found)?.is_none() {
            return Ok(true);
        }
        let page = if found.record { found.under() } else { Some(*found) };
        Ok(!self.is_sound(page.as_ref())?)
    }

    /// Returns whether the data of `page`, if any, matches its checksum. Does not compare the data
    /// again if it was verified before and no memory has failed.
    pub(in crate::cache) fn is_sound(&self, page: Option<&Found>) -> Result<bool> {
        let may_be_damaged = |page: &&Found| !page.verified || self.store.region.has_failed_pages();
        let Some(page) = page.filter(may_be_damaged) else { return Ok(true) };
        self.copy_out(page, &mut [0; PAGE])
    }

    /// Copies `part` of the page of `found` to `buf`.
    pub(in crate::cache) fn copy_part(
        &self,
        found: &Found,
        part: &Part,
        buf: &mut [u8],
    ) -> Result<Copied> {
        if found.record {
            self.copy_from_record(found, part, buf)
        } else {
            self.copy_from_page(found, part, buf)
        }
    }

    /// Copies `part` of `found`, a whole page, to `buf`.
    fn copy_from_page(&self, found: &Found, part: &Part, buf: &mut [u8]) -> Result<Copied> {
        let of = |is_whole| if is_whole { Copied::Whole } else { Copied::Damaged };
        if found.zero || buf.len() == PAGE {
            return self.copy_out(found, buf).map(of);
        }
        let from = part.from;
        if found.verified {
            let data = self.store.places.data(found.slot);
            return self.store.read_memory(data + from as u64, buf).map(of);
        }
        // The checksum covers the whole page.
        let mut page = [0; PAGE];
        let is_whole = self.copy_out(found, &mut page)?;
        buf.copy_from_slice(&page[from..from + buf.len()]);
        Ok(of(is_whole))
    }

    /// Copies the data of `found`, a whole page, to `buf`. Returns `false` if the memory failed,
    /// the checksum does not match, or the slot holds another version by now.
    pub(in crate::cache) fn copy_out(&self, found: &Found, buf: &mut [u8]) -> Result<bool> {
        if found.zero {
            buf.fill(0);
            return Ok(true);
        }
        if !self.store.read_memory(self.store.places.data(found.slot), buf)? {
            return Ok(false);
        }
        if found.verified {
            return Ok(true);
        }
        let mut bytes = [0; HEADER];
        if !self.store.read_memory(self.store.places.header(found.slot), &mut bytes)? {
            return Ok(false);
        }
        let is_whole = match SlotHeader::decode(&bytes, self.store.salt, found.slot) {
            Decoded::Header(header) => header.data_check == data_check(buf),
            Decoded::Free { .. } | Decoded::Bad | Decoded::Split => false,
        };
        if is_whole {
            self.shard(found.page).verified(found);
        }
        Ok(is_whole)
    }

    /// Removes the damaged page `found` from the cache if it is clean: the backing has its bytes.
    ///
    /// # Errors
    /// Fails if the page is dirty, as the backing's bytes are older, or cannot leave the cache.
    fn damaged_page(&self, found: &Found) -> Result<()> {
        self.damaged.fetch_add(1, Ordering::Relaxed);
        self.failures.count();
        if found.dirty {
            return Err(damaged(found));
        }
        self.remove_clean(&[*found])?;
        let shard = self.shard(found.page);
        if shard.stands(found) && shard.allocator.is_stuck(found.page) {
            let offset = found.page * PAGE_BYTES;
            return Err(Self::stuck(&format!("the page at offset {offset} cannot be read")));
        }
        Ok(())
    }

    /// Copies `part` of the page of `found`, a record, to `buf`. Bytes that the record lacks come
    /// from the page under it, if that is cached.
    pub(in crate::cache) fn copy_from_record(
        &self,
        found: &Found,
        part: &Part,
        buf: &mut [u8],
    ) -> Result<Copied> {
        let Some(record) = self.store.copy_record(found)? else { return Ok(Copied::Damaged) };
        if record.copy_part(part, buf) {
            return Ok(Copied::Whole);
        }
        let Some(under) = found.under() else { return Ok(Copied::Lacks) };
        let mut page = [0; PAGE];
        let to = part.from..part.from + buf.len();
        let copied = self.copy_from_page(&under, part, &mut page[to.clone()])?;
        record.put_into(&mut page);
        buf.copy_from_slice(&page[to]);
        Ok(copied)
    }
}

/// Returns the error for a dirty page whose data is damaged.
pub(in crate::cache) fn damaged(found: &Found) -> DeviceError {
    let message = format!(
        "dirty page at offset {} is damaged in slot {} of the cache: its memory failed or its \
         checksum is wrong, restore the page from a backup",
        found.page * PAGE_BYTES,
        found.slot
    );
    DeviceError::new(DeviceErrorKind::Corrupt, message)
}
