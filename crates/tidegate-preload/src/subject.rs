//! A file under its lock, for an operation that is not a write: its record, then the kernel's part; and what happens where
//! the record cannot be had.
//!
//! Invariants:
//! 1. The record is durable before the kernel is asked; it is voided where the kernel refuses.
//! 2. Where no record can be had, what the log has of the file is made durable and retired before the kernel is asked: a replay
//!    never undoes what the operation did.
//!
//! Entry points: [`Subject::of`] locks a file, [`Subject::run`] operates on it,
//! [`Subject::settle`] leaves it to the kernel.

use std::ffi::c_int;
use std::time::Duration;

use tidegate::log::{AppendError, FileGuard, FileKey, FileRef, LockError, Log, Ticket};

use crate::files::Seen;
use crate::path::PathBuffer;
use crate::raw::Errno;
use crate::{absorb, mend, process};

/// How long the lock or room in the log is waited for, each of [`TRIES`] times.
const PATIENCE: Duration = Duration::from_secs(1);
const TRIES: u32 = 10;

/// Where a file can be reached.
pub(crate) trait Place {
    /// Which file it is; its path is put into `path`.
    fn identify(&self, path: &mut PathBuffer) -> Result<(Seen, FileKey), Errno>;

    /// Makes what the kernel has of the file durable: whether that was done.
    fn make_durable(&self) -> bool;
}

/// Positions of the records of one operation, 0 for none.
pub(crate) type Positions = [u64; 2];

/// A file that an operation is about, locked.
pub(crate) struct Subject<'l> {
    log: &'l Log,
    pub(crate) guard: FileGuard<'l>,
}

impl<'l> Subject<'l> {
    /// Locks the file that `find` finds, open as `fd`; `find` is asked again if the entry has become another file's.
    pub(crate) fn of(log: &'l Log, fd: c_int, find: impl Fn() -> Option<FileRef>) -> Option<Self> {
        for _ in 0..TRIES {
            match log.lock(find()?) {
                Ok(guard) if guard.absorber() != 0 => {
                    let file = guard.file();
                    drop(guard);
                    // Not by `fd`, which may be a descriptor that only names the file.
                    absorb::settle_named(process::log()?, file).ok()?;
                }
                Ok(guard) => {
                    if guard.owner_died() {
                        mend::file(log, fd, &guard);
                    }
                    return Some(Self { log, guard });
                }
                Err(LockError::Stale | LockError::Busy) => {}
                Err(LockError::Reentered) => return None,
            }
        }
        None
    }

    /// The log has records of the file.
    pub(crate) fn is_live(&self) -> bool {
        self.guard.is_live()
    }

    /// Changes of the file's content go to the log: a sync may rely on it, and nobody changes the file unseen.
    pub(crate) fn is_logged(&self) -> bool {
        (self.guard.is_covered() || self.is_live())
            && !self.guard.is_sticky()
            && !self.guard.is_nameless()
    }

    /// Appends records, then runs `operation`; where that fails the records are voided.
    pub(crate) fn run(
        &self,
        place: &impl Place,
        append: impl Fn(&mut Ticket<'_>) -> Result<Positions, AppendFailure>,
        operation: impl FnOnce() -> isize,
    ) -> isize {
        let Ok((mut ticket, positions)) = self.append(place, append) else {
            self.settle(place);
            self.log.mark_names_unlogged();
            let result = operation();
            self.log.mark_names_unlogged();
            return result;
        };
        let result = operation();
        let mut void = |position| position == 0 || ticket.void(position).is_ok();
        if result < 0 && !positions.into_iter().all(&mut void) {
            drop(ticket);
            self.settle(place);
        }
        result
    }

    fn append(
        &self,
        place: &impl Place,
        append: impl Fn(&mut Ticket<'_>) -> Result<Positions, AppendFailure>,
    ) -> Result<(Ticket<'_>, Positions), AppendFailure> {
        let once = || {
            let mut ticket = self.guard.begin()?;
            if ticket.needs_define() {
                let mut path = PathBuffer::new();
                let (seen, key) = place.identify(&mut path)?;
                self.guard.note_mount(seen.mount);
                ticket.define(&seen.definition(key, self.guard.is_born(), &path))?;
            }
            let positions = append(&mut ticket)?;
            Ok((ticket, positions))
        };
        for _ in 0..TRIES {
            let room = self.log.room();
            match once() {
                Err(AppendFailure::Log(AppendError::Full)) if self.log.supervisor_alive() => {
                    self.log.wait_for_room(room, PATIENCE);
                }
                result => return result,
            }
        }
        Err(AppendFailure::Log(AppendError::Full))
    }

    /// Makes the file durable without the log: its records no longer count, and its next `fsync` is real. Where
    /// even that cannot be recorded, the file stays without the log. What does not become durable stays in the log, and the
    /// next `fsync` says so.
    pub(crate) fn settle(&self, place: &impl Place) {
        let durable = place.make_durable();
        if !durable {
            self.guard.note_failure();
        }
        let retire = || self.guard.begin().and_then(|mut ticket| ticket.retire()).is_ok();
        let retired = !self.guard.has_unretired() || (durable && retire());
        self.guard.mark_unlogged(!retired);
    }
}

/// Why a record was not appended.
pub(crate) enum AppendFailure {
    /// The log would not have it.
    Log(AppendError),
    /// A path or an identity is not known.
    Unknown,
}

impl From<AppendError> for AppendFailure {
    fn from(error: AppendError) -> Self {
        Self::Log(error)
    }
}

impl From<Errno> for AppendFailure {
    fn from(_: Errno) -> Self {
        Self::Unknown
    }
}
