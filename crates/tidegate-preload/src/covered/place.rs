//! Where a write goes, and what the log says where the kernel did something else.
//!
//! Invariants: where the kernel does less, or does it elsewhere, the record is voided and what was
//! done is recorded, before the program hears of it.

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
            // The kernel appends, then, whatever the place.
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

    /// Returns whether the kernel did what the record says, which starts at `recorded`.
    #[inline]
    pub(super) fn is_as_recorded(&self, recorded: u64, result: isize) -> bool {
        u64::try_from(result) == Ok(self.bytes)
            && self.start_of_last(recorded, self.bytes) == Some(recorded)
    }

    /// Returns where the kernel's last write, which had `bytes` bytes, began. Its record says
    /// `recorded`.
    #[inline]
    fn start_of_last(&self, recorded: u64, bytes: u64) -> Option<u64> {
        let (position, end) = (|| self.position().ok(), || self.end().ok());
        let appends = self.open.known.has(descriptors::APPEND);
        confirmed_start((self.request.place, appends), recorded, bytes, position, end)
    }

    /// Makes the log say what the kernel did instead of what it was asked for; where that cannot be
    /// told, the file leaves the log.
    #[cold]
    pub(super) fn correct(&self, mut ticket: Ticket<'_>, recorded: &Recorded, result: isize) {
        /// The kernel may have written before it failed: a descriptor with `O_SYNC`, for one.
        const FAILED: isize = -(libc::EIO as isize);
        let Self { open, guard, .. } = *self;
        if is_disk_failure(result) {
            guard.note_dropped();
        }
        let voided = ticket.void(recorded.position).is_ok();
        if voided && result == FAILED {
            // Nothing was promised of it. The next sync is real, and tells what the disk has.
            drop(ticket);
            guard.mark_unlogged(false);
            return;
        }
        let done = u64::try_from(result).unwrap_or(0);
        let is_corrected =
            voided && (done == 0 || self.record_done(&mut ticket, recorded, done).is_some());
        drop(ticket);
        if !is_corrected && !open.leave(guard) && !voided {
            // The record is wrong, and the disk does not take the file: no more is promised of it.
            open.end_unsynced(guard);
        }
    }

    /// Records that the kernel has written the first `done` bytes, and where; none where it cannot
    /// be told.
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

/// Records that the first `done` bytes of `parts` were written from `start` on.
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
