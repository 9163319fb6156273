//! State, drain and settings of a cache. Its counters have the names of Open CAS, whose *core* is
//! the backing, and whose *exported object* is the device that clients see.

use serde_json::json;

use super::counters::Counter;
use super::pages::index::Usage;
use super::pages::orders::ClassUsage;
use super::policy::classes::{CLASSES, Class};
use super::router::Router;
use super::router::mode::Mode;
use super::span::page_bytes;
use super::{CacheDevice, CacheError};
use crate::device::{DeviceError, DeviceErrorKind, Result};
use crate::size::Size;
use crate::stats::{Collector, Metric, Unit};
use crate::sync::Ordering;
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

const MODE: &str = "mode";
const SIZE: &str = "size";
const SIZE_HELP: &str = "size of the pool; a smaller one writes dirty pages to the backing first";
/// Suffix of a mode: all dirty pages are cleaned before the setting returns.
const FLUSH_SUFFIX: &str = "+flush";
/// Values of `mode`, in words.
const MODES: &str = "wb, wt, wa, wi, wo or pt, and +flush behind it to clean all dirty pages";

/// Returns the mode that `value` names, and whether all dirty pages are cleaned too.
fn mode_of(value: &str) -> std::result::Result<(Mode, bool), SettingError> {
    let (name, flushes) = match value.strip_suffix(FLUSH_SUFFIX) {
        Some(name) => (name, true),
        None => (value, false),
    };
    let mode = name.parse().map_err(|_| SettingError::value(MODE, value, MODES))?;
    Ok((mode, flushes))
}

/// Checks that `value` is a value of the setting `mode`.
///
/// # Errors
/// [`SettingError::Value`].
pub fn check_mode(value: &str) -> std::result::Result<(), SettingError> {
    mode_of(value).map(drop)
}

/// Checks that `value` is a mode that a cache with atomic flush can have.
///
/// # Errors
/// [`SettingError::Value`].
pub fn check_atomic_mode(value: &str) -> std::result::Result<(), SettingError> {
    if mode_of(value)?.0.writes_back() { Ok(()) } else { Err(not_atomic(value)) }
}

fn size_of(value: &str) -> std::result::Result<Size, SettingError> {
    let wrong = |error| SettingError::value(SIZE, value, format!("a size: {error}"));
    value.parse().map_err(wrong)
}

fn not_atomic(value: &str) -> SettingError {
    SettingError::value(MODE, value, "wb or wo with --atomic-flush")
}

impl CacheDevice {
    /// Returns a line about atomic flush if it is on.
    fn atomic_flush_line(&self, waiting: u64) -> Option<Line> {
        self.core.pages.groups.as_ref()?;
        let groups = self.core.pages.counters.get(Counter::GroupsCommitted);
        let early = self.core.pages.counters.get(Counter::GroupsCommittedEarly);
        let open = Size { bytes: page_bytes(waiting) };
        let said = format!("{groups} groups committed, {early} of them early; {open} uncommitted");
        Some(line("atomic flush", said))
    }

    /// Changes the mode. If dirty pages have to be cleaned and that fails, restores the old mode.
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
                (mode, _) if self.core.pages.groups.is_some() && !mode.writes_back() => {
                    Err(not_atomic(value))
                }
                _ => Ok(()),
            },
            _ => size_of(value).map(drop),
        }
    }

    fn size(&self) -> Size {
        Size { bytes: self.core.store.header.lock().superblock.pool_bytes }
    }

    fn set_size_text(&self, value: &str) -> std::result::Result<(), SettingError> {
        let wrong = |expected: String| SettingError::value(SIZE, value, expected);
        self.begin_resize(size_of(value)?.bytes)
            .map_err(|error| wrong(format!("a size that the pool can get: {}", error.in_words())))
    }
}

