//! `dram`: no persistent memory. A sync writes the dirty pages of its file to flash (AFCM's
//! DRAM-Cache).

use super::devices::{Devices, Source};
use super::hybrid::{Durable, Hybrid};
use super::page_cache::PageCache;
use super::{Pmem, SchemeEntry, Sizes};

/// The entry of the scheme.
pub const ENTRY: SchemeEntry = SchemeEntry {
    name: "dram",
    about: "pages in DRAM; syncs go to flash",
    pmem: Pmem::None,
    offer: Some("no persistent memory"),
    holds_data: false,
    create: |sizes: &Sizes| {
        Ok(Box::new(Hybrid::new(PageCache::new(sizes.dram_pages), Flash { is_pending: false })))
    },
};

/// Flash as the durable place.
struct Flash {
    /// The sync wrote something.
    is_pending: bool,
}

impl Durable for Flash {
    fn sync_page(&mut self, slot: u32, dram: &mut PageCache, devices: &mut dyn Devices) {
        devices.ssd_write(dram.id(slot), Source::Dram);
        self.is_pending = true;
    }

    fn end_sync(&mut self, devices: &mut dyn Devices) {
        if std::mem::take(&mut self.is_pending) {
            devices.ssd_flush();
        }
    }

    fn holds(&self, _slot: u32) -> bool {
        false
    }

    fn release(&mut self, _slot: u32, _devices: &mut dyn Devices) {}

    fn index_bytes_peak(&self) -> u64 {
        0
    }
}
