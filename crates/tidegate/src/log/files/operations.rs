//! What becomes of a file whose lock's holder was killed: it leaves the log, synced.
//!
//! The kernel may have done a part of a change that is in no record, attributes too. Until the file
//! has left, an older record that recovery replays could undo what a sync has promised since, one
//! of the whole file system by a process outside included. No process was told that the change was
//! made, so both outcomes are right.
//!
//! Invariant: nobody changes the file before: the killed thread held its lock.

use rustix::io::Errno;

use super::{FileGuard, Log};
use crate::log::control::SLOTS;
use crate::log::control::owner::{owner, process_of, thread_of};
use crate::log::control::slots::release;
use crate::log::control::table::{self, FileRef, flag};
use crate::log::error::AppendError;
use crate::log::pool::record::Header;
use crate::sync::Ordering;

/// An operation that a process was killed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupted {
    slot: u64,
    owner: u64,
    /// Position of the record, whole or not; 0: none yet.
    record: u64,
    /// The process.
    pub process: u32,
    /// The record, if one was finished: its operation may have been done by the kernel, or not, or
    /// in part.
    pub header: Option<Header>,
}

impl Interrupted {
    /// The thread.
    pub fn thread(&self) -> u32 {
        thread_of(self.owner)
    }
}

/// Why a file could not leave. Its syncs are real until it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RepairError {
    /// The record that says so was not appended.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// The file was not made durable.
    #[error("cannot make the file durable: {0}")]
    Sync(Errno),
}

/// The operations in the middle, and what becomes of those whose threads were killed.
#[derive(Clone, Copy)]
pub struct Operations<'a> {
    pub(super) log: &'a Log,
}

impl<'a> Operations<'a> {
    /// The operations that threads of `process` were killed in, or of the killed holder of a file's
    /// lock: slots that it never gave back. The process must be dead.
    pub fn interrupted_by(self, process: u32) -> impl Iterator<Item = Interrupted> + 'a {
        self.taken_slots(move |slot_owner, _| process_of(slot_owner) == process)
    }

    /// The operations on a locked file that their threads were killed in.
    pub(in crate::log) fn interrupted_on(
        self,
        guard: &FileGuard<'_>,
    ) -> impl Iterator<Item = Interrupted> + 'a {
        let file = u64::from(guard.file().index) + 1;
        let own = owner();
        self.taken_slots(move |slot_owner, slot_file| slot_file == file && slot_owner != own)
    }

    /// All operations in the middle: of killed processes, where all processes are.
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

    /// Makes the record durable: its writer may have been killed before it did. The thread that
    /// finds it whole does what it says, other programs read that, and their syncs rely on the log.
    fn make_durable(self, interrupted: &Interrupted) {
        let Some(header) = &interrupted.header else { return };
        let persisted = self.log.ring.pool().persist_record(header);
        if persisted.is_err() {
            self.log.ring.note_hole();
        }
        if let (Err(_), Some(file)) = (persisted, self.file_of(interrupted)) {
            // One that is gone from the table is synced by nobody.
            let _ = self.log.note_failure(file);
        }
    }

    /// The entry of the file on which an operation was interrupted, if it was one on a file.
    pub fn file_of(self, interrupted: &Interrupted) -> Option<FileRef> {
        let number = self.log.ring.control.slot(interrupted.slot).file.load(Ordering::Acquire);
        let index = u32::try_from(number.checked_sub(1)?).ok()?;
        let found = table::entry(&self.log.ring.control, index).generation().load(Ordering::SeqCst);
        Some(FileRef { index, generation: u32::try_from(found).ok()? })
    }

    /// The slot is the interrupted operation's still.
    pub fn is_interrupted(self, interrupted: &Interrupted) -> bool {
        let slot = self.log.ring.control.slot(interrupted.slot);
        slot.owner.load(Ordering::Acquire) == interrupted.owner
            && slot.record_position() == interrupted.record
    }

    /// Nothing is left to do of the interrupted operation: its slot is free again. One that serves
    /// another operation by now is left alone.
    pub fn complete(self, interrupted: &Interrupted) {
        if self.is_interrupted(interrupted) {
            let slot = self.log.ring.control.slot(interrupted.slot);
            if interrupted.header.is_none() && slot.unfinished_from().is_some() {
                self.log.ring.note_hole();
            }
            release(slot);
        }
    }

    /// Has the file leave whose lock's former holder was killed, and gives back what that was in
    /// the middle of. `sync` makes the file and its names durable as the kernel has them.
    ///
    /// # Errors
    /// [`RepairError`]: the story goes on, for the log alone has what it promises. The file's syncs
    /// are real, or say that it failed.
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
