//! Syncs of a file: made by the kernel, or answered by the log.
//!
//! [`tidegate::log::cover`] decides. This module gathers the facts and carries out the actions.
//!
//! Invariant: no lock is held over the real sync of a file that stays covered, since its writers
//! would wait for the disk.

use std::cell::Cell;
use std::ffi::c_int;

use tidegate::durable;
use tidegate::log::Counter;
use tidegate::log::cover::{
    Cause, NotAdmitted, SyncAction, SyncFacts, SyncLookups, SyncedState, decide_sync,
};

pub(crate) use tidegate::log::cover::Sync;

use super::in_place::is_overwritten_in_place;
use super::making::sync_if_new;
use super::{Locked, Open, is_disk_failure, negated};
use crate::state::descriptors::{self, Entry};
use crate::state::files::Seen;
use crate::state::process::Holding;
use crate::state::real::{self, tell, why_unseen};
use crate::state::{new_files, pins};
use crate::sys::{own_stack, query, raw};

/// Makes a real sync. Returns 0 or a negative error number.
pub(crate) fn sync_by_kernel(fd: c_int, wanted: Sync) -> isize {
    let result = match wanted {
        Sync::All => raw::fsync(fd),
        Sync::Data => raw::fdatasync(fd),
    };
    result.map_or_else(negated, |_| 0)
}

/// Appends a record that the kernel has made all changes of an overwritten file up to its time of
/// modification. Recovery takes later times of the file for changes by processes outside the tree.
/// If the log has no space for the record, such a change is noticed a little later.
fn confirm(guard: &Locked, modified_ns: u64) {
    if guard.is_unconfirmed() {
        let _ = own_stack::run(|| guard.confirm(modified_ns));
    }
}

/// Result of a sync after a failed write-back that no sync has reported yet.
const FAILED: isize = -(libc::EIO as isize);

impl Open {
    /// Makes the file durable, by a real sync if the log does not answer. Returns the result as the
    /// kernel would.
    pub(crate) fn sync(&self, wanted: Sync) -> isize {
        let Some(entry) = self.entry_if_any() else { return self.sync_plain(wanted) };
        if self.log.is_plain(entry.file) {
            return self.sync_plain(wanted);
        }
        let Ok(guard) = self.lock(entry) else { return self.sync_refused(None, wanted) };
        let failed = guard.take_failure();
        if guard.is_logged() {
            // The log still has the bytes that the kernel may have dropped.
            return if failed { FAILED } else { self.sync_logged(entry, guard, wanted) };
        }
        drop(guard);
        let result = self.sync_plain(wanted);
        if failed && result == 0 { FAILED } else { result }
    }

    /// Syncs a file whose story has begun.
    pub(crate) fn sync_logged(&self, entry: Entry, guard: Locked, wanted: Sync) -> isize {
        let modified_ns = Cell::new(0);
        let lookups = SyncLookups {
            is_in_place: || {
                Seen::of(self.fd).is_ok_and(|seen| is_overwritten_in_place(self.fd, &seen))
            },
            is_resized: || self.is_resized(&guard, &modified_ns),
            is_pending: || self.log.file_systems().is_pending(guard.file_system),
        };
        match decide_sync(wanted, &SyncFacts::of(&guard), &lookups) {
            SyncAction::Plain => {
                drop(guard);
                return self.sync_plain(wanted);
            }
            SyncAction::Leave(cause) => return self.leave_at(&guard, cause, wanted),
            SyncAction::Real(cause) => return self.sync_covered(entry, guard, cause),
            SyncAction::Nothing => {
                confirm(&guard, modified_ns.get());
                self.log.note_sync_skipped(entry.file);
            }
            SyncAction::NothingYet => confirm(&guard, modified_ns.get()),
            SyncAction::Mark => {
                confirm(&guard, modified_ns.get());
                if own_stack::run(|| guard.mark(guard.size(), modified_ns.get())).is_err() {
                    return self.sync_covered(entry, guard, Counter::SyncsPending);
                }
                guard.names_synced();
            }
        }
        self.log.ring().stats().add(Counter::SyncsSkipped, 1);
        0
    }

