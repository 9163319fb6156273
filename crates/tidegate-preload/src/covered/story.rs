//! A story from its beginning to the record that covers the file.

use tidegate::log::{Definition, FileGuard};

use super::{Locked, Open};
use crate::state::descriptors::Entry;

/// A story that has begun, and has to be covered or given up.
pub(super) struct Story<'d> {
    open: Open,
    pub(super) entry: Entry,
    pub(super) definition: Definition<'d>,
    /// Distinguishes the story from later stories of the file.
    number: u64,
    /// [`FileGuard::unlogged`] when it began.
    pub(super) unlogged: u64,
}

impl<'d> Story<'d> {
    /// Returns the present story of the locked file. `unlogged` is [`FileGuard::unlogged`] as it
    /// was when the story began.
    pub(super) fn begun(
        open: &Open,
        entry: Entry,
        guard: &FileGuard<'_>,
        definition: Definition<'d>,
        unlogged: u64,
    ) -> Self {
        Self { open: *open, entry, definition, number: guard.story(), unlogged }
    }

    /// Locks the file. Returns `None` if it has no story now, or another one.
    pub(super) fn lock(&self) -> Option<Locked> {
        let guard = self.open.lock(self.entry).ok()?;
        (guard.is_logged() && guard.story() == self.number).then_some(guard)
    }

    /// Ends the story, which was not covered.
    pub(super) fn give_up(&self) {
        if self.lock().is_some_and(|guard| guard.end_story().is_err()) {
            // Recovery ignores the story. It goes on until the next sync begins another one.
            self.open.log.mark_unlogged(self.entry.file);
        }
    }
}
