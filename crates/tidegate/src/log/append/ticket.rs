//! The kinds of records: what can be said of a file.

use std::io::IoSlice;

use zerocopy::IntoBytes;

use super::super::error::AppendError;
use super::super::layout::RECORD_ALIGN_BYTES;
use super::super::record::{Definition, Header, RecordKind, RenamePaths, checked_path};
use super::super::stats::Counter;
use super::{NameTicket, Room, Ticket};
use crate::sync::Ordering;

/// Most parts of a record's payload: what the kernel allows in `writev`, and the record's own.
const OWN_PARTS: usize = 3;

impl Ticket<'_> {
    /// Says which file the records are about.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn define(&mut self, definition: &Definition<'_>) -> Result<(), AppendError> {
        let fixed = definition.encode();
        let parts = [IoSlice::new(fixed.as_bytes()), IoSlice::new(definition.path)];
        let id = self.entry.id().load(Ordering::Relaxed);
        // The first definition names the file by the position that it gets.
        let position = self.append(RecordKind::Define, id, [0, 0, 0], &parts, Room::Names)?;
        if id == 0 {
            self.entry.id().store(position, Ordering::Relaxed);
        }
        self.entry.defined_at().store(position, Ordering::Relaxed);
        self.log.stats().add(Counter::Definitions, 1);
        Ok(())
    }

    /// Appends that `parts` are written at byte `offset`: the record's position.
    ///
    /// # Errors
    /// [`AppendError`].
    #[inline]
    pub fn write(&mut self, offset: u64, parts: &[IoSlice<'_>]) -> Result<u64, AppendError> {
        self.about(RecordKind::Write, [offset, 0, 0], parts, Room::Data)
    }

    /// The same for a write that the kernel is not told of: whoever cleans or recovers the log brings it into the file.
    ///
    /// # Errors
    /// [`AppendError`].
    #[inline]
    pub fn absorb(&mut self, offset: u64, parts: &[IoSlice<'_>]) -> Result<u64, AppendError> {
        self.absorbed = true;
        let position = self.about(RecordKind::Write, [offset, 0, 0], parts, Room::Data);
        self.absorbed = false;
        position
    }

    /// Counts a write of so many bytes; with `absorbed`, one that ended in the log.
    #[inline]
    pub fn count(&self, bytes: u64, absorbed: bool) {
        self.log.stats().add_write(self.number, bytes, absorbed);
    }

    /// Appends that the kernel has all absorbed writes to the file.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn settle(&mut self) -> Result<u64, AppendError> {
        self.about(RecordKind::Settle, [0, 0, 0], &[], Room::Reserve)
    }

    /// Appends that the file's size becomes `size`.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn set_size(&mut self, size: u64) -> Result<u64, AppendError> {
        self.about(RecordKind::SetSize, [size, 0, 0], &[], Room::Data)
    }

    /// Appends that `len` bytes at `offset` become zero.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn zero(&mut self, offset: u64, len: u64) -> Result<u64, AppendError> {
        self.about(RecordKind::Zero, [offset, len, 0], &[], Room::Data)
    }

    /// Appends that all earlier records of the file are durable in the file.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn retire(&mut self) -> Result<u64, AppendError> {
        let position = self.about(RecordKind::Retire, [0, 0, 0], &[], Room::Reserve)?;
        self.entry.changed_end().store(0, Ordering::Relaxed);
        self.entry.retired_end().store(position + RECORD_ALIGN_BYTES, Ordering::Relaxed);
        Ok(position)
    }

    /// Appends that the operation of the record at `position` failed.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn void(&mut self, position: u64) -> Result<u64, AppendError> {
        self.about(RecordKind::Void, [0, 0, position], &[], Room::Reserve)
    }

    /// Appends that the file gets the name `path`.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn link(&mut self, path: &[u8]) -> Result<u64, AppendError> {
        let path = checked_path(path).ok_or(AppendError::TooLarge)?;
        self.about(RecordKind::Link, [0, 0, 0], &[IoSlice::new(path)], Room::Names)
    }

    /// Appends that the file loses the name `path`.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn unlink(&mut self, path: &[u8]) -> Result<u64, AppendError> {
        let path = checked_path(path).ok_or(AppendError::TooLarge)?;
        self.about(RecordKind::Unlink, [0, 0, 0], &[IoSlice::new(path)], Room::Names)
    }

    /// Appends that the file's name `from` becomes `to`, which the file of identity `replaced` (0: none) loses.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn rename(&mut self, from: &[u8], to: &[u8], replaced: u64) -> Result<u64, AppendError> {
        let from = checked_path(from).ok_or(AppendError::TooLarge)?;
        let to = checked_path(to).ok_or(AppendError::TooLarge)?;
        let fixed = RenamePaths { from, to }.encode();
        let parts: [_; OWN_PARTS] =
            [IoSlice::new(fixed.as_bytes()), IoSlice::new(from), IoSlice::new(to)];
        self.about(RecordKind::Rename, [0, 0, replaced], &parts, Room::Names)
    }

    fn about(
        &mut self,
        kind: RecordKind,
        numbers: [u64; 3],
        parts: &[IoSlice<'_>],
        room: Room,
    ) -> Result<u64, AppendError> {
        let id = self.entry.id().load(Ordering::Relaxed);
        debug_assert!(id != 0, "a record of a file that was never defined");
        self.append(kind, id, numbers, parts, room)
    }

    fn append(
        &mut self,
        kind: RecordKind,
        file: u64,
        [offset, len, aux]: [u64; 3],
        parts: &[IoSlice<'_>],
        room: Room,
    ) -> Result<u64, AppendError> {
        let draft = Header {
            position: 0,
            kind,
            file,
            offset,
            len,
            aux,
            payload_bytes: 0,
            payload_checksum: 0,
            absorbed: self.absorbed,
        };
        let header = self.log.put(self.slot, draft, parts, room)?;
        let end = header.position + header.record_bytes();
        self.entry.last_end().store(end, Ordering::Release);
        if matches!(kind, RecordKind::Write | RecordKind::Zero | RecordKind::SetSize) {
            self.entry.changed_end().store(end, Ordering::Relaxed);
        }
        Ok(header.position)
    }
}

impl NameTicket<'_> {
    /// Appends that the file of this identity loses the name `path`: the record's position. Leaves what must be said
    /// its room.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn unlink(&mut self, path: &[u8], identity: u64) -> Result<u64, AppendError> {
        let path = checked_path(path).ok_or(AppendError::TooLarge)?;
        self.append(RecordKind::Unlink, identity, &[IoSlice::new(path)], Room::Data)
    }

    /// Appends that the operation of the record at `position` failed.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn void(&mut self, position: u64) -> Result<u64, AppendError> {
        self.append(RecordKind::Void, position, &[], Room::Reserve)
    }

    fn append(
        &mut self,
        kind: RecordKind,
        aux: u64,
        parts: &[IoSlice<'_>],
        room: Room,
    ) -> Result<u64, AppendError> {
        // The record's own position stands for the file: no definition has it.
        let (position, file, offset, len) = (0, 0, 0, 0);
        let (payload_bytes, payload_checksum, absorbed) = (0, 0, false);
        let draft = Header {
            position,
            kind,
            file,
            offset,
            len,
            aux,
            payload_bytes,
            payload_checksum,
            absorbed,
        };
        Ok(self.log.put(self.slot, draft, parts, room)?.position)
    }
}
