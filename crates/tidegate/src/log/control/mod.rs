//! The control memory: volatile state that all processes of a log share.
//!
//! Invariants:
//! 1. `tail <= goal <= head` and `tail <= limit`; all four only grow. The tail and the limit here
//!    never run ahead of the persistent ones.
//! 2. A holder takes its slot before it reserves free space in the log. Until the kernel too has
//!    done the operation, the slot has a bound that is not above any position that the holder
//!    needs.
//! 3. The memory is as trusted as its owner: numbers from it are checked before use as an index.
//!
//! Map: the offsets of all words are here; `ring` moves head, limit, goal and tail; `slots` has the
//! operations in progress, `table` the files, `stats` the counters.

pub(super) mod owner;
pub(super) mod slots;
pub(super) mod stats;
pub(super) mod table;

use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use super::error::LogError;
use crate::pmem::{LOCK_BYTES, SharedMemory};
use crate::sync::{AtomicU64, Ordering};

const MAGIC: u64 = u64::from_le_bytes(*b"TIDECTL7");
/// A half word that changes when the supervisor holds a descriptor of another file.
pub(in crate::log) const KEPT_AT: u64 = 720;
/// A bit for each slot that was ever taken.
const SLOTS_USED_AT: u64 = 832;
/// Half words that processes wait on: free space in the log, work for the cleaner.
pub(in crate::log) const SPACE_AT: u64 = 448;
pub(in crate::log) const WORK_AT: u64 = 512;
/// The lock that the supervisor holds as long as it lives.
pub(in crate::log) const SUPERVISOR_LOCK_AT: u64 = 1024;
pub(in crate::log) const LIMIT_LOCK_AT: u64 = 1152;
pub(in crate::log) const TABLE_LOCK_AT: u64 = 1216;
pub(in crate::log) const REAL_SYNCS_LOCK_AT: u64 = 1280;
/// Words of the table beside its entries.
pub(in crate::log) const TABLE_AT: u64 = 2048;
pub(in crate::log) const STATS_AT: u64 = 64 << 10;
const SLOTS_AT: u64 = 128 << 10;
/// The pending changes of each file system.
pub(in crate::log) const FILE_SYSTEMS_AT: u64 = 32 << 10;
/// The programs whose code is known.
pub(in crate::log) const PROGRAMS_AT: u64 = 44 << 10;
/// Programs that the table holds.
pub(in crate::log) const PROGRAMS: u64 = 2048;
/// The processes for which the supervisor suspends logging.
pub(in crate::log) const SUSPENDERS_AT: u64 = 4 << 10;
/// Processes that the table of them holds.
pub(in crate::log) const SUSPENDERS: u64 = 1024;
/// Plain writes in flight.
pub(in crate::log) const LANES_AT: u64 = 1 << 20;
/// The kinds of the last changes of each file system.
pub(in crate::log) const KINDS_AT: u64 = 0x18_0000;
/// The files that processes keep unlogged.
pub(in crate::log) const KEEPERS_AT: u64 = 192 << 10;
pub(in crate::log) const BUCKETS_AT: u64 = 256 << 10;
/// The list of real syncs.
pub(in crate::log) const REAL_SYNCS_AT: u64 = 768 << 10;
pub(in crate::log) const ENTRIES_AT: u64 = 2 << 20;

/// Operations that may be in progress at once, in all processes.
#[cfg(not(loom))]
pub const SLOTS: u64 = 1024;
/// Operations that may be in progress at once: few, since loom explores each word.
#[cfg(loom)]
pub const SLOTS: u64 = 2;
const SLOT_BYTES: u64 = 64;
/// Files that may be in use at once.
pub const FILES_MAX: u64 = 65536;
pub(in crate::log) const ENTRY_BYTES: u64 = 256;

pub(in crate::log) const FILE_SYSTEM_BYTES: u64 = 192;
/// Offset of the names' lock in the entry of a file system.
pub(in crate::log) const NAMES_LOCK_AT: u64 = 128;
/// File systems whose files may be covered at once; the files of others stay plain.
pub(in crate::log) const FILE_SYSTEMS: u64 = 64;
/// Bytes of the control memory. Most pages are never touched.
pub const CONTROL_BYTES: u64 = ENTRIES_AT + FILES_MAX * ENTRY_BYTES;

const _: () = {
    assert!(SLOTS_AT + SLOTS * SLOT_BYTES <= KEEPERS_AT);
    assert!(FILE_SYSTEMS_AT + FILE_SYSTEMS * FILE_SYSTEM_BYTES <= PROGRAMS_AT);
    assert!(PROGRAMS_AT + PROGRAMS * 8 <= STATS_AT - 64);
    assert!(TABLE_AT + 64 <= SUSPENDERS_AT);
    assert!(SUSPENDERS_AT + SUSPENDERS * 8 <= FILE_SYSTEMS_AT);
    assert!(LOCK_BYTES <= 64);
    assert!(SLOTS_USED_AT + SLOTS.div_ceil(64) * 8 <= SUPERVISOR_LOCK_AT);
};

/// How long an operation waits for a lock before it goes on without the log.
pub(in crate::log) const TIMEOUT: Duration = Duration::from_secs(1);

/// The control memory of one log.
pub struct Control {
    memory: SharedMemory,
}

