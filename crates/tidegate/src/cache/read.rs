//! Reads: pages from their slots, the rest from the backing.

use super::index::Found;
use super::layout::{Decoded, HEADER, PAGE, PAGE_BYTES, SlotHeader, data_check};
use super::{Core, fill};
use crate::device::{Attempt, DeviceError, DeviceErrorKind, Result};
use crate::stats::RequestKind;
use crate::sync::Ordering;
use crate::tier::version_locks::Version;

/// Most pages that are read from the backing at once.
const RUN_PAGES_MAX: usize = 256;

/// A page that the cache did not have when it was looked for.
struct Missing {
    page: u64,
    version: Version,
    seen: super::traffic::Seen,
}

impl Core {
    /// Reads pages from `first` on. What the backing had is kept afterwards where `promotes`.
    pub(super) fn read_pages(&self, first: u64, buf: &mut [u8], promotes: bool) -> Result<()> {
        let pages = first..first + (buf.len() / PAGE) as u64;
        let promotes = promotes && self.admits(&pages, false);
        let (mut at, mut hits) = (0, 0);
        while at < buf.len() {
            let page = first + (at / PAGE) as u64;
            if self.read_hit(page, &mut buf[at..at + PAGE])? {
                hits += 1;
                at += PAGE;
                continue;
            }
            let run = self.missing_run(page, (buf.len() - at) / PAGE);
            if run.is_empty() {
                // It came into the cache this moment.
                self.region.relax();
                continue;
            }
            let part = &mut buf[at..at + run.len() * PAGE];
            let foreground = self.pace.foreground();
            self.backing.read(page * PAGE_BYTES, part)?;
            drop(foreground);
            // A page that was written meanwhile is read again, with all behind it.
            let is_last = |missing: &Missing| self.locks.unchanged(missing.page, missing.version);
            let stood = run.iter().take_while(|missing| is_last(missing)).count();
            if promotes {
                self.offer_fills(run[..stood].iter().zip(part.chunks(PAGE)));
            }
            at += stood * PAGE;
        }
        self.counters.count_read(hits, (buf.len() / PAGE) as u64);
        Ok(())
    }

    fn offer_fills<'a>(&self, read: impl Iterator<Item = (&'a Missing, &'a [u8])>) {
        for (missing, data) in read {
            let Missing { page, version, seen } = *missing;
            if self.fills.offer(|| fill::Fill { page, version, seen, data: data.into() }) {
                self.waker.wake_resting();
            }
            self.wake_where_due(page);
        }
    }

    /// The neighbours from `first` on that the cache does not have, at most `most`.
    fn missing_run(&self, first: u64, most: usize) -> Vec<Missing> {
        let pages = first..first + most.min(RUN_PAGES_MAX) as u64;
        let missing = |page| {
            // Before the look: a change after it is seen by the version.
            let (version, seen) = (self.locks.version(page), self.traffic.see(page));
            self.find(page).is_none().then_some(Missing { page, version, seen })
        };
        pages.map_while(missing).collect()
    }

    /// [`attempt`](crate::device::BlockDevice::attempt) of a read: done where all of it is cached.
    pub(super) fn attempt_read(&self, offset: u64, buf: &mut [u8]) -> Attempt {
        if let Err(error) = self.geometry.check(offset, buf.len() as u64) {
            return Attempt::Done(Err(error));
        }
        let running = self.requests.begin(RequestKind::Read, buf.len() as u64);
        for (page, part) in (offset / PAGE_BYTES..).zip(buf.chunks_mut(PAGE)) {
            match self.read_hit(page, part) {
                Ok(true) => {}
                Ok(false) => {
                    running.hand_back();
                    return Attempt::WouldBlock;
                }
                Err(error) => return Attempt::Done(Err(error)),
            }
        }
        let pages = (buf.len() / PAGE) as u64;
        self.counters.count_read(pages, pages);
        Attempt::Done(Ok(()))
    }

    /// Reads `page` from its slot. False: it has none.
    pub(super) fn read_hit(&self, page: u64, buf: &mut [u8]) -> Result<bool> {
        loop {
            let version = self.locks.version(page);
            let found = {
                let mut shard = self.shard(page);
                let Some(found) = shard.find(page) else { return Ok(false) };
                shard.touch(&found);
                found
            };
            let is_whole = self.copy_out(&found, buf).inspect_err(|_| self.fallback.count())?;
            if !self.locks.unchanged(page, version) {
                self.region.relax();
                continue;
            }
            if is_whole {
                return Ok(true);
            }
            if let Some(found) = self.still_damaged(&found, buf)? {
                self.damaged_page(&found)?;
                return Ok(false);
            }
        }
    }

    /// Looks again at `found`, whose data and header did not agree, with the page's lock: its
    /// holder may have voided the header of a page that leaves the cache.
    fn still_damaged(&self, found: &Found, buf: &mut [u8]) -> Result<Option<Found>> {
        let _lock = self.lock_pages(std::iter::once(found.page));
        let is_same = |now: &Found| now.slot == found.slot && now.version == found.version;
        match self.find(found.page).filter(is_same) {
            Some(now) if !self.copy_out(&now, buf)? => Ok(Some(now)),
            _ => Ok(None),
        }
    }

    /// Copies the data of `found`. False: it is not what its checksum says, or it is another
    /// version's by now.
    pub(super) fn copy_out(&self, found: &Found, buf: &mut [u8]) -> Result<bool> {
        if found.zero {
            buf.fill(0);
            return Ok(true);
        }
        self.region.read(self.places.data(found.slot), buf)?;
        if found.verified {
            return Ok(true);
        }
        let mut bytes = [0; HEADER];
        self.region.read(self.places.header(found.slot), &mut bytes)?;
        let is_whole = match SlotHeader::decode(&bytes, self.salt, found.slot) {
            Decoded::Header(header) => header.data_check == data_check(buf),
            Decoded::Free { .. } | Decoded::Bad => false,
        };
        if is_whole {
            self.shard(found.page).verified(found);
        }
        Ok(is_whole)
    }

    /// The newest version of a page is damaged: a clean one is given up for the backing's.
    ///
    /// # Errors
    /// It was dirty: the backing's bytes are older ones.
    fn damaged_page(&self, found: &Found) -> Result<()> {
        self.damaged.fetch_add(1, Ordering::Relaxed);
        self.fallback.count();
        if found.dirty {
            return Err(damaged(found));
        }
        self.remove_clean(&[*found]).map(drop)
    }
}

/// The error of a dirty page whose data is damaged.
pub(super) fn damaged(found: &Found) -> DeviceError {
    let message = format!(
        "dirty page at offset {} is damaged in slot {} of the cache: its checksum is wrong, \
         restore the page from a backup",
        found.page * PAGE_BYTES,
        found.slot
    );
    DeviceError::new(DeviceErrorKind::Corrupt, message)
}