    /// Returns whether a process outside the tree has changed the locked file's size, and otherwise
    /// stores the file's time of modification. Asks the kernel now and then only.
    fn is_resized(&self, guard: &Locked, modified_ns: &Cell<u64>) -> bool {
        if !guard.is_unchecked() {
            return false;
        }
        match query::size_and_time(self.fd) {
            Ok((size, found_ns)) if size == guard.size() => modified_ns.set(found_ns),
            _ => return true,
        }
        guard.note_checked();
        false
    }

    /// Returns the file system's failure, if it took writes when the file was opened or covered.
    fn failure(&self) -> Option<rustix::io::Errno> {
        durable::failure(raw::borrowed(self.fd)).filter(|_| self.was_writable())
    }

    /// Returns whether the file system took writes when the file was opened or covered.
    fn was_writable(&self) -> bool {
        query::status_flags(self.fd).is_ok_and(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY)
            || self.entry_if_any().is_some_and(|entry| self.log.must_log(entry.file))
    }

    /// Makes a real sync of a covered file, to commit pending changes. Always calls `fsync`, since
    /// `fdatasync` may not commit a transaction that has only the file's times.
    fn sync_covered(&self, entry: Entry, guard: Locked, cause: Counter) -> isize {
        let (before, size) = (SyncedState::of(&guard), guard.size());
        let own_changes = guard.own_changes();
        let (journaled_changes, file_system) = (guard.journaled_changes(), guard.file_system);
        drop(guard);
        let result = self.sync_for(cause, Sync::All);
        if result == 0 {
            self.log.file_systems().committed(file_system, journaled_changes);
        }
        let Ok(guard) = self.lock(entry) else { return result };
        if result < 0 {
            // The program gets the error now; the kernel may have dropped the data.
            guard.note_dropped();
            return result;
        }
        guard.own_synced(own_changes);
        let now = SyncedState::of(&guard);
        if before.has_names(&now) {
            guard.names_synced();
        }
        if before.has_bytes(&now) && guard.is_logged() {
            let modified_ns =
                query::size_and_time(self.fd).map_or(0, |(_, modified_ns)| modified_ns);
            confirm(&guard, modified_ns);
            // Without the mark the next sync is real.
            let _ = own_stack::run(|| guard.mark(size, modified_ns));
            guard.note_real_sync();
        }
        result
    }

    /// Makes a real sync and makes the file leave: recovery must not replay earlier promises of the
    /// log over the promise of this sync. A file leaves in this way if it was changed around the
    /// log, or if it logs more between two syncs than a sync costs.
    #[cold]
    fn leave_at(&self, guard: &Locked, cause: Counter, wanted: Sync) -> isize {
        let result = self.sync_for(cause, wanted);
        if result < 0 {
            guard.note_dropped();
            return result;
        }
        descriptors::forget_syncs(self.fd);
        if self.leave(guard) { result } else { negated(libc::EIO) }
    }

    /// Syncs a plain file, which may be covered afterwards.
    fn sync_plain(&self, wanted: Sync) -> isize {
        new_files::note_sync();
        let made = if new_files::has_some() { sync_if_new(self, wanted) } else { None };
        made.unwrap_or_else(|| self.sync_old(wanted))
    }

    /// Syncs a plain file that this process has not created, or has synced before.
    pub(super) fn sync_old(&self, wanted: Sync) -> isize {
        match self.admission() {
            Ok(()) => self.admit(wanted),
            Err(why) => self.sync_unadmitted(wanted, why),
        }
    }

