//! A story between its beginning and the record that covers the file.

use tidegate::log::{Definition, FileGuard};

use super::{Locked, Open};
use crate::state::descriptors::Entry;

/// A story that has begun, and is to be covered or given up.
pub(super) struct Story<'d> {
    open: Open,
    pub(super) entry: Entry,
    pub(super) definition: Definition<'d>,
    /// Tells the story from later ones of the file.
    number: u64,
    /// [`FileGuard::unlogged`] when it began.
    pub(super) unlogged: u64,
}

impl<'d> Story<'d> {
    /// Returns the story that the locked file has now. The file was changed around the log
    /// `unlogged` times before.
    pub(super) fn begun(
        open: &Open,
        entry: Entry,
        guard: &FileGuard<'_>,
        definition: Definition<'d>,
        unlogged: u64,
    ) -> Self {
        Self { open: *open, entry, definition, number: guard.story(), unlogged }
    }

    /// Locks the file, if its story is this one.
    pub(super) fn lock(&self) -> Option<Locked> {
        let guard = self.open.lock(self.entry).ok()?;
        (guard.is_logged() && guard.story() == self.number).then_some(guard)
    }

    /// Ends the story, which was not covered.
    pub(super) fn give_up(&self) {
        if self.lock().is_some_and(|guard| guard.end_story().is_err()) {
            // Recovery ignores the story; here it goes on until the next sync begins another one.
            self.open.log.mark_unlogged(self.entry.file);
        }
    }
}
