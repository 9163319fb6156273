//! The real syncs: a list of the files, processes and causes with the most syncs.
//!
//! Invariants:
//! 1. The list is for people only: a process's death during a change leaves one row wrong.
//! 2. The rows and the number of unlisted syncs add up to all syncs. A full list gives up the row
//!    with the fewest syncs, which then count as unlisted.
//! 3. Adding a sync neither waits nor allocates: while the lock is held, the sync counts as
//!    unlisted. So a signal handler may add one.

use crate::log::control::stats::Counter;
use crate::log::control::{Control, LANES_AT, REAL_SYNCS_AT, REAL_SYNCS_LOCK_AT, TIMEOUT};
use crate::pmem::Locked;
use crate::sync::{AtomicU64, Ordering};

/// Rows of the list: few, since the supervisor sends all in one message.
const ROWS: u64 = 64;
/// Bytes of a program's name.
pub const PROGRAM_BYTES: usize = 16;
/// Bytes of a path, or of its end.
pub const PATH_END_BYTES: usize = 224;

const KEYS_AT: u64 = REAL_SYNCS_AT;
const NUMBERS_AT: u64 = KEYS_AT + ROWS * 8;
const OTHERS_AT: u64 = NUMBERS_AT + ROWS * 8;
const ROWS_AT: u64 = OTHERS_AT + 64;
const ROW_BYTES: u64 = 256;
const PROCESS_AT: u64 = 0;
const CAUSE_AT: u64 = 8;
const PROGRAM_AT: u64 = 16;
const PATH_AT: u64 = PROGRAM_AT + PROGRAM_BYTES as u64;

const _: () = assert!(PATH_AT + PATH_END_BYTES as u64 <= ROW_BYTES);
const _: () = assert!(ROWS_AT + ROWS * ROW_BYTES <= LANES_AT);

/// The file, process and cause of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RealSync {
    /// Why the sync is real.
    pub cause: Counter,
    /// The process that makes it.
    pub process: u32,
    /// Device of the file.
    pub device: u64,
    /// Inode number of the file.
    pub inode: u64,
}

impl RealSync {
    /// Returns a hash that identifies the row; never 0.
    fn key(&self) -> u64 {
        let parts = [self.cause as u64, u64::from(self.process), self.device, self.inode];
        parts.into_iter().fold(1, |key: u64, part| {
            (key ^ part).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
        }) | 1
    }
}

/// The names of a row, with zeros behind them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyncNames {
    /// Name of the program.
    pub program: [u8; PROGRAM_BYTES],
    /// Path of the file, or its last part.
    pub path: [u8; PATH_END_BYTES],
}

impl SyncNames {
    /// No names.
    pub const NONE: Self = Self { program: [0; PROGRAM_BYTES], path: [0; PATH_END_BYTES] };
}

/// A row of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RealSyncs {
    /// Why they are real: the number of a [`Counter`].
    pub cause: u64,
    /// The process that made them.
    pub process: u32,
    /// The names of its program and of the file.
    pub names: SyncNames,
    /// Syncs since the row is in the list.
    pub number: u64,
}

/// The list of real syncs.
#[derive(Clone, Copy)]
pub struct RealSyncList<'a> {
    pub(super) control: &'a Control,
}

impl<'a> RealSyncList<'a> {
    /// Adds a sync to the list. Calls `names` only for a new row.
    pub fn add(self, sync: &RealSync, names: impl FnOnce() -> SyncNames) {
        if let Some(_locked) = self.try_lock() {
            self.add_locked(sync, names);
        } else {
            self.others().fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the rows, in descending order of syncs, and the number of unlisted syncs.
    pub fn rows(self) -> (Vec<RealSyncs>, u64) {
        // Goes on without the lock after a timeout: then one row may have the names of another.
        let _locked = self.control.memory().lock(REAL_SYNCS_LOCK_AT, TIMEOUT);
        let mut rows: Vec<_> = (0..ROWS).filter_map(|row| self.read(row)).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.number));
        (rows, self.others().load(Ordering::Relaxed))
    }

