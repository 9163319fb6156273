//! New files, their names and attributes: decides whether a record replaces a real sync.
//!
//! The rules have the numbers of docs/decisions/run-logs-what-was-synced.md.
//!
//! Invariants:
//! 1. B1: one record of the whole file answers its first sync only if the file has the one name
//!    under which this process created it, all of the file fits the record, and nothing is pending
//!    in its file system except creations and changes of its own attributes.
//! 2. B2: a change of the names of a covered file is recorded before the kernel makes it, and only
//!    while nothing is pending. The file that a rename replaces has no other name: its story ends.
//! 3. B3: if the file's creation is in a record, and its names were not changed since, a change of
//!    its attributes is recorded, after the change and only while nothing is pending. A file that
//!    would have to be synced to leave is synced and stays, if the sync commits all pending
//!    changes.
//! 4. B10: a file with an open stream, whose writes no hook sees, is *sealed*: its story is the one
//!    record that creates it. Any other operation on the file makes it leave. When the stream is
//!    closed, the file becomes covered if it is as in the record.
//!
//! Entry points: [`may_make`], [`has_all`], [`stands_for_sync`]; [`may_record_name`],
//! [`may_replace`], [`stays_by_sync`]; [`may_record_attributes`]; [`may_seal`], [`may_unseal`].

use crate::log::control::stats::Counter;
use crate::log::files::FileGuard;
use crate::log::files::naming::NamesGuard;

/// The largest file that a record creates, in bytes.
pub const MADE_BYTES_MAX: u64 = 128 << 10;

/// Attributes by `statx` that no record has: compressed, immutable, append-only, encrypted,
/// authenticated, mapped directly.
const SPECIAL: u64 = 0x4 | 0x10 | 0x20 | 0x800 | 0x10_0000 | 0x20_0000;
/// Extended flag of a file that has extended attributes.
const HAS_ATTRIBUTES: u32 = 0x8000_0000;

/// A process's facts about a file that it created, before it looks at the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct MakeFacts {
    /// The file's size in bytes.
    pub size: u64,
    /// The descriptor has `O_DIRECT`.
    pub is_direct: bool,
    /// Any file of the process may change unseen.
    pub writes_unseen: bool,
    /// The process shares its memory with its parent.
    pub in_vfork_child: bool,
    /// Logging is suspended.
    pub is_suspended: bool,
}

/// Returns whether a record may create the file at all.
pub fn may_make(
    facts: &MakeFacts,
    is_clock_steady: impl FnOnce() -> bool,
    is_wanted: impl FnOnce() -> bool,
) -> bool {
    facts.size <= MADE_BYTES_MAX
        && !facts.is_direct
        && !facts.writes_unseen
        && !facts.in_vfork_child
        && !facts.is_suspended
        && is_clock_steady()
        && is_wanted()
}

/// Returns the cause of the real sync of a new file. `is_quiet`: no other change is pending.
pub fn cause_of_new(is_quiet: bool) -> Counter {
    if is_quiet { Counter::SyncsNewRefused } else { Counter::SyncsNewPending }
}

/// Facts from the kernel about a file that a record is to hold whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileFacts {
    /// Number of the file's names.
    pub links: u32,
    /// The file has the name in the record.
    pub keeps_name: bool,
    /// An overwrite changes only bytes and times, and [all attributes](fit_record) fit a record.
    pub is_ordinary: bool,
}

/// Returns whether a record has all of a file's attributes: `attributes` from `statx`, and extended
/// `flags`, project and extent sizes from `FS_IOC_FSGETXATTR`.
pub fn fit_record(attributes: u64, flags: u32, others: [u32; 3]) -> bool {
    attributes & SPECIAL == 0 && flags & !HAS_ATTRIBUTES == 0 && others == [0; 3]
}

/// Returns whether a record has all of the file.
pub fn has_all(file: &FileFacts) -> bool {
    file.is_ordinary && file.links == 1 && file.keeps_name
}

/// Returns whether a record of the whole file replaces a sync: the sync would commit no pending
/// change except the file itself.
pub fn stands_for_sync(has_own_changes: bool, is_pending_beside: impl FnOnce() -> bool) -> bool {
    !has_own_changes && !is_pending_beside()
}

