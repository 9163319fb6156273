//! Where a write goes, and what the log says where the kernel did something else.
//!
//! Invariants: where the kernel does less, or does it elsewhere, the record is voided and what was done is recorded, before the
//! program hears of it.

use std::io::IoSlice;

use tidegate::log::{AppendError, FileGuard, Ticket};

use super::{Open, Request};
use crate::descriptors;
use crate::raw::{self, Errno};

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
        raw::fstat(self.fd).map(|stat| u64::try_from(stat.st_size).unwrap_or(0))
    }

    #[inline]
    fn position(&self) -> Result<u64, Errno> {
        raw::lseek(self.fd, 0, libc::SEEK_CUR).map(|at| at as u64)
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
        u64::try_from(result) == Ok(bytes) && self.start_of_last(place, bytes) == Ok(recorded)
    }

    /// Where the write of `bytes` bytes that the kernel has just done began.
    #[inline]
    fn start_of_last(&self, place: Place, bytes: u64) -> Result<u64, Errno> {
        let appends = self.known.has(descriptors::APPEND);
        match place {
            Place::Current => self.position().map(|end| end.saturating_sub(bytes)),
            Place::At(at) if !appends => Ok(at),
            Place::At(_) | Place::End => self.end().map(|end| end.saturating_sub(bytes)),
        }
    }

    /// Makes the log say what the kernel did instead of what it was asked for.
    #[cold]
    pub(super) fn correct(
        &self,
        guard: &FileGuard<'_>,
        ticket: &mut Ticket<'_>,
        position: u64,
        request: &Request<'_>,
        result: isize,
    ) {
        let corrected = ticket.void(position).map_err(|_| ()).and_then(|_| {
            let Ok(done) = u64::try_from(result) else { return Ok(()) };
            let start = self.start_of_last(request.place, done).map_err(|_| ())?;
            record(ticket, start, done, request.parts).map_err(|_| ())
        });
        if corrected.is_err() {
            let retired = self.make_durable(guard) && ticket.retire().is_ok();
            guard.mark_unlogged(!retired);
        }
    }
}

/// Records that the first `done` bytes of `parts` were written from `start` on.
fn record(
    ticket: &mut Ticket<'_>,
    mut start: u64,
    mut done: u64,
    parts: &[IoSlice<'_>],
) -> Result<(), AppendError> {
    for part in parts {
        let len = usize::try_from(done).map_or(part.len(), |done| done.min(part.len()));
        if len == 0 {
            continue;
        }
        ticket.write(start, &[IoSlice::new(&part[..len])])?;
        start += len as u64;
        done -= len as u64;
    }
    Ok(())
}
