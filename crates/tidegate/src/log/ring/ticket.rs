//! The kinds of records that an operation on a file may append.

use std::io::IoSlice;

use super::{Share, Ticket};
use crate::log::control::stats::Counter;
use crate::log::error::AppendError;
use crate::log::pool::heartbeat::time_of;
use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::log::pool::names::{Make, NameRecord};
use crate::log::pool::record::{Definition, Header, RecordKind};
use crate::sync::Ordering;

impl Ticket<'_> {
    /// Appends a definition: which file the records are about.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn define(&mut self, definition: &Definition<'_>) -> Result<(), AppendError> {
        self.define_marked(definition, 0)
    }

    /// Appends a definition that also promises growth in records before `marked_until`.
    pub(in crate::log) fn define_marked(
        &mut self,
        definition: &Definition<'_>,
        marked_until: u64,
    ) -> Result<(), AppendError> {
        let fixed = definition.encode();
        let parts = definition.parts(&fixed);
        let id = self.entry.id().load(Ordering::Relaxed);
        let draft = Header { file: id, aux: marked_until, ..Header::of(RecordKind::Define) };
        // The first definition names the file by the position that it gets.
        let position = self.append(draft, &parts, Share::Definitions)?;
        if id == 0 {
            self.entry.id().store(position, Ordering::Relaxed);
        }
        self.entry.defined_at().store(position, Ordering::Relaxed);
        self.ring.stats().add(Counter::Definitions, 1);
        Ok(())
    }

    /// Appends that `parts` are written at byte `offset`. Returns the record's position. With
    /// `grows`, not all of the bytes there are known to be written and allocated on the disk.
    ///
    /// # Errors
    /// [`AppendError`].
    #[inline]
    pub fn write(
        &mut self,
        offset: u64,
        parts: &[IoSlice<'_>],
        grows: bool,
    ) -> Result<u64, AppendError> {
        let draft = Header { offset, grows, ..Header::of(RecordKind::Write) };
        self.about(draft, parts, Share::Data)
    }

    /// Counts a write of `bytes`.
    #[inline]
    pub fn count(&self, bytes: u64) {
        self.ring.stats().add_write(self.number, bytes);
    }

    /// Appends a new size, larger than before with `grows`. Returns the record's position.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn set_size(&mut self, size: u64, grows: bool) -> Result<u64, AppendError> {
        let draft = Header { offset: size, grows, ..Header::of(RecordKind::SetSize) };
        self.about(draft, &[], Share::Data)
    }

    /// Appends that `len` bytes at `offset` become zero. Returns the record's position.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn zero(&mut self, offset: u64, len: u64, keeps_space: bool) -> Result<u64, AppendError> {
        let aux = u64::from(keeps_space);
        let draft = Header { offset, len, aux, ..Header::of(RecordKind::Zero) };
        self.about(draft, &[], Share::Data)
    }

    /// Appends that all earlier records of the file are promised, with the file's size, and with
    /// its modification time unless `modified_ns` is 0. Returns the record's position.
    ///
    /// # Errors
    /// [`AppendError`].
    pub(in crate::log) fn mark(&mut self, size: u64, modified_ns: u64) -> Result<u64, AppendError> {
        let draft = Header { offset: size, aux: modified_ns, ..Header::of(RecordKind::Mark) };
        self.about(draft, &[], Share::Definitions)
    }

    /// Appends that the story ends: all earlier records of the file are durable in the file, or are
    /// no longer promised.
    ///
    /// # Errors
    /// [`AppendError`].
    pub(in crate::log) fn end(&mut self) -> Result<(), AppendError> {
        let position = self.about(Header::of(RecordKind::End), &[], Share::Reserve)?;
        self.entry.changed_end().store(0, Ordering::Relaxed);
        self.entry.names_end().store(0, Ordering::SeqCst);
        self.entry.retired_end().store(position + RECORD_ALIGN_BYTES, Ordering::Relaxed);
        Ok(())
    }

    /// Appends that the operation of the record at `position` failed. Returns its own position.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn void(&mut self, position: u64) -> Result<u64, AppendError> {
        let draft = Header { aux: position, ..Header::of(RecordKind::Void) };
        self.about(draft, &[], Share::Reserve)
    }

    /// Appends that the names of the file are about to change. Returns the record's position. The
    /// caller holds the names' lock. It drops the ticket after it has
    /// [noted](crate::log::FileGuard::note_named) the kernel's change or [voided](Self::void) the
    /// record.
    ///
    /// # Errors
    /// [`AppendError`]; [`AppendError::Unsound`] for a name that is impossible in a directory.
    pub fn name(&mut self, record: &NameRecord<'_>) -> Result<u64, AppendError> {
        if !record.is_sound() {
            return Err(AppendError::Unsound);
        }
        let draft = Header::of(RecordKind::Name);
        record.with_parts(|parts| self.about(draft, parts, Share::Data))
    }

    /// Appends a whole file: `content`, the name and attributes of `make`, and the ctime. Returns
    /// the record's position. Without `is_last` it has no times: writes without a record may
    /// follow.
    pub(in crate::log) fn make(
        &mut self,
        (make, content, changed_ns): (&Make<'_>, &[u8], u64),
        is_last: bool,
    ) -> Result<u64, AppendError> {
        if !make.is_sound() {
            return Err(AppendError::Unsound);
        }
        let fixed = make.encode();
        let parts = make.parts(&fixed, content);
        self.is_dated = is_last;
        let aux = if is_last { changed_ns } else { 0 };
        self.about(Header { aux, ..Header::of(RecordKind::Make) }, &parts, Share::Data)
    }

    /// Appends the record of `draft` with the id of the file.
    fn about(
        &mut self,
        draft: Header,
        parts: &[IoSlice<'_>],
        space: Share,
    ) -> Result<u64, AppendError> {
        let file = self.entry.id().load(Ordering::Relaxed);
        debug_assert!(file != 0, "a record of a file that was never defined");
        self.append(Header { file, ..draft }, parts, space)
    }

    fn append(
        &mut self,
        draft: Header,
        parts: &[IoSlice<'_>],
        space: Share,
    ) -> Result<u64, AppendError> {
        let wall_ns = if self.is_dated { time_of(draft.kind) } else { 0 };
        let draft = Header { wall_ns, ..draft };
        let header = self.ring.put(self.slot, draft, parts, space)?;
        let end = header.position + header.record_bytes();
        self.entry.last_end().store(end, Ordering::Release);
        if matches!(header.kind, RecordKind::Write | RecordKind::Zero | RecordKind::SetSize) {
            self.entry.changed_end().store(end, Ordering::Relaxed);
        }
        if matches!(header.kind, RecordKind::Make | RecordKind::Name) {
            self.entry.names_end().store(end, Ordering::SeqCst);
            self.ring.note_names();
        }
        Ok(header.position)
    }
}