    fn word(self, at: u64) -> &'a AtomicU64 {
        self.control.memory().word(at)
    }

    fn try_lock(self) -> Option<Locked<'a>> {
        self.control.memory().try_lock(REAL_SYNCS_LOCK_AT).ok()
    }

    fn key(self, row: u64) -> &'a AtomicU64 {
        self.word(KEYS_AT + row * 8)
    }

    fn number(self, row: u64) -> &'a AtomicU64 {
        self.word(NUMBERS_AT + row * 8)
    }

    fn others(self) -> &'a AtomicU64 {
        self.word(OTHERS_AT)
    }

    fn add_locked(self, sync: &RealSync, names: impl FnOnce() -> SyncNames) {
        let key = sync.key();
        let found = (0..ROWS).find(|row| self.key(*row).load(Ordering::Relaxed) == key);
        let row = found.unwrap_or_else(|| {
            let row = self.give_up_least();
            self.write(row, sync, &names());
            self.key(row).store(key, Ordering::Relaxed);
            row
        });
        self.number(row).fetch_add(1, Ordering::Relaxed);
    }

    /// Empties the row with the fewest syncs. Returns its index.
    fn give_up_least(self) -> u64 {
        let number = |row: &u64| self.number(*row).load(Ordering::Relaxed);
        let row = (0..ROWS).min_by_key(number).unwrap_or(0);
        self.key(row).store(0, Ordering::Relaxed);
        let given_up = self.number(row).swap(0, Ordering::Relaxed);
        self.others().fetch_add(given_up, Ordering::Relaxed);
        row
    }

    fn write(self, row: u64, sync: &RealSync, names: &SyncNames) {
        let at = ROWS_AT + row * ROW_BYTES;
        self.word(at + PROCESS_AT).store(u64::from(sync.process), Ordering::Relaxed);
        self.word(at + CAUSE_AT).store(sync.cause as u64, Ordering::Relaxed);
        self.write_bytes(at + PROGRAM_AT, &names.program);
        self.write_bytes(at + PATH_AT, &names.path);
    }

    fn write_bytes(self, at: u64, bytes: &[u8]) {
        for (at, part) in (at..).step_by(8).zip(bytes.as_chunks::<8>().0) {
            self.word(at).store(u64::from_le_bytes(*part), Ordering::Relaxed);
        }
    }

    fn read(self, row: u64) -> Option<RealSyncs> {
        let at = ROWS_AT + row * ROW_BYTES;
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let names = SyncNames {
            program: self.read_bytes(at + PROGRAM_AT),
            path: self.read_bytes(at + PATH_AT),
        };
        (load(self.key(row)) != 0).then(|| RealSyncs {
            cause: load(self.word(at + CAUSE_AT)),
            process: u32::try_from(load(self.word(at + PROCESS_AT))).unwrap_or(0),
            names,
            number: load(self.number(row)),
        })
    }

    fn read_bytes<const BYTES: usize>(self, at: u64) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        for (at, part) in (at..).step_by(8).zip(bytes.as_chunks_mut::<8>().0) {
            *part = self.word(at).load(Ordering::Relaxed).to_le_bytes();
        }
        bytes
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::log::tests::log;

    fn of(process: u32, inode: u64) -> RealSync {
        RealSync { cause: Counter::SyncsPending, process, device: 1, inode }
    }

    fn named(name: &[u8]) -> SyncNames {
        let mut names = SyncNames::NONE;
        names.path[..name.len()].copy_from_slice(name);
        names
    }

    #[test]
    fn a_row_is_a_file_a_process_and_a_cause() {
        let log = log();
        let first = of(1, 1);
        let others = [
            of(2, 1),
            of(1, 2),
            RealSync { cause: Counter::SyncsOwn, ..first },
            RealSync { device: 2, ..first },
        ];
        let mut named_times = 0;
        for _ in 0..3 {
            log.real_syncs().add(&first, || {
                named_times += 1;
                named(b"/first")
            });
        }
        assert_eq!(named_times, 1);
        for sync in &others {
            log.real_syncs().add(sync, || SyncNames::NONE);
        }
        let (rows, unlisted) = log.real_syncs().rows();
        assert_eq!((rows.len(), unlisted), (5, 0));
        let cause = Counter::SyncsPending as u64;
        assert_eq!(rows[0], RealSyncs { cause, process: 1, names: named(b"/first"), number: 3 });
        assert!(rows[1..].iter().all(|row| row.number == 1));
    }

    #[test]
    fn names_that_fill_their_row_are_read_as_they_were_written() {
        let (log, full) = (log(), SyncNames { program: [b'p'; 16], path: [b'x'; 224] });
        (0..ROWS).for_each(|inode| log.real_syncs().add(&of(1, inode), || full));
        let (rows, _) = log.real_syncs().rows();
        assert!(rows.len() as u64 == ROWS && rows.iter().all(|row| row.names == full));
    }

    #[test]
    fn a_full_list_keeps_those_with_most_syncs_and_counts_all() {
        let log = log();
        let often = 5;
        for round in 0..200 {
            (0..often).for_each(|inode| log.real_syncs().add(&of(1, inode), || SyncNames::NONE));
            log.real_syncs().add(&of(2, round), || SyncNames::NONE);
        }
        let (rows, unlisted) = log.real_syncs().rows();
        assert_eq!(rows.len() as u64, ROWS);
        assert!(rows[..5].iter().all(|row| (row.process, row.number) == (1, 200)), "{rows:?}");
        let listed: u64 = rows.iter().map(|row| row.number).sum();
        assert_eq!(listed + unlisted, 200 * (often + 1));
        assert_eq!(unlisted, 200 - (ROWS - often));
    }

    #[test]
    fn threads_lose_no_sync() {
        let log = log();
        std::thread::scope(|scope| {
            for process in 0..4 {
                let log = &log;
                scope.spawn(move || {
                    for inode in 0..1000 {
                        log.real_syncs().add(&of(process, inode), || SyncNames::NONE);
                    }
                });
            }
        });
        let (rows, unlisted) = log.real_syncs().rows();
        assert_eq!(rows.iter().map(|row| row.number).sum::<u64>() + unlisted, 4000);
    }

    #[test]
    fn a_list_that_is_locked_is_not_waited_for() {
        let log = log();
        let list = RealSyncList { control: &log.ring().control };
        let locked = list.try_lock().unwrap();
        log.real_syncs().add(&of(1, 1), || SyncNames::NONE);
        drop(locked);
        assert_eq!(log.real_syncs().rows(), (Vec::new(), 1));
    }
}
