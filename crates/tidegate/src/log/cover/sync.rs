//! The table of syncs: decides whether the log answers a sync, or the cause of a real one.
//!
//! The table covers `fsync`, `fdatasync`, writes by descriptors with `O_SYNC` or `O_DSYNC`, and
//! `fsync` of directories. `sync` and `syncfs` are always real. `msync` and `sync_file_range` go to
//! the kernel: a file with a shared writable mapping has left the log.
//!
//! Invariants:
//! 1. The log answers a sync of a covered file only if the kernel would commit nothing of the
//!    journal for it, or if nothing is pending in the file system. It asks for pending changes
//!    after the sync began. A sync is real after a change of the file's own names or attributes
//!    without a record: on XFS even `fdatasync` commits those. A sync that would commit a recorded
//!    change of the file's names is real while another change is pending.
//! 2. A mark is appended after a real sync only if the file has not changed since before that sync.
//!
//! Entry points: [`decide_sync`], [`SyncedState`], [`answers_directory`].

use crate::log::control::stats::Counter;
use crate::log::files::FileGuard;

/// Bytes that a file may log between two syncs. Copying more takes longer than the sync of a fast
/// disk that the log saves, and displaces other files' records from the log.
pub const GAIN_BYTES_MAX: u64 = 4 << 20;

/// The part of a file that a sync makes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// All of the file, as by `fsync`.
    All,
    /// The data and the size, as by `fdatasync`.
    Data,
}

/// Facts from the log about a file whose story has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct SyncFacts {
    /// All of the file is in the log or on the disk.
    pub is_covered: bool,
    /// The log has answered for growth or names in this story.
    pub has_promises: bool,
    /// Bytes that the file has logged since its last sync.
    pub unsynced_bytes: u64,
    /// Names or attributes were changed without a record since the last real sync.
    pub has_own_changes: bool,
    /// The file was written or resized since its last sync.
    pub was_written: bool,
    /// The file has grown, or changed its size, since its last mark.
    pub has_grown: bool,
    /// A record has changed names or attributes since the last sync.
    pub was_named: bool,
}

impl SyncFacts {
    /// Reads the facts about a locked file.
    #[inline]
    pub fn of(guard: &FileGuard<'_>) -> Self {
        Self {
            is_covered: guard.is_covered(),
            has_promises: guard.is_logged() && guard.marked_until() > 0,
            unsynced_bytes: guard.unsynced_bytes(),
            has_own_changes: guard.has_own_changes(),
            was_written: guard.was_written(),
            has_grown: guard.has_grown(),
            was_named: guard.was_named(),
        }
    }
}

/// Facts about a sync that cost a lookup.
#[derive(Debug, Clone, Copy)]
pub struct SyncLookups<I, R, P> {
    /// Asks whether an overwrite of the file changes only its bytes and times.
    pub is_in_place: I,
    /// Asks whether a process outside has changed the file's size.
    pub is_resized: R,
    /// Asks whether a change without a record is pending in the file system.
    pub is_pending: P,
}

/// How a sync of a file whose story has begun is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncAction {
    /// The sync is served like that of a plain file.
    Plain,
    /// The kernel makes an `fsync`, for this cause. The file stays covered.
    Real(Counter),
    /// The kernel makes the sync, for this cause, and the file leaves.
    Leave(Counter),
    /// The log answers, and promises nothing new.
    Nothing,
    /// The log answers an `fdatasync` that the kernel may answer without a commit. A recorded
    /// change of names still waits for the next `fsync`.
    NothingYet,
    /// The log answers, and a mark promises all of the file.
    Mark,
}