/// Facts from the log about a locked file before a change of its names or attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordFacts {
    /// The log may record names of the file system now, and no holder of the file's lock died.
    pub can_record: bool,
    /// The log has all of the file.
    pub is_covered: bool,
    /// Names or attributes were changed without a record since the last real sync.
    pub has_own_changes: bool,
}

impl RecordFacts {
    /// Reads the facts about a locked file with locked names.
    pub fn of(names: &NamesGuard<'_>, guard: &FileGuard<'_>) -> Self {
        Self {
            can_record: names.may_record() && !guard.owner_died(),
            is_covered: guard.is_logged() && guard.is_covered(),
            has_own_changes: guard.has_own_changes(),
        }
    }
}

/// Returns whether a change of the file's names may be recorded, as far as the file decides it.
pub fn may_record_name(facts: &RecordFacts, is_pending: impl FnOnce() -> bool) -> bool {
    facts.can_record && facts.is_covered && !facts.has_own_changes && !is_pending()
}

/// A file that already has the new name of a renamed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplacedFacts {
    /// The call is a rename that replaces an existing file.
    pub is_replacing: bool,
    /// It is a regular file.
    pub is_file: bool,
    /// Number of the file's names.
    pub links: u32,
    /// It is on the file system of the renamed file, and a different file.
    pub is_beside: bool,
}

/// Returns whether a record may replace the file by a rename: the file has no other name.
pub fn may_replace(replaced: &ReplacedFacts) -> bool {
    replaced.is_replacing && replaced.is_file && replaced.links == 1 && replaced.is_beside
}

/// Looks for a reason to sync a file for real, so that a change of its names can be recorded. There
/// is one if the file would have to be synced to leave, and `commits` finds that this sync commits
/// all pending changes.
pub fn stays_by_sync<T>(
    (is_covered, needs_sync, is_pending): (bool, bool, bool),
    commits: impl FnOnce() -> Option<T>,
) -> Option<T> {
    if is_covered && needs_sync && is_pending { commits() } else { None }
}

/// Facts from the log about a file that a record may have created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MadeFacts {
    /// The log has the file's creation or changes of its names in records that are not retired.
    pub has_names: bool,
    /// The story has changed the file's names.
    pub was_moved: bool,
    /// The file's size in bytes.
    pub size: u64,
}

impl MadeFacts {
    /// Reads the facts about a locked file.
    pub fn of(guard: &FileGuard<'_>) -> Self {
        let (has_names, was_moved) = (guard.log.has_names(guard.file()), guard.was_moved());
        Self { has_names, was_moved, size: guard.size() }
    }
}

/// Returns whether a change of the file's attributes may be recorded after the change.
pub fn may_record_attributes(
    facts: &RecordFacts,
    made: &MadeFacts,
    is_pending: impl FnOnce() -> bool,
) -> bool {
    let is_as_made = made.has_names && !made.was_moved && made.size <= MADE_BYTES_MAX;
    is_as_made && may_record_name(facts, is_pending)
}

/// Returns whether a record may begin the story of a file with this number of pins. Only the stream
/// of the descriptor may pin the file.
pub fn may_seal(pins: u64, has_stream: bool) -> bool {
    pins == u64::from(has_stream)
}

