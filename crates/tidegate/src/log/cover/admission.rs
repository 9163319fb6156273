//! Admission and leaving: decides which sync covers a file, and how it becomes plain again.
//!
//! Invariants:
//! 1. A file is covered whole or not at all. Only a real sync, or a record of all of the file,
//!    covers it.
//! 2. A file is covered only if an overwrite changes nothing but its bytes and times. The log
//!    answers an `fdatasync` after overwrites because the kernel would commit nothing for it.
//! 3. A file leaves by a real sync, then the end of its story: recovery overwrites no newer bytes.
//!
//! Entry points: [`decide_admission`], [`is_overwritten_in_place`], [`decide_begin`];
//! [`decide_leave`], [`leaves_unrecorded`].

use super::cause::Cause;
use crate::log::control::stats::Counter;
use crate::log::files::FileGuard;

/// The number of syncs of a descriptor after which its file is covered even if the file is young.
const COVER_YOUNG_AFTER: u32 = 8;
/// Bits of the mode that a write clears: set-user-ID and set-group-ID.
const SET_ID_BITS: u32 = 0o6000;
/// Flag of an ext4 file whose data goes through the journal.
const FS_JOURNAL_DATA_FL: u32 = 0x4000;
/// Flag of an XFS file on the real-time device, which may never be overwritten in place.
const FS_XFLAG_REALTIME: u32 = 0x1;

/// Facts of a process about a plain file that it syncs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct AdmissionFacts {
    /// Number of syncs of the descriptor, including this one; 0: unknown.
    pub syncs: u32,
    /// Number of syncs of a descriptor that covers its file.
    pub cover_after: u32,
    /// The user wants each write to be synced.
    pub every_write: bool,
    /// Logging is suspended.
    pub is_suspended: bool,
    /// Any file of the process may change unseen.
    pub writes_unseen: bool,
    /// The descriptor has `O_DIRECT`.
    pub is_direct: bool,
    /// The descriptor is pinned: a stream writes by it.
    pub is_pinned: bool,
}

/// The obstacle that keeps a sync from admitting a plain file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotAdmitted {
    /// Logging is suspended because of a process that cannot be watched. The user was notified.
    Suspended,
    /// Any file of the process may change unseen.
    Unseen,
    /// The descriptor has `O_DIRECT`.
    Direct,
    /// A stream writes by the descriptor.
    Stream,
    /// The user's globs keep the file out.
    Excluded,
    /// The file was not synced often enough, or may soon be removed.
    NotYet,
}

impl NotAdmitted {
    /// Returns the counter of the real sync.
    pub fn counter(self) -> Counter {
        match self {
            Self::Suspended => Counter::SyncsSuspended,
            Self::Unseen | Self::Direct | Self::Stream => Counter::SyncsPinned,
            Self::Excluded => Counter::SyncsExcluded,
            Self::NotYet => Counter::SyncsNotYet,
        }
    }

    /// Returns the cause to tell the user. `why_unseen` returns why files may change unseen.
    pub fn cause(self, why_unseen: impl FnOnce() -> Option<Cause>) -> Option<Cause> {
        match self {
            Self::Unseen => why_unseen(),
            Self::Direct => Some(Cause::DirectIo),
            Self::Stream => Some(Cause::Stream),
            Self::Excluded => Some(Cause::Excluded),
            Self::Suspended | Self::NotYet => None,
        }
    }
}

/// Decides whether a sync admits a plain file.
///
/// # Errors
/// [`NotAdmitted`]: the kernel syncs the file, which stays plain.
#[inline]
pub fn decide_admission(
    facts: &AdmissionFacts,
    is_wanted: impl FnOnce() -> bool,
    is_young: impl FnOnce() -> bool,
) -> Result<(), NotAdmitted> {
    if facts.is_suspended {
        return Err(NotAdmitted::Suspended);
    }
    if facts.writes_unseen {
        return Err(NotAdmitted::Unseen);
    }
    if facts.is_direct {
        return Err(NotAdmitted::Direct);
    }
    if facts.is_pinned {
        return Err(NotAdmitted::Stream);
    }
    if !is_wanted() {
        return Err(NotAdmitted::Excluded);
    }
    let is_often = facts.syncs != 0 && (facts.syncs >= facts.cover_after || facts.every_write);
    // Covering a rollback journal that is soon removed costs more than its syncs. A file with many
    // syncs is no such journal.
    let lasts = || facts.syncs >= COVER_YOUNG_AFTER || !is_young();
    if is_often && lasts() { Ok(()) } else { Err(NotAdmitted::NotYet) }
}

