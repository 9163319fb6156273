//! Syncs that are made for real, counted by why.
//!
//! Entry points: [`Open::sync_unadmitted`], [`Open::sync_refused`], [`Open::sync_for`].

use tidegate::log::Counter;
use tidegate::log::cover::{Cause, NotAdmitted};

use super::{Open, Sync};
use crate::state::descriptors::Entry;
use crate::state::kept;
use crate::state::real::{self, tell, why_unseen};

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
    pub(super) fn sync_unadmitted(&self, wanted: Sync, why: NotAdmitted) -> isize {
        if let Some(cause) = why.cause(why_unseen) {
            tell(cause);
        }
        self.sync_for(why.counter(), wanted)
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::descriptors::PINNED;
    use crate::testing::World;

    #[test]
    fn a_real_sync_is_counted_by_its_cause() {
        let world = World::new();
        let file = world.file("file");
        let total = |counter| world.log.stats().total(counter);
        for (flags, cause) in [(0, Counter::SyncsNotYet), (PINNED, Counter::SyncsPinned)] {
            let open = world.open(&file, flags);
            assert_eq!(open.sync_unadmitted(Sync::All, open.admission().unwrap_err()), 0);
            assert_eq!(total(cause), 1, "{cause:?}");
        }
        let open = world.open(&file, 0);
        assert_eq!(open.sync_refused(open.entry(), Sync::All), 0);
        assert_eq!((total(Counter::SyncsRefused), total(Counter::SyncsReal)), (1, 3));
        open.keep().unwrap();
        assert_eq!(open.sync_refused(open.entry(), Sync::All), 0);
        assert_eq!(total(Counter::SyncsPinned), 2);
        world.log.suspend();
        assert_eq!(world.open(&file, PINNED).sync_old(Sync::All), 0);
        assert_eq!(total(Counter::SyncsSuspended), 1);
    }
}