/// Returns whether a sealed file becomes covered when its stream is closed: the story is that of
/// the record, and the file is as in the record.
pub fn may_unseal(
    owner_died: bool,
    is_same_story: bool,
    is_as_recorded: impl FnOnce() -> bool,
) -> bool {
    !owner_died && is_same_story && is_as_recorded()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const NEW: MakeFacts = MakeFacts {
        size: MADE_BYTES_MAX,
        is_direct: false,
        writes_unseen: false,
        in_vfork_child: false,
        is_suspended: false,
    };
    const FACTS: RecordFacts =
        RecordFacts { can_record: true, is_covered: true, has_own_changes: false };

    #[test]
    fn a_record_makes_small_files_that_are_seen_in_full() {
        for bits in 0_u8..128 {
            let is = |bit: u8| bits & 1 << bit != 0;
            let facts = MakeFacts {
                size: NEW.size + u64::from(is(0)),
                is_direct: is(1),
                writes_unseen: is(2),
                in_vfork_child: is(3),
                is_suspended: is(4),
            };
            assert_eq!(may_make(&facts, || !is(5), || !is(6)), bits == 0, "{facts:?}");
        }
        assert_eq!(cause_of_new(true), Counter::SyncsNewRefused);
        assert_eq!(cause_of_new(false), Counter::SyncsNewPending);
    }

    #[test]
    fn a_record_has_all_of_an_ordinary_file_with_the_one_name() {
        for (links, keeps_name, is_ordinary) in
            [(1, true, true), (2, true, true), (0, true, true), (1, false, true), (1, true, false)]
        {
            let file = FileFacts { links, keeps_name, is_ordinary };
            assert_eq!(
                has_all(&file),
                file == FileFacts { links: 1, keeps_name: true, is_ordinary: true }
            );
        }
        assert!(fit_record(0x1000, HAS_ATTRIBUTES, [0; 3]));
        let special = [0x4, 0x10, 0x20, 0x800, 0x10_0000, 0x20_0000];
        assert!(!special.into_iter().any(|it| fit_record(it, 0, [0; 3])));
        assert!(!fit_record(0, 1, [0; 3]) && !fit_record(0, 0, [0, 0, 1]));
    }

    #[test]
    fn names_and_attributes_are_recorded_of_covered_files_while_nothing_is_pending() {
        for bits in 0_u8..64 {
            let [cannot, is_plain, has_own_changes, is_pending, is_unlinked, was_moved] =
                [1, 2, 4, 8, 16, 32].map(|bit| bits & bit != 0);
            let facts = RecordFacts { can_record: !cannot, is_covered: !is_plain, has_own_changes };
            assert_eq!(
                may_record_name(&facts, || is_pending),
                bits.trailing_zeros() >= 4,
                "{facts:?}"
            );
            assert_eq!(stands_for_sync(has_own_changes, || is_pending), bits & 0b1100 == 0);
            let made = MadeFacts { has_names: !is_unlinked, was_moved, size: MADE_BYTES_MAX };
            let is_recorded = may_record_attributes(&facts, &made, || is_pending);
            assert_eq!(is_recorded, bits == 0, "{facts:?} {made:?}");
            let large = MadeFacts { size: MADE_BYTES_MAX + 1, ..made };
            assert!(!may_record_attributes(&facts, &large, || is_pending));
        }
        let unasked = RecordFacts { is_covered: false, ..FACTS };
        assert!(!may_record_name(&unasked, || unreachable!("the file is plain")));
    }

    #[test]
    fn only_the_last_name_of_a_file_is_replaced() {
        let replaced =
            ReplacedFacts { is_replacing: true, is_file: true, links: 1, is_beside: true };
        assert!(may_replace(&replaced));
        for other in [
            ReplacedFacts { is_replacing: false, ..replaced },
            ReplacedFacts { is_file: false, ..replaced },
            ReplacedFacts { links: 2, ..replaced },
            ReplacedFacts { is_beside: false, ..replaced },
        ] {
            assert!(!may_replace(&other), "{other:?}");
        }
    }

    #[test]
    fn a_file_is_synced_to_stay_where_it_would_be_synced_to_leave() {
        for bits in 0_u8..8 {
            let [is_covered, needs_sync, is_pending] = [1, 2, 4].map(|bit| bits & bit != 0);
            let found = stays_by_sync((is_covered, needs_sync, is_pending), || Some(5));
            assert_eq!(found, (bits == 7).then_some(5));
        }
        assert_eq!(stays_by_sync((true, true, true), || None::<u64>), None);
    }

    #[test]
    fn seals_are_for_one_stream_and_one_record() {
        let found = [(0, false), (1, true), (1, false), (0, true), (2, true)]
            .map(|(pins, has_stream)| may_seal(pins, has_stream));
        assert_eq!(found, [true, true, false, false, false]);
        for bits in 0_u8..8 {
            let [owner_died, is_same_story, is_same] = [1, 2, 4].map(|bit| bits & bit != 0);
            assert_eq!(may_unseal(owner_died, is_same_story, || is_same), bits == 6);
        }
    }
}