/// Decides a sync of a file whose story has begun.
#[inline]
pub fn decide_sync<I, R, P>(
    wanted: Sync,
    facts: &SyncFacts,
    lookups: &SyncLookups<I, R, P>,
) -> SyncAction
where
    I: Fn() -> bool,
    R: Fn() -> bool,
    P: Fn() -> bool,
{
    if !facts.is_covered {
        return if facts.has_promises {
            SyncAction::Leave(Counter::SyncsInterrupted)
        } else {
            SyncAction::Plain
        };
    }
    if facts.unsynced_bytes > GAIN_BYTES_MAX {
        return SyncAction::Leave(Counter::SyncsByGain);
    }
    if facts.has_own_changes {
        let cause = Counter::SyncsOwn;
        let stays = (lookups.is_in_place)();
        return if stays { SyncAction::Real(cause) } else { SyncAction::Leave(cause) };
    }
    if (lookups.is_resized)() {
        return SyncAction::Leave(Counter::SyncsOutside);
    }
    answer(wanted, facts, (lookups.is_pending)())
}

/// Decides a sync of a covered file that has the size and the attributes that the log knows.
#[inline]
fn answer(wanted: Sync, facts: &SyncFacts, is_pending: bool) -> SyncAction {
    let is_needed = match wanted {
        Sync::Data => facts.has_grown,
        Sync::All => facts.was_written,
    };
    // A read may have set the access time, which `fsync` would commit with the pending changes.
    let commits = is_needed || facts.was_named || wanted == Sync::All && is_pending;
    match (commits, is_pending) {
        (false, _) => SyncAction::Nothing,
        (true, true) => SyncAction::Real(Counter::SyncsPending),
        (true, false) if !is_needed && wanted == Sync::Data => SyncAction::NothingYet,
        (true, false) => SyncAction::Mark,
    }
}

/// The state of a file when a real sync began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyncedState {
    /// Number of the story.
    pub story: u64,
    /// End of the last record that changes bytes or the size.
    pub last_change: u64,
    /// End of the last record that changes names.
    pub named_until: u64,
}

impl SyncedState {
    /// Reads the state of a locked file.
    pub fn of(guard: &FileGuard<'_>) -> Self {
        Self {
            story: guard.story(),
            last_change: guard.last_change(),
            named_until: guard.named_until(),
        }
    }

    /// Returns whether a sync that began at this state has committed the names in the state `now`.
    pub fn has_names(&self, now: &Self) -> bool {
        self.named_until == now.named_until
    }

    /// Returns whether a sync that began at this state made all of `now` durable: a mark may
    /// follow.
    pub fn has_bytes(&self, now: &Self) -> bool {
        (self.story, self.last_change) == (now.story, now.last_change)
    }
}

/// Facts from the log about the file system of a directory that is synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectoryFacts {
    /// The supervisor holds a descriptor of the file system: recovery can create its files again.
    pub is_held: bool,
    /// A commit of the journal commits all changes before it.
    pub commits_in_order: bool,
    /// A change without a record, or the creation of a file, is pending.
    pub is_pending: bool,
}

