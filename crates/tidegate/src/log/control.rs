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
//! Map: the places of all words are constants here; `append` moves head and limit, `cleaner` goal
//! and tail, `table` keeps the files, `stats` counts.

use std::path::Path;
use std::time::Duration;

use super::error::LogError;
use crate::pmem::{LOCK_BYTES, LockFailure, Locked, SharedMemory};
use crate::sync::{AtomicU64, Ordering};

const MAGIC: u64 = u64::from_le_bytes(*b"TIDECTL7");
const MAGIC_AT: u64 = 0;
const POOL_AT: u64 = 8;
const HEAD_AT: u64 = 64;
/// In the line of the head, which a writer has when it asks for this.
const FINISHED_AT: u64 = 72;
/// Holes that nothing will ever fill end before this position.
const HOLES_END_AT: u64 = 80;
const TAIL_AT: u64 = 128;
const GOAL_AT: u64 = 192;
const LIMIT_AT: u64 = 256;
const ALLOCATED_AT: u64 = 320;
const LAP_AT: u64 = 328;
/// Processes that could not announce themselves.
const UNANNOUNCED_AT: u64 = 712;
/// Processes that cannot be watched: while there is one, no file is covered.
const SUSPENDED_AT: u64 = 704;
/// A half word that changes when the supervisor holds a descriptor of another file.
const KEPT_AT: u64 = 720;
/// A half word: some file waits for that.
const WANT_KEPT_AT: u64 = 724;
/// How many stories of files have begun since the log is in use.
const STORIES_AT: u64 = 728;
/// When the first record of names was appended that is not on its way to be retired, in nanoseconds
/// of the monotonic clock; 0: there is none.
const NAMED_NS_AT: u64 = 736;
/// A half word: the supervisor is asked to hold a descriptor of some file system.
const WANT_HELD_AT: u64 = 744;
/// The most that the clock of times of files was ahead of one that nobody sets, in nanoseconds.
const CLOCK_AHEAD_NS_AT: u64 = 752;
/// A bit for each slot that was ever taken.
const SLOTS_USED_AT: u64 = 832;
/// The lanes that were ever used, from the first on.
const LANES_USED_AT: u64 = 760;
/// The position up to which a caller waits for the log to be retired.
const WANTED_AT: u64 = 640;
/// Half words that processes wait on: free space in the log, work for the cleaner.
const SPACE_AT: u64 = 448;
const WORK_AT: u64 = 512;
/// Not zero: a writer waits for free space.
const BLOCKED_WRITER_AT: u64 = 516;
/// The head at which the cleaner wants to be woken.
const WAKE_AT: u64 = 576;
const SUPERVISOR_LOCK_AT: u64 = 1024;
const LIMIT_LOCK_AT: u64 = 1152;
pub(super) const TABLE_LOCK_AT: u64 = 1216;
pub(super) const REAL_SYNCS_LOCK_AT: u64 = 1280;
/// Words of the table beside its entries.
pub(super) const TABLE_AT: u64 = 2048;
pub(super) const STATS_AT: u64 = 64 << 10;
const SLOTS_AT: u64 = 128 << 10;
/// What is pending in each file system.
pub(super) const FILE_SYSTEMS_AT: u64 = 32 << 10;
/// What is known of programs.
pub(super) const PROGRAMS_AT: u64 = 44 << 10;
/// How many programs are known at most.
pub(super) const PROGRAMS: u64 = 2048;
/// Plain writes in flight.
pub(super) const LANES_AT: u64 = 1 << 20;
/// The kinds of the last changes of each file system.
pub(super) const KINDS_AT: u64 = 0x18_0000;
/// Which process keeps which file unlogged.
pub(super) const KEEPERS_AT: u64 = 192 << 10;
pub(super) const BUCKETS_AT: u64 = 256 << 10;
/// Which files are synced for real.
pub(super) const REAL_SYNCS_AT: u64 = 768 << 10;
pub(super) const ENTRIES_AT: u64 = 2 << 20;

/// Operations that may be in the middle at once, in all processes.
#[cfg(not(loom))]
pub const SLOTS: u64 = 1024;
/// Operations that may be in the middle at once: few, for loom looks at each word of each.
#[cfg(loom)]
pub const SLOTS: u64 = 2;
const SLOT_BYTES: u64 = 64;
/// Files that may be in use at once.
pub const FILES_MAX: u64 = 65536;
pub(super) const ENTRY_BYTES: u64 = 256;

