//! Changes past the log: writes that it does not take, and what no hook sees.
//!
//! Invariants:
//! 1. Before a change that the log does not have, the file's changes in the log are made durable in the file and retired: recovery
//!    never puts old data over newer data.
//! 2. A change past the log through a descriptor whose `O_SYNC` was taken away is synced before the program hears of it.

use tidegate::log::{AppendError, Counter, FileGuard};

use super::{Locked, Open, PATIENCE, Request, Sync, TRIES, negated};
use crate::descriptors::{self, Known};
use crate::raw;

impl Open {
    /// Writes past the log, under the file's lock.
    #[cold]
    pub(super) fn unlogged(
        &self,
        guard: &FileGuard<'_>,
        request: &Request<'_>,
        kernel: impl Fn() -> isize,
    ) -> isize {
        self.retire(guard);
        guard.mark_unlogged(false);
        self.done_unlogged(request, kernel(), guard.is_nameless())
    }

    /// Writes past the log to a file of which no name is known: the one that it was opened by is gone, and it has others. The disk
    /// has to keep what the log would.
    #[cold]
    pub(super) fn undefinable(&self, request: &Request<'_>, kernel: impl Fn() -> isize) -> isize {
        let Request { parts, place, .. } = *request;
        let request = &Request { parts, place, durable: true };
        match self.lock() {
            Ok(Some(guard)) => self.unlogged(&guard, request, kernel),
            Ok(None) => self.unlocked(request, kernel),
            Err(errno) => negated(errno),
        }
    }

    /// Writes past the log and without the lock.
    #[cold]
    pub(super) fn unlocked(&self, request: &Request<'_>, kernel: impl Fn() -> isize) -> isize {
        // Before and after: a sync in between must not take this write for one that it has covered.
        self.log.mark_unlogged(self.file);
        let result = kernel();
        self.log.mark_unlogged(self.file);
        self.done_unlogged(request, result, false)
    }

    fn done_unlogged(&self, request: &Request<'_>, result: isize, nameless: bool) -> isize {
        self.log.stats().add(Counter::UnloggedWrites, 1);
        if result == 0 || nameless { result } else { self.made_durable(request.durable, result) }
    }

    /// What the program gets for a change past the log that had this result: the change is durable then, if it is `wanted` or if
    /// the descriptor was opened so.
    fn made_durable(&self, wanted: bool, result: isize) -> isize {
        if result < 0 || !(wanted || self.known.has(descriptors::STRIPPED)) {
            return result;
        }
        self.log.stats().add(Counter::SyncsReal, 1);
        let all = self.known.has(descriptors::SYNC);
        let synced = if all { Sync::All } else { Sync::Data }.run(self.fd);
        if synced < 0 { synced } else { result }
    }

    /// Makes the file's changes in the log durable in the file, and says so in the log.
    pub(super) fn retire(&self, guard: &FileGuard<'_>) {
        if !guard.has_live_changes() || guard.is_nameless() {
            return;
        }
        if !self.make_durable(guard) {
            return;
        }
        for _ in 0..TRIES {
            let room = self.log.room();
            match guard.begin().and_then(|mut ticket| ticket.retire()) {
                Err(AppendError::Full) if self.log.supervisor_alive() => {
                    self.log.wait_for_room(room, PATIENCE);
                }
                _ => return,
            }
        }
    }

    /// Makes the file durable by the kernel, with its names: recovery leaves those of retired files alone. Where that fails the log
    /// must keep what it has, and the program is told by its next sync.
    pub(super) fn make_durable(&self, guard: &FileGuard<'_>) -> bool {
        let synced = raw::fsync(self.fd).is_ok();
        if !synced {
            // The kernel may take for clean what the disk did not take: this notes that, too.
            guard.note_failure();
        }
        synced
    }

    /// From now on the file may be changed in ways that are not seen, until [`show`](Self::show) is called for the descriptor.
    pub(crate) fn hide(&self) -> Known {
        if self.known.has(descriptors::STICKY) {
            return self.known;
        }
        let Some(guard) = self.left() else { return self.known };
        guard.keep_unlogged();
        let known = Known::of_file(guard.file(), self.known.flags).with(descriptors::STICKY);
        descriptors::set(self.fd, known);
        known
    }

    /// As [`hide`](Self::hide), but noted with no descriptor, and until the log is not in use any more.
    pub(crate) fn mark(&self) {
        if let Some(guard) = self.left() {
            guard.mark_unlogged(true);
        }
    }

    /// The same, until this process has ended.
    pub(crate) fn keep(&self) {
        if let Some(guard) = self.left() {
            guard.keep_unlogged();
        }
    }

    /// Locks the file when the log has nothing more of it; none: the next sync is real.
    fn left(&self) -> Option<Locked> {
        let Ok(Some(guard)) = self.lock() else {
            self.log.mark_unlogged(self.file);
            return None;
        };
        self.retire(&guard);
        Some(guard)
    }

    /// The descriptor changes its file no more in ways that are not seen.
    pub(crate) fn show(&self) {
        if !self.known.has(descriptors::STICKY) {
            return;
        }
        if let Some(guard) = self.lock_as_it_is() {
            guard.stop_keeping();
        }
    }

    /// Runs a change of the file that the log does not have: its result, as the kernel gives it.
    pub(crate) fn unseen(&self, change: impl FnOnce() -> isize) -> isize {
        self.unseen_as(false, change)
    }

    /// The same; with `durable` the change is to be durable even if the descriptor was not opened so.
    pub(crate) fn unseen_as(&self, durable: bool, change: impl FnOnce() -> isize) -> isize {
        let result = self.changed_unseen(change);
        self.made_durable(durable, result)
    }

    fn changed_unseen(&self, change: impl FnOnce() -> isize) -> isize {
        let guard = match self.lock() {
            Ok(Some(guard)) => guard,
            Ok(None) => {
                self.log.mark_unlogged(self.file);
                let result = change();
                self.log.mark_unlogged(self.file);
                return result;
            }
            Err(errno) => return negated(errno),
        };
        self.retire(&guard);
        guard.keep_unlogged();
        drop(guard);
        let result = change();
        if let Some(guard) = self.lock_as_it_is() {
            guard.stop_keeping();
        }
        result
    }
}