    /// Makes the real sync that the program has asked for. The sync of a logged file also fails if
    /// the file system has failed since the file was opened: ext4 may return 0 then, although it
    /// has dropped data.
    pub(crate) fn sync_real(&self, wanted: Sync) -> isize {
        let start_ns = raw::now_ns();
        let is_logged = self.entry_if_any().is_some_and(|entry| self.log.must_log(entry.file));
        let mut result = sync_by_kernel(self.fd, wanted);
        // Not if the log was given up meanwhile: a system call filter may kill the process.
        if result == 0
            && is_logged
            && let Some(errno) = Holding::new().and_then(|_holding| self.failure())
        {
            result = negated(errno.raw_os_error());
        }
        if is_disk_failure(result) {
            self.log.ring().distrust_kernel();
        }
        let stats = self.log.ring().stats();
        stats.add(Counter::SyncsReal, 1);
        stats.add(Counter::SyncsRealNs, raw::now_ns().saturating_sub(start_ns));
        result
    }

    /// Makes a real sync, and counts it by its cause.
    pub(super) fn sync_for(&self, cause: Counter, wanted: Sync) -> isize {
        self.count(cause);
        self.sync_real(wanted)
    }

    /// Counts a real sync of the file.
    pub(crate) fn count(&self, cause: Counter) {
        real::count(self.log, self.fd, (self.known.device, self.known.inode), cause);
    }

    /// Makes the real sync of a plain file that is not admitted, and tells the supervisor why.
    #[cold]
    pub(super) fn sync_unadmitted(&self, wanted: Sync, why: NotAdmitted) -> isize {
        if let Some(cause) = why.cause(why_unseen) {
            tell(cause);
        }
        self.sync_for(why.counter(), wanted)
    }

