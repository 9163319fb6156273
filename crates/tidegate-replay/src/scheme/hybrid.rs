//! AFCM's hybrid cache: pages in DRAM answer reads and take writes; a sync copies what is dirty to
//! a durable place.
//!
//! - A page that DRAM gives up is written to flash where that does not have all of it, and leaves
//!   persistent memory: that keeps no page that DRAM does not have.
//! - A page that persistent memory gives up is written to flash out of DRAM, where it stays, clean,
//!   in its place in the order.
//! - Pages of a file that is removed or cut off are dropped, dirty or not.
//! - A write of a part of a page that DRAM does not have reads the page from flash first, where the
//!   trace has shown that the file is that long.

use super::devices::{Devices, Source};
use super::page::{PAGE_BYTES, PageId, lines_of, pages_of, part_of};
use super::page_cache::PageCache;
use super::{Requests, Scheme};
use crate::error::Error;
use crate::trace::{FileId, Op};

/// Where a sync puts what is dirty.
pub trait Durable {
    /// A sync begins.
    fn begin_sync(&mut self, _devices: &mut dyn Devices) {}

    /// Makes the dirty lines of `slot` durable. Where that needs space, other pages are written to
    /// flash out of DRAM and become clean there.
    fn sync_page(&mut self, slot: u32, dram: &mut PageCache, devices: &mut dyn Devices);

    /// All of the sync is there.
    fn end_sync(&mut self, devices: &mut dyn Devices);

    /// The page of `slot` is kept here, and flash does not have all of it.
    fn holds(&self, slot: u32) -> bool;

    /// Gives the page of `slot` up, if it is kept.
    fn release(&mut self, slot: u32, devices: &mut dyn Devices);

    /// Most bytes of DRAM so far that said what lies where.
    fn index_bytes_peak(&self) -> u64;
}

/// Pages in DRAM over a durable place.
pub struct Hybrid<D> {
    dram: PageCache,
    durable: D,
    requests: Requests,
    cut: Vec<u32>,
}

impl<D: Durable> Hybrid<D> {
    /// An empty cache.
    pub fn new(dram: PageCache, durable: D) -> Self {
        Self { dram, durable, requests: Requests::default(), cut: Vec::new() }
    }

    fn read(&mut self, id: PageId, lines: u64, devices: &mut dyn Devices) {
        self.requests.reads += 1;
        if self.dram.touch(id).is_some() {
            self.requests.read_hits += 1;
        } else {
            self.bring_in(id, devices);
            devices.ssd_read(id);
        }
        devices.dram_copy(id, lines);
    }

    fn write(&mut self, id: PageId, lines: u64, needs_rest: bool, devices: &mut dyn Devices) {
        self.requests.writes += 1;
        let slot = self.dram.touch(id).unwrap_or_else(|| {
            let slot = self.bring_in(id, devices);
            if needs_rest {
                devices.ssd_read(id);
            }
            slot
        });
        devices.dram_copy(id, lines);
        self.dram.dirty(slot, lines);
    }

    /// Gives `id` a slot.
    fn bring_in(&mut self, id: PageId, devices: &mut dyn Devices) -> u32 {
        if let Some(victim) = self.dram.victim() {
            let page = self.dram.id(victim);
            if self.dram.dirty_lines(victim) != 0 || self.durable.holds(victim) {
                devices.ssd_write(page, Source::Dram);
            }
            if self.durable.holds(victim) {
                devices.ssd_flush();
            }
            self.drop_page(victim, devices);
        }
        self.dram.insert(id)
    }

    fn drop_page(&mut self, slot: u32, devices: &mut dyn Devices) {
        if self.durable.holds(slot) {
            self.durable.release(slot, devices);
            devices.pmem_forget(self.dram.id(slot));
        }
        devices.dram_forget(self.dram.id(slot));
        self.dram.remove(slot);
    }

    fn sync(&mut self, file: FileId, devices: &mut dyn Devices) {
        while let Some(slot) = self.dram.first_dirty(file) {
            self.requests.synced_pages += 1;
            self.durable.sync_page(slot, &mut self.dram, devices);
            self.dram.clean(slot);
        }
    }

    fn sync_all(&mut self, devices: &mut dyn Devices) {
        while let Some(file) = self.dram.first_dirty_file() {
            self.sync(file, devices);
        }
    }

    fn cut(&mut self, file: FileId, len_bytes: u64, devices: &mut dyn Devices) {
        let mut cut = std::mem::take(&mut self.cut);
        self.dram.cut(file, len_bytes, &mut cut);
        for slot in cut.drain(..) {
            self.drop_page(slot, devices);
        }
        self.cut = cut;
    }
}

impl<D: Durable> Scheme for Hybrid<D> {
    fn play(&mut self, op: &Op, devices: &mut dyn Devices) -> Result<(), Error> {
        match *op {
            Op::Read { file, offset_bytes, len_bytes } => {
                for page in pages_of(offset_bytes, len_bytes) {
                    let (id, bytes) =
                        (PageId { file, page }, part_of(page, offset_bytes, len_bytes));
                    self.dram.note_extent(id, &bytes);
                    self.read(id, lines_of(&bytes), devices);
                }
            }
            Op::Write { file, offset_bytes, len_bytes } => {
                for page in pages_of(offset_bytes, len_bytes) {
                    let (id, bytes) =
                        (PageId { file, page }, part_of(page, offset_bytes, len_bytes));
                    let has_rest = self.dram.note_extent(id, &bytes);
                    let needs_rest = has_rest && bytes.end - bytes.start < PAGE_BYTES;
                    self.write(id, lines_of(&bytes), needs_rest, devices);
                }
            }
            Op::Sync { file } => {
                self.requests.syncs += 1;
                self.durable.begin_sync(devices);
                self.sync(file, devices);
                self.durable.end_sync(devices);
            }
            Op::SyncAll => {
                self.requests.syncs += 1;
                self.durable.begin_sync(devices);
                self.sync_all(devices);
                self.durable.end_sync(devices);
            }
            Op::Resize { file, len_bytes } => self.cut(file, len_bytes, devices),
            Op::Remove { file } => self.cut(file, 0, devices),
        }
        Ok(())
    }

    fn requests(&self) -> Requests {
        self.requests
    }

    fn index_bytes_peak(&self) -> u64 {
        self.durable.index_bytes_peak()
    }
}
