//! What becomes of a file whose lock's holder was killed: it leaves the log, synced.
//!
//! The kernel may have done a part of a change that is in no record, attributes too. Until the file
//! has left, an older record that recovery replays could undo what a sync has promised since, one
//! of the whole file system by a process outside included. No process was told that the change was
//! made, so both outcomes are right.
//!
//! Invariant: nobody changes the file before: the killed thread held its lock.

use rustix::io::Errno;

use super::append::FileGuard;
use super::{AppendError, Log};

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

impl Log {
    /// Has the file leave whose lock's former holder was killed, and gives back what that was in
    /// the middle of. `sync` makes the file and its names durable as the kernel has them.
    ///
    /// # Errors
    /// [`RepairError`]: the story goes on, for the log alone has what it promises. The file's syncs
    /// are real, or say that it failed.
    pub fn repair(
        &self,
        guard: &FileGuard<'_>,
        sync: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), RepairError> {
        let outcome = if guard.is_logged() { leave(guard, sync) } else { Ok(()) };
        for interrupted in self.interrupted_on(guard) {
            self.complete(&interrupted);
        }
        guard.repaired();
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
