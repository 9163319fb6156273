//! Counters of the whole cache and of each IO class, and the tally of one write. The names are from
//! Open CAS: its *core* is the backing, its *exported object* the device that clients see.

use std::cell::Cell;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64 as StdAtomicU64;

use strum::{EnumMessage, IntoStaticStr, VariantArray};

use super::policy::classes::CLASSES;
use crate::device::Result;
use crate::stats::{Collector, Metric, Unit};
use crate::sync::shard::{self, Shards};
use crate::sync::{AtomicBool, Ordering};

/// A counter. Its name is the name of its metric, and its doc comment, without the full stop, is
/// the help of the metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumMessage, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case", prefix = "cache_")]
pub(super) enum Counter {
    /// Reads of which all pages were cached.
    ReadHits,
    /// Reads of which a part was cached.
    ReadPartialMisses,
    /// Reads of which nothing was cached.
    ReadFullMisses,
    /// Writes of which all pages were cached.
    WriteHits,
    /// Writes of which a part was cached.
    WritePartialMisses,
    /// Writes of which nothing was cached.
    WriteFullMisses,
    /// Reads around the cache.
    PassThroughReads,
    /// Writes around the cache.
    PassThroughWrites,
    /// Pages read from the cache.
    BlockReads,
    /// Pages written to the cache.
    BlockWrites,
    /// Pages read from the backing.
    CoreReads,
    /// Pages written to the backing.
    CoreWrites,
    /// Clean pages that made place for others.
    Evictions,
    /// Waits of a write for a free slot.
    FullWaits,
    /// Requests of long streams that were not cached.
    CutOff,
    /// Requests that promotion did not cache.
    NotPromoted,
    /// Requests that went around the cache because their IO class may not use more of it.
    ClassFull,
    /// Reads of cached pages that the backing served because the memory was slower.
    ReadsByCost,
    /// Large writes that went to the backing because the memory was slower.
    WritesByCost,
    /// Bytes that writes did not store, for the memory had them already.
    UnchangedBytes,
    /// Groups of writes that were committed.
    GroupsCommitted,
    /// Groups that filled the cache, and were committed before a flush.
    GroupsCommittedEarly,
    /// Batches of pages that the memory failed.
    WriteErrors,
    /// Reads that the backing failed.
    CoreReadErrors,
    /// Writes and flushes that the backing failed.
    CoreWriteErrors,
}

const COUNTERS: usize = Counter::VARIANTS.len();

impl Counter {
    fn metric(self) -> Metric {
        let unit = if self == Self::UnchangedBytes { Unit::Bytes } else { Unit::Count };
        let help = self.get_documentation().unwrap_or_default().trim_end_matches('.');
        Metric::counter(self.into(), unit, help)
    }
}

/// Number of [`Counter`]s, from the first on, that are counted for each IO class too: requests, and
/// the pages that they read and write.
const CLASS_COUNTERS: usize = Counter::CoreWrites as usize + 1;

/// Requests by their cached pages: all, a part, none.
const READS: [Counter; 3] =
    [Counter::ReadHits, Counter::ReadPartialMisses, Counter::ReadFullMisses];
const WRITES: [Counter; 3] =
    [Counter::WriteHits, Counter::WritePartialMisses, Counter::WriteFullMisses];

/// Counters of one thread, or of several that share a shard. Other shards use other cache lines.
type ThreadCounters = [StdAtomicU64; COUNTERS];

/// Counters of one thread, or of several that share a shard, for each IO class.
struct ThreadClassCounters([[StdAtomicU64; CLASS_COUNTERS]; CLASSES]);

impl Default for ThreadClassCounters {
    fn default() -> Self {
        Self([const { [const { StdAtomicU64::new(0) }; CLASS_COUNTERS] }; CLASSES])
    }
}

/// The counters of one cache.
#[derive(Default)]
pub(super) struct Counters {
    all: Shards<ThreadCounters>,
    /// There is more than one IO class.
    has_classes: AtomicBool,
    /// Created with the first table of classes: few caches have one.
    classes: OnceLock<Shards<ThreadClassCounters>>,
}

impl Counters {
    pub(super) fn add(&self, counter: Counter, count: u64) {
        let (mine, is_exclusive) = self.all.mine();
        shard::add(&mine[counter as usize], count, is_exclusive);
    }

    /// Returns the sum over all threads. Threads that run may have counted more by now.
    pub(super) fn get(&self, counter: Counter) -> u64 {
        let of = |thread: &ThreadCounters| thread[counter as usize].load(Ordering::Relaxed);
        self.all.iter().map(of).fold(0, u64::wrapping_add)
    }

