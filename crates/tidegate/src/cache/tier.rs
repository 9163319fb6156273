//! What a cache says of itself, and how it is drained and tuned. Its counters have the names that
//! Open CAS gives them: the backing is its *core*, the device that clients see its *exported
//! object*.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64 as StdAtomicU64;

use serde_json::json;
use strum::{EnumMessage, IntoStaticStr, VariantArray};

use super::pages::index::{Found, Usage};
use super::pages::orders::ClassUsage;
use super::policy::classes::{CLASSES, Class};
use super::router::mode::Mode;
use super::store::layout::PAGE_BYTES;
use super::tally::Tally;
use super::{CacheDevice, CacheError, Core};
use crate::device::{DeviceError, DeviceErrorKind, Result};
use crate::size::Size;
use crate::stats::{Collector, Metric, Unit};
use crate::sync::shard::{self, Shards};
use crate::sync::{AtomicBool, Ordering};
use crate::tier::{Level, Line, Purged, Setting, SettingError, State, Tier, line, memory};

const OCCUPANCY: Metric =
    Metric::gauge("cache_occupancy_bytes", Unit::Bytes, "Bytes of the pages in the cache");
const FREE: Metric =
    Metric::gauge("cache_free_bytes", Unit::Bytes, "Bytes of the slots that hold no page");
const CLEAN: Metric =
    Metric::gauge("cache_clean_bytes", Unit::Bytes, "Bytes of the pages that the backing has too");
const DIRTY: Metric =
    Metric::gauge("cache_dirty_bytes", Unit::Bytes, "Bytes of the pages that the backing lacks");
const RECORDS: Metric = Metric::gauge(
    "cache_records",
    Unit::Count,
    "Slots that hold some lines of a page, the rest of which is the backing's",
);
const WAITING: Metric = Metric::gauge(
    "cache_uncommitted_bytes",
    Unit::Bytes,
    "Bytes of the pages that wait for a flush, which commits all of them or none",
);
const CACHE_ERRORS: Metric = Metric::counter(
    "cache_read_errors",
    Unit::Count,
    "Pages whose data did not match their checksums",
);

const FALLBACK: Metric = Metric::gauge(
    "cache_fallback_pass_through",
    Unit::Count,
    "1 while all passes through after errors of the memory",
);

/// What is counted. The name of each is that of its metric, and what is said of it here is the help
/// of the metric, without the full stop.
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

/// Of all [`Counter`]s the first so many are counted for each IO class too: requests, and pages
/// read and written for them.
const CLASS_COUNTERS: usize = Counter::CoreWrites as usize + 1;

/// Requests of which all pages were cached, a part, nothing.
const READS: [Counter; 3] =
    [Counter::ReadHits, Counter::ReadPartialMisses, Counter::ReadFullMisses];
const WRITES: [Counter; 3] =
    [Counter::WriteHits, Counter::WritePartialMisses, Counter::WriteFullMisses];

/// Counters of one thread, or of several that share a shard: on no line that others write.
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
    /// Made with the first table of classes: few caches have one.
    classes: OnceLock<Shards<ThreadClassCounters>>,
}

impl Counters {
    pub(super) fn add(&self, counter: Counter, count: u64) {
        let (mine, is_exclusive) = self.all.mine();
        shard::add(&mine[counter as usize], count, is_exclusive);
    }

    /// The sum of all threads; those that run may have counted more.
    pub(super) fn get(&self, counter: Counter) -> u64 {
        let of = |thread: &ThreadCounters| thread[counter as usize].load(Ordering::Relaxed);
        self.all.iter().map(of).fold(0, u64::wrapping_add)
    }

    /// How many writes of the calling thread the cache took, at no cost to others.
    pub(super) fn own_cached_writes(&self) -> u64 {
        let mine = self.all.mine().0;
        let count = |counter: Counter| mine[counter as usize].load(Ordering::Relaxed);
        WRITES.map(count).into_iter().fold(0, u64::wrapping_add)
    }

    /// The classes are counted from now on, or not.
    pub(super) fn set_has_classes(&self, has_classes: bool) {
        if has_classes {
            self.classes.get_or_init(Shards::default);
        }
        self.has_classes.store(has_classes, Ordering::Relaxed);
    }

    /// Counts for the cache and for IO class `class`.
    pub(super) fn add_of(&self, class: u8, counter: Counter, count: u64) {
        self.add(counter, count);
        if self.has_classes() {
            self.add_to_class(class, counter, count);
        }
    }

