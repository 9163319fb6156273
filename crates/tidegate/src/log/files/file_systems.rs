//! The pending changes of each file system: names, attributes and sizes that the kernel has changed
//! and its journal may lack.
//!
//! A sync that commits the journal makes all earlier changes durable (ext4 with a journal, XFS). So
//! the log must not answer a sync while such changes are pending.
//!
//! Invariants:
//! 1. Each change is counted before its call and after it. So it is pending from before the kernel
//!    makes it until the end of a sync that began after it.
//! 2. The count for `committed` was read before a change that a successful sync has made durable,
//!    and only file systems that commit in order take it.
//! 3. Each change has a number, the count before it. A number that is not committed stands for a
//!    change of any kind, unless its word in the ring of kinds says otherwise: a creation, which
//!    only syncs of directories wait for, or a change that no sync waits for any more. A word has
//!    the number beside the kind, and counts only for that number.
//!
//! Entry points: [`FileSystems::find_or_add`], [`FileSystems::note_change`],
//! [`FileSystems::note_creation_everywhere`], [`FileSystems::take_off`],
//! [`FileSystems::is_pending`], [`FileSystems::is_pending_for_directories`],
//! [`FileSystems::committed`].

use crate::log::control::{
    Control, ENTRIES_AT, FILE_SYSTEM_BYTES, FILE_SYSTEMS, FILE_SYSTEMS_AT, KINDS_AT, NAMES_LOCK_AT,
    STATS_AT,
};
use crate::log::pool::record::{FileSystemId, identity};
use crate::log::ring::Ring;
use crate::sync::{AtomicU64, Ordering};

/// Changes of each file system whose kind is known: the last ones.
const KINDS: u64 = 1024;
/// Numbers taken off that are skipped one by one before `committed` moves past them.
const LOOKS: u64 = 16;
/// File systems that a [`ChangeNumbers`] covers.
const TRACKED: usize = 4;

/// The change created a regular file.
const CREATION: u64 = 1;
/// No sync waits for the change any more.
const TAKEN_OFF: u64 = 2;

const _: () = assert!(FILE_SYSTEMS_AT + FILE_SYSTEMS * FILE_SYSTEM_BYTES <= STATS_AT - 64);
const _: () = assert!(KINDS_AT + FILE_SYSTEMS * KINDS * 8 <= ENTRIES_AT);

/// The numbers of one change in the counts of the first file systems that the log knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChangeNumbers {
    numbers: [u64; TRACKED],
    known: usize,
}

impl ChangeNumbers {
    /// Returns the number in a file system, if the change was counted there and the number is kept.
    #[inline]
    pub fn of(&self, file_system: FileSystemRef) -> Option<u64> {
        let at = usize::try_from(file_system.0).ok()?;
        self.numbers.get(..self.known)?.get(at).copied()
    }

    #[inline]
    fn note(&mut self, number: u64) {
        if let Some(place) = self.numbers.get_mut(self.known) {
            *place = number;
            self.known += 1;
        }
    }
}

/// A file system that the log knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileSystemRef(u32);

impl FileSystemRef {
    /// Returns the reference as a number, below 64.
    pub fn to_number(self) -> u32 {
        self.0
    }

    /// Returns the reference with a number from [`to_number`](Self::to_number).
    pub fn from_number(number: u32) -> Self {
        Self(number)
    }
}

pub(in crate::log) struct Words<'a> {
    /// A hash of the UUID; 0: free. Another value never changes.
    id: &'a AtomicU64,
    commits_in_order: &'a AtomicU64,
    changes: &'a AtomicU64,
    committed: &'a AtomicU64,
    /// Not zero: a sync commits its own file only, so that syncs never wait for other changes.
    commits_alone: &'a AtomicU64,
    /// Not zero: the supervisor holds a descriptor of the file system.
    pub(in crate::log) held: &'a AtomicU64,
    /// A file on the file system that the supervisor is asked to hold; 0: it is not asked.
    pub(in crate::log) wanted_by: &'a AtomicU64,
    /// Not zero: a holder of the names' lock was killed, and its record is not repaired.
    pub(in crate::log) orphaned: &'a AtomicU64,
    /// Not zero: another mounted file system has the UUID.
    copies: &'a AtomicU64,
    /// Offset of the names' lock.
    pub(in crate::log) names_lock_at: u64,
}

