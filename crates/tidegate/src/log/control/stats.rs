//! Counters and latencies of all processes that use a log, in its control memory.
//!
//! The counters are spread over shards by thread, so that threads do not contend. Counters that
//! each write changes are in the writer's slot, which has one writer: a load and a store suffice.
//! The sum is exact once all threads have stopped.

use crate::log::control::owner::owner;
use crate::log::control::{Control, SLOTS, STATS_AT};
use crate::stats::histogram;
use crate::sync::Ordering;

/// The counters of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Counter {
    /// Writes that went into the log.
    Writes = 0,
    /// Bytes of these writes.
    WriteBytes = 1,
    /// Writes that went to the kernel only.
    UnloggedWrites = 2,
    /// Syncs that had nothing to do.
    SyncsSkipped = 3,
    /// Syncs that went to the kernel.
    SyncsReal = 4,
    /// Definitions of files.
    Definitions = 5,
    /// Waits of writes for a full log.
    FullWaits = 6,
    /// Nanoseconds of these waits.
    FullWaitNs = 7,
    /// Files and directories that the cleaner synced.
    CleanerSyncs = 8,
    /// Nanoseconds of these syncs.
    CleanerSyncNs = 9,
    /// Bytes of the log that the cleaner retired.
    RetiredBytes = 10,
    /// The most that the log was filled, in bytes.
    HighWaterBytes = 11,
    /// Nanoseconds that real syncs of programs took.
    SyncsRealNs = 12,
    /// Files that a sync has admitted to the log.
    Admissions = 13,
    /// Real syncs of covered files, since names, attributes or sizes were pending.
    SyncsPending = 14,
    /// Files that have left the log.
    Leaves = 15,
    /// Real syncs of files that are not admitted yet.
    SyncsNotYet = 16,
    /// Real syncs of files pinned to the kernel path: mapped, written by `io_uring`, and so on.
    SyncsPinned = 17,
    /// Real syncs of files on disks whose file systems are not covered.
    SyncsUnsupported = 18,
    /// Real syncs while a process ran that cannot be watched.
    SyncsSuspended = 19,
    /// Real syncs of files that left the log since logging them cost more than syncing them.
    SyncsByGain = 20,
    /// Real syncs of files that could not be admitted: no descriptor kept, no space in the log.
    SyncsRefused = 21,
    /// Real syncs of covered files whose own names or attributes were changed.
    SyncsOwn = 22,
    /// Real syncs of files that the user's globs keep out of the log.
    SyncsExcluded = 23,
    /// Syncs of directories, which are always real.
    SyncsOfDirectories = 24,
    /// Writes that the kernel synced, since their descriptors have `O_SYNC` or `O_DSYNC`.
    SyncsSynchronous = 25,
    /// Syncs of new files that a record of the whole file has answered.
    SyncsMade = 26,
    /// Changes of names that were recorded.
    NamesRecorded = 27,
    /// Real syncs of new files while names, attributes or sizes of others were pending.
    SyncsNewPending = 28,
    /// Real syncs of new files that no record could recreate.
    SyncsNewRefused = 29,
    /// Real syncs of files that left the log since a process was killed while it changed them.
    SyncsInterrupted = 30,
    /// Real syncs of files that left the log since a process outside changed their size.
    SyncsOutside = 31,
}

const COUNTERS: u64 = 32;
/// The counters that slots have, in their order there.
const IN_SLOTS: [Counter; 2] = [Counter::Writes, Counter::WriteBytes];
/// Buckets of latencies: the first ones of [`histogram`], up to 2^33 ns.
pub const BUCKETS: usize = 248;
const SHARDS: u64 = 16;
const SHARD_BYTES: u64 = 4096;
const ENABLED_AT: u64 = STATS_AT - 64;

const _: () = assert!(STATS_AT + SHARDS * SHARD_BYTES <= 128 << 10);
const _: () = assert!((COUNTERS + BUCKETS as u64) * 8 <= SHARD_BYTES);
const _: () = assert!(SLOTS > 0);

/// The counters of a log.
pub struct Stats<'a> {
    pub(in crate::log) control: &'a Control,
}

