//! Why syncs are real: counted by cause, and told to the supervisor where the user may want to
//! know.
//!
//! Invariant: only syncs that are made for real cost anything here. What the log answers never
//! comes here.
//!
//! Entry points: [`Open::sync_unadmitted`], [`Open::sync_refused`], [`Open::sync_for`] make a real
//! sync and count it; [`note_uncoverable`], [`note_synchronous`] count what has been made;
//! [`note_unseen`].

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use tidegate::log::{Counter, Log};

use crate::covered::{Locked, Open, Sync};
use crate::descriptors::{DIRECT, Entry, PINNED};
use crate::files::{self, Seen};
use crate::process::Holding;
use crate::{file_systems, process, supervisor, unseen};

/// A cause that the supervisor is told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// All files of the process: it has set up asynchronous I/O of the kernel.
    Libaio,
    /// The process has mapped the file, or has others write it.
    Mapping,
    /// The descriptor has `O_DIRECT`.
    DirectIo,
    /// A stream of the C library writes the descriptor's file.
    Stream,
    /// The file system is not covered.
    FileSystem,
    /// The user's globs keep the file out.
    Excluded,
    /// The descriptor has `O_SYNC` or `O_DSYNC`.
    Synchronous,
}

impl Reason {
    const ALL: [Self; 7] = [
        Self::Libaio,
        Self::Mapping,
        Self::DirectIo,
        Self::Stream,
        Self::FileSystem,
        Self::Excluded,
        Self::Synchronous,
    ];

    /// The supervisor's word for it.
    fn word(self) -> &'static str {
        match self {
            Self::Libaio => "libaio",
            Self::Mapping => "mapping",
            Self::DirectIo => "direct_io",
            Self::Stream => "stream",
            Self::FileSystem => "file_system",
            Self::Excluded => "excluded",
            Self::Synchronous => "synchronous",
        }
    }
}

/// A bit for each reason that this program has told.
static TOLD: AtomicU32 = AtomicU32::new(0);
/// Why any file of this process may change unseen: the number of a [`Reason`] plus 1; 0: none is
/// known.
static UNSEEN: AtomicU32 = AtomicU32::new(0);

/// Tells the supervisor, once.
#[cold]
fn tell(reason: Reason) {
    let bit = 1 << reason as u32;
    // A process that has given up the log may be killed for a system call that is not its own.
    let Some(_holding) = Holding::new() else { return };
    // The memory of a child of `vfork` is its parent's, the connection would be its own.
    if !process::in_vfork_child() && TOLD.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        supervisor::tell_plain(reason.word());
    }
}

/// Notes why any file of this process may change unseen from now on. Told when the process syncs
/// one.
pub(crate) fn note_unseen(reason: Option<Reason>) {
    UNSEEN.store(reason.map_or(0, |reason| reason as u32 + 1), Ordering::Relaxed);
}

fn why_unseen() -> Option<Reason> {
    let number = UNSEEN.load(Ordering::Relaxed).checked_sub(1)?;
    Reason::ALL.into_iter().find(|reason| *reason as u32 == number)
}

/// Counts a sync that the C library has made of what can never be covered: a directory, or a file
/// of another file system on a disk.
pub(crate) fn note_uncoverable(fd: c_int) {
    let (Some(log), Some(_holding)) = (process::log(), Holding::new()) else { return };
    let Some(seen) = Seen::of(fd).ok().filter(|_| !file_systems::is_in_memory(fd)) else { return };
    if seen.is_directory() {
        log.stats().add(Counter::SyncsOfDirectories, 1);
    } else if seen.is_file() {
        log.stats().add(Counter::SyncsUnsupported, 1);
        tell(Reason::FileSystem);
    }
}

/// Counts a write, with this result, by a descriptor that has the kernel sync it.
#[cold]
pub(crate) fn note_synchronous(log: &Log, result: isize) {
    if result > 0 {
        log.stats().add(Counter::SyncsSynchronous, 1);
        tell(Reason::Synchronous);
    }
}

/// Why the sync of a covered file that needs a commit of the journal is real.
pub(crate) fn cause_of_pending(guard: &Locked) -> Counter {
    if guard.has_own_changes() { Counter::SyncsOwn } else { Counter::SyncsPending }
}

/// Why the sync is real that was to cover a file.
pub(crate) fn cause_of_admission(is_covered: bool) -> Counter {
    if is_covered { Counter::SyncsNotYet } else { Counter::SyncsRefused }
}

impl Open {
    /// Makes a real sync, and counts it by its cause.
    pub(crate) fn sync_for(&self, cause: Counter, wanted: Sync) -> isize {
        self.log.stats().add(cause, 1);
        self.sync_real(wanted)
    }

    /// Makes the sync of a plain file that it does not admit.
    #[cold]
    pub(crate) fn sync_unadmitted(&self, wanted: Sync) -> isize {
        let (cause, reason) = self.why_unadmitted();
        if let Some(reason) = reason {
            tell(reason);
        }
        self.sync_for(cause, wanted)
    }

    /// Makes the sync of a file that was to be admitted, but cannot be. Without its entry nothing
    /// more is known of it.
    #[cold]
    pub(crate) fn sync_refused(&self, entry: Option<Entry>, wanted: Sync) -> isize {
        let pinned = entry.filter(|entry| self.lock(*entry).is_ok_and(|guard| guard.is_pinned()));
        let Some(entry) = pinned else { return self.sync_for(Counter::SyncsRefused, wanted) };
        if unseen::is_kept(entry.file) {
            tell(Reason::Mapping);
        }
        self.sync_for(Counter::SyncsPinned, wanted)
    }

    fn why_unadmitted(&self) -> (Counter, Option<Reason>) {
        if self.log.is_suspended() {
            // That was told of the process that cannot be watched.
            (Counter::SyncsSuspended, None)
        } else if process::writes_unseen() {
            (Counter::SyncsPinned, why_unseen())
        } else if self.known.has(DIRECT) {
            (Counter::SyncsPinned, Some(Reason::DirectIo))
        } else if self.known.has(PINNED) {
            (Counter::SyncsPinned, Some(Reason::Stream))
        } else if Holding::new().is_some_and(|_holding| !files::is_wanted(self.fd)) {
            (Counter::SyncsExcluded, Some(Reason::Excluded))
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
    fn a_reason_that_is_noted_is_found_by_its_number() {
        for reason in Reason::ALL {
            note_unseen(Some(reason));
            assert_eq!(why_unseen(), Some(reason));
        }
        note_unseen(None);
        assert_eq!(why_unseen(), None);
    }

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
