//! Storing a record to the medium: free space, payload, header, one fence.

use std::io::IoSlice;

use zerocopy::IntoBytes;

use super::Ring;
use super::Share;
use super::reserve::Reserved;
use crate::log::control::slots::SlotWords;
use crate::log::error::AppendError;
use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::log::pool::record::{Header, RecordKind, record_bytes};
use crate::sync::Ordering;

/// Bytes of a payload that are copied at once; a payload up to `SMALL_BYTES` uses a smaller buffer.
const CHUNK_BYTES: usize = 4096;
const SMALL_BYTES: usize = 512;

/// Returns the gap record before `position`, the first of a lap: no record is from `from` to it.
fn gap(from: u64, position: u64, finished: u64) -> Header {
    let position = position - RECORD_ALIGN_BYTES;
    Header { position, aux: from, finished, ..Header::of(RecordKind::Gap) }
}

impl Ring {
    /// Appends the record of `draft` and `parts` for the holder of `slot`. Returns its header.
    #[inline]
    pub(super) fn put(
        &self,
        slot: SlotWords<'_>,
        draft: Header,
        parts: &[IoSlice<'_>],
        space: Share,
    ) -> Result<Header, AppendError> {
        let payload: u64 = parts.iter().map(|part| part.len() as u64).sum();
        if payload > self.pool.payload_bytes_max() {
            return Err(AppendError::TooLarge);
        }
        let payload_bytes = u32::try_from(payload).map_err(|_| AppendError::TooLarge)?;
        let bytes = record_bytes(payload);
        let former = slot.record.load(Ordering::Relaxed);
        let reserved =
            self.reserve(slot.record, bytes, self.usable_bytes(space)).inspect_err(|error| {
                slot.record.store(former, Ordering::Relaxed);
                self.ask_for_all_space(bytes, *error);
            })?;
        let draft = Header { payload_bytes, finished: self.finished_before(&reserved), ..draft };
        match self.fill(slot, &reserved, draft, parts) {
            Ok(header) => {
                self.finish(slot, &reserved, header.finished);
                Ok(header)
            }
            Err(error) => {
                self.note_hole();
                slot.record.store(0, Ordering::Release);
                Err(error)
            }
        }
    }

    /// Stores the record of `draft` and `parts` to the reserved space, and makes it durable.
    #[inline]
    fn fill(
        &self,
        slot: SlotWords<'_>,
        reserved: &Reserved,
        draft: Header,
        parts: &[IoSlice<'_>],
    ) -> Result<Header, AppendError> {
        let position = reserved.position;
        if reserved.from != position {
            // The record begins a lap, and a gap covers the rest of the former one.
            self.seal(&gap(reserved.from, position, draft.finished))?;
        }
        // Before the record is whole, so that the next owner of the lock finds it after a crash.
        slot.record.store(position, Ordering::Release);
        let payload = u64::from(draft.payload_bytes);
        let payload_checksum = if payload <= SMALL_BYTES as u64 {
            self.store_payload::<SMALL_BYTES>(position, parts)?
        } else {
            self.store_payload::<CHUNK_BYTES>(position, parts)?
        };
        let file = if draft.file == 0 { position } else { draft.file };
        let header = Header { position, file, payload_checksum, ..draft };
        self.seal(&header)?;
        Ok(header)
    }

    /// Stores the payload of the record at `position`. Returns the checksum of the stored bytes:
    /// another thread may change `parts` meanwhile, as databases do with pages that they write.
    fn store_payload<const CHUNK: usize>(
        &self,
        position: u64,
        parts: &[IoSlice<'_>],
    ) -> Result<u32, AppendError> {
        let region = self.pool.region();
        let to = self.pool.region_offset(position) + RECORD_ALIGN_BYTES;
        // The record owns its last line, also behind the payload.
        region.write_streaming_crc32c::<CHUNK>(to, parts).map_err(|_| AppendError::Memory)
    }

    /// Stores the header of a record behind its payload, and makes both durable with one fence.
    fn seal(&self, header: &Header) -> Result<(), AppendError> {
        let region = self.pool.region();
        let at = self.pool.region_offset(header.position);
        let stored = region
            .write_streaming(at, header.encode(self.pool.salt()).as_bytes())
            // Header and payload need no order between them: the header's checksums cover both.
            .and_then(|()| region.fence());
        stored.map_err(|_| AppendError::Memory)
    }
}
