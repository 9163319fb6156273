//! Reads: pages from their slots, the rest from the backing.

use super::background::fill::{Fill, Missing};
use super::pages::index::Found;
use super::span::{Part, bytes_at, bytes_of, is_whole, pages_of, parts};
use super::store::layout::{Decoded, HEADER, PAGE, PAGE_BYTES, SlotHeader, data_check};
use super::store::record::Copied;
use super::{Core, Origin};
use crate::device::{Attempt, DeviceError, DeviceErrorKind, Result};
use crate::pmem::PmemError;
use crate::stats::RequestKind;
use crate::sync::Ordering;

/// Most pages that are read from the backing at once.
const RUN_PAGES_MAX: usize = 256;

impl Core {
    /// Reads at `offset`. What the backing had is kept afterwards where `promotes`.
    pub(super) fn read_bytes(
        &self,
        offset: u64,
        buf: &mut [u8],
        promotes: bool,
        from: Origin,
    ) -> Result<()> {
        let Origin { class, .. } = from;
        let pages = pages_of(offset, buf.len() as u64);
        let promotes = promotes && self.admits(&bytes_at(offset, buf.len()), false, from)?;
        let (mut at, mut hits) = (0, 0);
        while let Some(part) = parts(offset + at as u64, buf.len() - at).next() {
            let rest = &mut buf[at..];
            if self.read_hit(&part, &mut rest[part.at.clone()], class)? {
                hits += 1;
                at += part.at.len();
            } else if part.is_whole() {
                let most = rest.len() / PAGE;
                let missed = &mut rest[..most * PAGE];
                at += self.read_missing(part.page, missed, promotes, class)? * PAGE;
            } else {
                let mut page = [0; PAGE];
                if self.read_missing(part.page, &mut page, promotes, class)? > 0 {
                    let len = part.at.len();
                    rest[part.at].copy_from_slice(&page[part.from..part.from + len]);
                    at += len;
                }
            }
        }
        self.counters.count_read(class, hits, pages.end - pages.start);
        Ok(())
    }

    /// Reads neighbours from `first` on that the cache does not have from the backing, at most as
    /// many as fit into `buf`, for `class`, and keeps them where it `promotes`. Returns how many: 0
    /// where it has the first one by now.
    fn read_missing(&self, first: u64, buf: &mut [u8], promotes: bool, class: u8) -> Result<usize> {
        let run = self.missing_run(first, buf.len() / PAGE);
        if run.is_empty() {
            // It came into the cache this moment.
            self.region.relax();
            return Ok(0);
        }
        let buf = &mut buf[..run.len() * PAGE];
        self.read_backing(first * PAGE_BYTES, buf, class)?;
        // A page that was written meanwhile is read again, with all behind it.
        let stood = self.standing(&run, buf)?;
        if promotes {
            self.keep_read(&run[..stood], buf, class);
        }
        Ok(stood)
    }

    /// How many pages of `run`, neighbours that were read from the backing into `buf`, were not
    /// changed meanwhile, from the first on. Puts the records that the cache has of them over them.
    pub(super) fn standing(&self, run: &[Missing], buf: &mut [u8]) -> Result<usize> {
        for (stood, (missing, page)) in run.iter().zip(buf.chunks_mut(PAGE)).enumerate() {
            let is_whole = self.put_record(missing, page)?;
            if !is_whole || !self.locks.unchanged(missing.page, missing.version) {
                return Ok(stood);
            }
        }
        Ok(run.len())
    }

    /// Has the pages of `run`, neighbours whose bytes are `buf`, kept for `class`, after the answer
    /// to the client.
    pub(super) fn keep_read(&self, run: &[Missing], buf: &[u8], class: u8) {
        let first = run.first().map_or(0, |missing| missing.page);
        for (missing, data) in run.iter().zip(buf.chunks(PAGE)) {
            let fill = || Fill { missing: *missing, data: data.into(), class };
            if self.fills.offer(fill) {
                self.waker.wake_resting();
            }
            self.wake_where_due(missing.page);
        }
        self.offer_clusters(&(first..first + run.len() as u64), class);
    }

