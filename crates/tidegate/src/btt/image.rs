//! The content of a copy of a pool: the data blocks by their offsets in the map, all else as bytes.

use super::arena::Arena;
use super::layout::{MapEntry, MapState};
use super::{Btt, BttError};
use crate::device::Result;
use crate::tier::Image;

/// The map of an arena at one instant.
struct Places {
    lbas: u64,
    data_base: u64,
    block_bytes: u64,
    map: Vec<u8>,
    /// Blocks of lbas whose entries recovery could not store, by lba.
    overlay: Vec<(u32, u32)>,
}

impl Places {
    fn of(arena: &Arena) -> Result<Self> {
        let mut map = vec![0; arena.lbas as usize * size_of::<MapEntry>()];
        arena.region.read(arena.map_base, &mut map).map_err(BttError::from)?;
        let Arena { lbas, data_base, block_bytes, .. } = *arena;
        let overlay = arena.overlay.clone();
        Ok(Self { lbas: lbas.into(), data_base, block_bytes, map, overlay })
    }

    /// Returns the offset of lba `lba`, or `None` if it has no data.
    fn offset(&self, lba: u32) -> Option<u64> {
        let at = lba as usize * size_of::<MapEntry>();
        let bytes = self.map.get(at..at + size_of::<MapEntry>())?;
        let entry = MapEntry(u32::from_le_bytes(bytes.try_into().ok()?));
        let overlaid = self.overlay.iter().find(|(it, _)| *it == lba).map(|(_, block)| *block);
        let stored = (entry.state() == MapState::Normal).then(|| entry.block(lba));
        let block = overlaid.or(stored)?;
        Some(self.data_base + u64::from(block) * self.block_bytes)
    }
}

impl Btt {
    /// Returns the present content of the pool; the caller makes sure that no change is under way.
    pub(super) fn image_of_arenas(&self) -> Result<Image> {
        let (mut parts, mut from) = (Vec::new(), 0);
        let mut places = Vec::new();
        for arena in &self.arenas {
            parts.push(from..arena.data_base);
            from = arena.data_base + u64::from(arena.blocks) * arena.block_bytes;
            places.push(Places::of(arena)?);
        }
        parts.push(from..self.region().len_bytes());
        let stored_bytes = places.first().map_or(0, |it| it.block_bytes);
        let read = |part: std::ops::Range<u64>| {
            let len = usize::try_from(part.end.saturating_sub(part.start)).unwrap_or(0);
            let mut bytes = vec![0; len];
            self.region().read(part.start, &mut bytes).map_err(BttError::from)?;
            Ok((part.start, bytes))
        };
        let parts = parts.into_iter().map(read).collect::<Result<_>>()?;
        let place = Box::new(move |number: u64| {
            let mut lba = number;
            for places in &places {
                if lba < places.lbas {
                    return places.offset(u32::try_from(lba).ok()?);
                }
                lba -= places.lbas;
            }
            None
        });
        Ok(Image { parts, stored_bytes, place })
    }
}