    /// Makes the real sync of a file that cannot be admitted. The file's entry, if known, shows
    /// whether the file is pinned.
    #[cold]
    pub(super) fn sync_refused(&self, entry: Option<Entry>, wanted: Sync) -> isize {
        let pinned = entry.filter(|entry| self.log.is_pinned(entry.file));
        let Some(entry) = pinned else { return self.sync_for(Counter::SyncsRefused, wanted) };
        if pins::has(entry.file) {
            tell(Cause::Mapping);
        }
        self.sync_for(Counter::SyncsPinned, wanted)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::IoSlice;
    use std::os::unix::fs::FileExt;

    use tidegate::log::cover::GAIN_BYTES_MAX;

    use super::super::{Place, Request};
    use super::*;
    use crate::state::descriptors::PINNED;
    use crate::testing::World;

    struct Case {
        world: World,
        file: File,
        open: Open,
        entry: Entry,
    }

    impl Case {
        fn new() -> Self {
            let world = World::new();
            let file = world.file("file");
            let open = world.covered(&file, 0);
            let entry = open.entry().unwrap();
            Self { world, file, open, entry }
        }

        fn write(&self, at: u64) {
            let parts = [IoSlice::new(b"data")];
            let kernel = || self.file.write_at(b"data", at).unwrap().cast_signed();
            self.open.write(&Request { parts: &parts, place: Place::At(at) }, kernel);
        }

        /// A thread writes "lost", and is killed after the kernel has written it.
        fn write_and_die(&self) {
            std::thread::scope(|scope| {
                let dying = scope.spawn(|| {
                    let guard = self.world.log.lock(self.entry.file).unwrap();
                    let mut ticket = guard.begin().unwrap();
                    ticket.write(0, &[IoSlice::new(b"lost")], false).unwrap();
                    self.file.write_all_at(b"lost", 0).unwrap();
                    std::mem::forget(ticket);
                    std::mem::forget(guard);
                });
                dying.join().unwrap();
            });
        }

        /// A name was changed somewhere in the file system.
        fn rename(&self) {
            self.world.log.file_systems().note_change(self.entry.file_system);
            self.world.log.file_systems().note_change(self.entry.file_system);
        }

        fn is_pending(&self) -> bool {
            self.world.log.file_systems().is_pending(self.entry.file_system)
        }

        /// The records that a sync appends, and whether it is real. Leaves out the marks of a file
        /// that has not grown, which only confirm the kernel's changes now and then.
        fn sync(&self, wanted: Sync) -> (String, bool) {
            let (log, from) = (self.world.log, self.world.log.ring().head());
            let has_grown = log.has_grown(self.entry.file);
            let before = log.ring().stats().total(Counter::SyncsReal);
            assert_eq!(self.open.sync(wanted), 0);
            let is_real = log.ring().stats().total(Counter::SyncsReal) > before;
            let records = self.world.records_since(from);
            let said = records.split(' ').filter(|record| has_grown || !record.starts_with("mark"));
            (said.collect::<Vec<_>>().join(" "), is_real)
        }
    }

    fn answered(records: &str) -> (String, bool) {
        (records.to_owned(), false)
    }

    fn real(records: &str) -> (String, bool) {
        (records.to_owned(), true)
    }

    #[test]
    fn a_sync_after_growth_marks_and_after_overwrites_does_nothing() {
        let case = Case::new();
        assert_eq!(case.sync(Sync::All), answered(""));
        case.write(0);
        assert_eq!(case.sync(Sync::Data), answered(""));
        assert_eq!(case.sync(Sync::All), answered(""));
        case.write(2);
        assert_eq!(case.sync(Sync::Data), answered("mark:6"));
        assert_eq!(case.sync(Sync::Data), answered(""));
        case.write(2);
        assert_eq!(case.sync(Sync::Data), answered(""), "promised bytes are overwritten");
    }

    #[test]
    fn a_sync_after_overwrites_says_when_the_kernel_has_done_them() {
        let case = Case::new();
        let from = case.world.log.ring().head();
        assert_eq!(case.open.sync(Sync::Data), 0);
        assert_eq!(case.world.records_since(from), "", "nothing was written");
        case.write(0);
        assert_eq!(case.open.sync(Sync::Data), 0);
        assert_eq!(case.world.records_since(from), "0 mark:4");
        let (from, at_once) = (case.world.log.ring().head(), case.open.sync(Sync::Data));
        assert_eq!((at_once, &*case.world.records_since(from)), (0, ""), "nothing was written");
        case.write(0);
        assert_eq!(case.open.sync(Sync::All), 0);
        assert_eq!(case.world.records_since(from), "0 mark:4", "however soon after the last");
        case.write(0);
        case.rename();
        let from = case.world.log.ring().head();
        assert_eq!(case.open.sync(Sync::All), 0);
        assert_eq!(case.world.records_since(from), "mark:4", "a real sync says so, too");
        case.write(0);
        assert_eq!(case.open.sync(Sync::Data), 0);
        let guard = case.open.lock(case.entry).unwrap();
        assert!(guard.was_written(), "an `fsync` may still commit the time of the write");
    }

    #[test]
    fn a_sync_that_finds_another_size_is_real_and_the_file_leaves() {
        let case = Case::new();
        case.write(0);
        case.file.set_len(1).unwrap();
        assert_eq!(case.sync(Sync::Data), real("end"));
        assert_eq!(case.world.log.ring().stats().total(Counter::SyncsOutside), 1);
    }

    #[test]
    fn what_a_killed_thread_wrote_is_not_undone_by_older_records_once_it_was_synced() {
        let case = Case::new();
        case.write(0);
        case.write_and_die();
        let first_of_its_descriptor = case.world.open(&case.file, 0);
        let from = case.world.log.ring().head();
        assert_eq!(first_of_its_descriptor.sync(Sync::Data), 0);
        assert_eq!(case.world.records_since(from), "end");
        assert_eq!(case.world.log.operations().all().count(), 0);
    }

    #[test]
    fn only_a_sync_that_would_commit_waits_for_what_is_pending() {
        let case = Case::new();
        case.write(0);
        case.rename();
        assert_eq!(case.sync(Sync::Data), answered(""));
        assert!(case.is_pending());
        assert_eq!(case.sync(Sync::All), real(""), "the time of the write");
        assert!(case.is_pending(), "the kernel may have committed the time before the change");
        assert_eq!(case.sync(Sync::All), real(""), "a read may have set the time of access");
        assert_eq!(case.sync(Sync::Data), answered(""), "which `fdatasync` leaves alone");
        case.write(4);
        assert_eq!(case.sync(Sync::Data), real("mark:8"));
        assert!(!case.is_pending(), "growth that began after it was committed");
    }

    #[test]
    fn growth_before_a_change_does_not_commit_it() {
        let case = Case::new();
        case.write(4);
        case.rename();
        assert_eq!(case.sync(Sync::Data), real("mark:8"));
        assert!(case.is_pending(), "the kernel may have committed the growth before the change");
        case.write(6);
        assert_eq!(case.sync(Sync::Data), real("mark:10"));
        assert!(!case.is_pending());
    }

    #[test]
    fn an_overwrite_after_a_change_commits_it_once_it_has_set_the_files_times() {
        let case = Case::new();
        case.rename();
        let changed_at = || query::fstat(case.open.fd).map(|stat| stat.st_ctime_nsec).unwrap();
        let before = changed_at();
        // The clock of files moves in ticks: within one a write leaves the inode as it is.
        while changed_at() == before {
            case.write(0);
        }
        assert_eq!(case.sync(Sync::All), real(""));
        assert!(!case.is_pending());
        case.write(0);
        assert_eq!(case.sync(Sync::All), answered(""));
    }

    #[test]
    fn each_change_waits_for_an_overwrite_of_its_own_that_sets_the_files_times() {
        let case = Case::new();
        let changed_at = || query::fstat(case.open.fd).map(|stat| stat.st_ctime_nsec).unwrap();
        for _ in 0..3 {
            case.rename();
            let before = changed_at();
            while changed_at() == before {
                case.write(0);
            }
            // The first of these writes is not watched, and the next change is watched again.
            case.write(0);
        }
        case.rename();
        assert_eq!(case.sync(Sync::All), real(""));
        assert!(case.is_pending(), "no overwrite came after the last change");
        case.rename();
        let before = changed_at();
        while changed_at() == before {
            case.write(0);
        }
        assert_eq!(case.sync(Sync::All), real(""));
        assert!(!case.is_pending());
    }

    #[test]
    fn a_sync_after_the_file_was_renamed_is_real() {
        let case = Case::new();
        case.world.log.note_own_change(case.entry.file);
        assert_eq!(case.sync(Sync::Data), real(""));
        assert_eq!(case.sync(Sync::Data), answered(""));
    }

    #[test]
    fn a_failed_write_back_is_told_once() {
        let case = Case::new();
        case.world.log.note_failure(case.entry.file).unwrap();
        assert_eq!(case.open.sync(Sync::Data), FAILED);
        assert_eq!(case.open.sync(Sync::Data), 0);
    }

    #[test]
    fn a_file_that_logs_more_than_a_sync_costs_leaves_at_one() {
        let case = Case::new();
        let guard = case.open.lock(case.entry).unwrap();
        let (bytes, size) = (GAIN_BYTES_MAX + 1, guard.size());
        guard.note_change(tidegate::log::Change { bytes, grew: false, journaled: None, size });
        drop(guard);
        assert_eq!(case.sync(Sync::Data), real("end"));
        assert_eq!(case.sync(Sync::Data), real(""));
    }

    #[test]
    fn a_real_sync_is_counted_by_its_cause() {
        let world = World::new();
        let file = world.file("file");
        let total = |counter| world.log.ring().stats().total(counter);
        for (flags, cause) in [(0, Counter::SyncsNotYet), (PINNED, Counter::SyncsPinned)] {
            let open = world.open(&file, flags);
            assert_eq!(open.sync_unadmitted(Sync::All, open.admission().unwrap_err()), 0);
            assert_eq!(total(cause), 1, "{cause:?}");
        }
        let open = world.open(&file, 0);
        assert_eq!(open.sync_refused(open.entry(), Sync::All), 0);
        assert_eq!((total(Counter::SyncsRefused), total(Counter::SyncsReal)), (1, 3));
        open.pin_until_exit().unwrap();
        assert_eq!(open.sync_refused(open.entry(), Sync::All), 0);
        assert_eq!(total(Counter::SyncsPinned), 2);
        world.log.processes().suspend();
        assert_eq!(world.open(&file, PINNED).sync_old(Sync::All), 0);
        assert_eq!(total(Counter::SyncsSuspended), 1);
    }
}
