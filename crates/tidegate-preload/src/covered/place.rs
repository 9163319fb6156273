//! Where a write goes, and what the log says where the kernel did something else.
//!
//! Invariants: where the kernel does less, or does it elsewhere, the record is voided and what was
//! done is recorded, before the program hears of it.

use std::io::IoSlice;

use tidegate::log::{AppendError, Change, FileGuard, Ticket};

use super::write::Recorded;
use super::{Open, is_disk_failure};
use crate::descriptors;
use crate::query;
use crate::raw::Errno;

/// Where a write goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// To the descriptor's position, which moves.
    Current,
    /// To a byte of the file.
    At(u64),
    /// To the file's end, without moving the position.
    End,
}

impl Open {
    /// The byte of the file that a write will start at.
    #[inline]
    pub(super) fn place(&self, place: Place) -> Result<u64, Errno> {
        let appends = self.known.has(descriptors::APPEND);
        match place {
            // The kernel appends, then, whatever the place.
            _ if appends => self.end(),
            Place::End => self.end(),
            Place::At(at) => Ok(at),
            Place::Current => self.position(),
        }
    }

    fn end(&self) -> Result<u64, Errno> {
        query::size(self.fd)
    }

    #[inline]
    fn position(&self) -> Result<u64, Errno> {
        query::position(self.fd)
    }

    /// Whether the kernel did what the record says.
    #[inline]
    pub(super) fn is_as_recorded(
        &self,
        place: Place,
        recorded: u64,
        bytes: u64,
        result: isize,
    ) -> bool {
        u64::try_from(result) == Ok(bytes)
            && self.start_of_last(place, recorded, bytes) == Some(recorded)
    }

    /// Where the write of `bytes` bytes that the kernel has just done began, of which the record
    /// says `recorded`; none where that cannot be told.
    ///
    /// A process that shares the description may have moved its position since, and a process
    /// outside the tree may have made the file longer since. So each of the two is believed where
    /// it confirms the record, and only there: before a process outside the file leaves.
    #[inline]
    fn start_of_last(&self, place: Place, recorded: u64, bytes: u64) -> Option<u64> {
        let appends = self.known.has(descriptors::APPEND);
        let by_position = match place {
            Place::At(at) if !appends => return Some(at),
            Place::Current => self.position().ok()?.checked_sub(bytes),
            Place::At(_) | Place::End => None,
        };
        if by_position == Some(recorded) {
            return by_position;
        }
        if place == Place::Current && !appends {
            return None;
        }
        let by_end = self.end().ok()?.checked_sub(bytes);
        by_end.filter(|by_end| *by_end == recorded)
    }

    /// Makes the log say what the kernel did instead of what it was asked for; where that cannot be
    /// told, the file leaves the log.
    #[cold]
    pub(super) fn correct(
        &self,
        guard: &FileGuard<'_>,
        mut ticket: Ticket<'_>,
        recorded: &Recorded<'_>,
        place: Place,
        result: isize,
    ) {
        /// The kernel may have written before it failed: a descriptor with `O_SYNC`, for one.
        const FAILED: isize = -(libc::EIO as isize);
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
        let is_corrected = voided
            && (done == 0 || self.record_done(guard, &mut ticket, recorded, place, done).is_some());
        drop(ticket);
        if !is_corrected && !self.leave(guard) && !voided {
            // The record is wrong, and the disk does not take the file: no more is promised of it.
            self.end_unsynced(guard);
        }
    }

    /// Records that the kernel has written the first `done` bytes, and where; none where it cannot
    /// be told.
    fn record_done(
        &self,
        guard: &FileGuard<'_>,
        ticket: &mut Ticket<'_>,
        recorded: &Recorded<'_>,
        place: Place,
        done: u64,
    ) -> Option<()> {
        let start = self.start_of_last(place, recorded.start, done)?;
        let (end, size) = (start + done, self.end().ok()?);
        let grew = guard.grows(end);
        record(ticket, start, done, recorded.parts, grew).ok()?;
        if start > guard.size() {
            guard.note_hole();
        }
        let journaled = (end > guard.size()).then_some(recorded.changes);
        guard.note_change(Change { bytes: done, grew, journaled, size });
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
