//! The bed of the measurements: devices, and turns of a workload on them.

use std::sync::Arc;
use std::time::Duration;

use tidegate::cache::{self, Binding, CacheDevice, CacheDeviceOptions, CacheOptions};
use tidegate::device::delay::{Delay, Delays};
use tidegate::device::null::NullDevice;
use tidegate::device::{self, BlockDevice, DeviceError, Geometry, Operation};
use tidegate::pmem::{MediaModel, Region};
use tidegate::stats::{Collector, Value};
use tidegate::tier::{SettingError, Tier};

use super::{Bench, CACHE, CacheArgs, LOG};
use crate::block::{new_btt, new_log_device, pool_bytes, unnamed_region};
use crate::error::{BenchError, Result};
use crate::floor::BareCopy;
use crate::measure::{Key, Op, Sample, Traffic};
use crate::pattern::Pattern;
use crate::workload::{Outcome, Stop, Workload};

/// Size of a page.
pub(super) const PAGE_BYTES: u32 = 4096;
/// A disk that loses nothing that it acknowledged: 20 µs a request, 1.4 GB/s.
pub(super) const DISK: Delays =
    Delays { read_ns: 20_000, write_ns: 20_000, flush_ns: 0, byte_ps: 714 };

/// A device under test.
#[derive(Clone)]
pub(super) struct Subject {
    pub(super) policy: &'static str,
    pub(super) device: Arc<dyn BlockDevice>,
    /// The memory of the device, if its counters are accessible.
    region: Option<Arc<Region>>,
}

impl Subject {
    /// Makes a subject whose memory has no accessible counters.
    pub(super) fn plain(policy: &'static str, device: Arc<dyn BlockDevice>) -> Self {
        Self { policy, device, region: None }
    }

    pub(super) fn failed(&self) -> impl FnOnce(DeviceError) -> BenchError + use<> {
        BenchError::device(self.policy)
    }

    fn traffic(&self) -> Option<Traffic> {
        self.region.as_deref().map(Traffic::of)
    }

    /// Runs `workload` and discards its measurements.
    pub(super) fn prepare(&self, workload: &Workload) -> Result<()> {
        workload.run(&*self.device).map(drop).map_err(self.failed())
    }
}

/// A cache by its lines and its setting of `cost`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Variant {
    pub(super) policy: &'static str,
    line_bytes: u32,
    cost: &'static str,
}

impl Variant {
    /// The cache with lines of 4 KiB, and all other variants.
    pub(super) const ALL: [Self; 4] = [
        Self { policy: CACHE, line_bytes: PAGE_BYTES, cost: "off" },
        Self::LINES[0],
        Self::LINES[1],
        Self::BY_COST,
    ];
    /// Lines of the study's other sizes.
    pub(super) const LINES: [Self; 2] = [
        Self { policy: "cache-16k", line_bytes: 16 << 10, cost: "off" },
        Self { policy: "cache-64k", line_bytes: 64 << 10, cost: "off" },
    ];
    /// Measured costs decide which pages are cached.
    pub(super) const BY_COST: Self =
        Self { policy: "cache-cost", line_bytes: PAGE_BYTES, cost: "auto" };
}

/// The memory of caches and logs, one at a time.
pub(super) struct Pool {
    region: Arc<Region>,
}

impl Pool {
    /// Creates touched memory for a cache of about `bytes`.
    pub(super) fn new(args: &CacheArgs, bytes: u64) -> Result<Self> {
        Self::on_medium(args, &args.media, bytes)
    }

    /// Creates touched memory that stands for `media`, for a cache of about `bytes`.
    pub(super) fn on_medium(args: &CacheArgs, media: &MediaModel, bytes: u64) -> Result<Self> {
        let region = unnamed_region(&args.dir, media, pool_bytes(bytes))?;
        region.zero_streaming(0, region.len_bytes())?;
        Ok(Self { region })
    }

    /// Makes an empty cache before `backing`, with lines of `line_bytes` and these settings.
    /// Returns it as a subject and as a device.
    fn cache(
        &self,
        policy: &'static str,
        line_bytes: u32,
        settings: &[(&str, &str)],
        backing: Arc<dyn BlockDevice>,
    ) -> Result<(Subject, Arc<CacheDevice>)> {
        cache::create(&self.region, &CacheOptions { line_bytes, ..CacheOptions::default() })?;
        let pages = backing.geometry().size_bytes() / u64::from(PAGE_BYTES);
        let binding = Binding { identity: 1, name: "bench".to_owned(), pages };
        let options = CacheDeviceOptions::default();
        let region = Arc::clone(&self.region);
        let device = Arc::new(CacheDevice::open(region, backing, binding, options)?);
        // Each write changes one line of a cached page: `by-content` would not count whole pages.
        set_all(&device, &[("by-content", "off"), ("cost", "off")])?;
        set_all(&device, settings)?;
        Ok((self.subject_of(policy, Arc::clone(&device) as _), device))
    }

    fn subject_of(&self, policy: &'static str, device: Arc<dyn BlockDevice>) -> Subject {
        Subject { policy, device, region: Some(Arc::clone(&self.region)) }
    }

    /// Makes an empty cache like `variant`.
    pub(super) fn variant(
        &self,
        variant: &Variant,
        backing: Arc<dyn BlockDevice>,
    ) -> Result<Subject> {
        let Variant { policy, line_bytes, cost } = *variant;
        Ok(self.cache(policy, line_bytes, &[("cost", cost)], backing)?.0)
    }