/// Returns whether an overwrite of a file with this `mode` changes only its bytes and times.
///
/// `has_capability` asks for a capability, which a write removes. `inode_flags` and
/// `extended_flags` ask for the flags of `FS_IOC_GETFLAGS` and `FS_IOC_FSGETXATTR`. A file system
/// without these flags has no files with other effects of an overwrite.
pub fn is_overwritten_in_place(
    mode: u32,
    has_capability: impl FnOnce() -> bool,
    inode_flags: impl FnOnce() -> Option<u32>,
    extended_flags: impl FnOnce() -> Option<u32>,
) -> bool {
    mode & SET_ID_BITS == 0
        && !has_capability()
        && inode_flags().unwrap_or(0) & FS_JOURNAL_DATA_FL == 0
        && extended_flags().unwrap_or(0) & FS_XFLAG_REALTIME == 0
}

/// How the story of a file begins before the real sync that is to cover it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeginAction {
    /// No story begins: the file cannot be covered by this sync.
    Refuse,
    /// The story begins at once.
    Begin,
    /// The last story ends first: its promises must not depend on the sync to come.
    LeaveAndBegin,
}

/// Facts from the log about a locked file that is to be admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct BeginFacts {
    /// The file is pinned to the kernel path.
    pub is_pinned: bool,
    /// The file's story has begun.
    pub is_logged: bool,
    /// All of the file is in the log or on the disk.
    pub is_covered: bool,
    /// The log has answered for growth or names in this story.
    pub has_promises: bool,
}

impl BeginFacts {
    /// Reads the facts about a locked file.
    pub fn of(guard: &FileGuard<'_>) -> Self {
        Self {
            is_pinned: guard.pins() > 0,
            is_logged: guard.is_logged(),
            is_covered: guard.is_covered(),
            has_promises: guard.marked_until() > 0,
        }
    }
}

/// Decides how the story of a file begins before the real sync that is to cover it.
pub fn decide_begin(facts: &BeginFacts) -> BeginAction {
    if facts.is_pinned || facts.is_logged && facts.is_covered {
        BeginAction::Refuse
    } else if facts.is_logged && facts.has_promises {
        BeginAction::LeaveAndBegin
    } else {
        BeginAction::Begin
    }
}

/// Returns the cause of a real sync that was to cover a file.
pub fn cause_of_admission(is_covered: bool) -> Counter {
    if is_covered { Counter::SyncsNotYet } else { Counter::SyncsRefused }
}

/// How a file leaves the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaveAction {
    /// The file is not in the log.
    Nothing,
    /// The file's story ends: the disk has everything that the log has promised.
    End,
    /// The file is made durable, and then its story ends.
    SyncAndEnd,
}

/// Decides how a locked file leaves. It `needs_sync` if the disk may lack bytes, a size or names
/// that the log has promised.
#[inline]
pub fn decide_leave(is_logged: bool, needs_sync: impl FnOnce() -> bool) -> LeaveAction {
    if !is_logged {
        LeaveAction::Nothing
    } else if needs_sync() {
        LeaveAction::SyncAndEnd
    } else {
        LeaveAction::End
    }
}

