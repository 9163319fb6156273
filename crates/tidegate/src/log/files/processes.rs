//! The programs whose code is known, so that it is read once in a session and not at each start;
//! and the processes that cannot be watched.
//!
//! Invariants:
//! 1. A word of the table stands for one version of a file: device, inode, size and times are in
//!    the hash. A file that has just changed is not noted: another change may keep its times.
//! 2. Any word may be overwritten at any time. An unknown program is read again.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::Log;
use crate::log::control::{PROGRAMS, PROGRAMS_AT};
use crate::sync::{AtomicU64, Ordering};

/// The least age of a version of a file that is noted.
const AGE_MIN: Duration = Duration::from_secs(2);
/// Bit of a word: the program makes system calls of its own.
const MAKES_OWN_CALLS: u64 = 1;
/// Bit of the count of suspensions: logging never resumes.
const FOR_GOOD: u64 = 1 << 32;
/// Bit of a word: it is in use.
const IS_NOTED: u64 = 2;

/// A version of a program's file, from `stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProgramVersion {
    /// The file's device.
    pub device: u64,
    /// The file's inode.
    pub inode: u64,
    /// Size of the file.
    pub len_bytes: u64,
    /// When its bytes were changed: seconds and nanoseconds since 1970.
    pub changed: (i64, i64),
    /// When its attributes were changed, or its bytes: seconds and nanoseconds since 1970.
    pub attributes_changed: (i64, i64),
}

impl ProgramVersion {
    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        Hash::hash(self, &mut hasher);
        hasher.finish()
    }

    fn is_old_enough_at(&self, now: Duration) -> bool {
        let changed = u64::try_from(self.attributes_changed.0).unwrap_or(u64::MAX);
        now.checked_sub(AGE_MIN).is_some_and(|then| changed < then.as_secs())
    }
}

/// The state of processes: the known programs, and whether all processes can be watched.
#[derive(Clone, Copy)]
pub struct Processes<'a> {
    pub(super) log: &'a Log,
}

impl<'a> Processes<'a> {
    /// Returns whether the program makes system calls of its own; `None` if it is not known.
    pub fn makes_own_calls(self, version: &ProgramVersion) -> Option<bool> {
        let hash = version.hash();
        let word = self.program_word(hash).load(Ordering::Relaxed);
        (word & !MAKES_OWN_CALLS == noted(hash)).then_some(word & MAKES_OWN_CALLS != 0)
    }

    /// Notes whether the program makes system calls of its own. The caller read its version at
    /// `now`, the time since 1970, and its code after that.
    pub fn note_program(self, version: &ProgramVersion, makes_own_calls: bool, now: Duration) {
        if !version.is_old_enough_at(now) {
            return;
        }
        let hash = version.hash();
        let word = noted(hash) | if makes_own_calls { MAKES_OWN_CALLS } else { 0 };
        self.program_word(hash).store(word, Ordering::Relaxed);
    }

    fn program_word(self, hash: u64) -> &'a AtomicU64 {
        self.log.ring.control.memory().word(PROGRAMS_AT + (hash >> 32) % PROGRAMS * 8)
    }

    /// Notes that this process could not announce itself to the supervisor.
    pub fn note_unannounced(self) {
        self.log.ring.control.unannounced().fetch_add(1, Ordering::SeqCst);
    }

    /// Returns whether some process could not announce itself to the supervisor.
    pub fn has_unannounced(self) -> bool {
        self.log.ring.control.unannounced().load(Ordering::SeqCst) > 0
    }

    /// Suspends logging for a process that cannot be watched: no file is covered until
    /// [`resume_logging`](Self::resume_logging) was called as often. The records of all files must
    /// be retired before that process runs: see [`checkpoint`](crate::log::Ring::checkpoint).
    pub fn suspend(self) {
        self.log.ring.control.suspended().fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes one [`suspend`](Self::suspend), after its process has ended.
    ///
    /// Counts a change in each file system, since the process's own changes were not counted.
    pub fn resume_logging(self) {
        self.log.file_systems().note_change_everywhere();
        let less = |word: u64| (word & !FOR_GOOD > 0).then(|| word - 1);
        let _ = self.log.ring.control.suspended().fetch_update(
            Ordering::SeqCst,
            Ordering::SeqCst,
            less,
        );
    }

    /// Suspends logging for as long as the log is open, for a process that cannot be watched and
    /// cannot be announced to the supervisor.
    pub fn suspend_for_good(self) {
        self.log.ring.control.suspended().fetch_or(FOR_GOOD, Ordering::SeqCst);
    }

    /// Returns whether [`suspend_for_good`](Self::suspend_for_good) was called.
    pub fn is_suspended_for_good(self) -> bool {
        self.log.ring.control.suspended().load(Ordering::SeqCst) & FOR_GOOD != 0
    }

    /// Returns whether some process cannot be watched.
    #[inline]
    pub fn is_suspended(self) -> bool {
        self.log.ring.control.is_suspended()
    }
}

fn noted(hash: u64) -> u64 {
    hash & !MAKES_OWN_CALLS | IS_NOTED
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::log::tests::log;

    const NOW: Duration = Duration::from_secs(1000);
    const VERSION: ProgramVersion = ProgramVersion {
        device: 1,
        inode: 2,
        len_bytes: 3,
        changed: (4, 5),
        attributes_changed: (6, 7),
    };

    #[test]
    fn what_was_noted_of_a_version_is_known_of_no_other() {
        for makes in [true, false] {
            let log = log();
            assert_eq!(log.processes().makes_own_calls(&VERSION), None);
            log.processes().note_program(&VERSION, makes, NOW);
            assert_eq!(log.processes().makes_own_calls(&VERSION), Some(makes));
            for other in [
                ProgramVersion { device: 9, ..VERSION },
                ProgramVersion { inode: 9, ..VERSION },
                ProgramVersion { len_bytes: 9, ..VERSION },
                ProgramVersion { changed: (4, 9), ..VERSION },
                ProgramVersion { attributes_changed: (6, 9), ..VERSION },
            ] {
                assert_eq!(log.processes().makes_own_calls(&other), None, "{other:?}");
            }
        }
    }

    #[test]
    fn a_program_that_was_just_changed_is_not_noted() {
        let log = log();
        for (changed_s, is_noted) in [(1000, false), (998, false), (1100, false), (997, true)] {
            let version = ProgramVersion { attributes_changed: (changed_s, 0), ..VERSION };
            log.processes().note_program(&version, true, NOW);
            assert_eq!(
                log.processes().makes_own_calls(&version).is_some(),
                is_noted,
                "at {changed_s} s"
            );
        }
    }

    #[test]
    fn more_programs_than_there_is_space_for_are_looked_at_again() {
        let log = log();
        let versions = (0..4 * PROGRAMS).map(|inode| ProgramVersion { inode, ..VERSION });
        for version in versions.clone() {
            log.processes().note_program(&version, version.inode % 2 == 0, NOW);
        }
        let known = versions.filter_map(|version| {
            let makes = log.processes().makes_own_calls(&version)?;
            assert_eq!(makes, version.inode % 2 == 0);
            Some(version)
        });
        assert!((PROGRAMS / 2..=PROGRAMS).contains(&(known.count() as u64)));
    }
}
