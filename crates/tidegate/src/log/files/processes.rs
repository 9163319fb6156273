//! The programs whose code is known, so that it is read once in a session and not at each start;
//! and the processes that cannot be watched.
//!
//! Invariants:
//! 1. A word of the table stands for one version of a file: device, inode, size and times are in
//!    the hash. A file that has just changed is not noted: another change may keep its times.
//! 2. Any word may be overwritten at any time. An unknown program is read again.
//! 3. The supervisor alone counts suspensions. It notes the process before it counts the
//!    suspension, and forgets the process after it has taken the suspension off. So the next
//!    supervisor finds the processes of this one, and a count above theirs has other causes.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::Log;
use crate::log::control::{PROGRAMS, PROGRAMS_AT, SUSPENDERS, SUSPENDERS_AT};
use crate::sync::{AtomicU64, Ordering};

/// The least age of a version of a file that is noted.
const AGE_MIN: Duration = Duration::from_secs(2);
/// Bit of a word: the program makes system calls of its own.
const MAKES_OWN_CALLS: u64 = 1;
/// Bit of the count of suspensions: logging never resumes.
const FOR_GOOD: u64 = 1 << 32;
/// Bit of the count of suspensions: logging does not resume in this session.
const FOR_SESSION: u64 = 1 << 33;
/// The bits of the count of suspensions that count.
const COUNT: u64 = FOR_GOOD - 1;
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

    /// Suspends logging: no file is covered until [`resume_logging`](Self::resume_logging) was
    /// called as often. If the supervisor dies before that, logging stays suspended for the
    /// session.
    pub fn suspend(self) {
        self.log.ring.control.suspended().fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes one [`suspend`](Self::suspend).
    ///
    /// Counts a change in each file system, since the changes of unwatched processes were not
    /// counted.
    pub fn resume_logging(self) {
        self.log.file_systems().note_change_everywhere();
        self.update_suspensions(|word| if word & COUNT > 0 { word - 1 } else { word });
    }

    /// [Suspends](Self::suspend) logging for a process that cannot be watched. The records of all
    /// files must be retired before that process runs: see
    /// [`checkpoint`](crate::log::Ring::checkpoint).
    pub fn suspend_for(self, process: u32) {
        // Without a free word, the next supervisor does not find the process.
        if let Some(free) = self.suspenders().find(|word| word.load(Ordering::Relaxed) == 0) {
            free.store(process.into(), Ordering::SeqCst);
        }
        self.suspend();
    }

    /// Undoes one [`suspend_for`](Self::suspend_for) of `process`, after its end.
    pub fn resume_for(self, process: u32) {
        self.resume_logging();
        let is_its = |word: &&AtomicU64| word.load(Ordering::Relaxed) == u64::from(process);
        if let Some(word) = self.suspenders().find(is_its) {
            word.store(0, Ordering::SeqCst);
        }
    }

    /// Takes over the suspensions of a supervisor that died, and returns their processes. Some may
    /// have ended since. If it counted others, such as that of an unfinished
    /// [`suspend`](Self::suspend), logging stays suspended for the session.
    pub fn take_over_suspensions(self) -> BTreeSet<u32> {
        let mut processes = BTreeSet::new();
        for word in self.suspenders() {
            let process = u32::try_from(word.load(Ordering::SeqCst)).unwrap_or(0);
            let is_new = i32::try_from(process).is_ok_and(|it| it > 0) && processes.insert(process);
            if !is_new {
                word.store(0, Ordering::SeqCst);
            }
        }
        let count = processes.len() as u64;
        self.update_suspensions(|word| {
            let others = if word & COUNT > count { FOR_SESSION } else { 0 };
            word & !COUNT | others | count
        });
        processes
    }

    fn suspenders(self) -> impl Iterator<Item = &'a AtomicU64> {
        let memory = self.log.ring.control.memory();
        (0..SUSPENDERS).map(move |number| memory.word(SUSPENDERS_AT + number * 8))
    }

    fn update_suspensions(self, update: impl Fn(u64) -> u64) {
        let suspended = self.log.ring.control.suspended();
        let updated = |word| Some(update(word));
        // It always succeeds.
        let _ = suspended.fetch_update(Ordering::SeqCst, Ordering::SeqCst, updated);
    }

    /// Suspends logging for as long as the log is open.
    pub fn suspend_for_session(self) {
        self.log.ring.control.suspended().fetch_or(FOR_SESSION, Ordering::SeqCst);
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

    #[test]
    fn the_next_supervisor_finds_the_processes_that_suspend_logging() {
        let log = log();
        let processes = log.processes();
        processes.suspend_for(7);
        processes.suspend_for(8);
        processes.resume_for(7);
        assert_eq!(processes.take_over_suspensions(), BTreeSet::from([8]));
        assert!(processes.is_suspended());
        processes.resume_for(8);
        assert!(!processes.is_suspended());
        assert_eq!(processes.take_over_suspensions(), BTreeSet::new());
        assert!(!processes.is_suspended());
    }

    #[test]
    fn a_suspension_without_a_process_outlives_its_supervisor() {
        let log = log();
        let processes = log.processes();
        (0..=SUSPENDERS).for_each(|_| processes.suspend_for(7));
        // Words that are no processes are not counted.
        log.ring.control.memory().word(SUSPENDERS_AT).store(u64::MAX, Ordering::Relaxed);
        assert_eq!(processes.take_over_suspensions(), BTreeSet::from([7]));
        processes.resume_for(7);
        assert!(processes.is_suspended() && !processes.is_suspended_for_good());
    }

    #[test]
    fn a_supervisor_that_died_before_it_counted_leaves_a_process() {
        let log = log();
        log.ring.control.memory().word(SUSPENDERS_AT).store(7, Ordering::Relaxed);
        assert_eq!(log.processes().take_over_suspensions(), BTreeSet::from([7]));
        assert!(log.processes().is_suspended());
        log.processes().resume_for(7);
        assert!(!log.processes().is_suspended());
    }
}
