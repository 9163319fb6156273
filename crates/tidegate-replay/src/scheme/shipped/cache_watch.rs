//! Watches the shipped cache's operations on persistent memory, as an observer of the region.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use tidegate::cache::layout::{
    ALL_PART_HEADERS, CHUNK_BYTES, CHUNK_SLOTS, Decoded, HEADER_BYTES, PAGE_BYTES, Places,
    SlotHeader, parts_of,
};
use tidegate::pmem::Observer;

use super::work::Work;

/// Operations that are specific to the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CacheWork {
    /// A page, or some of its lines, was stored in a slot, with the header.
    Stored {
        slot: u32,
        page: u64,
        lines: u64,
        /// The page reads as zeroes, and has no data.
        zero: bool,
    },
    /// The header of a slot became void.
    Voided { slot: u32 },
}

/// An observer that sends the cache's operations to a channel.
pub(super) struct Watch {
    places: Places,
    salt: u64,
    /// Slots that are split now.
    split: Mutex<HashSet<u32>>,
    /// Maximum number of slots that were split at a time.
    most_split: Arc<AtomicUsize>,
    work: Sender<Work<CacheWork>>,
}

/// The part of a slot at an offset.
enum Part {
    Header { slot: u32, at: u64 },
    Data,
    Other,
}

impl Watch {
    pub(super) fn new(places: Places, salt: u64, work: Sender<Work<CacheWork>>) -> Self {
        Self { places, salt, split: Mutex::default(), most_split: Arc::default(), work }
    }

    /// Returns the shared maximum of the number of slots that were split at a time.
    pub(super) fn most_split(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.most_split)
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
        slot.map_or(Part::Other, |slot| self.part_in(slot, offset))
    }

    /// Returns the part at `offset`, in the page of `slot`.
    fn part_in(&self, slot: u32, offset: u64) -> Part {
        let is_split = self.split.lock().unwrap_or_else(PoisonError::into_inner).contains(&slot);
        let headers = parts_of(slot).filter(|_| is_split);
        let header = headers.map(|part| (part, self.places.header(part)));
        let mut near = header.filter(|(_, at)| (*at..*at + HEADER_BYTES).contains(&offset));
        near.next().map_or(Part::Data, |(slot, start)| Part::Header { slot, at: offset - start })
    }

    fn note_split(&self, slot: u32, is_split: bool) {
        let mut known = self.split.lock().unwrap_or_else(PoisonError::into_inner);
        if is_split {
            known.insert(slot);
        } else {
            known.remove(&slot);
        }
        self.most_split.fetch_max(known.len(), Ordering::Relaxed);
    }

    fn send(&self, work: Work<CacheWork>) {
        // The receiver no longer exists while the cache is dropped.
        let _ = self.work.send(work);
    }
}

impl Observer for Watch {
    fn store(&self, offset: u64, data: &[u8], _non_temporal: bool) {
        let bytes = data.len() as u64;
        match (self.part(offset), <&[u8; 64]>::try_from(data)) {
            // Headers of parts, before the slot is split. A replay writes no zeroes.
            (Part::Data, _) if *data == [0; ALL_PART_HEADERS] => {
                self.send(Work::Metadata { bytes });
            }
            // Data is not counted here: the header has the mask of the stored lines.
            (Part::Data, _) => {}
            (Part::Header { slot, at: 0 }, Ok(header)) => {
                let decoded = SlotHeader::decode(header, self.salt, slot);
                self.note_split(slot, decoded == Decoded::Split);
                match decoded {
                    Decoded::Header(SlotHeader { page, lines, zero, .. }) => {
                        self.send(Work::Engine(CacheWork::Stored { slot, page, lines, zero }));
                    }
                    Decoded::Free { .. } | Decoded::Bad | Decoded::Split => {
                        self.send(Work::Metadata { bytes });
                    }
                }
            }
            (Part::Header { slot, at: 0 }, Err(_)) => {
                self.note_split(slot, false);
                self.send(Work::Metadata { bytes });
                self.send(Work::Engine(CacheWork::Voided { slot }));
            }
            _ => self.send(Work::Metadata { bytes }),
        }
    }

    fn write_back(&self, _offset: u64, _len: u64) {}

    fn fence(&self) {
        self.send(Work::Fence);
    }

    fn load(&self, offset: u64, _len: u64) {
        if let Part::Data = self.part(offset) {
            self.send(Work::Loaded);
        }
    }

    fn relax(&self) {}
}