/// Returns whether the log answers the sync of a directory: each file that was created in its file
/// system, and each change of names, is on the disk or in the log.
pub fn answers_directory(facts: &DirectoryFacts) -> bool {
    facts.is_held && facts.commits_in_order && !facts.is_pending
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    const COVERED: SyncFacts = SyncFacts {
        is_covered: true,
        has_promises: true,
        unsynced_bytes: 0,
        has_own_changes: false,
        was_written: false,
        has_grown: false,
        was_named: false,
    };

    /// Decides, and counts the lookups: in place, resized, pending.
    fn decide(wanted: Sync, facts: &SyncFacts, answers: [bool; 3]) -> (SyncAction, [u32; 3]) {
        let asked = [const { Cell::new(0) }; 3];
        let ask = |which: usize| {
            asked[which].set(asked[which].get() + 1);
            answers[which]
        };
        let lookups =
            SyncLookups { is_in_place: || ask(0), is_resized: || ask(1), is_pending: || ask(2) };
        let action = decide_sync(wanted, facts, &lookups);
        (action, asked.map(|asked| asked.get()))
    }

    /// Each row: written, grown, named, pending; the actions of `fdatasync` and `fsync`.
    #[test]
    fn syncs_of_covered_files_follow_the_table() {
        use SyncAction::{Mark, Nothing, NothingYet};
        let real = SyncAction::Real(Counter::SyncsPending);
        let table = [
            ("----", Nothing, Nothing),
            ("---p", Nothing, real),
            ("--n-", NothingYet, Mark),
            ("--np", real, real),
            ("w---", Nothing, Mark),
            ("w--p", Nothing, real),
            ("w-n-", NothingYet, Mark),
            ("w-np", real, real),
            ("wg--", Mark, Mark),
            ("wg-p", real, real),
            ("wgn-", Mark, Mark),
            ("wgnp", real, real),
        ];
        for (row, data, all) in table {
            let facts = SyncFacts {
                was_written: row.contains('w'),
                has_grown: row.contains('g'),
                was_named: row.contains('n'),
                ..COVERED
            };
            let answers = [true, false, row.contains('p')];
            assert_eq!(decide(Sync::Data, &facts, answers), (data, [0, 1, 1]), "{row}");
            assert_eq!(decide(Sync::All, &facts, answers), (all, [0, 1, 1]), "{row}");
        }
    }

    #[test]
    fn files_leave_for_causes_that_come_before_the_table() {
        let leave = SyncAction::Leave;
        for (wanted, is_pending) in
            [Sync::All, Sync::Data].into_iter().flat_map(|it| [(it, false), (it, true)])
        {
            let decide =
                |facts, in_place, resized| decide(wanted, &facts, [in_place, resized, is_pending]);
            let changed = SyncFacts { was_written: true, has_grown: true, ..COVERED };
            let uncovered = SyncFacts { is_covered: false, ..changed };
            assert_eq!(decide(uncovered, true, true), (leave(Counter::SyncsInterrupted), [0; 3]));
            let begun = SyncFacts { has_promises: false, ..uncovered };
            assert_eq!(decide(begun, true, true), (SyncAction::Plain, [0; 3]));
            let own = SyncFacts { has_own_changes: true, ..changed };
            let real = SyncAction::Real(Counter::SyncsOwn);
            assert_eq!(decide(own, true, true), (real, [1, 0, 0]));
            assert_eq!(decide(own, false, true), (leave(Counter::SyncsOwn), [1, 0, 0]));
            let large = SyncFacts { unsynced_bytes: GAIN_BYTES_MAX + 1, ..own };
            assert_eq!(decide(large, true, true), (leave(Counter::SyncsByGain), [0; 3]));
            assert_eq!(decide(changed, true, true), (leave(Counter::SyncsOutside), [0, 1, 0]));
            let most = SyncFacts { unsynced_bytes: GAIN_BYTES_MAX, ..changed };
            assert_ne!(decide(most, true, false).0, leave(Counter::SyncsByGain));
        }
    }

    #[test]
    fn a_real_sync_is_good_for_the_state_that_it_began_at() {
        let before = SyncedState { story: 1, last_change: 2, named_until: 3 };
        assert!(before.has_names(&before) && before.has_bytes(&before));
        let story = SyncedState { story: 9, ..before };
        let change = SyncedState { last_change: 9, ..before };
        let names = SyncedState { named_until: 9, ..before };
        assert_eq!([story, change, names].map(|now| before.has_bytes(&now)), [false, false, true]);
        assert_eq!([story, change, names].map(|now| before.has_names(&now)), [true, true, false]);
    }

    #[test]
    fn a_directory_is_answered_only_if_nothing_speaks_against_it() {
        for bits in 0_u8..8 {
            let [is_held, commits_in_order, is_pending] = [1, 2, 4].map(|bit| bits & bit != 0);
            let facts = DirectoryFacts { is_held, commits_in_order, is_pending };
            assert_eq!(answers_directory(&facts), bits == 3, "{facts:?}");
        }
    }
}