    /// Makes an empty cache with `settings`. Returns it as a subject and as a device.
    pub(super) fn with_settings(
        &self,
        policy: &'static str,
        settings: &[(&str, &str)],
        backing: Arc<dyn BlockDevice>,
    ) -> Result<(Subject, Arc<CacheDevice>)> {
        self.cache(policy, PAGE_BYTES, settings, backing)
    }

    /// Makes an empty log with default settings before `backing`.
    pub(super) fn log(&self, backing: Arc<dyn BlockDevice>) -> Result<Subject> {
        Ok(self.subject_of(LOG, Arc::new(new_log_device(&self.region, backing)?)))
    }

    /// Makes an empty cache with lines of 4 KiB before `backing`.
    pub(super) fn subject(
        &self,
        policy: &'static str,
        backing: Arc<dyn BlockDevice>,
    ) -> Result<Subject> {
        Ok(self.cache(policy, PAGE_BYTES, &[], backing)?.0)
    }
}

fn set_all(cache: &CacheDevice, settings: &[(&str, &str)]) -> Result<()> {
    let failed = |error: SettingError| BenchError::program("the cache", error.to_string());
    settings.iter().try_for_each(|(key, value)| cache.set(key, value).map_err(failed))
}

/// Returns the value of the counter or gauge `name` of `cache`.
pub(super) fn reading(cache: &CacheDevice, name: &str) -> u64 {
    let mut collector = Collector::default();
    cache.metrics(&mut collector);
    let found = collector.finish().into_iter().find(|reading| reading.metric.name == name);
    match found.map(|reading| reading.value) {
        Some(Value::Whole(number)) => number,
        _ => 0,
    }
}

/// Makes a BTT of `bytes`, and writes every block once.
pub(super) fn btt(args: &CacheArgs, bytes: u64) -> Result<Subject> {
    let region = unnamed_region(&args.dir, &args.media, pool_bytes(bytes))?;
    let device = new_btt(&region, PAGE_BYTES)?;
    filled(Subject { policy: "btt", device: Arc::new(device), region: Some(region) }, bytes)
}

/// Makes a bare copy with two fences, and writes every block once.
pub(super) fn copy(args: &CacheArgs, bytes: u64) -> Result<Subject> {
    let region = unnamed_region(&args.dir, &args.media, pool_bytes(bytes))?;
    let device = BareCopy::new(Arc::clone(&region), PAGE_BYTES, true);
    filled(Subject { policy: "copy", device: Arc::new(device), region: Some(region) }, bytes)
}

fn filled(subject: Subject, bytes: u64) -> Result<Subject> {
    writes(Pattern::Sequential, bytes, Stop::Requests(0))
        .fill(&*subject.device)
        .map_err(subject.failed())?;
    Ok(subject)
}

/// Makes a device of `bytes` that keeps nothing.
pub(super) fn null(bytes: u64) -> Result<Arc<dyn BlockDevice>> {
    let device = NullDevice::new(PAGE_BYTES, bytes / u64::from(PAGE_BYTES));
    Ok(Arc::new(device.map_err(BenchError::device("null"))?))
}

/// Makes a device of `bytes` that keeps nothing and delays requests by `delays`.
pub(super) fn slow(bytes: u64, delays: Delays) -> Result<Arc<dyn BlockDevice>> {
    Ok(Arc::new(Delay::new(null(bytes)?, delays)))
}

/// Describes writes of a page by one thread.
pub(super) fn writes(pattern: Pattern, working_set_bytes: u64, stop: Stop) -> Workload {
    Workload::writes(pattern, PAGE_BYTES, working_set_bytes, stop)
}

impl Bench<'_> {
    /// Returns the end of a timed run that takes `times` as long as other runs.
    pub(super) fn run_time(&self, times: f64) -> Stop {
        Stop::After(Duration::from_secs_f64(self.args.seconds * times))
    }

    /// Runs `workload` on `subject`, and collects the measurements under `case`.
    pub(super) fn turn(
        &mut self,
        case: &str,
        subject: &Subject,
        workload: &Workload,
    ) -> Result<Outcome> {
        let before = subject.traffic();
        let outcome = workload.run(&*subject.device).map_err(subject.failed())?;
        let traffic = subject.traffic().zip(before).map(|(after, before)| after.since(before));
        let Workload { threads, iodepth, block_bytes, .. } = *workload;
        let measured = Sample::of_kinds(&outcome, traffic).filter(|(op, _)| *op != Op::Flush);
        for (op, sample) in measured {
            let key = Key::new(subject.policy, case, op, block_bytes.into());
            self.collector.add(Key { threads, iodepth, ..key }, sample);
        }
        Ok(outcome)
    }
}

/// A device whose every write is durable when it is answered.
pub(super) struct Forced(pub(super) Arc<dyn BlockDevice>);

impl BlockDevice for Forced {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> device::Result<()> {
        match operation {
            Operation::Write { flags, .. } => flags.fua = true,
            Operation::WriteZeroes { flags, .. } => flags.fua = true,
            _ => {}
        }
        self.0.run(operation)
    }
}

/// Makes a subject of the backing alone, with each write forced.
pub(super) fn alone(backing: Arc<dyn BlockDevice>) -> Subject {
    Subject::plain(super::BACKING, Arc::new(Forced(backing)))
}