    /// Returns the number of the calling thread's writes that the cache took. Reads no counters of
    /// other shards, and so costs other threads nothing.
    pub(super) fn own_cached_writes(&self) -> u64 {
        let mine = self.all.mine().0;
        let count = |counter: Counter| mine[counter as usize].load(Ordering::Relaxed);
        WRITES.map(count).into_iter().fold(0, u64::wrapping_add)
    }

    /// Sets whether requests are counted by IO class from now on.
    pub(super) fn set_has_classes(&self, has_classes: bool) {
        if has_classes {
            self.classes.get_or_init(Shards::default);
        }
        self.has_classes.store(has_classes, Ordering::Relaxed);
    }

    /// Counts for the cache, and for IO class `class` if there are several classes.
    pub(super) fn add_of(&self, class: u8, counter: Counter, count: u64) {
        self.add(counter, count);
        if self.has_classes() {
            self.add_to_class(class, counter, count);
        }
    }

    /// Counts one for each of `classes`: the IO classes of a batch's pages.
    pub(super) fn add_each(&self, counter: Counter, classes: impl ExactSizeIterator<Item = u8>) {
        self.add(counter, classes.len() as u64);
        if self.has_classes() {
            classes.for_each(|class| self.add_to_class(class, counter, 1));
        }
    }

    pub(super) fn has_classes(&self) -> bool {
        self.has_classes.load(Ordering::Relaxed)
    }

    fn add_to_class(&self, class: u8, counter: Counter, count: u64) {
        if let Some((mine, is_exclusive)) = self.classes.get().map(Shards::mine)
            && let Some(counters) = mine.0.get(usize::from(class))
        {
            shard::add(&counters[counter as usize], count, is_exclusive);
        }
    }

    /// Collects the counters of IO class `class`.
    pub(super) fn collect_class(&self, class: u8, collector: &mut Collector) {
        let Some(threads) = self.classes.get() else { return };
        for counter in &Counter::VARIANTS[..CLASS_COUNTERS] {
            let of = |it: &ThreadClassCounters| {
                it.0[usize::from(class)][*counter as usize].load(Ordering::Relaxed)
            };
            collector.add(&counter.metric(), threads.iter().map(of).fold(0, u64::wrapping_add));
        }
    }

    /// Counts a read that found `hits` of its `pages` cached.
    pub(super) fn count_read(&self, class: u8, hits: u64, pages: u64) {
        self.count_request(class, READS, hits, pages);
        self.add_of(class, Counter::BlockReads, hits);
    }

    /// Counts a write of `pages` that has ended, by its `tally`.
    pub(super) fn count_write(&self, class: u8, tally: &Tally, pages: &Range<u64>) {
        // The whole write went around the cache.
        if tally.cached.get() == 0 {
            let is_empty = pages.is_empty();
            return self.add_of(class, Counter::PassThroughWrites, u64::from(!is_empty));
        }
        self.count_request(class, WRITES, tally.hits.get(), pages.end - pages.start);
    }

    /// Counts a read of `pages` pages from the backing for IO class `class`, or its failure.
    pub(super) fn count_core_read(&self, class: u8, pages: u64, read: &Result<()>) {
        match read {
            Ok(()) => self.add_of(class, Counter::CoreReads, pages),
            Err(_) => self.add(Counter::CoreReadErrors, 1),
        }
    }

    fn count_request(&self, class: u8, kinds: [Counter; 3], hits: u64, pages: u64) {
        let [hit, partial, miss] = kinds;
        let kind = match hits {
            hits if hits == pages => hit,
            0 => miss,
            _ => partial,
        };
        self.add_of(class, kind, 1);
    }

    pub(super) fn collect(&self, collector: &mut Collector) {
        let mut sums = [0_u64; COUNTERS];
        for thread in self.all.iter() {
            for (sum, count) in sums.iter_mut().zip(thread) {
                *sum = sum.wrapping_add(count.load(Ordering::Relaxed));
            }
        }
        for (counter, sum) in Counter::VARIANTS.iter().zip(sums) {
            collector.add(&counter.metric(), sum);
        }
    }
}

/// Counts of the pages of one write. A write is counted once, however many batches it takes.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) cached: Cell<u64>,
    /// Pages that were cached before.
    pub(super) hits: Cell<u64>,
}

impl Tally {
    /// Adds `cached` pages that the write has stored in the cache; `hits` pages were cached before.
    pub(super) fn add(&self, cached: u64, hits: u64) {
        self.cached.set(self.cached.get() + cached);
        self.hits.set(self.hits.get() + hits);
    }
}
