//! The map: which block holds each lba.
//!
//! Entries are single words of 4 bytes, loaded and stored atomically, so that one is never torn.

use super::BttError;
use super::layout::{MAP_ENTRY_BYTES, MapEntry};
use crate::pmem::{PmemError, Region};

/// The map of one arena.
#[derive(Debug, Clone, Copy)]
pub(super) struct Map {
    /// Where it starts in the region, in bytes.
    pub(super) base: u64,
    /// Number of blocks in the arena: every entry must point below it.
    pub(super) blocks: u32,
}

impl Map {
    /// Where the entry of `lba` is, in bytes from the region's start.
    pub(super) fn entry_offset(&self, lba: u32) -> u64 {
        self.base + u64::from(lba) * MAP_ENTRY_BYTES
    }

    /// The entry of `lba`, as it is.
    pub(super) fn load(&self, region: &Region, lba: u32) -> Result<MapEntry, PmemError> {
        region.load_u32(self.entry_offset(lba)).map(MapEntry)
    }

    /// The entry of `lba` and the block it points at.
    pub(super) fn load_block(
        &self,
        region: &Region,
        lba: u32,
    ) -> Result<(MapEntry, u32), BttError> {
        let entry = self.load(region, lba)?;
        let block = entry.block(lba);
        if block >= self.blocks {
            return Err(BttError::MapDamaged { lba, block, blocks: self.blocks });
        }
        Ok((entry, block))
    }

    /// Changes the entry of `lba`, in the cache only.
    pub(super) fn store(
        &self,
        region: &Region,
        lba: u32,
        entry: MapEntry,
    ) -> Result<(), PmemError> {
        region.store_u32(self.entry_offset(lba), entry.0)
    }

    /// Writes the line of `lba`'s entry back; the caller's next fence makes it durable.
    pub(super) fn write_back(&self, region: &Region, lba: u32) -> Result<(), PmemError> {
        region.write_back(self.entry_offset(lba), MAP_ENTRY_BYTES)
    }
}