/// Declares functions that return words at fixed offsets; `$word` makes a `$type` of an offset.
macro_rules! words {
    ($type:ty = $word:ident: $($(#[$doc:meta])* $name:ident at $offset:expr;)*) => {
        $($(#[$doc])* #[inline] pub(in crate::log) fn $name(&self) -> $type {
            self.$word($offset)
        })*
    };
}
pub(in crate::log) use words;

/// Initial values of a log's volatile numbers.
#[derive(Debug, Clone, Copy)]
pub(in crate::log) struct Start {
    pub(in crate::log) pool: u64,
    pub(in crate::log) tail: u64,
    pub(in crate::log) limit: u64,
    pub(in crate::log) allocated_bytes: u64,
    pub(in crate::log) lap_bytes: u64,
    pub(in crate::log) finished: u64,
}

impl Control {
    /// Initializes control memory in zero bytes.
    pub(in crate::log) fn init(memory: SharedMemory, start: Start) -> Self {
        let names_locks = (0..FILE_SYSTEMS)
            .map(|number| FILE_SYSTEMS_AT + number * FILE_SYSTEM_BYTES + NAMES_LOCK_AT);
        let locks = [SUPERVISOR_LOCK_AT, LIMIT_LOCK_AT, TABLE_LOCK_AT, REAL_SYNCS_LOCK_AT];
        for lock in locks.into_iter().chain(names_locks) {
            memory.init_lock(lock);
        }
        let this = Self { memory };
        this.head().store(start.limit, Ordering::Relaxed);
        this.finished().store(start.finished, Ordering::Relaxed);
        // A log that starts without a finished position has holes below its head.
        let holes_end = if start.finished == 0 { start.limit } else { 0 };
        this.holes_end().store(holes_end, Ordering::Relaxed);
        this.tail().store(start.tail, Ordering::Relaxed);
        this.goal().store(start.tail, Ordering::Relaxed);
        this.limit().store(start.limit, Ordering::Relaxed);
        this.allocated_bytes().store(start.allocated_bytes, Ordering::Relaxed);
        this.lap_bytes().store(start.lap_bytes, Ordering::Relaxed);
        this.wake_at().store(u64::MAX, Ordering::Relaxed);
        this.pool().store(start.pool, Ordering::Relaxed);
        // Last: a process that finds the magic finds all.
        this.magic().store(MAGIC, Ordering::Release);
        this
    }

    /// Joins the control memory at `path`, which must belong to the pool whose salt is `pool`.
    pub(in crate::log) fn open(path: &Path, pool: u64) -> Result<Self, LogError> {
        let this = Self { memory: SharedMemory::open(path)? };
        let fits = this.memory.len_bytes() >= CONTROL_BYTES
            && this.magic().load(Ordering::Acquire) == MAGIC
            && this.pool().load(Ordering::Relaxed) == pool;
        if fits { Ok(this) } else { Err(LogError::ForeignControl) }
    }

    pub(in crate::log) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        self.memory.word(at)
    }

    fn half(&self, at: u64) -> &AtomicU32 {
        self.memory.half(at)
    }

    words! { &AtomicU64 = word:
        magic at 0;
        /// The salt of the pool.
        pool at 8;
        head at 64;
        /// All records below this position are finished: see `ring::finished`. This word is in the
        /// line of the head, which a writer has in its cache when it reads this.
        finished at 72;
        /// Below this position, reserved space may remain without a record for ever.
        holes_end at 80;
        tail at 128;
        goal at 192;
        limit at 256;
        /// Bytes of the ring, from its start, that have space in the file under the pool.
        allocated_bytes at 320;
        /// Bytes of the ring, from its start, that records may use: all, unless space was refused.
        lap_bytes at 328;
        /// The head that wakes the cleaner; `u64::MAX`: it does not sleep, or was woken.
        wake_at at 576;
        /// The tail that a caller waits for.
        wanted at 640;
        /// Number of suspensions, and bits of those without an end: above 0, no file is covered.
        suspended at 704;
        /// Number of processes that could not announce themselves to the supervisor.
        unannounced at 712;
        /// How many stories of files have begun since the log is in use.
        stories at 728;
        /// When the first record of names was appended that the cleaner does not yet retire, in
        /// nanoseconds of the monotonic clock; 0: there is none.
        named_ns at 736;
        /// The most that the clock of file times was ahead of the clock since boot, which is never
        /// set, in nanoseconds.
        clock_ahead_ns at 752;
        /// How many lanes, from the first on, were ever used.
        lanes_used at 760;
    }

    words! { &AtomicU32 = half:
        /// Not zero: a writer found no free space since this was cleared.
        blocked_writer at 516;
        /// Not zero: the supervisor is asked to hold a descriptor of some file.
        want_kept at 724;
        /// Not zero: the supervisor is asked to hold a descriptor of some file system.
        want_held at 744;
    }

    /// Returns whether a process runs that cannot be watched.
    #[inline]
    pub(super) fn is_suspended(&self) -> bool {
        self.suspended().load(Ordering::SeqCst) != 0
    }

    /// Changes the half word at `at`, and wakes all threads that [wait](Self::wait) for a change.
    pub(in crate::log) fn announce(&self, at: u64) {
        self.half(at).fetch_add(1, std::sync::atomic::Ordering::Release);
        self.memory.wake(at, i32::MAX);
    }

    /// Returns the half word at `at`, which each [`announce`](Self::announce) changes.
    pub(in crate::log) fn announced(&self, at: u64) -> u32 {
        self.half(at).load(std::sync::atomic::Ordering::Acquire)
    }

    /// Sleeps until the half word at `at` differs from `seen`, at most `timeout`.
    pub(in crate::log) fn wait(&self, at: u64, seen: u32, timeout: Option<Duration>) {
        self.memory.wait(at, seen, timeout);
    }
}
