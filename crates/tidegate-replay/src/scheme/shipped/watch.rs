//! What the shipped cache asks of its persistent memory and of its backing, seen from outside: an
//! observer of the region, and a backing that keeps nothing.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use tidegate::cache::layout::{
    CHUNK_BYTES, CHUNK_SLOTS, Decoded, HEADER_BYTES, PAGE_BYTES, Places, SlotHeader,
};
use tidegate::device::{BlockDevice, Extent, Geometry, Result, WriteFlags, ZeroFlags};
use tidegate::pmem::Observer;

/// A piece of work, in its order. Pages are the backing's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// A page, or lines of it, was stored in a slot, and the header that says so.
    Stored {
        slot: u32,
        page: u64,
        lines: u64,
        /// It reads as zeroes, and has no data.
        zero: bool,
    },
    /// The header of a slot became void.
    Voided {
        slot: u32,
    },
    /// Other bytes that say what is where.
    Metadata {
        bytes: u64,
    },
    Fence,
    /// The data of a slot was loaded.
    Loaded {
        slot: u32,
    },
    BackingRead {
        page: u64,
    },
    BackingWritten {
        page: u64,
    },
    BackingFlushed,
}

/// Sends what it sees.
pub(super) struct Watch {
    places: Places,
    salt: u64,
    work: Sender<Work>,
}

/// Which part of a slot an offset lies in.
enum Part {
    Header { slot: u32, at: u64 },
    Data { slot: u32 },
    Other,
}

impl Watch {
    pub(super) fn new(places: Places, salt: u64) -> (Self, Receiver<Work>) {
        let (work, works) = channel();
        (Self { places, salt, work }, works)
    }

    /// A backing of `blocks` blocks of 512 bytes that keeps nothing.
    pub(super) fn backing(&self, blocks: u64) -> Arc<dyn BlockDevice> {
        Arc::new(Backing { blocks, work: self.work.clone() })
    }

    fn part(&self, offset: u64) -> Part {
        let first_header = self.places.header(0);
        let Some(from_start) = offset.checked_sub(first_header) else { return Part::Other };
        let chunk = u32::try_from(from_start / CHUNK_BYTES).unwrap_or(u32::MAX);
        let first = chunk.saturating_mul(CHUNK_SLOTS);
        if first >= self.places.slots() {
            return Part::Other;
        }
        let in_chunk = CHUNK_SLOTS.min(self.places.slots() - first);
        let slot_at =
            |at: u64| u32::try_from(at).ok().filter(|at| *at < in_chunk).map(|at| first + at);
        let header = offset - self.places.header(first);
        if let Some(slot) = slot_at(header / HEADER_BYTES) {
            return Part::Header { slot, at: header % HEADER_BYTES };
        }
        let data = offset.checked_sub(self.places.data(first));
        let slot = data.and_then(|data| slot_at(data / PAGE_BYTES));
        slot.map_or(Part::Other, |slot| Part::Data { slot })
    }

    fn send(&self, work: Work) {
        // Nobody listens while the cache is dropped.
        let _ = self.work.send(work);
    }
}

impl Observer for Watch {
    fn store(&self, offset: u64, data: &[u8], _non_temporal: bool) {
        let bytes = data.len() as u64;
        match (self.part(offset), <&[u8; 64]>::try_from(data)) {
            // Its header says how much of it there is.
            (Part::Data { .. }, _) => {}
            (Part::Header { slot, at: 0 }, Ok(header)) => {
                match SlotHeader::decode(header, self.salt, slot) {
                    Decoded::Header(SlotHeader { page, lines, zero, .. }) => {
                        self.send(Work::Stored { slot, page, lines, zero });
                    }
                    Decoded::Free { .. } | Decoded::Bad => self.send(Work::Metadata { bytes }),
                }
            }
            (Part::Header { slot, at: 0 }, Err(_)) => {
                self.send(Work::Metadata { bytes });
                self.send(Work::Voided { slot });
            }
            _ => self.send(Work::Metadata { bytes }),
        }
    }

    fn write_back(&self, _offset: u64, _len: u64) {}

    fn fence(&self) {
        self.send(Work::Fence);
    }

    fn load(&self, offset: u64, _len: u64) {
        if let Part::Data { slot } = self.part(offset) {
            self.send(Work::Loaded { slot });
        }
    }

    fn relax(&self) {}
}

struct Backing {
    blocks: u64,
    work: Sender<Work>,
}

impl Backing {
    fn send_pages(&self, offset: u64, len: u64, work: impl Fn(u64) -> Work) {
        for page in offset / PAGE_BYTES..(offset + len).div_ceil(PAGE_BYTES) {
            let _ = self.work.send(work(page));
        }
    }
}

impl BlockDevice for Backing {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: 512,
            blocks: self.blocks,
            preferred_bytes: 4096,
            read_only: false,
            atomic_block: false,
            volatile_cache: true,
            fast_zero: true,
            keeps_data: false,
        }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        buf.fill(0);
        self.send_pages(offset, buf.len() as u64, |page| Work::BackingRead { page });
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8], _flags: WriteFlags) -> Result<()> {
        self.send_pages(offset, data.len() as u64, |page| Work::BackingWritten { page });
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        let _ = self.work.send(Work::BackingFlushed);
        Ok(())
    }

    fn discard(&self, _offset: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    /// Zeroes are a command to flash, not pages.
    fn write_zeroes(&self, _offset: u64, _len: u64, _flags: ZeroFlags) -> Result<()> {
        Ok(())
    }

    fn status(&self, offset: u64, len: u64, _most: usize) -> Result<Vec<Extent>> {
        Ok(vec![Extent { offset, len, hole: false, zero: false }])
    }
}
