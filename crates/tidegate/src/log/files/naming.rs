//! Files that the log can recreate, and their names: the lock of the names of a file system, the
//! descriptor that tells the supervisor of the file system's failures, the names in a file's story.
//!
//! Invariants (B2, B8 and B9 of docs/decisions/run-logs-what-was-synced.md):
//! 1. A [`RecordKind::Make`] or [`RecordKind::Name`] is appended under the lock of the names of its
//!    file system, while [`NamesGuard::may_record`] holds. The lock for a Name is held until the
//!    kernel has made the change: these records have the order of the changes.
//! 2. The supervisor closes its descriptor of a file system under that lock, and only while the log
//!    has no record of the file system's names.
//! 3. A killed holder leaves the lock *orphaned*. No names are recorded until the file of the
//!    interrupted operation has left the log.
//! 4. A file *has names in the log* while the log has a Make or a Name of its story. Before any
//!    change of its names or attributes that is not recorded, it leaves the log.
//!
//! Locks are taken in this order: names, file.
//!
//! [`RecordKind::Make`]: crate::log::RecordKind::Make
//! [`RecordKind::Name`]: crate::log::RecordKind::Name

use std::time::Duration;

use super::file_systems::{FileSystemRef, FileSystems};
use super::supervising::wait_for_supervisor;
use super::{FileGuard, Log};
use crate::log::control::table::{FileRef, flag};
use crate::log::control::{KEPT_AT, TIMEOUT};
use crate::log::error::{AppendError, LockError};
use crate::log::pool::heartbeat::TICK_NS;
use crate::log::pool::names::Make;
use crate::log::pool::record::Definition;
use crate::pmem::{LockFailure, Locked};
use crate::sync::Ordering;
use crate::tier::clock::monotonic_ns;

/// The lock of the names of a file system.
pub struct NamesGuard<'a> {
    file_systems: FileSystems<'a>,
    file_system: FileSystemRef,
    _locked: Locked<'a>,
}

/// The supervisor holds a descriptor of the file system.
const HELD: u64 = 1;
/// The supervisor cannot hold the file system.
const REFUSED: u64 = 2;

impl<'a> FileSystems<'a> {
    /// Notes how far the clock of file times is ahead of the clock since boot, in nanoseconds.
    /// Returns `false` if the clock was set back since the log is in use: the parent of a new file
    /// may then have a time later than now.
    pub fn note_clock(self, ahead_ns: u64) -> bool {
        let most_ns = self.ring.control.clock_ahead_ns().fetch_max(ahead_ns, Ordering::SeqCst);
        ahead_ns.saturating_add(TICK_NS) >= most_ns
    }

