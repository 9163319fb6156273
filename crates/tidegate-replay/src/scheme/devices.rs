//! Operations of a scheme on DRAM, persistent memory and flash, its only effects. The devices
//! compute time and totals; a test's devices also track the content.

use super::page::PageId;

/// Source of a page that is written to flash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The page in DRAM.
    Dram,
    /// The parts in persistent memory, merged with the rest of the page on flash.
    Pmem,
}

/// The devices below a scheme. `lines` is a mask of the cache lines of a page.
pub trait Devices {
    /// Copies a program's bytes to or from the page in DRAM.
    fn dram_copy(&mut self, page: PageId, lines: u64);

    /// Drops the page from DRAM.
    fn dram_forget(&mut self, _page: PageId) {}

    /// Reads the page from flash into DRAM. The reads of one event are in flight together.
    fn ssd_read(&mut self, page: PageId);

    /// Writes the page to flash. The writes of one event are in flight together.
    fn ssd_write(&mut self, page: PageId, source: Source);

    /// Makes the writes to flash of this event durable at the event's end.
    fn ssd_flush(&mut self);

    /// Copies lines of the page from persistent memory to DRAM.
    fn pmem_read(&mut self, page: PageId, lines: u64);

    /// Copies lines of the page from DRAM to persistent memory.
    fn pmem_store(&mut self, page: PageId, lines: u64);

    /// Stores `bytes` contiguous bytes of metadata in persistent memory.
    fn pmem_metadata(&mut self, bytes: u64);

    /// Makes all earlier stores to persistent memory durable.
    fn pmem_fence(&mut self);

    /// Drops the page from persistent memory.
    fn pmem_forget(&mut self, _page: PageId) {}

    /// Searches or changes an index in `steps` entries.
    fn index_steps(&mut self, steps: u32);

    /// Returns the program's time so far, in nanoseconds; 0 if the devices measure no time.
    fn now_ns(&self) -> f64;

    /// Sets the time so far, for a scheme that computes the time itself.
    fn set_now_ns(&mut self, now_ns: f64);
}