pub(super) const FILE_SYSTEM_BYTES: u64 = 192;
/// Where the lock of the names is in an entry.
pub(super) const NAMES_LOCK_AT: u64 = 128;
/// File systems whose files may be covered at once; the files of others stay plain.
pub(super) const FILE_SYSTEMS: u64 = 64;
/// Bytes of the control memory. Most of it is never touched.
pub const CONTROL_BYTES: u64 = ENTRIES_AT + FILES_MAX * ENTRY_BYTES;

const _: () = {
    assert!(SLOTS_AT + SLOTS * SLOT_BYTES <= KEEPERS_AT);
    assert!(FILE_SYSTEMS_AT + FILE_SYSTEMS * FILE_SYSTEM_BYTES <= PROGRAMS_AT);
    assert!(PROGRAMS_AT + PROGRAMS * 8 <= STATS_AT - 64);
    assert!(SLOTS_USED_AT + SLOTS.div_ceil(64) * 8 <= SUPERVISOR_LOCK_AT);
};

/// How long a lock is waited for before an operation goes on without the log.
pub(super) const TIMEOUT: Duration = Duration::from_secs(1);

/// The control memory of one log.
pub struct Control {
    memory: SharedMemory,
}

/// Where a log's volatile numbers start.
#[derive(Debug, Clone, Copy)]
pub(super) struct Start {
    pub(super) pool: u64,
    pub(super) tail: u64,
    pub(super) head: u64,
    pub(super) limit: u64,
    pub(super) allocated_bytes: u64,
    pub(super) lap_bytes: u64,
    pub(super) finished: u64,
}

impl Control {
    /// Makes control memory out of zero bytes.
    pub(super) fn init(memory: SharedMemory, start: Start) -> Self {
        let names_locks = (0..FILE_SYSTEMS)
            .map(|number| FILE_SYSTEMS_AT + number * FILE_SYSTEM_BYTES + NAMES_LOCK_AT);
        let locks = [SUPERVISOR_LOCK_AT, LIMIT_LOCK_AT, TABLE_LOCK_AT, REAL_SYNCS_LOCK_AT];
        for lock in locks.into_iter().chain(names_locks) {
            memory.init_lock(lock);
        }
        memory.word(HEAD_AT).store(start.head, Ordering::Relaxed);
        memory.word(FINISHED_AT).store(start.finished, Ordering::Relaxed);
        // A log that starts without a finished position has holes below its head.
        let holes_end = if start.finished == 0 { start.head } else { 0 };
        memory.word(HOLES_END_AT).store(holes_end, Ordering::Relaxed);
        for word in [TAIL_AT, GOAL_AT] {
            memory.word(word).store(start.tail, Ordering::Relaxed);
        }
        memory.word(LIMIT_AT).store(start.limit, Ordering::Relaxed);
        memory.word(ALLOCATED_AT).store(start.allocated_bytes, Ordering::Relaxed);
        memory.word(LAP_AT).store(start.lap_bytes, Ordering::Relaxed);
        memory.word(WAKE_AT).store(u64::MAX, Ordering::Relaxed);
        memory.word(POOL_AT).store(start.pool, Ordering::Relaxed);
        // Last: a process that finds it finds all.
        memory.word(MAGIC_AT).store(MAGIC, Ordering::Release);
        Self { memory }
    }

    /// Joins the control memory at `path`, that of the pool whose salt is `pool`.
    pub(super) fn open(path: &Path, pool: u64) -> Result<Self, LogError> {
        let memory = SharedMemory::open(path)?;
        let fits = memory.len_bytes() >= CONTROL_BYTES
            && memory.word(MAGIC_AT).load(Ordering::Acquire) == MAGIC
            && memory.word(POOL_AT).load(Ordering::Relaxed) == pool;
        if fits { Ok(Self { memory }) } else { Err(LogError::ForeignControl) }
    }

    pub(super) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    pub(super) fn head(&self) -> &AtomicU64 {
        self.memory.word(HEAD_AT)
    }

    /// All records below this position are finished: see `append::finished`.
    pub(super) fn finished(&self) -> &AtomicU64 {
        self.memory.word(FINISHED_AT)
    }

    /// Below this position space may have been reserved that no record fills.
    pub(super) fn holes_end(&self) -> &AtomicU64 {
        self.memory.word(HOLES_END_AT)
    }

