//! Admission and leaving: at which sync a plain file is covered, and how it becomes plain again.
//!
//! Invariants:
//! 1. A file is covered whole or not at all. Only a real sync, or a record of all of the file,
//!    covers it.
//! 2. No file is covered of which an overwrite changes more than bytes and times: the log answers
//!    an `fdatasync` after mere overwrites because the kernel would commit nothing for it.
//! 3. A file leaves by a real sync and the end of its story, in this order: recovery never puts
//!    older bytes over newer ones.
//!
//! Entry points: [`decide_admission`], [`is_overwritten_in_place`], [`decide_begin`];
//! [`decide_leave`], [`leaves_unrecorded`].

use super::cause::Cause;
use crate::log::control::stats::Counter;
use crate::log::files::FileGuard;

/// The sync of a descriptor that covers its file however young that is.
const COVER_YOUNG_AFTER: u32 = 8;
/// Bits of the mode that a write clears: set-user-ID and set-group-ID.
const SET_ID_BITS: u32 = 0o6000;
/// Flag of a file of ext4 whose data goes through the journal.
const FS_JOURNAL_DATA_FL: u32 = 0x4000;
/// Flag of a file of XFS on the real-time device, which may be one that is never overwritten.
const FS_XFLAG_REALTIME: u32 = 0x1;

/// What a process knows of a plain file that it syncs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct AdmissionFacts {
    /// How often the descriptor was synced, with this sync; 0: it is not known.
    pub syncs: u32,
    /// From which sync on files are covered.
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

/// Why a sync of a plain file does not admit it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotAdmitted {
    /// Logging is suspended, for a process that cannot be watched. The user was told of that.
    Suspended,
    /// Any file of the process may change unseen.
    Unseen,
    /// The descriptor has `O_DIRECT`.
    Direct,
    /// A stream writes by the descriptor.
    Stream,
    /// The user's globs keep the file out.
    Excluded,
    /// The file was not synced often enough, or may be gone in a moment.
    NotYet,
}

impl NotAdmitted {
    /// Returns what the real sync counts as.
    pub fn counter(self) -> Counter {
        match self {
            Self::Suspended => Counter::SyncsSuspended,
            Self::Unseen | Self::Direct | Self::Stream => Counter::SyncsPinned,
            Self::Excluded => Counter::SyncsExcluded,
            Self::NotYet => Counter::SyncsNotYet,
        }
    }

    /// Returns what the user is told; `why_unseen` says why files may change unseen.
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
    // To cover a rollback journal that is gone in a moment costs more than its syncs. A file that
    // was synced often is none.
    let lasts = || facts.syncs >= COVER_YOUNG_AFTER || !is_young();
    if is_often && lasts() { Ok(()) } else { Err(NotAdmitted::NotYet) }
}

/// Returns whether an overwrite of a file with this `mode` changes its bytes and times alone.
///
/// `has_capability` asks for a capability, which a write takes away. `inode_flags` and
/// `extended_flags` ask for those of `FS_IOC_GETFLAGS` and `FS_IOC_FSGETXATTR`: a file system
/// without these has no such files.
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

/// How a story begins that a real sync is to cover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeginAction {
    /// It does not: the sync is that of a file that cannot be covered.
    Refuse,
    /// At once.
    Begin,
    /// Behind the end of the last story: what that has promised must not hang on the sync to come.
    LeaveAndBegin,
}

/// What the log has noted about a locked file that is to be admitted.
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

/// Decides how the story of a file begins that a real sync is to cover.
pub fn decide_begin(facts: &BeginFacts) -> BeginAction {
    if facts.is_pinned || facts.is_logged && facts.is_covered {
        BeginAction::Refuse
    } else if facts.is_logged && facts.has_promises {
        BeginAction::LeaveAndBegin
    } else {
        BeginAction::Begin
    }
}

/// Returns the cause of the real sync that was to cover a file.
pub fn cause_of_admission(is_covered: bool) -> Counter {
    if is_covered { Counter::SyncsNotYet } else { Counter::SyncsRefused }
}

/// How a file leaves the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaveAction {
    /// It is not there.
    Nothing,
    /// Its story ends: the disk has all that the log has promised.
    End,
    /// It is made durable, and then its story ends.
    SyncAndEnd,
}

/// Decides how a locked file leaves. It `needs_sync` where the disk may lack what the log has
/// promised.
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

/// Returns whether a file leaves before a change of its names or attributes that no record says:
/// the log has names of it, or the change `sets_times`, of which recovery would take a later one
/// for that of a change from outside.
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
