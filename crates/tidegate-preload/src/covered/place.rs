//! Offsets of writes, and the correction of a record if the kernel's write differs from it.
//!
//! Invariant: if the kernel writes less, or at another offset, the record is voided and the actual
//! write is recorded, before the program's call returns.

use std::io::IoSlice;

pub(crate) use tidegate::log::cover::Place;
use tidegate::log::cover::{WriteExtent, confirmed_start};
use tidegate::log::{AppendError, Change, Ticket};

use super::is_disk_failure;
use super::write::{LoggedWrite, Recorded};
use crate::state::descriptors;
use crate::sys::query;
use crate::sys::raw::Errno;

impl LoggedWrite<'_> {
    /// Returns the offset in the file that the write will start at.
    #[inline]
    pub(super) fn start(&self) -> Result<u64, Errno> {
        let appends = self.open.known.has(descriptors::APPEND);
        match self.request.place {
            // With `O_APPEND` the kernel appends, whatever the offset.
            _ if appends => self.end(),
            Place::End => self.end(),
            Place::At(at) => Ok(at),
            Place::Current => self.position(),
        }
    }

    pub(super) fn end(&self) -> Result<u64, Errno> {
        query::size(self.open.fd)
    }

    #[inline]
    fn position(&self) -> Result<u64, Errno> {
        query::position(self.open.fd)
    }

    /// Returns whether the kernel's write with this `result` equals its record, which starts at
    /// `recorded`.
    #[inline]
    pub(super) fn is_as_recorded(&self, recorded: u64, result: isize) -> bool {
        u64::try_from(result) == Ok(self.bytes)
            && self.start_of_last(recorded, self.bytes) == Some(recorded)
    }

    /// Returns the offset of the kernel's last write, of `bytes` bytes, or `None` if it cannot be
    /// found out. Its record starts at `recorded`.
    #[inline]
    fn start_of_last(&self, recorded: u64, bytes: u64) -> Option<u64> {
        let (position, end) = (|| self.position().ok(), || self.end().ok());
        let appends = self.open.known.has(descriptors::APPEND);
        confirmed_start((self.request.place, appends), recorded, bytes, position, end)
    }

    /// Replaces the record by one of the kernel's actual write. If that write cannot be found out,
    /// makes the file leave the log.
    #[cold]
    pub(super) fn correct(&self, mut ticket: Ticket<'_>, recorded: &Recorded, result: isize) {
        /// The kernel may have written before it failed, as by a descriptor with `O_SYNC`.
        const FAILED: isize = -(libc::EIO as isize);
        let Self { open, guard, .. } = *self;
        if is_disk_failure(result) {
            guard.note_dropped();
        }
        let voided = ticket.void(recorded.position).is_ok();
        if voided && result == FAILED {
            // The log has not promised this write. The next sync is real, and fails if the disk
            // does.
            drop(ticket);
            guard.mark_unlogged(false);
            return;
        }
        let done = u64::try_from(result).unwrap_or(0);
        let is_corrected =
            voided && (done == 0 || self.record_done(&mut ticket, recorded, done).is_some());
        drop(ticket);
        if !is_corrected && !open.leave(guard) && !voided {
            // The record is wrong, and the disk fails: the log makes no more promises of the file.
            open.end_unsynced(guard);
        }
    }

    /// Appends a record of the first `done` bytes at the offset of the kernel's write. Returns
    /// `None` if that offset cannot be found out or the log refuses the record.
    fn record_done(&self, ticket: &mut Ticket<'_>, recorded: &Recorded, done: u64) -> Option<()> {
        let guard = self.guard;
        let start = self.start_of_last(recorded.start, done)?;
        let size = self.end().ok()?;
        let write = WriteExtent::of(guard, start, done);
        record(ticket, start, done, self.request.parts, write.grows).ok()?;
        if write.makes_hole() {
            guard.note_hole();
        }
        let journaled = write.is_resized().then_some(recorded.changes);
        guard.note_change(Change { size, ..write.change(journaled) });
        ticket.count(done);
        Some(())
    }
}

/// Appends records of a write of the first `done` bytes of `parts` at offset `start`.
fn record(
    ticket: &mut Ticket<'_>,
    mut start: u64,
    mut done: u64,
    parts: &[IoSlice<'_>],
    grew: bool,
) -> Result<(), AppendError> {
    for part in parts {
        let len = usize::try_from(done).map_or(part.len(), |done| done.min(part.len()));
        if len == 0 {
            continue;
        }
        ticket.write(start, &[IoSlice::new(&part[..len])], grew)?;
        start += len as u64;
        done -= len as u64;
    }
    Ok(())
}
