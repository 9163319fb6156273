//! Repairs a file whose lock's holder was killed: the file leaves the log, synced.
//!
//! The kernel may have done part of a change that no record has, of attributes too. Until the file
//! has left, recovery could replay an older record and undo changes that a later sync has promised,
//! even a sync of the whole file system by a process outside. The killed process did not learn that
//! its change was made, so both outcomes are right.
//!
//! Invariant: no other thread changes the file before the repair: the killed thread held the file's
//! lock, and the lock's next owner repairs first.

use rustix::io::Errno;

use super::{FileGuard, Log};
use crate::log::control::SLOTS;
use crate::log::control::owner::{owner, process_of, thread_of};
use crate::log::control::slots::release;
use crate::log::control::table::{self, FileRef, flag};
use crate::log::error::AppendError;
use crate::log::pool::record::Header;
use crate::sync::Ordering;

/// An operation that was interrupted by its process's death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupted {
    slot: u64,
    owner: u64,
    /// Position of the record, whole or not; 0: none yet.
    record: u64,
    /// The process.
    pub process: u32,
    /// The record, if it is whole. The kernel may have done its operation, in part or not at all.
    pub header: Option<Header>,
}

impl Interrupted {
    /// Returns the number of the thread.
    pub fn thread(&self) -> u32 {
        thread_of(self.owner)
    }
}

/// Why a file could not leave the log. Its syncs are real until it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RepairError {
    /// The end of its story was not appended.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// The file was not made durable.
    #[error("cannot make the file durable: {0}")]
    Sync(Errno),
}

/// The operations in progress, and the repair of interrupted ones.
#[derive(Clone, Copy)]
pub struct Operations<'a> {
    pub(super) log: &'a Log,
}

impl<'a> Operations<'a> {
    /// Returns the interrupted operations of `process`, which must be dead.
    pub fn interrupted_by(self, process: u32) -> impl Iterator<Item = Interrupted> + 'a {
        self.taken_slots(move |slot_owner, _| process_of(slot_owner) == process)
    }

    /// Returns the interrupted operations on a locked file.
    pub(in crate::log) fn interrupted_on(
        self,
        guard: &FileGuard<'_>,
    ) -> impl Iterator<Item = Interrupted> + 'a {
        let file = u64::from(guard.file().index) + 1;
        let own = owner();
        self.taken_slots(move |slot_owner, slot_file| slot_file == file && slot_owner != own)
    }

    /// Returns all operations in progress; if all processes are dead, these are interrupted.
    pub fn all(self) -> impl Iterator<Item = Interrupted> + 'a {
        self.taken_slots(|_, _| true)
    }

    fn taken_slots(
        self,
        wanted: impl Fn(u64, u64) -> bool + 'a,
    ) -> impl Iterator<Item = Interrupted> + 'a {
        (0..SLOTS).filter_map(move |number| {
            let slot = self.log.ring.control.slot(number);
            let owner = slot.owner.load(Ordering::Acquire);
            if owner == 0 || !wanted(owner, slot.file.load(Ordering::Acquire)) {
                return None;
            }
            let record = slot.record_position();
            let header =
                (record != 0).then(|| self.log.ring.pool().read_header(record).ok().flatten());
            let header =
                header.flatten().filter(|it| self.log.ring.pool().is_whole(it).unwrap_or(false));
            let process = process_of(owner);
            let interrupted = Interrupted { slot: number, owner, record, process, header };
            self.make_durable(&interrupted);
            Some(interrupted)
        })
    }

    /// Makes a whole record durable: its writer may have been killed before the fence, while the
    /// kernel did the operation, other programs saw the result, and their syncs rely on the log.
    fn make_durable(self, interrupted: &Interrupted) {
        let Some(header) = &interrupted.header else { return };
        let persisted = self.log.ring.pool().persist_record(header);
        if persisted.is_err() {
            self.log.ring.note_hole();
        }
        if let (Err(_), Some(file)) = (persisted, self.file_of(interrupted)) {
            // A file that is gone from the table gets no more syncs.
            let _ = self.log.note_failure(file);
        }
    }

    /// Returns the entry of the file of an interrupted operation; `None` if its slot names no file.
    pub fn file_of(self, interrupted: &Interrupted) -> Option<FileRef> {
        let number = self.log.ring.control.slot(interrupted.slot).file.load(Ordering::Acquire);
        let index = u32::try_from(number.checked_sub(1)?).ok()?;
        let found = table::entry(&self.log.ring.control, index).generation().load(Ordering::SeqCst);
        Some(FileRef { index, generation: u32::try_from(found).ok()? })
    }

    /// Returns whether the slot still belongs to the interrupted operation.
    pub fn is_interrupted(self, interrupted: &Interrupted) -> bool {
        let slot = self.log.ring.control.slot(interrupted.slot);
        slot.owner.load(Ordering::Acquire) == interrupted.owner
            && slot.record_position() == interrupted.record
    }

    /// Frees the slot of a repaired operation, unless it serves another operation by now.
    pub fn complete(self, interrupted: &Interrupted) {
        if self.is_interrupted(interrupted) {
            let slot = self.log.ring.control.slot(interrupted.slot);
            if interrupted.header.is_none() && slot.unfinished_from().is_some() {
                self.log.ring.note_hole();
            }
            release(slot);
        }
    }

    /// Makes a file leave the log after its lock's holder was killed, and frees the holder's slots.
    /// `sync` makes the file and its names durable as the kernel has them.
    ///
    /// # Errors
    /// [`RepairError`]: the story goes on, since only the log has the promised changes. The file's
    /// syncs are real, or report the failure.
    pub fn repair(
        self,
        guard: &FileGuard<'_>,
        sync: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), RepairError> {
        let outcome = if guard.is_logged() { leave(guard, sync) } else { Ok(()) };
        for interrupted in self.interrupted_on(guard) {
            self.complete(&interrupted);
        }
        guard.entry.clear(flag::ORPHANED);
        outcome
    }
}

fn leave(
    guard: &FileGuard<'_>,
    sync: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), RepairError> {
    guard.mark_unlogged(false);
    sync().map_err(|errno| {
        guard.note_failure();
        RepairError::Sync(errno)
    })?;
    Ok(guard.end_story()?)
}