pub(in crate::log) fn words(control: &Control, number: u64) -> Words<'_> {
    let at = FILE_SYSTEMS_AT + number % FILE_SYSTEMS * FILE_SYSTEM_BYTES;
    let word = |offset| control.memory().word(at + offset);
    Words {
        id: word(0),
        commits_in_order: word(8),
        changes: word(16),
        committed: word(24),
        commits_alone: word(32),
        held: word(56),
        wanted_by: word(64),
        orphaned: word(72),
        copies: word(80),
        names_lock_at: at + NAMES_LOCK_AT,
    }
}

/// Returns the word for the kind of a change; it may still have an older change.
fn kind_word(control: &Control, file_system: u64, number: u64) -> &AtomicU64 {
    let at = file_system % FILE_SYSTEMS * KINDS + number % KINDS;
    control.memory().word(KINDS_AT + at * 8)
}

/// The pending changes of each file system, and the locks of their names.
#[derive(Clone, Copy)]
pub struct FileSystems<'a> {
    pub(super) ring: &'a Ring,
}

impl<'a> FileSystems<'a> {
    #[inline]
    pub(super) fn words(self, file_system: FileSystemRef) -> Words<'a> {
        words(&self.ring.control, file_system.0.into())
    }

    /// Returns the file system with this id, a hash of its UUID, not 0; adds it if the log does not
    /// know it. With `commits_in_order`, a sync that commits one of its changes commits all earlier
    /// ones. Returns `None` if the log has no space for another file system.
    pub fn find_or_add(self, id: u64, commits_in_order: bool) -> Option<FileSystemRef> {
        (0..FILE_SYSTEMS).find_map(|number| {
            let words = words(&self.ring.control, number);
            let found = match words.id.load(Ordering::Acquire) {
                // One thread wins a free slot. The others have the same id, or try the next slot.
                0 => words.id.compare_exchange(0, id, Ordering::AcqRel, Ordering::Acquire),
                other => Err(other),
            };
            let is_it = found.is_ok() || found == Err(id);
            if found.is_ok() {
                words.commits_in_order.store(u64::from(commits_in_order), Ordering::Release);
                // Changes from before the log knew the file system were not counted.
                words.changes.fetch_add(1, Ordering::SeqCst);
            }
            is_it.then(|| FileSystemRef(u32::try_from(number).unwrap_or(0)))
        })
    }

    /// Returns the file system with this UUID, if the log knows that it commits in order.
    pub fn with_journal(self, uuid: &FileSystemId) -> Option<FileSystemRef> {
        self.with_uuid(uuid).filter(|found| self.commits_in_order(*found))
    }

    /// Returns the file system with this UUID, if the log knows it.
    pub fn with_uuid(self, uuid: &FileSystemId) -> Option<FileSystemRef> {
        let id = identity(uuid, 0, b"");
        let has_id = |found: &FileSystemRef| self.words(*found).id.load(Ordering::Acquire) == id;
        self.all().find(has_id)
    }

    /// Notes whether several file systems with the UUID of this one are mounted. Recovery could not
    /// tell them apart, so none of their files is covered meanwhile. Returns whether that is new.
    pub fn note_copies(self, file_system: FileSystemRef, has_copies: bool) -> bool {
        let word = self.words(file_system).copies;
        word.swap(has_copies.into(), Ordering::SeqCst) != u64::from(has_copies)
    }

    /// Returns whether several file systems with this UUID are known to be mounted.
    pub fn has_copies(self, file_system: FileSystemRef) -> bool {
        self.words(file_system).copies.load(Ordering::SeqCst) != 0
    }

    /// Counts a change of names, attributes or sizes in the file system. The caller calls this
    /// before the system call and after it.
    #[inline]
    pub fn note_change(self, file_system: FileSystemRef) {
        self.words(file_system).changes.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts a change in each file system, since the caller does not know which one it is in.
    #[inline]
    pub fn note_change_everywhere(self) -> ChangeNumbers {
        self.count_everywhere(|_, _| ())
    }

    /// Counts a regular file's creation in each file system; it holds up syncs of directories only.
    #[inline]
    pub fn note_creation_everywhere(self) -> ChangeNumbers {
        let set = |file_system, number| {
            let word = kind_word(&self.ring.control, file_system, number);
            word.store(number << 2 | CREATION, Ordering::SeqCst);
        };
        self.count_everywhere(set)
    }

    #[inline]
    fn count_everywhere(self, set_kind: impl Fn(u64, u64)) -> ChangeNumbers {
        let mut numbers = ChangeNumbers::default();
        for file_system in 0..FILE_SYSTEMS {
            let words = words(&self.ring.control, file_system);
            if words.id.load(Ordering::Acquire) == 0 {
                break;
            }
            let number = words.changes.fetch_add(1, Ordering::SeqCst);
            set_kind(file_system, number);
            numbers.note(number);
        }
        numbers
    }

    /// Notes that no sync has to wait for the change with this number any more: the change is on
    /// the disk or in a durable record, or was not made.
    pub fn take_off(self, file_system: FileSystemRef, number: u64) {
        let word = kind_word(&self.ring.control, file_system.0.into(), number);
        word.store(number << 2 | TAKEN_OFF, Ordering::SeqCst);
    }

    /// Returns the count of changes, for [`committed`](Self::committed).
    #[inline]
    pub fn changes(self, file_system: FileSystemRef) -> u64 {
        self.words(file_system).changes.load(Ordering::SeqCst)
    }

    /// Returns whether a change that syncs of files wait for may not be on the disk.
    #[inline]
    pub fn is_pending(self, file_system: FileSystemRef) -> bool {
        self.waits_for(file_system, |_, kind| kind != CREATION)
    }

    /// Returns whether a change that syncs of files wait for may not be on the disk, apart from
    /// changes whose numbers satisfy `is_own`.
    pub fn is_pending_beside(
        self,
        file_system: FileSystemRef,
        is_own: impl Fn(u64) -> bool,
    ) -> bool {
        self.waits_for(file_system, |number, kind| kind != CREATION && !is_own(number))
    }

    /// Returns whether a change that syncs of directories wait for may not be on the disk.
    pub fn is_pending_for_directories(self, file_system: FileSystemRef) -> bool {
        self.waits_for(file_system, |_, _| true)
    }

    /// Returns whether a change is not committed, not [taken off](Self::take_off), and satisfies
    /// `waits`, which gets its number and kind.
    #[inline]
    fn waits_for(self, file_system: FileSystemRef, waits: impl Fn(u64, u64) -> bool) -> bool {
        let words = self.words(file_system);
        let changes = words.changes.load(Ordering::SeqCst);
        let committed = words.committed.load(Ordering::SeqCst);
        if committed >= changes || words.commits_alone.load(Ordering::SeqCst) != 0 {
            return false;
        }
        if changes - committed > KINDS {
            return true;
        }
        let kind_of = |number: u64| {
            let word = kind_word(&self.ring.control, file_system.0.into(), number);
            let word = word.load(Ordering::SeqCst);
            // A word of another number says nothing about this one.
            if word >> 2 == number { word & 3 } else { 0 }
        };
        let is_left = |number: &u64| kind_of(*number) != TAKEN_OFF;
        let first = (committed..changes).find(is_left).unwrap_or(changes);
        if first > committed + LOOKS {
            // So that later calls skip these numbers.
            words.committed.fetch_max(first, Ordering::SeqCst);
        }
        (first..changes).filter(is_left).any(|number| waits(number, kind_of(number)))
    }

    /// Returns whether a sync that commits one change of the file system commits all earlier ones.
    pub fn commits_in_order(self, file_system: FileSystemRef) -> bool {
        let words = self.words(file_system);
        words.commits_in_order.load(Ordering::Acquire) != 0
    }

    /// Notes that the file system has no journal: a sync of a file makes only that file durable. So
    /// nothing is pending but a file's [own changes](crate::log::FileGuard::has_own_changes).
    pub fn note_commits_alone(self, file_system: FileSystemRef) {
        self.words(file_system).commits_alone.store(1, Ordering::SeqCst);
    }

    /// Notes that a real sync has made a change from after [`changes`](Self::changes) was `seen`
    /// durable. If the file system commits in order, all changes counted by then are durable.
    pub fn committed(self, file_system: FileSystemRef, seen: u64) {
        let words = self.words(file_system);
        if words.commits_in_order.load(Ordering::Acquire) != 0 {
            words.committed.fetch_max(seen, Ordering::SeqCst);
        }
    }

    /// Notes the success of a sync of the whole file system that began after
    /// [`changes`](Self::changes) was `seen`.
    pub fn synced_whole(self, file_system: FileSystemRef, seen: u64) {
        let words = self.words(file_system);
        words.committed.fetch_max(seen, Ordering::SeqCst);
    }

    /// Returns all file systems that the log knows.
    pub fn all(self) -> impl Iterator<Item = FileSystemRef> + 'a {
        let known =
            |number: &u64| words(&self.ring.control, *number).id.load(Ordering::Acquire) != 0;
        (0..FILE_SYSTEMS)
            .take_while(known)
            .map(|number| FileSystemRef(u32::try_from(number).unwrap_or(0)))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::log::tests::log;

    #[test]
    fn a_change_is_pending_until_something_later_was_synced() {
        let log = log();
        let fs = log.file_systems().find_or_add(5, true).unwrap();
        assert_eq!(log.file_systems().find_or_add(5, true), Some(fs));
        assert!(log.file_systems().is_pending(fs), "what was changed before");
        log.file_systems().committed(fs, log.file_systems().changes(fs));
        assert!(!log.file_systems().is_pending(fs));
        log.file_systems().note_change(fs);
        let before_its_end = log.file_systems().changes(fs);
        log.file_systems().note_change(fs);
        let after = log.file_systems().changes(fs);
        assert!(log.file_systems().is_pending(fs));
        log.file_systems().committed(fs, before_its_end);
        assert!(log.file_systems().is_pending(fs), "a sync that began before the change ended");
        log.file_systems().committed(fs, after);
        assert!(!log.file_systems().is_pending(fs));
        log.file_systems().committed(fs, before_its_end);
        assert!(!log.file_systems().is_pending(fs), "an older sync that ends later");
    }

    #[test]
    fn a_file_system_without_order_is_committed_as_a_whole_only() {
        let log = log();
        let (ordered, other) = (
            log.file_systems().find_or_add(5, true).unwrap(),
            log.file_systems().find_or_add(6, false).unwrap(),
        );
        log.file_systems().note_change_everywhere();
        assert!(log.file_systems().is_pending(ordered) && log.file_systems().is_pending(other));
        log.file_systems().committed(other, log.file_systems().changes(other));
        assert!(log.file_systems().is_pending(other));
        log.file_systems().synced_whole(other, log.file_systems().changes(other));
        assert!(!log.file_systems().is_pending(other) && log.file_systems().is_pending(ordered));
        assert_eq!(log.file_systems().all().collect::<Vec<_>>(), [ordered, other]);
    }

    #[test]
    fn without_a_journal_nothing_is_pending() {
        let log = log();
        let fs = log.file_systems().find_or_add(5, false).unwrap();
        assert!(log.file_systems().is_pending(fs));
        log.file_systems().note_commits_alone(fs);
        log.file_systems().note_change(fs);
        assert!(!log.file_systems().is_pending(fs));
    }

    #[test]
    fn creations_hold_up_directories_only_until_they_are_taken_off() {
        let log = log();
        let fs = log.file_systems().find_or_add(5, true).unwrap();
        log.file_systems().committed(fs, log.file_systems().changes(fs));
        let waits = || {
            (log.file_systems().is_pending(fs), log.file_systems().is_pending_for_directories(fs))
        };
        let [first, second] =
            [(); 2].map(|()| log.file_systems().note_creation_everywhere().of(fs).unwrap());
        assert_eq!(waits(), (false, true));
        log.file_systems().take_off(fs, first);
        assert_eq!(waits(), (false, true));
        log.file_systems().take_off(fs, second);
        assert_eq!(waits(), (false, false));
        let change = log.file_systems().note_change_everywhere().of(fs).unwrap();
        assert_eq!(waits(), (true, true));
        assert!(!log.file_systems().is_pending_beside(fs, |number| number == change));
        log.file_systems().take_off(fs, change);
        assert_eq!(waits(), (false, false));
    }

    #[test]
    fn the_kind_of_an_old_change_says_nothing_of_a_new_one() {
        let log = log();
        let fs = log.file_systems().find_or_add(5, true).unwrap();
        for _ in 0..1024 {
            log.file_systems().note_creation_everywhere();
        }
        log.file_systems().committed(fs, log.file_systems().changes(fs));
        log.file_systems().note_change(fs);
        assert!(log.file_systems().is_pending(fs), "its word is of a creation");
        log.file_systems().committed(fs, log.file_systems().changes(fs));
        for _ in 0..1025 {
            let number = log.file_systems().note_creation_everywhere().of(fs).unwrap();
            log.file_systems().take_off(fs, number);
        }
        assert!(log.file_systems().is_pending(fs), "more than are known");
    }

    #[test]
    fn more_file_systems_than_there_is_place_for_are_refused() {
        let log = log();
        assert!((1..=64).all(|id| log.file_systems().find_or_add(id, true).is_some()));
        assert_eq!(log.file_systems().find_or_add(65, true), None);
    }
}