    /// Puts the record that the cache has of `missing` over `page`, the backing's bytes. False: it
    /// is damaged, or another version's by now.
    pub(super) fn put_record(&self, missing: &Missing, page: &mut [u8]) -> Result<bool> {
        let Some(found) = &missing.record else { return Ok(true) };
        let record = self.copy_record(found)?;
        if let Some(record) = &record {
            record.put_into(page);
        }
        Ok(record.is_some())
    }

    /// Reads at `offset` from the backing for `class`, by whole pages where that has larger blocks.
    pub(super) fn read_below(&self, offset: u64, buf: &mut [u8], class: u8) -> Result<()> {
        let range = pages_of(offset, buf.len() as u64);
        let read_core = |offset: u64, buf: &mut [u8]| {
            let read = self.backing.read(offset, buf);
            self.counters.count_core_read(class, range.end - range.start, &read);
            read
        };
        if self.backing_takes(&bytes_at(offset, buf.len())) {
            return read_core(offset, buf);
        }
        let bytes = bytes_of(&range);
        let mut pages = vec![0; usize::try_from(bytes.end - bytes.start).unwrap_or_default()];
        read_core(bytes.start, &mut pages)?;
        let from = usize::try_from(offset - bytes.start).unwrap_or_default();
        buf.copy_from_slice(&pages[from..from + buf.len()]);
        Ok(())
    }

    /// The neighbours from `first` on that the cache does not have all of, at most `most`.
    fn missing_run(&self, first: u64, most: usize) -> Vec<Missing> {
        let pages = first..first + most.min(RUN_PAGES_MAX) as u64;
        pages.map_while(|page| self.missing(page)).collect()
    }

    /// The pages of `len` bytes at `offset` where these are whole pages, and few, and the cache
    /// does not have all of any.
    pub(super) fn missing_all(&self, (offset, len): (u64, u64)) -> Option<Vec<Missing>> {
        if self.geometry.check(offset, len).is_err() || !is_whole(&(offset..offset + len)) {
            return None;
        }
        let pages = pages_of(offset, len);
        let count = usize::try_from(pages.end - pages.start).ok().filter(|count| *count > 0)?;
        let run = self.missing_run(pages.start, count);
        (run.len() == count).then_some(run)
    }

    /// `page`, where the cache does not have all of it.
    pub(super) fn missing(&self, page: u64) -> Option<Missing> {
        // Before the look: a change after it is seen by the version.
        let (version, seen) = (self.locks.version(page), self.traffic.see(page));
        let record = self.find(page);
        let is_missing = record.is_none_or(|found| found.record && found.base.is_none());
        is_missing.then_some(Missing { page, record, version, seen })
    }

    /// [`attempt`](crate::device::BlockDevice::attempt) of a read of whole blocks of the device,
    /// which the caller has checked: done where all of it is cached.
    pub(super) fn attempt_read(&self, offset: u64, buf: &mut [u8], class: u8) -> Attempt {
        let running = self.requests.begin(RequestKind::Read, buf.len() as u64);
        for part in parts(offset, buf.len()) {
            match self.read_hit(&part, &mut buf[part.at.clone()], class) {
                Ok(true) => {}
                Ok(false) => {
                    running.hand_back();
                    return Attempt::WouldBlock;
                }
                Err(error) => return Attempt::Done(Err(error)),
            }
        }
        let pages = pages_of(offset, buf.len() as u64);
        let pages = pages.end - pages.start;
        self.counters.count_read(class, pages, pages);
        self.note_read_cost(buf.len(), &running);
        Attempt::Done(Ok(()))
    }

