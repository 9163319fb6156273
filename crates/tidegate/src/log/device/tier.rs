//! A log device as a tier: state, draining, settings, metrics.

use serde_json::json;

use super::{CLOSED, LogDevice};
use crate::device::Result;
use crate::log::control::stats::Counter;
use crate::size::Size;
use crate::stats::{Collector, Metric, Unit};
use crate::sync::Ordering;
use crate::tier::{Level, Setting, SettingError, State, Tier, line, memory};

const USED_BYTES: Metric =
    Metric::gauge("log_used_bytes", Unit::Bytes, "Bytes of the ring between tail and head");
const RING_BYTES: Metric = Metric::gauge("log_ring_bytes", Unit::Bytes, "Bytes of the ring");
const FULL_WAITS: Metric =
    Metric::counter("log_full_waits", Unit::Count, "Waits of a write for free space in the log");
const RETIRED_BYTES: Metric = Metric::counter(
    "log_retired_bytes",
    Unit::Bytes,
    "Bytes of the log that were retired after the backing had the data",
);
const FAILURES: Metric = Metric::counter(
    "log_destage_failures",
    Unit::Count,
    "Attempts to destage records that the backing failed",
);

const CLEAN_FROM: &str = "clean-from-pct";
/// The batch of `NVCache`'s cleanup thread (figure 6 of its paper), in bytes of the log.
const BATCH: &str = "batch";
/// The largest batch: the cleaner holds its blocks in memory.
const BATCH_BYTES_MAX: u64 = 64 << 20;

impl LogDevice {
    fn clean_from_pct(&self) -> u64 {
        let ring_bytes = self.core.ring.pool().ring_bytes();
        self.core.clean_from_bytes.load(Ordering::Relaxed) * 100 / ring_bytes
    }
}

/// A setting with its new value.
enum Change {
    /// How full the log may be before it is cleaned, in percent.
    CleanFrom(u64),
    /// Bytes of a batch.
    Batch(u64),
}

impl Change {
    fn of(key: &str, value: &str, known: &[Setting]) -> std::result::Result<Self, SettingError> {
        let wrong = |expected: &str| SettingError::value(key, value, expected);
        match key {
            CLEAN_FROM => {
                let pct = value.parse().ok().filter(|pct: &u64| (1..=90).contains(pct));
                pct.map(Self::CleanFrom).ok_or_else(|| wrong("1 to 90"))
            }
            BATCH => {
                let size = value.parse().ok().filter(|size: &Size| size.bytes <= BATCH_BYTES_MAX);
                size.map(|size| Self::Batch(size.bytes)).ok_or_else(|| wrong("1 to 64M"))
            }
            _ => Err(SettingError::of(key, known)),
        }
    }
}

impl Tier for LogDevice {
    fn state(&self) -> State {
        let (used_bytes, ring_bytes) = self.fill_bytes();
        let backing = String::from_utf8_lossy(&self.core.binding.path).into_owned();
        let ring = Size { bytes: ring_bytes };
        let used = match used_bytes {
            0 => format!("empty, of {ring}"),
            bytes => format!("{} of {ring} in use", Size { bytes }),
        };
        State {
            level: Level::Pmem,
            name: "log".into(),
            pending_bytes: if self.core.has_changes() { used_bytes } else { 0 },
            lines: vec![line("log", used)],
            details: json!({
                "ring_bytes": ring_bytes,
                "used_bytes": used_bytes,
                "backing": backing,
                "destage_failures": self.core.ledger.failures(),
            }),
        }
    }

    fn drain(&self) -> Result<()> {
        self.stop_thread();
        self.destage()?;
        Ok(self.core.ring.pool().set_session(CLOSED)?)
    }

    fn stop_destaging(&self) {
        self.workers.abandon();
        self.core.end_blocking(self);
        self.core.ring.announce_space();
    }

    fn destage(&self) -> Result<u64> {
        let head = self.core.ring.head();
        let mut scratch = self.core.lock_cleaning();
        while self.core.has_work() && self.core.ring.tail() < head {
            if !self.core.clean(&mut scratch)? {
                self.core.ring.pool().region().relax();
            }
        }
        Ok(0)
    }

    fn settings(&self) -> Vec<Setting> {
        let setting = |key: &str, value, help: &str| Setting {
            key: key.into(),
            value,
            help: help.into(),
            fixed: None,
        };
        let batch = Size { bytes: self.core.batch_bytes.load(Ordering::Relaxed) };
        vec![
            setting(
                CLEAN_FROM,
                self.clean_from_pct().to_string(),
                "how full the log may be before it is cleaned, in percent: 1 to 90",
            ),
            setting(
                BATCH,
                batch.exact(),
                "bytes of the log that are written back between two flushes of the backing: 1 to 64M",
            ),
        ]
    }

    fn check(&self, settings: &[(&str, &str)]) -> std::result::Result<(), SettingError> {
        let known = self.settings();
        settings.iter().try_for_each(|(key, value)| Change::of(key, value, &known).map(drop))
    }

    fn set(&self, key: &str, value: &str) -> std::result::Result<(), SettingError> {
        match Change::of(key, value, &self.settings())? {
            Change::CleanFrom(pct) => {
                // Rounded up, so that the setting reads as it was written.
                let bytes = (self.core.ring.pool().ring_bytes() * pct).div_ceil(100);
                self.core.clean_from_bytes.store(bytes, Ordering::Relaxed);
                self.core.waker.wake_another();
            }
            Change::Batch(bytes) => self.core.batch_bytes.store(bytes, Ordering::Relaxed),
        }
        Ok(())
    }

    fn metrics(&self, collector: &mut Collector) {
        let (used_bytes, ring_bytes) = self.fill_bytes();
        let stats = self.core.ring.stats();
        collector.add(&USED_BYTES, used_bytes);
        collector.add(&RING_BYTES, ring_bytes);
        collector.add(&FULL_WAITS, stats.total(Counter::FullWaits));
        collector.add(&RETIRED_BYTES, stats.total(Counter::RetiredBytes));
        collector.add(&FAILURES, self.core.ledger.failures());
        self.core.requests.collect(collector);
        memory::collect(self.core.ring.pool().region(), collector);
    }
}