    /// Locks the names of a file system. Waits a second at most.
    ///
    /// # Errors
    /// [`LockError`]; the change is then made without a record.
    pub fn lock_names(self, file_system: FileSystemRef) -> Result<NamesGuard<'a>, LockError> {
        self.lock_names_within(file_system, TIMEOUT)
    }

    /// Locks the names of a file system. Waits at most `timeout`.
    ///
    /// # Errors
    /// [`LockError`]; the change is then made without a record.
    pub fn lock_names_within(
        self,
        file_system: FileSystemRef,
        timeout: Duration,
    ) -> Result<NamesGuard<'a>, LockError> {
        let words = self.words(file_system);
        let locked = self.ring.control.memory().lock(words.names_lock_at, timeout);
        let locked = locked.map_err(|failure| match failure {
            LockFailure::TimedOut => LockError::Busy,
            LockFailure::Reentered => LockError::Reentered,
            LockFailure::Damaged => LockError::Stale,
        })?;
        if locked.owner_died() {
            words.orphaned.store(1, Ordering::SeqCst);
        }
        Ok(NamesGuard { file_systems: self, file_system, _locked: locked })
    }

    /// Asks the supervisor to hold the file system of `file`, whose story has begun.
    pub fn want_held(self, file_system: FileSystemRef, file: FileRef) {
        self.words(file_system).wanted_by.store(file.to_word(), Ordering::SeqCst);
        self.ring.control.want_held().store(1, std::sync::atomic::Ordering::SeqCst);
        self.ring.wake_cleaner();
    }

    /// Returns each file system [wanted](Self::want_held) since the last call, and one of its
    /// files.
    pub fn take_wanted_held(self) -> Vec<(FileSystemRef, FileRef)> {
        if self.ring.control.want_held().swap(0, std::sync::atomic::Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        let wanted = self.all().filter_map(|file_system| {
            let word = self.words(file_system).wanted_by.swap(0, Ordering::SeqCst);
            (word != 0).then(|| (file_system, FileRef::from_word(word)))
        });
        wanted.collect()
    }

    /// Notes that the supervisor holds a descriptor of the file system.
    pub fn note_held(self, file_system: FileSystemRef) {
        self.words(file_system).held.store(HELD, Ordering::SeqCst);
        self.ring.control.announce(KEPT_AT);
    }

    /// Notes for good that the supervisor cannot hold the file system, or find files by handle.
    pub fn refuse_held(self, file_system: FileSystemRef) {
        self.words(file_system).held.store(REFUSED, Ordering::SeqCst);
        self.ring.control.announce(KEPT_AT);
    }

    /// Returns whether the supervisor [cannot hold](Self::refuse_held) the file system, or the file
    /// system [has copies](Self::has_copies).
    pub fn is_refused(self, file_system: FileSystemRef) -> bool {
        self.has_copies(file_system)
            || self.words(file_system).held.load(Ordering::SeqCst) == REFUSED
    }

    /// Returns whether the supervisor holds the file system and can find its files by handle.
    pub fn is_held(self, file_system: FileSystemRef) -> bool {
        self.words(file_system).held.load(Ordering::SeqCst) == HELD
    }

    /// Returns whether the names' lock is orphaned: its next owner found that a holder was killed.
    pub fn has_orphaned_names(self, file_system: FileSystemRef) -> bool {
        self.words(file_system).orphaned.load(Ordering::SeqCst) != 0
    }

    /// Waits at most `timeout` for the supervisor to hold the file system. Returns whether it does.
    pub fn wait_for_held(self, file_system: FileSystemRef, timeout: Duration) -> bool {
        let held = self.words(file_system).held;
        wait_for_supervisor(self.ring, timeout, || held.load(Ordering::SeqCst) != 0)
            && self.is_held(file_system)
    }

    /// Returns the age of the first record of names since
    /// [`take_names_since`](Self::take_names_since); `None` if there is none.
    pub fn names_age(self) -> Option<Duration> {
        let since_ns = self.ring.control.named_ns().load(Ordering::SeqCst);
        (since_ns != 0).then(|| Duration::from_nanos(monotonic_ns().saturating_sub(since_ns)))
    }

    /// Takes the time of the first record of names since the last call, in nanoseconds of the
    /// monotonic clock. The caller is about to retire these records.
    pub fn take_names_since(self) -> Option<u64> {
        Some(self.ring.control.named_ns().swap(0, Ordering::SeqCst))
            .filter(|since_ns| *since_ns != 0)
    }

    /// Undoes [`take_names_since`](Self::take_names_since), since records were not retired.
    pub fn names_remain(self, since_ns: u64) {
        self.ring.control.named_ns().store(since_ns, Ordering::SeqCst);
    }
}

impl Log {
    /// Returns whether the log has the file's creation or changes of its names, not retired.
    pub fn has_names(&self, file: FileRef) -> bool {
        let entry = self.entry(file);
        entry.has(flag::LOGGED)
            && entry.names_end().load(Ordering::SeqCst) > self.ring.tail()
            && entry.is_of(file)
    }

    /// Returns the files with a story that a Make record covered.
    pub fn made_files(&self) -> Vec<FileRef> {
        let wanted = flag::MADE | flag::LOGGED;
        let made = self
            .entries()
            .filter(|(_, entry)| entry.flags().load(Ordering::SeqCst) & wanted == wanted);
        made.map(|(file, _)| file).collect()
    }
}

