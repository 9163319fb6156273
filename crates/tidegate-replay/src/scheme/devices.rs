//! What a scheme asks of DRAM, persistent memory and flash: the only way in which its work leaves
//! it. Time and totals are the devices' business, and a test's devices know the content too.

use super::page::PageId;

/// From where a page that is written to flash comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// From the page in DRAM.
    Dram,
    /// From persistent memory; what that does not have of the page is flash's own.
    Pmem,
}

/// The devices below a scheme. `lines` are bits of cache lines of a page.
pub trait Devices {
    /// A program's bytes were copied to or from the page in DRAM.
    fn dram_copy(&mut self, page: PageId, lines: u64);

    /// DRAM gave the page up.
    fn dram_forget(&mut self, _page: PageId) {}

    /// The page is read from flash into DRAM. Those of one event are under way together.
    fn ssd_read(&mut self, page: PageId);

    /// The page is written to flash. Those of one event are under way together.
    fn ssd_write(&mut self, page: PageId, source: Source);

    /// What is written to flash in this event is to be durable there at its end.
    fn ssd_flush(&mut self);

    /// Lines of the page are copied from persistent memory to DRAM.
    fn pmem_read(&mut self, page: PageId, lines: u64);

    /// Lines of the page are copied from DRAM to persistent memory.
    fn pmem_store(&mut self, page: PageId, lines: u64);

    /// `bytes` bytes that lie together and say what is where are stored in persistent memory.
    fn pmem_metadata(&mut self, bytes: u64);

    /// All that was stored in persistent memory before is made durable.
    fn pmem_fence(&mut self);

    /// Persistent memory does not have the page any more.
    fn pmem_forget(&mut self, _page: PageId) {}

    /// An index was searched or changed, entry by entry.
    fn index_steps(&mut self, steps: u32);

    /// What all so far took the program, in nanoseconds; 0 where nobody measures.
    fn now_ns(&self) -> f64;

    /// Says instead of the devices what all so far took: a scheme knows the time by itself.
    fn set_now_ns(&mut self, now_ns: f64);
}