    /// Counts one for each of `classes`: those of the pages of a batch.
    pub(super) fn add_each(&self, counter: Counter, classes: impl ExactSizeIterator<Item = u8>) {
        self.add(counter, classes.len() as u64);
        if self.has_classes() {
            classes.for_each(|class| self.add_to_class(class, counter, 1));
        }
    }

    fn has_classes(&self) -> bool {
        self.has_classes.load(Ordering::Relaxed)
    }

    fn add_to_class(&self, class: u8, counter: Counter, count: u64) {
        if let Some((mine, is_exclusive)) = self.classes.get().map(Shards::mine)
            && let Some(counters) = mine.0.get(usize::from(class))
        {
            shard::add(&counters[counter as usize], count, is_exclusive);
        }
    }

    /// What was counted for IO class `class`.
    fn collect_class(&self, class: u8, collector: &mut Collector) {
        let Some(threads) = self.classes.get() else { return };
        for counter in &Counter::VARIANTS[..CLASS_COUNTERS] {
            let of = |it: &ThreadClassCounters| {
                it.0[usize::from(class)][*counter as usize].load(Ordering::Relaxed)
            };
            collector.add(&counter.metric(), threads.iter().map(of).fold(0, u64::wrapping_add));
        }
    }

    /// A read found `hits` of its `pages` cached.
    pub(super) fn count_read(&self, class: u8, hits: u64, pages: u64) {
        self.count_request(class, READS, hits, pages);
        self.add_of(class, Counter::BlockReads, hits);
    }

    /// A write of `pages` has ended, and did what `tally` says.
    pub(super) fn count_write(&self, class: u8, tally: &Tally, pages: &Range<u64>) {
        // All of it went around the cache.
        if tally.cached.get() == 0 {
            let is_empty = pages.is_empty();
            return self.add_of(class, Counter::PassThroughWrites, u64::from(!is_empty));
        }
        self.count_request(class, WRITES, tally.hits.get(), pages.end - pages.start);
    }

    /// The backing was read, `pages` pages for IO class `class`, or that failed.
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

