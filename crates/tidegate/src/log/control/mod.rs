//! The control memory: what all processes that use a log share, and lose with the machine.
//!
//! Invariants:
//! 1. `tail <= goal <= head` and `tail <= limit`; all of them only grow. The tail and the limit
//!    here never run ahead of the persistent ones.
//! 2. A slot is taken before its holder reserves free space in the log, and holds a position that
//!    is not above any that the holder depends on, until the holder's operation has been done by
//!    the kernel too.
//! 3. It is as trusted as its owner: numbers read from it are checked before they index anything.
//!
//! Map: the places of all words are here; `ring` moves head, limit, goal and tail; `slots` has the
//! operations in the middle, `table` the files, `stats` the counters.

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
/// What is pending in each file system.
pub(in crate::log) const FILE_SYSTEMS_AT: u64 = 32 << 10;
/// What is known of programs.
pub(in crate::log) const PROGRAMS_AT: u64 = 44 << 10;
/// How many programs are known at most.
pub(in crate::log) const PROGRAMS: u64 = 2048;
/// Plain writes in flight.
pub(in crate::log) const LANES_AT: u64 = 1 << 20;
/// The kinds of the last changes of each file system.
pub(in crate::log) const KINDS_AT: u64 = 0x18_0000;
/// Which process keeps which file unlogged.
pub(in crate::log) const KEEPERS_AT: u64 = 192 << 10;
pub(in crate::log) const BUCKETS_AT: u64 = 256 << 10;
/// Which files are synced for real.
pub(in crate::log) const REAL_SYNCS_AT: u64 = 768 << 10;
pub(in crate::log) const ENTRIES_AT: u64 = 2 << 20;

/// Operations that may be in the middle at once, in all processes.
#[cfg(not(loom))]
pub const SLOTS: u64 = 1024;
/// Operations that may be in the middle at once: few, for loom looks at each word of each.
#[cfg(loom)]
pub const SLOTS: u64 = 2;
const SLOT_BYTES: u64 = 64;
/// Files that may be in use at once.
pub const FILES_MAX: u64 = 65536;
pub(in crate::log) const ENTRY_BYTES: u64 = 256;

pub(in crate::log) const FILE_SYSTEM_BYTES: u64 = 192;
/// Where the lock of the names is in an entry.
pub(in crate::log) const NAMES_LOCK_AT: u64 = 128;
/// File systems whose files may be covered at once; the files of others stay plain.
pub(in crate::log) const FILE_SYSTEMS: u64 = 64;
/// Bytes of the control memory. Most of it is never touched.
pub const CONTROL_BYTES: u64 = ENTRIES_AT + FILES_MAX * ENTRY_BYTES;

const _: () = {
    assert!(SLOTS_AT + SLOTS * SLOT_BYTES <= KEEPERS_AT);
    assert!(FILE_SYSTEMS_AT + FILE_SYSTEMS * FILE_SYSTEM_BYTES <= PROGRAMS_AT);
    assert!(PROGRAMS_AT + PROGRAMS * 8 <= STATS_AT - 64);
    assert!(LOCK_BYTES <= 64);
    assert!(SLOTS_USED_AT + SLOTS.div_ceil(64) * 8 <= SUPERVISOR_LOCK_AT);
};

/// How long a lock is waited for before an operation goes on without the log.
pub(in crate::log) const TIMEOUT: Duration = Duration::from_secs(1);

/// The control memory of one log.
pub struct Control {
    memory: SharedMemory,
}

/// Words at fixed places, each with the function that returns it: `$type` is what `$word` makes of
/// a place.
macro_rules! words {
    ($type:ty = $word:ident: $($(#[$doc:meta])* $name:ident at $offset:expr;)*) => {
        $($(#[$doc])* #[inline] pub(in crate::log) fn $name(&self) -> $type {
            self.$word($offset)
        })*
    };
}
pub(in crate::log) use words;

/// Where a log's volatile numbers start.
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
    /// Makes control memory out of zero bytes.
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
        // Last: a process that finds it finds all.
        this.magic().store(MAGIC, Ordering::Release);
        this
    }

    /// Joins the control memory at `path`, that of the pool whose salt is `pool`.
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
        /// All records below this position are finished: see `append::finished`. In the line of
        /// the head, which a writer has when it asks for this.
        finished at 72;
        /// Below this position space may have been reserved that no record will ever fill.
        holes_end at 80;
        tail at 128;
        goal at 192;
        limit at 256;
        /// Bytes of the ring, from its start, that have space in the file under the pool.
        allocated_bytes at 320;
        /// Bytes of the ring, from its start, that records may use: all, unless space was refused.
        lap_bytes at 328;
        /// The head at which the cleaner wants to be woken; the largest number: it does not sleep,
        /// or was woken.
        wake_at at 576;
        /// The position up to which a caller waits for the log to be retired.
        wanted at 640;
        /// Processes that cannot be watched: while there is one, no file is covered.
        suspended at 704;
        /// Processes that could not tell the supervisor that they are there.
        unannounced at 712;
        /// How many stories of files have begun since the log is in use.
        stories at 728;
        /// When the first record of names was appended that is not on its way to be retired, in
        /// nanoseconds of the monotonic clock; 0: there is none.
        named_ns at 736;
        /// The most that the clock of times of files was ahead of one that nobody sets, in
        /// nanoseconds.
        clock_ahead_ns at 752;
        /// The lanes that were ever used, from the first on.
        lanes_used at 760;
    }

    words! { &AtomicU32 = half:
        /// Not zero: a writer found no free space since this was cleared.
        blocked_writer at 516;
        /// Not zero: a file waits for the supervisor to hold a descriptor of it.
        want_kept at 724;
        /// Not zero: the supervisor is asked to hold a descriptor of some file system.
        want_held at 744;
    }

    /// Returns whether a process runs that cannot be watched.
    #[inline]
    pub(super) fn is_suspended(&self) -> bool {
        self.suspended().load(Ordering::SeqCst) != 0
    }

    /// Changes the half word at `at`, and wakes those that [wait](Self::wait) for that.
    pub(in crate::log) fn announce(&self, at: u64) {
        self.half(at).fetch_add(1, std::sync::atomic::Ordering::Release);
        self.memory.wake(at, i32::MAX);
    }

    /// A number that changes with each [`announce`](Self::announce).
    pub(in crate::log) fn announced(&self, at: u64) -> u32 {
        self.half(at).load(std::sync::atomic::Ordering::Acquire)
    }

    /// Sleeps until that number is not `seen` any more, `timeout` at most.
    pub(in crate::log) fn wait(&self, at: u64, seen: u32, timeout: Option<Duration>) {
        self.memory.wait(at, seen, timeout);
    }
}