    /// Slots that were ever taken: those with numbers from `64 * index` on, a bit each.
    pub(super) fn slots_used(&self, index: u64) -> &AtomicU64 {
        self.memory.word(SLOTS_USED_AT + index * 8)
    }

    pub(super) fn tail(&self) -> &AtomicU64 {
        self.memory.word(TAIL_AT)
    }

    pub(super) fn goal(&self) -> &AtomicU64 {
        self.memory.word(GOAL_AT)
    }

    pub(super) fn limit(&self) -> &AtomicU64 {
        self.memory.word(LIMIT_AT)
    }

    /// Bytes of the ring, from its start, that have space in the file under the pool.
    pub(super) fn allocated_bytes(&self) -> &AtomicU64 {
        self.memory.word(ALLOCATED_AT)
    }

    /// Bytes of the ring, from its start, that records may use: all, unless space was refused.
    pub(super) fn lap_bytes(&self) -> &AtomicU64 {
        self.memory.word(LAP_AT)
    }

    /// Processes that could not tell the supervisor that they are there.
    pub(super) fn unannounced(&self) -> &AtomicU64 {
        self.memory.word(UNANNOUNCED_AT)
    }

    pub(super) fn suspended(&self) -> &AtomicU64 {
        self.memory.word(SUSPENDED_AT)
    }

    /// How many stories of files have begun.
    pub(super) fn stories(&self) -> &AtomicU64 {
        self.memory.word(STORIES_AT)
    }

    /// Not zero: a file waits for the supervisor to hold a descriptor of it.
    pub(super) fn want_kept(&self) -> &std::sync::atomic::AtomicU32 {
        self.memory.half(WANT_KEPT_AT)
    }

    /// See [`Log::names_age`](super::Log::names_age).
    pub(super) fn named_ns(&self) -> &AtomicU64 {
        self.memory.word(NAMED_NS_AT)
    }

    /// The number of the last lane that was ever used, plus 1.
    pub(super) fn lanes_used(&self) -> &AtomicU64 {
        self.memory.word(LANES_USED_AT)
    }

    /// See [`Log::note_clock`](super::Log::note_clock).
    pub(super) fn clock_ahead_ns(&self) -> &AtomicU64 {
        self.memory.word(CLOCK_AHEAD_NS_AT)
    }

    /// Not zero: a descriptor of a file system is wanted.
    pub(super) fn want_held(&self) -> &std::sync::atomic::AtomicU32 {
        self.memory.half(WANT_HELD_AT)
    }

    /// The supervisor holds a descriptor of one more file: wakes those that wait for one.
    pub(super) fn announce_kept(&self) {
        self.memory.half(KEPT_AT).fetch_add(1, std::sync::atomic::Ordering::Release);
        self.memory.wake(KEPT_AT, i32::MAX);
    }

    /// A number that changes with each [`announce_kept`](Self::announce_kept).
    pub(super) fn kept(&self) -> u32 {
        self.memory.half(KEPT_AT).load(std::sync::atomic::Ordering::Acquire)
    }

    /// Sleeps until that number is not `seen` any more, `timeout` at most.
    pub(super) fn wait_for_kept(&self, seen: u32, timeout: Duration) {
        self.memory.wait(KEPT_AT, seen, Some(timeout));
    }

    pub(super) fn wanted(&self) -> &AtomicU64 {
        self.memory.word(WANTED_AT)
    }

