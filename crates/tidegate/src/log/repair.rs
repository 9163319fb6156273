//! Takes back what threads were in the middle of when they were killed with a file's lock.
//!
//! The file is marked: the kernel may have done a part of a change that is in no record, attributes
//! too. So the file's next sync is a real one, at which it leaves the log: an older record that
//! recovery replayed would undo what that sync promised. The record of a change is voided. No
//! process was told that the change was made, so both outcomes are right until then. A file whose
//! names were being changed leaves at once, for whether the kernel has changed them would have to
//! be looked up.
//!
//! Invariant: a record is voided under its file's lock, which the killed thread held: the file was
//! not changed since.

use rustix::io::Errno;

use super::append::{FileGuard, Interrupted};
use super::{AppendError, Log, RecordKind};

/// Why an operation could not be taken back. It may be repeated after a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RepairError {
    /// The record that says so was not appended.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// The names of the file were not made durable.
    #[error("cannot make the names of the file durable: {0}")]
    Sync(Errno),
}

impl Log {
    /// Takes back all that former holders of the file's lock were killed in. `sync_names` makes the
    /// names of the file durable as the kernel has them.
    ///
    /// # Errors
    /// [`RepairError`]: of the first that could not be taken back. The file's syncs are real, or
    /// say that it failed.
    pub fn take_back(
        &self,
        guard: &FileGuard<'_>,
        mut sync_names: impl FnMut() -> Result<(), Errno>,
    ) -> Result<(), RepairError> {
        let mut outcome = Ok(());
        if guard.is_logged() {
            guard.mark_unlogged(false);
        }
        for interrupted in self.interrupted_on(guard) {
            let taken_back = take_back(guard, &interrupted, &mut sync_names);
            self.complete(&interrupted);
            outcome = outcome.and(taken_back);
        }
        guard.repaired();
        outcome
    }
}

fn take_back(
    guard: &FileGuard<'_>,
    interrupted: &Interrupted,
    sync_names: &mut dyn FnMut() -> Result<(), Errno>,
) -> Result<(), RepairError> {
    let Some(header) = interrupted.header.filter(|_| guard.is_logged()) else { return Ok(()) };
    match header.kind {
        RecordKind::Write | RecordKind::SetSize => {
            guard.begin()?.void(header.position)?;
        }
        RecordKind::Name => {
            // Once they are durable as they are, no record of them counts.
            sync_names().map_err(|errno| {
                guard.note_failure();
                RepairError::Sync(errno)
            })?;
            guard.end_story()?;
        }
        // These are done with their record.
        _ => {}
    }
    Ok(())
}