impl Stats<'_> {
    fn shard() -> u64 {
        STATS_AT + (owner().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60) % SHARDS * SHARD_BYTES
    }

    /// Adds `number` to a counter.
    #[inline]
    pub fn add(&self, counter: Counter, number: u64) {
        let at = Self::shard() + counter as u64 * 8;
        self.control.memory().word(at).fetch_add(number, Ordering::Relaxed);
    }

    /// Counts a write of `bytes`, for the holder of `slot`.
    ///
    /// Needs no locked instruction: a slot's holder sees all stores of the former holder, and is
    /// the only one to change these words.
    #[inline]
    pub(in crate::log) fn add_write(&self, slot: u64, bytes: u64) {
        for (which, number) in [1, bytes].into_iter().enumerate() {
            let word = self.control.slot_counter(slot, which as u64);
            word.store(word.load(Ordering::Relaxed).wrapping_add(number), Ordering::Relaxed);
        }
    }

    /// Raises a counter to `number`, if that is larger.
    pub fn raise(&self, counter: Counter, number: u64) {
        let at = STATS_AT + counter as u64 * 8;
        self.control.memory().word(at).fetch_max(number, Ordering::Relaxed);
    }

    /// Returns the sum of a counter over all threads.
    pub fn total(&self, counter: Counter) -> u64 {
        let in_slots = IN_SLOTS.iter().position(|it| *it == counter).map_or(0, |which| {
            let words = (0..SLOTS).map(|slot| self.control.slot_counter(slot, which as u64));
            words.map(|word| word.load(Ordering::Relaxed)).sum()
        });
        self.sum(counter as u64) + in_slots
    }

    /// Returns whether latencies are wanted: taking the time costs more than a short append.
    #[inline]
    pub fn wants_latencies(&self) -> bool {
        self.control.memory().word(ENABLED_AT).load(Ordering::Relaxed) != 0
    }

    /// Asks for latencies.
    pub fn want_latencies(&self) {
        self.control.memory().word(ENABLED_AT).store(1, Ordering::Relaxed);
    }

    /// Notes the latency of a write.
    pub fn record_latency(&self, nanoseconds: u64) {
        let bucket = histogram::bucket_of(nanoseconds).min(BUCKETS - 1) as u64;
        let at = Self::shard() + (COUNTERS + bucket) * 8;
        self.control.memory().word(at).fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of writes in each bucket; see [`histogram::upper_bound_ns`].
    pub fn latencies(&self) -> [u64; BUCKETS] {
        std::array::from_fn(|bucket| self.sum(COUNTERS + bucket as u64))
    }

    fn sum(&self, word: u64) -> u64 {
        let shards = (0..SHARDS).map(|shard| STATS_AT + shard * SHARD_BYTES + word * 8);
        shards.map(|at| self.control.memory().word(at).load(Ordering::Relaxed)).sum()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn control() -> Control {
        use crate::log::CONTROL_BYTES;
        use crate::log::control::Start;
        use crate::pmem::SharedMemory;
        let memory = SharedMemory::anonymous(CONTROL_BYTES).unwrap();
        let start =
            Start { pool: 1, tail: 0, limit: 0, allocated_bytes: 0, lap_bytes: 0, finished: 0 };
        Control::init(memory, start)
    }

    /// The histogram has more buckets; the next one here would be a word of the next shard.
    #[test]
    fn a_latency_beyond_the_last_bucket_falls_into_that() {
        let control = control();
        let stats = Stats { control: &control };
        for latency_ns in [0, 7, 8, u64::MAX] {
            stats.record_latency(latency_ns);
        }
        let found = stats.latencies();
        assert_eq!([0, 7, 8, BUCKETS - 1].map(|bucket| found[bucket]), [1; 4]);
        assert_eq!(found.iter().sum::<u64>(), 4);
    }

    #[test]
    fn writes_that_slots_have_counted_are_in_the_totals() {
        let control = control();
        let stats = Stats { control: &control };
        stats.add_write(0, 100);
        stats.add_write(SLOTS - 1, 28);
        stats.add(Counter::Writes, 1);
        stats.add(Counter::SyncsSkipped, 7);
        let totals =
            [Counter::Writes, Counter::WriteBytes, Counter::UnloggedWrites, Counter::SyncsSkipped];
        assert_eq!(totals.map(|counter| stats.total(counter)), [3, 128, 0, 7]);
        let slot = control.slot(0);
        assert!(
            [slot.owner, slot.bound, slot.record, slot.file]
                .iter()
                .all(|word| word.load(Ordering::Relaxed) == 0),
            "a free slot stays one"
        );
    }
}