    pub(super) fn try_lock_limit(&self) -> Result<Locked<'_>, LockFailure> {
        self.memory.try_lock(LIMIT_LOCK_AT)
    }

    pub(super) fn lock_limit(&self) -> Result<Locked<'_>, LockFailure> {
        self.memory.lock(LIMIT_LOCK_AT, TIMEOUT)
    }

    /// The lock that the supervisor holds as long as it lives.
    pub(super) fn lock_supervisor(&self, timeout: Duration) -> Result<Locked<'_>, LockFailure> {
        self.memory.lock(SUPERVISOR_LOCK_AT, timeout)
    }

    /// A living process holds it.
    #[inline]
    pub(super) fn supervisor_is_locked(&self) -> bool {
        self.memory.is_held(SUPERVISOR_LOCK_AT)
    }

    /// There is free space in the log, or may be: wakes all writers that wait for it.
    pub(super) fn announce_space(&self) {
        self.memory.half(SPACE_AT).fetch_add(1, std::sync::atomic::Ordering::Release);
        self.memory.wake(SPACE_AT, i32::MAX);
    }

    /// A number that changes whenever free space is announced.
    pub(super) fn space_changes(&self) -> u32 {
        self.memory.half(SPACE_AT).load(std::sync::atomic::Ordering::Acquire)
    }

    /// Sleeps until free space is announced after [`space_changes`](Self::space_changes) returned
    /// `seen`.
    pub(super) fn wait_for_space(&self, seen: u32, timeout: Duration) {
        self.memory.wait(SPACE_AT, seen, Some(timeout));
    }

    /// Wakes the cleaner.
    pub(super) fn announce_work(&self) {
        self.wake_at().store(u64::MAX, Ordering::Release);
        self.memory.half(WORK_AT).fetch_add(1, std::sync::atomic::Ordering::Release);
        self.memory.wake(WORK_AT, i32::MAX);
    }

    /// The head at which the cleaner wants to be woken; the largest number: it does not sleep, or
    /// was woken.
    #[inline]
    pub(super) fn wake_at(&self) -> &AtomicU64 {
        self.memory.word(WAKE_AT)
    }

    /// A number that changes whenever work is announced.
    pub(super) fn work(&self) -> u32 {
        self.memory.half(WORK_AT).load(std::sync::atomic::Ordering::Acquire)
    }

    /// Sleeps until work is announced after [`work`](Self::work) returned `seen`, or the head
    /// reaches `position`.
    pub(super) fn wait_for_work(&self, seen: u32, position: u64, timeout: Option<Duration>) {
        self.wake_at().store(position, Ordering::SeqCst);
        // Writers move the head and then look where to wake: one of both sees the other.
        if self.head().load(Ordering::SeqCst) < position {
            self.memory.wait(WORK_AT, seen, timeout);
        }
        self.wake_at().store(u64::MAX, Ordering::Release);
    }

    /// Not zero: a writer found no free space since this was cleared.
    pub(super) fn blocked_writer(&self) -> &std::sync::atomic::AtomicU32 {
        self.memory.half(BLOCKED_WRITER_AT)
    }

    /// Slot `number`, below [`SLOTS`].
    pub(super) fn slot(&self, number: u64) -> SlotWords<'_> {
        let at = SLOTS_AT + number * SLOT_BYTES;
        SlotWords {
            owner: self.memory.word(at),
            bound: self.memory.word(at + 8),
            record: self.memory.word(at + 16),
            file: self.memory.word(at + 24),
        }
    }

    /// What holders of a slot have counted, `which` below 4. Changed by the slot's holder
    /// alone.
    #[inline]
    pub(super) fn slot_counter(&self, number: u64, which: u64) -> &AtomicU64 {
        self.memory.word(SLOTS_AT + number * SLOT_BYTES + 32 + which * 8)
    }

    /// Makes the lock at `offset`.
    pub(super) fn init_lock(&self, offset: u64) {
        const { assert!(LOCK_BYTES <= 64) };
        self.memory.init_lock(offset);
    }
}

/// Bit of [`SlotWords::record`]: space from this position on may be reserved, for a record that is
/// not there yet.
pub(super) const RESERVING: u64 = 1;
/// Bit of [`SlotWords::record`]: the record is durable.
pub(super) const FINISHED: u64 = 2;

/// The words of a slot.
#[derive(Clone, Copy)]
pub(super) struct SlotWords<'a> {
    /// Process and thread that hold it, 0: nobody.
    pub(super) owner: &'a AtomicU64,
    /// No position below this may be retired; 0: nothing is depended on yet.
    pub(super) bound: &'a AtomicU64,
    /// Position of the record that is being written, 0: none yet; with [`RESERVING`] or
    /// [`FINISHED`].
    pub(super) record: &'a AtomicU64,
    /// Number of the file's entry plus 1, 0: none.
    pub(super) file: &'a AtomicU64,
}

impl SlotWords<'_> {
    /// Position of the record for which the holder has space, finished or not; 0: none.
    pub(super) fn record_position(&self) -> u64 {
        let word = self.record.load(Ordering::Acquire);
        if word & RESERVING == 0 { word & !FINISHED } else { 0 }
    }

    /// The position from which on the holder may have space with a record that is not finished.
    pub(super) fn unfinished_from(&self) -> Option<u64> {
        let word = self.record.load(Ordering::Acquire);
        (word != 0 && word & FINISHED == 0).then_some(word & !RESERVING)
    }
}