impl Tier for CacheDevice {
    fn state(&self) -> State {
        let usage = self.core.pages.usage();
        let (Usage { dirty, waiting, records, splits, .. }, live) = (usage, usage.used_slots());
        let slots = u64::from(self.core.store.slots());
        let size = |pages| Size { bytes: page_bytes(pages) };
        let unflushed = self.core.pages.unflushed().min(dirty);
        let mut used =
            format!("{} of {} in use, {} dirty", size(live), size(slots), size(dirty - unflushed));
        if unflushed > 0 {
            let unflushed = size(unflushed).to_string();
            used += &[", ", &unflushed, " written through and not flushed yet"].concat();
        }
        let (binding, settings) = {
            let header = self.core.store.header.lock();
            (header.binding.clone(), json!(header.settings_by_key()))
        };
        State {
            level: Level::Pmem,
            name: "cache".into(),
            pending_bytes: page_bytes(dirty),
            lines: [line("cache", used), line("mode", self.core.router.mode_in_words())]
                .into_iter()
                .chain(self.atomic_flush_line(waiting))
                .chain(self.core.router.by_cost.in_words().map(|it| line("by cost", it)))
                .chain(self.core.router.class_lines())
                .collect(),
            details: json!({
                "mode": self.mode().name(),
                "granularity": self.core.choices.lock().granularity(),
                "settings": settings,
                "records": records,
                "record_slots": records,
                "split_slots": splits,
                "line_bytes": self.core.pages.sharding.cluster.bytes(),
                "used_slots": live,
                "dirty_slots": dirty,
                "free_slots": slots.saturating_sub(live),
                "uncommitted_slots": waiting,
                "by_cost": self.core.router.by_cost.in_words(),
                "passes_through_after_errors": self.core.router.fallback.is_reached(&self.core.pages.failures),
                "size_bytes": page_bytes(slots),
                "pool_bytes": self.size().bytes,
                "resize": self.core.background.resizing.details(),
                "occupancy_bytes": page_bytes(live),
                "dirty_bytes": page_bytes(dirty),
                "atomic_flush": self.core.pages.groups.is_some(),
                "uncommitted_bytes": page_bytes(waiting),
                "backing": binding.map(|binding| binding.name),
                "core_write_errors": self.core.pages.counters.get(Counter::CoreWriteErrors),
                "cache_read_errors": self.core.pages.damaged.load(Ordering::Relaxed),
            }),
        }
    }

    fn drain(&self) -> Result<()> {
        self.shutdown()
    }

    fn stop_destaging(&self) {
        self.core.backing.keeps_dirty.store(true, Ordering::SeqCst);
        self.core.background.resizing.abandon();
        self.workers.abandon();
        // Writers that wait for a background thread make free slots by themselves now.
        self.core.pages.notify_all();
    }

    fn purge(&self) -> Result<Purged> {
        let pages = self.core.background.purge()?;
        let left = self.core.pages.usage().live;
        Ok(Purged { freed_bytes: page_bytes(pages), left_bytes: page_bytes(left) })
    }

    fn destage(&self) -> Result<u64> {
        self.core.background.cleaners.clean_all()?;
        Ok(page_bytes(self.core.pages.usage().waiting))
    }

    fn check_committed(&self) -> Result<()> {
        match self.core.pages.usage().waiting {
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
        let usage = self.core.pages.usage();
        let (Usage { dirty, waiting, records, .. }, live) = (usage, usage.used_slots());
        let slots = u64::from(self.core.store.slots());
        collector.add(&OCCUPANCY, page_bytes(live));
        collector.add(&FREE, page_bytes(slots.saturating_sub(live)));
        collector.add(&CLEAN, page_bytes(usage.live - dirty));
        collector.add(&DIRTY, page_bytes(dirty));
        collector.add(&WAITING, page_bytes(waiting));
        collector.add(&RECORDS, records);
        collector.add(&CACHE_ERRORS, self.core.pages.damaged.load(Ordering::Relaxed));
        collector.add(
            &FALLBACK,
            u64::from(self.core.router.fallback.is_reached(&self.core.pages.failures)),
        );
        self.core.pages.counters.collect(collector);
        self.core.router.collect_classes(collector);
        self.core.requests.collect(collector);
        memory::collect(&self.core.store.region, collector);
    }
}

impl Router {
    fn mode_in_words(&self) -> String {
        if self.fallback.is_reached(&self.pages.failures) {
            let mode = self.mode();
            return format!("pt, in place of {mode}: pt-error-threshold was reached");
        }
        self.mode().to_string()
    }

    /// Returns the usage of each IO class; nothing if there is class 0 alone.
    fn class_usage(&self) -> Vec<(Class, ClassUsage)> {
        let mut usage = [ClassUsage::default(); CLASSES];
        self.pages.each_shard(|shard| {
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
        let slots = u64::from(self.pages.store.slots());
        let shown = |(class, usage): (Class, ClassUsage)| {
            let size = |pages| Size { bytes: page_bytes(pages) };
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

    /// Collects usage, requests and blocks of each IO class, by the names that the cache uses.
    fn collect_classes(&self, collector: &mut Collector) {
        for (class, usage) in self.class_usage() {
            collector.labelled("io_class", class.id.to_string(), |collector| {
                collector.add(&OCCUPANCY, page_bytes(usage.live()));
                collector.add(&CLEAN, page_bytes(usage.live() - usage.dirty()));
                collector.add(&DIRTY, page_bytes(usage.dirty()));
                self.pages.counters.collect_class(class.id, collector);
            });
        }
    }
}