impl NamesGuard<'_> {
    /// Returns whether names of the file system may be recorded now: it commits in order, the
    /// supervisor holds it, the lock is not orphaned, and all processes can be watched.
    pub fn may_record(&self) -> bool {
        self.file_systems.commits_in_order(self.file_system)
            && self.file_systems.is_held(self.file_system)
            && !self.is_orphaned()
            && !self.file_systems.ring.control.is_suspended()
    }

    /// Returns whether a holder was killed since the last [`repaired`](Self::repaired).
    pub fn is_orphaned(&self) -> bool {
        self.file_systems.has_orphaned_names(self.file_system)
    }

    /// Notes that no interrupted operation on names is left.
    pub fn repaired(&self) {
        self.file_systems.words(self.file_system).orphaned.store(0, Ordering::SeqCst);
    }

    /// Notes that the supervisor is about to close its descriptor of the file system.
    pub fn let_go(&self) {
        self.file_systems.words(self.file_system).held.store(0, Ordering::SeqCst);
    }
}

impl FileGuard<'_> {
    /// Appends a record of the whole file. The record covers a file whose story has
    /// [begun](Self::begin_story), or replaces the earlier records of a covered file whose names
    /// are as in its first such record. Returns `false` if the file was changed around the log.
    ///
    /// The caller holds the names' lock. It looked at `make`, `content` and the file's ctime,
    /// `changed_ns` in nanoseconds since 1970, while the file was locked and no plain write was in
    /// flight, and nothing has changed since. `unlogged` is the value of
    /// [`unlogged`](Self::unlogged) when the story began. With `data_only` the record answers an
    /// `fdatasync`. With `is_last`, no write without a record follows.
    ///
    /// # Errors
    /// [`AppendError`]: the file is not covered.
    pub fn make(
        &self,
        (make, content, changed_ns): (&Make<'_>, &[u8], u64),
        definition: &Definition<'_>,
        unlogged: u64,
        data_only: bool,
        is_last: bool,
    ) -> Result<bool, AppendError> {
        let entry = &self.entry;
        if !self.is_undisturbed_since(unlogged) {
            return Ok(false);
        }
        let mut ticket = self.begin()?;
        if ticket.needs_define() {
            self.define_again(&mut ticket, definition)?;
        }
        ticket.make((make, content, changed_ns), is_last)?;
        let (size, end) = (content.len() as u64, entry.names_end().load(Ordering::Relaxed));
        entry.changed_end().store(end, Ordering::Relaxed);
        entry.marked_at().store(end, Ordering::Relaxed);
        entry.durable_size().store(size, Ordering::Relaxed);
        entry.size().store(size, Ordering::Relaxed);
        entry.unsynced_bytes().store(0, Ordering::Relaxed);
        entry.synced().fetch_max(unlogged, Ordering::SeqCst);
        self.entry.clear(flag::GREW | flag::WRITTEN | flag::NAMED);
        // The kernel may commit nothing for an `fdatasync`, so that an `fsync` would still have to.
        // And the disk may have any size that the file ever had.
        let changed = if data_only { flag::WRITTEN } else { 0 };
        self.entry.set(flag::COVERED | flag::DENSE | flag::CUT | flag::MADE | changed);
        Ok(true)
    }

    /// Notes that the kernel has made a recorded change of the file's names. `journaled` is the
    /// file system's count of changes from before the change.
    pub fn note_named(&self, journaled: u64) {
        self.entry.journaled_changes().fetch_max(journaled, Ordering::SeqCst);
        self.entry.set(flag::NAMED | flag::RENAMED | flag::MOVED);
    }

    /// Notes that the kernel has made a recorded change of the file's attributes. `journaled` is
    /// the file system's count of changes from before the change.
    pub fn note_attributes(&self, journaled: u64) {
        self.entry.journaled_changes().fetch_max(journaled, Ordering::SeqCst);
        self.entry.set(flag::NAMED);
    }

    /// Returns whether the story has changed the file's names.
    pub fn was_moved(&self) -> bool {
        self.entry.has(flag::MOVED)
    }

    /// Returns whether a recorded change of the file's names or attributes came after its last
    /// sync. The next sync would commit the change, perhaps even an `fdatasync`.
    pub fn was_named(&self) -> bool {
        self.entry.has(flag::NAMED)
    }

    /// Returns the end of the last record with the file's creation or a change of its names.
    pub fn named_until(&self) -> u64 {
        self.entry.names_end().load(Ordering::SeqCst)
    }

    /// Notes that a sync, real or answered while nothing was pending, has promised the names.
    pub fn names_synced(&self) {
        self.entry.clear(flag::NAMED);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::log::pool::names::{Attributes, NameAt, NameChange, NameRecord, Timestamp};
    use crate::log::pool::record::FileHandle;
    use crate::log::tests::{definition, key, log};
    use crate::log::{RecordKind, Scanner};

    fn at(name: &[u8]) -> NameAt<'_> {
        NameAt { parent: FileHandle::new(1, &[1; 8]).unwrap(), name }
    }

    fn make() -> Make<'static> {
        let time = Timestamp::default();
        let attributes = Attributes {
            mode: 0o644,
            owner: 0,
            group: 0,
            accessed: time,
            modified: time,
            extended: b"",
        };
        Make { at: at(b"file"), parent_changed: time, attributes }
    }

    fn made(log: &Log, data_only: bool) -> FileRef {
        let file = log.entry_for(&key(1)).unwrap();
        let guard = log.lock(file).unwrap();
        guard.begin_story(&definition(1), 3).unwrap();
        let unlogged = guard.unlogged();
        assert_eq!(
            guard.make((&make(), b"abc", 0), &definition(1), unlogged, data_only, true),
            Ok(true)
        );
        file
    }

    #[test]
    fn a_record_of_all_of_a_file_covers_it() {
        let log = log();
        let file = made(&log, false);
        assert!(log.is_covered(file) && log.has_names(file) && log.made_files() == [file]);
        let guard = log.lock(file).unwrap();
        assert!(!guard.was_written() && !guard.has_grown() && !guard.grows(3) && guard.grows(4));
        assert!(guard.has_live_changes());
        log.ring().retire_to(log.ring().safe_position()).unwrap();
        assert!(!log.has_names(file) && guard.is_covered(), "what was retired is on the disk");
        guard.end_story().unwrap();
        assert_eq!(log.made_files(), []);
    }

    #[test]
    fn a_sealed_file_is_covered_again_only_where_nobody_has_marked_it() {
        let log = log();
        let file = made(&log, false);
        let guard = log.lock(file).unwrap();
        guard.keep_unlogged();
        assert!(guard.is_sealed() && !guard.is_covered());
        let sealed = guard.unlogged();
        guard.keep_unlogged();
        assert!(!guard.unseal(guard.unlogged()), "two may change it");
        guard.stop_keeping();
        assert!(!guard.unseal(sealed), "it may have been changed since");
        assert!(guard.is_sealed() && guard.unseal(guard.unlogged()));
        assert!(
            guard.is_covered() && !guard.is_sealed() && log.keepers().processes().next().is_none()
        );
        guard.keep_unlogged();
        let process = log.keepers().processes().next().unwrap();
        drop(guard);
        assert_eq!(
            log.keepers().stop_keeping_of(process, std::time::Duration::ZERO),
            [file],
            "not yet"
        );
        log.lock(file).unwrap().end_story().unwrap();
        assert!(log.keepers().stop_keeping_of(process, std::time::Duration::ZERO).is_empty());
    }

    #[test]
    fn a_file_that_was_made_durable_before_its_record_needs_no_sync_until_one_is_answered() {
        let log = log();
        let file = made(&log, false);
        let guard = log.lock(file).unwrap();
        assert!(guard.needs_sync());
        guard.note_retired();
        assert!(!guard.needs_sync());
        log.note_sync_skipped(file);
        assert!(guard.needs_sync(), "the record may have more");
        guard.note_retired();
        guard.mark(3, 0).unwrap();
        assert!(guard.needs_sync());
        guard.note_retired();
        guard.note_failure();
        assert!(guard.needs_sync());
    }

    #[test]
    fn a_record_that_answers_fdatasync_leaves_the_inode_changed() {
        let log = log();
        let file = made(&log, true);
        let guard = log.lock(file).unwrap();
        assert!(guard.was_written() && !guard.has_grown());
    }

    #[test]
    fn a_file_that_was_changed_around_the_log_is_not_made() {
        let log = log();
        let file = log.entry_for(&key(1)).unwrap();
        let guard = log.lock(file).unwrap();
        let make = make();
        assert_eq!(
            guard.make((&make, b"", 0), &definition(1), 0, false, true),
            Ok(false),
            "no story"
        );
        guard.begin_story(&definition(1), 0).unwrap();
        let unlogged = guard.unlogged();
        guard.mark_unlogged(false);
        assert_eq!(guard.make((&make, b"", 0), &definition(1), unlogged, false, true), Ok(false));
        let unsound = Make { at: at(b"a/b"), ..make };
        let result = guard.make((&unsound, b"", 0), &definition(1), guard.unlogged(), false, true);
        assert_eq!(result, Err(AppendError::Unsound));
        assert!(!log.has_names(file));
    }

    #[test]
    fn a_change_of_names_waits_for_the_next_sync() {
        let log = log();
        let file = made(&log, false);
        let guard = log.lock(file).unwrap();
        let mut ticket = guard.begin().unwrap();
        let change = NameChange::Rename { from: at(b"file"), to: at(b"other"), replaced: None };
        let position = ticket.name(&NameRecord { change, links: 1 }).unwrap();
        guard.note_named(7);
        drop(ticket);
        assert!(guard.was_named() && guard.journaled_changes() == 7);
        let last =
            Scanner::new(log.ring().pool(), log.ring().tail(), log.ring().head()).last().unwrap();
        assert_eq!((last.kind, last.position), (RecordKind::Name, position));
        guard.names_synced();
        assert!(!guard.was_named() && log.has_names(file));
        guard.end_story().unwrap();
        assert!(!log.has_names(file));
    }

    #[test]
    fn names_are_recorded_only_while_the_supervisor_holds_the_file_system() {
        let log = log();
        let fs = log.file_systems().find_or_add(5, true).unwrap();
        let file = log.entry_for(&key(1)).unwrap();
        assert!(
            !log.file_systems().lock_names(fs).unwrap().may_record()
                && log.file_systems().take_wanted_held().is_empty()
        );
        log.file_systems().want_held(fs, file);
        assert_eq!(log.file_systems().take_wanted_held(), [(fs, file)]);
        assert!(log.file_systems().take_wanted_held().is_empty());
        log.file_systems().note_held(fs);
        assert!(
            log.file_systems().wait_for_held(fs, Duration::ZERO)
                && log.file_systems().lock_names(fs).unwrap().may_record()
        );
        log.processes().suspend();
        assert!(!log.file_systems().lock_names(fs).unwrap().may_record());
        log.processes().resume_logging();
        log.file_systems().lock_names(fs).unwrap().let_go();
        assert!(!log.file_systems().is_held(fs));
    }

    #[test]
    fn a_holder_that_was_killed_leaves_the_names_to_the_supervisor() {
        let log = log();
        let fs = log.file_systems().find_or_add(5, true).unwrap();
        log.file_systems().note_held(fs);
        std::thread::scope(|scope| {
            scope
                .spawn(|| std::mem::forget(log.file_systems().lock_names(fs).unwrap()))
                .join()
                .unwrap();
        });
        assert!(!log.file_systems().lock_names(fs).unwrap().may_record());
        let names = log.file_systems().lock_names(fs).unwrap();
        assert!(names.is_orphaned(), "until it was seen to");
        names.repaired();
        assert!(names.may_record());
    }

    #[test]
    fn the_cleaner_is_told_of_the_first_record_of_a_batch() {
        let log = log();
        assert_eq!(log.file_systems().names_age(), None);
        made(&log, false);
        let since_ns = log.file_systems().take_names_since().unwrap();
        assert_eq!(log.file_systems().names_age(), None);
        log.file_systems().names_remain(since_ns);
        assert!(log.file_systems().names_age().is_some());
    }
}
