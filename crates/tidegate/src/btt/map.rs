//! The map: the block of each lba.
//!
//! Entries are single words of 4 bytes, loaded and stored atomically, so that none is ever torn.

use super::BttError;
use super::layout::{MAP_ENTRY_BYTES, MapEntry};
use crate::pmem::{PmemError, Region};

/// Number of entries in one read.
const CHUNK_ENTRIES: u32 = 16 << 10;
/// Number of entries that are read before their pages are released: 2 MiB, a huge page.
const RELEASE_ENTRIES: u32 = 512 << 10;

/// The map of one arena.
#[derive(Debug, Clone, Copy)]
pub(super) struct Map<'a> {
    /// The memory of the pool.
    pub(super) region: &'a Region,
    /// Start of the map in the region, in bytes.
    pub(super) base: u64,
    /// Number of blocks in the arena: every entry must point below it.
    pub(super) blocks: u32,
}

impl Map<'_> {
    /// Returns the offset of the entry of `lba` in the region, in bytes.
    pub(super) fn entry_offset(&self, lba: u32) -> u64 {
        self.base + u64::from(lba) * MAP_ENTRY_BYTES
    }

    /// Loads the entry of `lba` unchecked.
    pub(super) fn load(&self, lba: u32) -> Result<MapEntry, PmemError> {
        self.region.load_u32(self.entry_offset(lba)).map(MapEntry)
    }

    /// Shows the entries of the `lbas` lbas to `see`, in order. The memory that this takes does not
    /// grow with the map. An entry that changes meanwhile is shown as it was or as it is.
    pub(super) fn for_each(
        &self,
        lbas: u32,
        mut see: impl FnMut(u32, Result<MapEntry, PmemError>),
    ) {
        let mut chunk = vec![[0; size_of::<u32>()]; CHUNK_ENTRIES.min(lbas) as usize];
        for first in (0..lbas).step_by(CHUNK_ENTRIES as usize) {
            let count = CHUNK_ENTRIES.min(lbas - first);
            let entries = &mut chunk[..count as usize];
            match self.region.read(self.entry_offset(first), entries.as_flattened_mut()) {
                Ok(()) => (first..)
                    .zip(&*entries)
                    .for_each(|(lba, &entry)| see(lba, Ok(MapEntry(u32::from_le_bytes(entry))))),
                Err(_) => {
                    (first..first + count).for_each(|lba| see(lba, self.load(lba)));
                }
            }
            let end = first + count;
            if end == lbas || end.is_multiple_of(RELEASE_ENTRIES) {
                let start = (end - 1) / RELEASE_ENTRIES * RELEASE_ENTRIES;
                let len = u64::from(end - start) * MAP_ENTRY_BYTES;
                // A failure costs memory only; nothing depends on the release.
                let _ = self.region.release(self.entry_offset(start), len);
            }
        }
    }

    /// Loads the entry of `lba` and the block that it points at.
    pub(super) fn load_block(&self, lba: u32) -> Result<(MapEntry, u32), BttError> {
        let entry = self.load(lba)?;
        let block = entry.block(lba);
        if block >= self.blocks {
            return Err(BttError::MapDamaged { lba, block, blocks: self.blocks });
        }
        Ok((entry, block))
    }

    /// Changes the entry of `lba`, in the cache only.
    pub(super) fn store(&self, lba: u32, entry: MapEntry) -> Result<(), PmemError> {
        self.region.store_u32(self.entry_offset(lba), entry.0)
    }

    /// Writes the line of `lba`'s entry back; the caller's next fence makes it durable.
    pub(super) fn write_back(&self, lba: u32) -> Result<(), PmemError> {
        self.region.write_back(self.entry_offset(lba), MAP_ENTRY_BYTES)
    }
}
