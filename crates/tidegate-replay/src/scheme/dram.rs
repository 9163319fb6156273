//! `dram`: no persistent memory. A sync writes the dirty pages of its file to flash (AFCM's
//! DRAM-Cache).

use super::devices::{Devices, Source};
use super::hybrid::{Durable, Hybrid};
use super::page_cache::PageCache;
use super::{Scheme, Sizes};
use crate::error::Result;

/// Creates the scheme.
pub(super) fn dram(sizes: &Sizes) -> Box<dyn Scheme> {
    Box::new(Hybrid::new(PageCache::new(sizes.dram_pages), Flash { is_pending: false }))
}

/// Flash as the durable medium.
struct Flash {
    /// Whether the sync has written a page.
    is_pending: bool,
}

impl Durable for Flash {
    fn make_way(&mut self, slot: u32, dram: &PageCache, devices: &mut dyn Devices) -> Result<()> {
        if dram.dirty_lines(slot) != 0 {
            devices.ssd_write(dram.id(slot), Source::Dram);
        }
        Ok(())
    }

    fn leave(&mut self, slot: u32, dram: &PageCache, devices: &mut dyn Devices) {
        devices.dram_forget(dram.id(slot));
    }

    fn sync_page(&mut self, slot: u32, dram: &mut PageCache, devices: &mut dyn Devices) {
        devices.ssd_write(dram.id(slot), Source::Dram);
        self.is_pending = true;
    }

    fn end_sync(&mut self, devices: &mut dyn Devices) -> Result<()> {
        if std::mem::take(&mut self.is_pending) {
            devices.ssd_flush();
        }
        Ok(())
    }

    fn index_bytes_peak(&self) -> u64 {
        0
    }
}
