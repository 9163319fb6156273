//! Serves reads and writes from pages in DRAM; a sync makes the dirty lines durable below DRAM.
//!
//! - Pages of a file that is removed or truncated are dropped, dirty or not.
//! - A partial write of a page that DRAM does not have loads the page first, if the trace has shown
//!   that the file is long enough.
//!
//! The level below, a [`Durable`], is AFCM's persistent memory ([`slots`](super::slots)), flash
//! alone ([`dram`](super::dram)), or a shipped engine ([`shipped`](super::shipped)).

use std::ops::Range;

use super::devices::Devices;
use super::page::{PAGE_BYTES, PageId, lines_of, parts_of};
use super::page_cache::PageCache;
use super::{Requests, Scheme};
use crate::error::Result;
use crate::trace::{FileId, Op};

/// The level that a sync writes dirty lines to. Slots are the slots of pages in DRAM.
///
/// # Errors
/// A method fails if a shipped engine fails.
pub(super) trait Durable {
    /// Loads `id` into DRAM. Returns whether memory had all of the page.
    fn load(&mut self, id: PageId, devices: &mut dyn Devices) -> Result<bool> {
        devices.ssd_read(id);
        Ok(false)
    }

    /// Saves the dirty lines of the page in `slot`, because DRAM needs the slot.
    fn make_way(&mut self, slot: u32, dram: &PageCache, devices: &mut dyn Devices) -> Result<()>;

    /// Drops the page in `slot` from DRAM.
    fn leave(&mut self, slot: u32, dram: &PageCache, devices: &mut dyn Devices);

    /// Makes the dirty lines of `slot` durable, at the latest at the end of its file's pages. If
    /// space is needed, writes other pages from DRAM to flash, and marks them clean in DRAM.
    fn sync_page(&mut self, slot: u32, dram: &mut PageCache, devices: &mut dyn Devices);

    /// Ends a file: all of its dirty pages were passed to [`sync_page`](Self::sync_page).
    fn end_file(&mut self, _devices: &mut dyn Devices) -> Result<()> {
        Ok(())
    }

    /// Ends the sync, and makes it durable.
    fn end_sync(&mut self, devices: &mut dyn Devices) -> Result<()>;

    /// Drops the pages of `file` from `end` on.
    fn cut(&mut self, _file: FileId, _end: u64, _devices: &mut dyn Devices) -> Result<()> {
        Ok(())
    }

    /// Returns the peak bytes of DRAM for indexes.
    fn index_bytes_peak(&self) -> u64;
}

/// Pages in DRAM over a durable level.
pub(super) struct Hybrid<D> {
    dram: PageCache,
    durable: D,
    requests: Requests,
}

impl<D: Durable> Hybrid<D> {
    /// Returns an empty cache.
    pub(super) fn new(dram: PageCache, durable: D) -> Self {
        Self { dram, durable, requests: Requests::default() }
    }

    fn read(&mut self, id: PageId, bytes: &Range<u64>, devices: &mut dyn Devices) -> Result<()> {
        self.requests.reads += 1;
        self.dram.note_extent(id, bytes);
        if self.dram.touch(id).is_some() {
            self.requests.read_hits += 1;
        } else {
            self.take_in(id, devices)?;
            self.requests.read_hits += u64::from(self.durable.load(id, devices)?);
        }
        devices.dram_copy(id, lines_of(bytes));
        Ok(())
    }

    fn write(&mut self, id: PageId, bytes: &Range<u64>, devices: &mut dyn Devices) -> Result<()> {
        self.requests.writes += 1;
        let has_rest = self.dram.note_extent(id, bytes);
        let slot = if let Some(slot) = self.dram.touch(id) {
            slot
        } else {
            let slot = self.take_in(id, devices)?;
            if has_rest && bytes.end - bytes.start < PAGE_BYTES {
                self.durable.load(id, devices)?;
            }
            slot
        };
        let lines = lines_of(bytes);
        devices.dram_copy(id, lines);
        self.dram.dirty(slot, lines);
        Ok(())
    }

    /// Assigns a slot to `id`, and evicts a page if necessary.
    fn take_in(&mut self, id: PageId, devices: &mut dyn Devices) -> Result<u32> {
        if let Some(victim) = self.dram.victim() {
            self.durable.make_way(victim, &self.dram, devices)?;
            self.drop_page(victim, devices);
        }
        Ok(self.dram.insert(id))
    }

    fn drop_page(&mut self, slot: u32, devices: &mut dyn Devices) {
        self.durable.leave(slot, &self.dram, devices);
        self.dram.remove(slot);
    }

    fn sync_file(&mut self, file: FileId, devices: &mut dyn Devices) -> Result<()> {
        while let Some(slot) = self.dram.first_dirty(file) {
            self.requests.synced_pages += 1;
            self.durable.sync_page(slot, &mut self.dram, devices);
            self.dram.clean(slot);
        }
        self.durable.end_file(devices)
    }

    fn cut(&mut self, file: FileId, len_bytes: u64, devices: &mut dyn Devices) -> Result<()> {
        let mut cut = Vec::new();
        self.dram.cut(file, len_bytes, &mut cut);
        for slot in cut {
            self.drop_page(slot, devices);
        }
        self.durable.cut(file, len_bytes.div_ceil(PAGE_BYTES), devices)
    }
}

impl<D: Durable> Scheme for Hybrid<D> {
    fn play(&mut self, op: &Op, devices: &mut dyn Devices) -> Result<()> {
        match *op {
            Op::Read { file, offset_bytes, len_bytes } => {
                let mut parts = parts_of(file, offset_bytes, len_bytes);
                parts.try_for_each(|(id, bytes)| self.read(id, &bytes, devices))
            }
            Op::Write { file, offset_bytes, len_bytes } => {
                let mut parts = parts_of(file, offset_bytes, len_bytes);
                parts.try_for_each(|(id, bytes)| self.write(id, &bytes, devices))
            }
            Op::Sync { file } => {
                self.requests.syncs += 1;
                self.sync_file(file, devices)?;
                self.durable.end_sync(devices)
            }
            Op::SyncAll => {
                self.requests.syncs += 1;
                while let Some(file) = self.dram.first_dirty_file() {
                    self.sync_file(file, devices)?;
                }
                self.durable.end_sync(devices)
            }
            Op::Resize { file, len_bytes } => self.cut(file, len_bytes, devices),
            Op::Remove { file } => self.cut(file, 0, devices),
        }
    }

    fn requests(&self) -> Requests {
        self.requests
    }

    fn index_bytes_peak(&self) -> u64 {
        self.durable.index_bytes_peak()
    }
}