/// Returns whether a file leaves before a change of its names or attributes that the log does not
/// record. It leaves if the log has names of the file, or if the change `sets_times`: recovery
/// would take a later timestamp for a change from outside.
#[inline]
pub fn leaves_unrecorded(sets_times: bool, has_names: impl FnOnce() -> bool) -> bool {
    sets_times || has_names()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const FACTS: AdmissionFacts = AdmissionFacts {
        syncs: 2,
        cover_after: 2,
        every_write: false,
        is_suspended: false,
        writes_unseen: false,
        is_direct: false,
        is_pinned: false,
    };

    #[test]
    fn of_what_keeps_a_file_plain_the_first_of_a_list_counts() {
        for bits in 0_u8..32 {
            let [is_suspended, writes_unseen, is_direct, is_pinned, is_excluded] =
                [1, 2, 4, 8, 16].map(|bit| bits & bit != 0);
            let facts =
                AdmissionFacts { is_suspended, writes_unseen, is_direct, is_pinned, ..FACTS };
            let found = decide_admission(&facts, || !is_excluded, || false);
            let expected = match bits.trailing_zeros() {
                0 => Err(NotAdmitted::Suspended),
                1 => Err(NotAdmitted::Unseen),
                2 => Err(NotAdmitted::Direct),
                3 => Err(NotAdmitted::Stream),
                4 => Err(NotAdmitted::Excluded),
                _ => Ok(()),
            };
            assert_eq!(found, expected, "{facts:?}");
        }
    }

    #[test]
    fn a_file_is_admitted_once_it_was_synced_often_enough_for_its_age() {
        let admits = |syncs, every_write, is_young| {
            let facts = AdmissionFacts { syncs, every_write, ..FACTS };
            decide_admission(&facts, || true, || is_young).is_ok()
        };
        assert_eq!(
            [0, 1, 2, 7, 8].map(|it| admits(it, false, false)),
            [false, false, true, true, true]
        );
        assert_eq!(
            [0, 1, 2, 7, 8].map(|it| admits(it, false, true)),
            [false, false, false, false, true]
        );
        assert_eq!([0, 1].map(|it| admits(it, true, false)), [false, true]);
    }

    #[test]
    fn each_obstacle_has_a_counter_and_what_the_user_is_told() {
        let told = |why: NotAdmitted| (why.counter(), why.cause(|| Some(Cause::Libaio)));
        assert_eq!(told(NotAdmitted::Suspended), (Counter::SyncsSuspended, None));
        assert_eq!(told(NotAdmitted::Unseen), (Counter::SyncsPinned, Some(Cause::Libaio)));
        assert_eq!(told(NotAdmitted::Direct), (Counter::SyncsPinned, Some(Cause::DirectIo)));
        assert_eq!(told(NotAdmitted::Stream), (Counter::SyncsPinned, Some(Cause::Stream)));
        assert_eq!(told(NotAdmitted::Excluded), (Counter::SyncsExcluded, Some(Cause::Excluded)));
        assert_eq!(told(NotAdmitted::NotYet), (Counter::SyncsNotYet, None));
        assert_eq!(
            [true, false].map(cause_of_admission),
            [Counter::SyncsNotYet, Counter::SyncsRefused]
        );
    }

    #[test]
    fn files_of_which_an_overwrite_changes_more_than_bytes_are_told_by_mode_and_flags() {
        let is_in_place = |mode, has_capability, inode: Option<u32>, extended: Option<u32>| {
            is_overwritten_in_place(mode, || has_capability, || inode, || extended)
        };
        assert!(is_in_place(0o644, false, Some(0x8_0000), Some(0x8000_0000)));
        assert!(is_in_place(0o1777, false, None, None));
        assert!(![0o4755, 0o2755, 0o6755].into_iter().any(|it| is_in_place(it, false, None, None)));
        assert!(!is_in_place(0o644, true, None, None));
        assert!(!is_in_place(0o644, false, Some(FS_JOURNAL_DATA_FL), None));
        assert!(!is_in_place(0o644, false, None, Some(FS_XFLAG_REALTIME)));
    }

    #[test]
    fn a_story_begins_where_none_is_that_answers() {
        for bits in 0_u8..16 {
            let [is_pinned, is_logged, is_covered, has_promises] =
                [1, 2, 4, 8].map(|bit| bits & bit != 0);
            let facts = BeginFacts { is_pinned, is_logged, is_covered, has_promises };
            let expected = match bits {
                0b0110 | 0b1110 => BeginAction::Refuse,
                0b1010 => BeginAction::LeaveAndBegin,
                _ if is_pinned => BeginAction::Refuse,
                _ => BeginAction::Begin,
            };
            assert_eq!(decide_begin(&facts), expected, "{facts:?}");
        }
    }

    #[test]
    fn a_file_leaves_with_a_sync_only_if_the_disk_may_lack_something() {
        assert_eq!(decide_leave(false, || unreachable!("there is no story")), LeaveAction::Nothing);
        assert_eq!(decide_leave(true, || false), LeaveAction::End);
        assert_eq!(decide_leave(true, || true), LeaveAction::SyncAndEnd);
        assert!(leaves_unrecorded(true, || false) && leaves_unrecorded(false, || true));
        assert!(!leaves_unrecorded(false, || false));
    }
}
