//! Watches the shipped log's operations on persistent memory, as an observer of the region.

use std::ops::Range;
use std::sync::mpsc::Sender;

use tidegate::log::RecordKind;
use tidegate::log::layout::{RING_OFFSET, RecordHeaderBytes, TAIL_OFFSET, position_of};
use tidegate::pmem::Observer;
use tidegate::pool::Superblock;
use zerocopy::FromBytes;

use super::BLOCK_BYTES;
use super::work::Work;

/// Operations that are specific to the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LogWork {
    /// The record at this position contains these bytes of the device.
    Written { position: u64, bytes: Range<u64> },
    /// A record states that these bytes of the device are zeroes.
    Zeroed { bytes: Range<u64> },
    /// Records before this position are retired.
    Retired { position: u64 },
}

/// An observer that sends the log's operations to a channel.
pub(super) struct Watch {
    /// Offset of the engine's data in the region.
    data_offset: u64,
    ring_bytes: u64,
    work: Sender<Work<LogWork>>,
}

impl Watch {
    /// Returns an observer for the log with `superblock`.
    pub(super) fn new(superblock: &Superblock, work: Sender<Work<LogWork>>) -> Self {
        let Superblock { data_offset, data_bytes, .. } = *superblock;
        Self { data_offset, ring_bytes: data_bytes.saturating_sub(RING_OFFSET).max(1), work }
    }

    fn send(&self, work: Work<LogWork>) {
        // The receiver no longer exists while the log is dropped.
        let _ = self.work.send(work);
    }

    /// Decodes `data` at `offset` as the header of a record of data or zeroes.
    fn record(&self, offset: u64, data: &[u8]) -> Option<LogWork> {
        let in_ring = offset.checked_sub(self.data_offset + RING_OFFSET)?;
        let header = RecordHeaderBytes::read_from_bytes(data).ok()?;
        let (position, start) = (header.position.get(), header.offset.get());
        if position % self.ring_bytes != in_ring {
            return None;
        }
        let bytes = |len: u64| start..start.saturating_add(len);
        match header.kind.get() {
            kind if kind == RecordKind::Write as u16 => {
                let bytes = bytes(header.payload_bytes.get().into());
                Some(LogWork::Written { position, bytes })
            }
            kind if kind == RecordKind::Zero as u16 => {
                Some(LogWork::Zeroed { bytes: bytes(header.len.get()) })
            }
            _ => None,
        }
    }

    /// Returns the new tail if `data` at `offset` is one.
    fn tail(&self, offset: u64, data: &[u8]) -> Option<u64> {
        if offset != self.data_offset + TAIL_OFFSET {
            return None;
        }
        position_of(u64::from_le_bytes(data.try_into().ok()?))
    }
}

impl Observer for Watch {
    fn store(&self, offset: u64, data: &[u8], _non_temporal: bool) {
        // Payloads are whole blocks; the header of a record describes its payload.
        if data.len().is_multiple_of(BLOCK_BYTES as usize) {
            return;
        }
        let record = self.record(offset, data);
        self.send(Work::Metadata { bytes: data.len() as u64 });
        if let Some(record) = record {
            self.send(Work::Engine(record));
        }
        if let Some(position) = self.tail(offset, data) {
            self.send(Work::Engine(LogWork::Retired { position }));
        }
    }

    fn write_back(&self, _offset: u64, _len: u64) {}

    fn fence(&self) {
        self.send(Work::Fence);
    }

    fn load(&self, _offset: u64, len: u64) {
        if len >= u64::from(BLOCK_BYTES) {
            self.send(Work::Loaded);
        }
    }

    fn relax(&self) {}
}
