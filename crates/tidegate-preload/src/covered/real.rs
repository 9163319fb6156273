//! Syncs that are made for real, counted by why.
//!
//! Entry points: [`Open::sync_unadmitted`], [`Open::sync_refused`], [`Open::sync_for`].

use tidegate::log::Counter;
use tidegate::log::cover::Cause;

use super::{Open, Sync};
use crate::descriptors::{DIRECT, Entry, PINNED};
use crate::process::Holding;
use crate::real::{self, tell, why_unseen};
use crate::{files, kept, process};

/// Why the sync is real that was to cover a file.
pub(super) fn cause_of_admission(is_covered: bool) -> Counter {
    if is_covered { Counter::SyncsNotYet } else { Counter::SyncsRefused }
}

impl Open {
    /// Makes a real sync, and counts it by its cause.
    pub(super) fn sync_for(&self, cause: Counter, wanted: Sync) -> isize {
        self.count(cause);
        self.sync_real(wanted)
    }

    /// Counts a real sync of the file.
    pub(crate) fn count(&self, cause: Counter) {
        real::count(self.log, self.fd, (self.known.device, self.known.inode), cause);
    }

    /// Makes the sync of a plain file that it does not admit.
    #[cold]
    pub(super) fn sync_unadmitted(&self, wanted: Sync) -> isize {
        let (cause, reason) = self.why_unadmitted();
        if let Some(reason) = reason {
            tell(reason);
        }
        self.sync_for(cause, wanted)
    }

    /// Makes the sync of a file that was to be admitted, but cannot be. Without its entry nothing
    /// more is known of it.
    #[cold]
    pub(super) fn sync_refused(&self, entry: Option<Entry>, wanted: Sync) -> isize {
        let pinned = entry.filter(|entry| self.log.is_pinned(entry.file));
        let Some(entry) = pinned else { return self.sync_for(Counter::SyncsRefused, wanted) };
        if kept::is_kept(entry.file) {
            tell(Cause::Mapping);
        }
        self.sync_for(Counter::SyncsPinned, wanted)
    }

    fn why_unadmitted(&self) -> (Counter, Option<Cause>) {
        if self.log.is_suspended() {
            // That was told of the process that cannot be watched.
            (Counter::SyncsSuspended, None)
        } else if process::writes_unseen() {
            (Counter::SyncsPinned, why_unseen())
        } else if self.known.has(DIRECT) {
            (Counter::SyncsPinned, Some(Cause::DirectIo))
        } else if self.known.has(PINNED) {
            (Counter::SyncsPinned, Some(Cause::Stream))
        } else if Holding::new().is_some_and(|_holding| !files::is_wanted(self.fd)) {
            (Counter::SyncsExcluded, Some(Cause::Excluded))
        } else {
            (Counter::SyncsNotYet, None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::World;

    #[test]
    fn a_real_sync_is_counted_by_its_cause() {
        let world = World::new();
        let file = world.file("file");
        let total = |counter| world.log.stats().total(counter);
        for (flags, cause) in [(0, Counter::SyncsNotYet), (PINNED, Counter::SyncsPinned)] {
            assert_eq!(world.open(&file, flags).sync_unadmitted(Sync::All), 0);
            assert_eq!(total(cause), 1, "{cause:?}");
        }
        let open = world.open(&file, 0);
        assert_eq!(open.sync_refused(open.entry(), Sync::All), 0);
        assert_eq!((total(Counter::SyncsRefused), total(Counter::SyncsReal)), (1, 3));
        open.keep().unwrap();
        assert_eq!(open.sync_refused(open.entry(), Sync::All), 0);
        assert_eq!(total(Counter::SyncsPinned), 2);
        world.log.suspend();
        assert_eq!(world.open(&file, PINNED).sync_unadmitted(Sync::All), 0);
        assert_eq!(total(Counter::SyncsSuspended), 1);
    }
}
