//! The slot store: persistent memory with a header and 4 KiB for each slot.
//!
//! The store reads and writes headers and data, and fences them. Its callers in
//! [`pages`](super::pages) know which version of a page counts and which slot is free.

pub(super) mod batch;
pub(super) mod header;
pub(super) mod lane;
pub mod layout;
pub(super) mod record;

use std::sync::Arc;

use parking_lot::Mutex;

use super::PmemResult;
use super::pages::index::Found;
use crate::device::Result;
use crate::pmem::{PmemError, Region};
use crate::sync::{AtomicBool, Ordering};
use header::CacheHeader;
use lane::Lanes;
use layout::{
    Decoded, HEADER, Places, SlotHeader, commit_offset, commit_word, data_check, stored_bytes,
};
use record::Record;

/// The slots of a pool, in persistent memory.
pub(super) struct Store {
    pub(super) region: Arc<Region>,
    pub(super) header: Mutex<CacheHeader>,
    pub(super) salt: u64,
    /// Offset of the engine's first byte in the region.
    pub(super) data_offset: u64,
    /// Offsets of slots. `header` has the present number of slots.
    pub(super) places: Places,
    pub(super) lanes: Lanes,
    /// The memory failed while a slot was filled or voided. Such a slot stays taken.
    pub(super) has_lost_slots: AtomicBool,
}

impl Store {
    /// Reads memory at `offset`. Returns `false` if the memory there failed.
    pub(in crate::cache) fn read_memory(&self, offset: u64, buf: &mut [u8]) -> Result<bool> {
        match self.region.read(offset, buf) {
            Ok(()) => Ok(true),
            Err(PmemError::Poisoned { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the number of slots.
    pub(in crate::cache) fn slots(&self) -> u32 {
        self.header.lock().places.slots()
    }

    /// Notes that the memory failed while a slot was filled or voided. The slot stays taken.
    pub(in crate::cache) fn note_lost_slot(&self) {
        self.has_lost_slots.store(true, Ordering::SeqCst);
    }

    /// Voids the headers of `dead`, which hold older versions, and then the headers of `removed`.
    pub(in crate::cache) fn void_pages(&self, dead: &[u32], removed: &[&Found]) -> PmemResult {
        if !dead.is_empty() {
            dead.iter().try_for_each(|slot| self.void(*slot))?;
            // Invariant 3: older versions must be gone before the newest one goes.
            self.region.fence()?;
        }
        if !removed.is_empty() {
            removed.iter().try_for_each(|found| self.void(found.slot))?;
            // The slots are overwritten next, and no valid header may outlive its data.
            self.region.fence()?;
        }
        Ok(())
    }

    /// Voids the header of `slot` by one atomic store to its checksums. Durable at the next fence.
    pub(in crate::cache) fn void(&self, slot: u32) -> PmemResult {
        let at = self.places.header(slot);
        self.region.store_u64(at, 0)?;
        self.region.write_back(at, 8)
    }

    /// Returns the record in the slot of `found`, or `None` if the memory failed, the checksum does
    /// not match, or the slot holds another version by now.
    pub(in crate::cache) fn copy_record(&self, found: &Found) -> Result<Option<Record>> {
        if found.base.is_some_and(|base| base.is_lost) {
            return Ok(None);
        }
        let mut header = [0; HEADER];
        if !self.read_memory(self.places.header(found.slot), &mut header)? {
            return Ok(None);
        }
        let Decoded::Header(header) = SlotHeader::decode(&header, self.salt, found.slot) else {
            return Ok(None);
        };
        if (header.page, header.version) != (found.page, found.version) {
            return Ok(None);
        }
        let mut bytes = vec![0; stored_bytes(header.lines)];
        let is_read = self.read_memory(self.places.data(found.slot), &mut bytes)?;
        let is_whole = is_read && data_check(&bytes) == header.data_check;
        Ok(is_whole.then_some(Record { lines: header.lines, bytes }))
    }

    /// Stores the commit word of `group`, durably. The writers of its members have fenced them.
    pub(in crate::cache) fn store_commit_word(&self, group: u64) -> PmemResult {
        let at = self.data_offset + commit_offset(group);
        for (offset, half) in [0, 8].into_iter().zip(commit_word(self.salt, group)) {
            self.region.store_u64(at + offset, half)?;
        }
        self.region.write_back(at, 16)?;
        self.region.fence()
    }
}