    /// Reads `part` from the slot of its page. False: it has none, or a record without all of the
    /// part.
    fn read_hit(&self, part: &Part, buf: &mut [u8], class: u8) -> Result<bool> {
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
            let copied = copied.inspect_err(|_| self.fallback.count())?;
            if !self.locks.unchanged(page, version) {
                self.region.relax();
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

    /// Looks again at `found`, whose data and header did not agree, with the page's lock: its
    /// holder may have voided the header of a page that leaves the cache.
    fn still_damaged(&self, found: &Found) -> Result<Option<Found>> {
        let _lock = self.lock_pages(std::iter::once(found.page));
        match self.find(found.page).filter(|now| now.is_same(found)) {
            Some(now) if self.is_damaged(&now)? => Ok(Some(now)),
            _ => Ok(None),
        }
    }

    /// The data of `found`, whose page's lock the caller holds, is not what its checksum says.
    fn is_damaged(&self, found: &Found) -> Result<bool> {
        if found.record && self.copy_record(found)?.is_none() {
            return Ok(true);
        }
        let page = if found.record { found.under() } else { Some(*found) };
        Ok(!self.is_sound(page.as_ref())?)
    }

    /// The data of `page`, if there is one, is what its checksum says, as far as that is not known
    /// already.
    pub(super) fn is_sound(&self, page: Option<&Found>) -> Result<bool> {
        let may_be_damaged = |page: &&Found| !page.verified || self.region.has_failed_pages();
        let Some(page) = page.filter(may_be_damaged) else { return Ok(true) };
        self.copy_out(page, &mut [0; PAGE])
    }

    /// Reads memory at `offset`. False: it failed there.
    pub(super) fn read_memory(&self, offset: u64, buf: &mut [u8]) -> Result<bool> {
        match self.region.read(offset, buf) {
            Ok(()) => Ok(true),
            Err(PmemError::Poisoned { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Copies `part` of the page of `found`.
    pub(super) fn copy_part(&self, found: &Found, part: &Part, buf: &mut [u8]) -> Result<Copied> {
        let of = |is_whole| if is_whole { Copied::Whole } else { Copied::Damaged };
        if found.record {
            return self.copy_from_record(found, part, buf);
        }
        if found.zero || buf.len() == PAGE {
            return self.copy_out(found, buf).map(of);
        }
        let from = part.from;
        if found.verified {
            return self.read_memory(self.places.data(found.slot) + from as u64, buf).map(of);
        }
        // The checksum is that of all of it.
        let mut page = [0; PAGE];
        let is_whole = self.copy_out(found, &mut page)?;
        buf.copy_from_slice(&page[from..from + buf.len()]);
        Ok(of(is_whole))
    }

    /// Copies the data of `found`, a whole page. False: its memory failed, it is not what its
    /// checksum says, or it is another version's by now.
    pub(super) fn copy_out(&self, found: &Found, buf: &mut [u8]) -> Result<bool> {
        if found.zero {
            buf.fill(0);
            return Ok(true);
        }
        if !self.read_memory(self.places.data(found.slot), buf)? {
            return Ok(false);
        }
        if found.verified {
            return Ok(true);
        }
        let mut bytes = [0; HEADER];
        if !self.read_memory(self.places.header(found.slot), &mut bytes)? {
            return Ok(false);
        }
        let is_whole = match SlotHeader::decode(&bytes, self.salt, found.slot) {
            Decoded::Header(header) => header.data_check == data_check(buf),
            Decoded::Free { .. } | Decoded::Bad | Decoded::Split => false,
        };
        if is_whole {
            self.shard(found.page).verified(found);
        }
        Ok(is_whole)
    }

    /// The newest version of a page is damaged: a clean one is given up for the backing's.
    ///
    /// # Errors
    /// It was dirty: the backing's bytes are older ones. Or it cannot leave the cache.
    fn damaged_page(&self, found: &Found) -> Result<()> {
        self.damaged.fetch_add(1, Ordering::Relaxed);
        self.fallback.count();
        if found.dirty {
            return Err(damaged(found));
        }
        self.remove_clean(&[*found])?;
        let shard = self.shard(found.page);
        if shard.stands(found) && shard.is_stuck(found.page) {
            let offset = found.page * PAGE_BYTES;
            return Err(Self::stuck(&format!("the page at offset {offset} cannot be read")));
        }
        Ok(())
    }
}

/// The error of a dirty page whose data is damaged.
pub(super) fn damaged(found: &Found) -> DeviceError {
    let message = format!(
        "dirty page at offset {} is damaged in slot {} of the cache: its memory failed or its \
         checksum is wrong, restore the page from a backup",
        found.page * PAGE_BYTES,
        found.slot
    );
    DeviceError::new(DeviceErrorKind::Corrupt, message)
}