    fn collect(&self, collector: &mut Collector) {
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

const MODE: &str = "mode";
const SIZE: &str = "size";
const SIZE_HELP: &str = "size of the pool; a smaller one writes dirty pages to the backing first";
/// Behind a mode: all dirty pages are cleaned before the setting returns.
const FLUSH_SUFFIX: &str = "+flush";
/// What `mode` may be set to, in words.
const MODES: &str = "wb, wt, wa, wi, wo or pt, and +flush behind it to clean all dirty pages";

impl Core {
    fn mode_in_words(&self) -> String {
        if self.fallback.is_reached() {
            let mode = self.mode();
            return format!("pt, in place of {mode}: pt-error-threshold was reached");
        }
        self.mode().to_string()
    }

    fn bytes_of(pages: u64) -> u64 {
        pages * PAGE_BYTES
    }

    /// Pages that the backing was given in mode wt and has not flushed: dirty until it has.
    fn unflushed(&self) -> u64 {
        let written = self.written.lock().clone();
        let is_dirty = |found: &&Found| {
            self.find(found.page).is_some_and(|now| now.dirty && now.is_same(found))
        };
        written.iter().filter(is_dirty).count() as u64
    }

    /// What the IO classes use, where there are any but class 0: by class.
    fn class_usage(&self) -> Vec<(Class, ClassUsage)> {
        let mut usage = [ClassUsage::default(); CLASSES];
        self.each_shard(|shard| {
            for (sum, part) in usage.iter_mut().zip(&shard.orders.usage) {
                sum.live_units += part.live_units;
                sum.dirty_units += part.dirty_units;
            }
        });
        let table = self.classes.table();
        let classes = table.iter().flat_map(|table| table.iter());
        classes.map(|class| (class.clone(), usage[usize::from(class.id)])).collect()
    }

    fn class_lines(&self) -> Vec<Line> {
        let slots = u64::from(self.slots());
        let shown = |(class, usage): (Class, ClassUsage)| {
            let size = |pages| Size { bytes: Self::bytes_of(pages) };
            let most = size(slots * u64::from(class.max_pct) / 100);
            let (live, dirty) = (size(usage.live()), size(usage.dirty()));
            let said = format!(
                "{live} of {most} in use, {dirty} dirty; priority {}, mode {}: {}",
                class.priority,
                class.mode.unwrap_or_else(|| self.mode().name()),
                class.rule
            );
            (format!("io class {}", class.id).into(), said)
        };
        self.class_usage().into_iter().map(shown).collect()
    }

    /// Usage, requests and blocks of each IO class, as those of the cache.
    fn collect_classes(&self, collector: &mut Collector) {
        for (class, usage) in self.class_usage() {
            collector.labelled("io_class", class.id.to_string(), |collector| {
                collector.add(&OCCUPANCY, Self::bytes_of(usage.live()));
                collector.add(&CLEAN, Self::bytes_of(usage.live() - usage.dirty()));
                collector.add(&DIRTY, Self::bytes_of(usage.dirty()));
                self.counters.collect_class(class.id, collector);
            });
        }
    }

    /// What there is to say of atomic flush, where it is on.
    fn atomic_flush_line(&self, waiting: u64) -> Option<Line> {
        self.groups.as_ref()?;
        let groups = self.counters.get(Counter::GroupsCommitted);
        let early = self.counters.get(Counter::GroupsCommittedEarly);
        let open = Size { bytes: Self::bytes_of(waiting) };
        let said = format!("{groups} groups committed, {early} of them early; {open} uncommitted");
        Some(line("atomic flush", said))
    }
}

/// The mode that `value` names, and whether all dirty pages are cleaned too.
fn mode_of(value: &str) -> std::result::Result<(Mode, bool), SettingError> {
    let (name, flushes) = match value.strip_suffix(FLUSH_SUFFIX) {
        Some(name) => (name, true),
        None => (value, false),
    };
    let mode = name.parse().map_err(|_| SettingError::value(MODE, value, MODES))?;
    Ok((mode, flushes))
}

fn size_of(value: &str) -> std::result::Result<Size, SettingError> {
    let wrong = |error| SettingError::value(SIZE, value, format!("a size: {error}"));
    value.parse().map_err(wrong)
}

fn not_atomic(value: &str) -> SettingError {
    SettingError::value(MODE, value, "wb or wo with --atomic-flush")
}

impl CacheDevice {
    /// Changes the mode. Where the pages that are to be cleaned cannot be, the mode is the one of
    /// before again.
    fn set_mode_text(&self, value: &str) -> std::result::Result<(), SettingError> {
        let wrong = |expected: String| SettingError::value(MODE, value, expected);
        let (mode, flushes) = mode_of(value)?;
        let set = |mode| {
            self.set_mode(mode).map_err(|error| match error {
                CacheError::NotAtomic { .. } => not_atomic(value),
                error => wrong(format!("memory that works: {error}")),
            })
        };
        let before = self.mode();
        set(mode)?;
        if flushes && let Err(error) = self.clean_all() {
            set(before)?;
            return Err(wrong(format!("a backing that takes the dirty pages: {error}")));
        }
        Ok(())
    }

    fn check_one(&self, key: &str, value: &str) -> std::result::Result<(), SettingError> {
        match key {
            MODE => match mode_of(value)? {
                (mode, _) if self.core.groups.is_some() && !mode.writes_back() => {
                    Err(not_atomic(value))
                }
                _ => Ok(()),
            },
            _ => size_of(value).map(drop),
        }
    }

    fn size(&self) -> Size {
        Size { bytes: self.core.header.lock().superblock.pool_bytes }
    }

    fn set_size_text(&self, value: &str) -> std::result::Result<(), SettingError> {
        let wrong = |expected: String| SettingError::value(SIZE, value, expected);
        self.begin_resize(size_of(value)?.bytes)
            .map_err(|error| wrong(format!("a size that the pool can get: {}", error.in_words())))
    }
}

impl Tier for CacheDevice {
    fn state(&self) -> State {
        let usage = self.core.usage();
        let (Usage { dirty, waiting, records, splits, .. }, live) = (usage, usage.used_slots());
        let slots = u64::from(self.core.slots());
        let size = |pages| Size { bytes: Core::bytes_of(pages) };
        let unflushed = self.core.unflushed().min(dirty);
        let mut used =
            format!("{} of {} in use, {} dirty", size(live), size(slots), size(dirty - unflushed));
        if unflushed > 0 {
            let unflushed = size(unflushed).to_string();
            used += &[", ", &unflushed, " written through and not flushed yet"].concat();
        }
        let (binding, settings) = {
            let header = self.core.header.lock();
            (header.binding.clone(), json!(header.settings_by_key()))
        };
        State {
            level: Level::Pmem,
            name: "cache".into(),
            pending_bytes: Core::bytes_of(dirty),
            lines: [line("cache", used), line("mode", self.core.mode_in_words())]
                .into_iter()
                .chain(self.core.atomic_flush_line(waiting))
                .chain(self.core.by_cost.in_words().map(|it| line("by cost", it)))
                .chain(self.core.class_lines())
                .collect(),
            details: json!({
                "mode": self.mode().name(),
                "granularity": self.core.choices.lock().granularity(),
                "settings": settings,
                "records": records,
                "record_slots": records,
                "split_slots": splits,
                "line_bytes": self.core.sharding.cluster.bytes(),
                "used_slots": live,
                "dirty_slots": dirty,
                "free_slots": slots.saturating_sub(live),
                "uncommitted_slots": waiting,
                "by_cost": self.core.by_cost.in_words(),
                "passes_through_after_errors": self.core.fallback.is_reached(),
                "size_bytes": Core::bytes_of(slots),
                "pool_bytes": self.size().bytes,
                "resize": self.core.resizing.details(),
                "occupancy_bytes": Core::bytes_of(live),
                "dirty_bytes": Core::bytes_of(dirty),
                "atomic_flush": self.core.groups.is_some(),
                "uncommitted_bytes": Core::bytes_of(waiting),
                "backing": binding.map(|binding| binding.name),
                "core_write_errors": self.core.counters.get(Counter::CoreWriteErrors),
                "cache_read_errors": self.core.damaged.load(Ordering::Relaxed),
            }),
        }
    }

    fn drain(&self) -> Result<()> {
        self.shutdown()
    }

    fn stop_destaging(&self) {
        self.core.keeps_dirty.store(true, Ordering::SeqCst);
        self.core.resizing.abandon();
        self.workers.abandon();
        // Writers that wait for a thread make free slots by themselves now.
        self.core.notify_all();
    }

    fn purge(&self) -> Result<Purged> {
        let pages = self.core.purge()?;
        let left = self.core.usage().live;
        Ok(Purged { freed_bytes: Core::bytes_of(pages), left_bytes: Core::bytes_of(left) })
    }

    fn destage(&self) -> Result<u64> {
        self.core.clean_all()?;
        Ok(Core::bytes_of(self.core.usage().waiting))
    }

    fn check_committed(&self) -> Result<()> {
        match self.core.usage().waiting {
            0 => Ok(()),
            waiting => Err(DeviceError::new(
                DeviceErrorKind::Unsupported,
                format!(
                    "{waiting} pages wait for the flush that commits them; flush, and try again"
                ),
            )),
        }
    }

    fn settings(&self) -> Vec<Setting> {
        let (key, value) = (MODE.into(), self.mode().to_string());
        let mut settings = vec![Setting { key, value, help: MODES.into(), fixed: None }];
        let (key, value, help) = (SIZE.into(), self.size().exact(), SIZE_HELP.into());
        settings.push(Setting { key, value, help, fixed: None });
        settings.extend(self.core.choices.lock().list());
        settings
    }

    fn check(&self, settings: &[(&str, &str)]) -> std::result::Result<(), SettingError> {
        let is_own = |(key, _): &&(&str, &str)| [MODE, SIZE].contains(key);
        let (own, choices): (Vec<_>, Vec<_>) = settings.iter().partition(is_own);
        own.iter().try_for_each(|(key, value)| self.check_one(key, value))?;
        self.core.changed_by(&choices).map(drop)
    }

    fn set(&self, key: &str, value: &str) -> std::result::Result<(), SettingError> {
        match key {
            MODE => self.set_mode_text(value),
            SIZE => self.set_size_text(value),
            _ => self.core.choose(key, value),
        }
    }

    fn metrics(&self, collector: &mut Collector) {
        let usage = self.core.usage();
        let (Usage { dirty, waiting, records, .. }, live) = (usage, usage.used_slots());
        let slots = u64::from(self.core.slots());
        collector.add(&OCCUPANCY, Core::bytes_of(live));
        collector.add(&FREE, Core::bytes_of(slots.saturating_sub(live)));
        collector.add(&CLEAN, Core::bytes_of(usage.live - dirty));
        collector.add(&DIRTY, Core::bytes_of(dirty));
        collector.add(&WAITING, Core::bytes_of(waiting));
        collector.add(&RECORDS, records);
        collector.add(&CACHE_ERRORS, self.core.damaged.load(Ordering::Relaxed));
        collector.add(&FALLBACK, u64::from(self.core.fallback.is_reached()));
        self.core.counters.collect(collector);
        self.core.collect_classes(collector);
        self.core.requests.collect(collector);
        memory::collect(&self.core.region, collector);
    }
}
