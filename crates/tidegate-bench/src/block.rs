//! Block devices in this process, side by side: `bench block`.
//!
//! Invariants:
//! 1. All devices are made, filled and kept open before the first run, each on a pool of its own.
//!    Pools are unlinked once open, so that nothing stays behind however the run ends.
//! 2. Policies take turns: each runs once in a repetition, so that a pair to compare ran within
//!    seconds.
//! 3. A DRAM tier stands over a BTT of its own, stays open between cells of one cache size, and is
//!    flushed after each run: nothing of one run is written back while another is measured.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tidegate::btt::{Btt, BttOptions};
use tidegate::device::{BlockDevice, BlockDeviceExt, DeviceError};
use tidegate::dram::{self, DramTier, Phases};
use tidegate::log::device::{Binding, LogDevice, LogDeviceOptions};
use tidegate::log::{self, LogOptions, LogPool};
use tidegate::pmem::{Domain, MediaModel, Region, RegionOptions};
use tidegate::raw::{self, RawDevice, RawOptions};

use crate::block_args::BlockArgs;
use crate::error::{BenchError, Result};
use crate::floor::BareCopy;
use crate::measure::{Collector, Key, Op, Sample, Series, Traffic};
use crate::peers::libpmemblk::PmemBlk;
use crate::plan::{self, Cell, MATRIX_CACHES};
use crate::policy::Policy;
use crate::progress::Progress;
use crate::tiers::{Breakdown, IdleRow, Place, TierReport};
use crate::trace::Trace;
use crate::workload::{Outcome, Stop, Workload};

/// Case of a bare copy with the fence that makes it durable.
pub(crate) const COPY_ONE_FENCE: &str = "bare-copy-1-fence";
/// Case of a bare copy with a fence, a commit word and a fence.
pub(crate) const COPY_TWO_FENCES: &str = "bare-copy-2-fences";
/// Case of uniformly random blocks of a device.
pub(crate) const POOL_UNIFORM: &str = "uniform";
/// Case of a bare copy out.
pub(crate) const COPY_READ: &str = "bare-copy";

/// A device under test.
struct Subject {
    policy: Policy,
    /// The case of a bare copy's writes, instead of the cell's case.
    copy_case: Option<&'static str>,
    device: Arc<dyn BlockDevice>,
    /// The DRAM tier over the device, with the requested size.
    tier: Option<(u64, Arc<dyn DramTier>)>,
    /// The memory of the device, if its counters are accessible.
    region: Option<Arc<Region>>,
}

impl Subject {
    fn new(policy: Policy, device: Arc<dyn BlockDevice>, region: Option<Arc<Region>>) -> Self {
        Self { policy, copy_case: None, device, tier: None, region }
    }

    fn case<'a>(&self, op: Op, cell: &'a Cell) -> &'a str {
        match (self.copy_case, op) {
            (None, _) => &cell.case,
            (Some(_), Op::Read) => COPY_READ,
            (Some(case), _) => case,
        }
    }

    /// Returns whether the subject runs `cell`. Reads of both copies are identical: one copy runs
    /// them.
    fn wants(&self, cell: &Cell) -> bool {
        let twice = self.copy_case == Some(COPY_ONE_FENCE) && cell.workload.read_pct > 0;
        cell.wanted.has(self.policy) && !twice
    }

    fn failed(&self) -> impl FnOnce(DeviceError) -> BenchError + use<> {
        BenchError::device(self.policy.name())
    }

    fn traffic(&self) -> Option<Traffic> {
        self.region.as_deref().map(Traffic::of)
    }

    /// Returns the device that requests go to.
    fn top(&self) -> Arc<dyn BlockDevice> {
        match &self.tier {
            Some((_, tier)) => Arc::clone(tier) as _,
            None => Arc::clone(&self.device),
        }
    }

    fn phases(&self) -> Option<Phases> {
        self.tier.as_ref().map(|(_, tier)| tier.phases())
    }

    /// Opens a tier of `bytes` bytes, if the policy has one and it is not open.
    fn set_cache(&mut self, bytes: u64) -> Result<()> {
        let Policy::Tier(policy) = self.policy else { return Ok(()) };
        if self.tier.as_ref().is_some_and(|(open, _)| *open == bytes) {
            return Ok(());
        }
        self.close_cache()?;
        let below = Arc::clone(&self.device);
        let tier = dram::open(policy, bytes, below).map_err(self.failed())?;
        self.tier = Some((bytes, tier));
        Ok(())
    }

    fn close_cache(&mut self) -> Result<()> {
        match self.tier.take() {
            Some((_, tier)) => tier.drain().map_err(self.failed()),
            None => Ok(()),
        }
    }
}

/// Returns the planned time of [`measure`].
pub fn planned(args: &BlockArgs) -> Duration {
    let subjects = args.policies.len()
        + args.policies.iter().filter(|&&policy| policy == Policy::Copy).count();
    let tiers = args.policies.iter().filter(|policy| policy.has_tier());
    let mut planned = fill_cost(args) * u32::try_from(subjects).unwrap_or(u32::MAX);
    planned += tiers.map(|_| REST_DELAY + IDLE_TIME).sum::<Duration>();
    for cell in plan::cells(args) {
        let wanting = args.policies.iter().filter(|&&policy| cell.wanted.has(policy));
        planned += wanting.map(|_| step_cost(&cell)).sum::<Duration>() * args.common.repetitions;
    }
    planned
}

fn step_cost(cell: &Cell) -> Duration {
    let overrun = if cell.overrun { cell.cache_bytes / 4096 } else { 0 };
    let run = match cell.workload.stop {
        Stop::After(time) => time.mul_f64(1.0 + WARM_UP_SHARE),
        Stop::Requests(requests) => WRITE_COST * u32::try_from(requests).unwrap_or(u32::MAX),
    };
    run + WRITE_COST * u32::try_from(overrun).unwrap_or(u32::MAX)
}

fn fill_cost(args: &BlockArgs) -> Duration {
    Duration::from_nanos(args.common.size / 2)
}

/// Rough time of a write, for plans.
const WRITE_COST: Duration = Duration::from_micros(3);

/// Share of a run's time that warms up before, without being counted.
const WARM_UP_SHARE: f64 = 0.1;

/// Time that a tier without requests is watched.
const IDLE_TIME: Duration = Duration::from_millis(300);
/// Time from the last request until a tier is at rest: its threads look on for some milliseconds
/// before they sleep.
const REST_DELAY: Duration = Duration::from_millis(50);

/// Measures all cells that `args` name.
///
/// # Errors
/// [`BenchError::Usage`] for combinations that make no sense, and errors of the devices.
pub fn measure(args: &BlockArgs, progress: &mut Progress) -> Result<(Vec<Series>, TierReport)> {
    args.check()?;
    let mut run = Run {
        args,
        subjects: Vec::new(),
        collector: Collector::default(),
        tiers: TierReport { paper: args.is_paper(), ..TierReport::default() },
        trace: args.trace.as_deref(),
    };
    for &policy in &args.policies {
        run.subjects.extend(open(policy, args)?);
    }
    run.fill(progress)?;
    for cell in plan::cells(args) {
        run.cell(&cell, progress)?;
    }
    run.idle(progress)?;
    Ok((run.collector.into_series(), run.tiers))
}

/// A run through all cells.
struct Run<'a> {
    args: &'a BlockArgs,
    subjects: Vec<Subject>,
    collector: Collector,
    tiers: TierReport,
    /// The file that the requests of the next run are written to.
    trace: Option<&'a Path>,
}

impl Run<'_> {
    fn fill(&self, progress: &mut Progress) -> Result<()> {
        let Some(cell) = plan::cells(self.args).into_iter().next() else { return Ok(()) };
        for subject in &self.subjects {
            let name = subject.policy.name();
            progress.step(&format!("{name}: write every block once"), fill_cost(self.args));
            fits(subject, self.args)?;
            cell.workload.fill(&*subject.device).map_err(subject.failed())?;
        }
        Ok(())
    }

    fn cell(&mut self, cell: &Cell, progress: &mut Progress) -> Result<()> {
        for repetition in 1..=self.args.common.repetitions {
            for index in 0..self.subjects.len() {
                if self.subjects[index].wants(cell) {
                    let of = self.args.common.repetitions;
                    let what = describe(&self.subjects[index], cell);
                    progress.step(&format!("{what}, run {repetition} of {of}"), step_cost(cell));
                    self.subjects[index].set_cache(cell.cache_bytes)?;
                    self.turn(index, cell, repetition == 1)?;
                }
            }
        }
        Ok(())
    }

    /// Runs `cell` once on a subject, after requests that are not counted.
    fn turn(&mut self, index: usize, cell: &Cell, first: bool) -> Result<()> {
        let subject = &self.subjects[index];
        let measured = &cell.workload;
        warm_up(subject, cell)?;
        let (phases, traffic) = (subject.phases(), subject.traffic());
        let outcome = match self.trace.take() {
            Some(path) => run_traced(subject, measured, path)?,
            None => measured.run(&*subject.top()).map_err(subject.failed())?,
        };
        let traffic = subject.traffic().zip(traffic).map(|(after, before)| after.since(before));
        let phases = phases.zip(subject.phases());
        subject.top().flush().map_err(subject.failed())?;
        let (policy, case) = (subject.policy.name(), &cell.case);
        let Workload { threads, iodepth, block_bytes, .. } = *measured;
        for (op, sample) in Sample::of_kinds(&outcome, traffic) {
            // In a mix, all stored bytes belong to the writes.
            let traffic = traffic.filter(|_| op == Op::Write || outcome.write.is_empty());
            let key = Key::new(policy, subject.case(op, cell), op, block_bytes.into());
            self.collector.add(Key { threads, iodepth, ..key }, Sample { traffic, ..sample });
        }
        if let Some((before, after)) = phases {
            let (policy, case) = (policy.to_owned(), case.clone());
            let place = Place { policy, case, threads, iodepth };
            let writes = outcome.write.len();
            let breakdown = Breakdown::between(place, cell.breakdown, &before, &after, writes);
            self.tiers.add(breakdown);
        }
        if first && !measured.tick.is_zero() {
            self.tiers.timelines.push(outcome.timeline.row(policy, case));
        }
        Ok(())
    }

    /// Watches each tier while it has no requests and no other tier is open.
    fn idle(&mut self, progress: &mut Progress) -> Result<()> {
        self.subjects.iter_mut().try_for_each(Subject::close_cache)?;
        for subject in self.subjects.iter_mut().filter(|subject| subject.policy.has_tier()) {
            progress.step(&format!("{}: at rest", subject.policy.name()), REST_DELAY + IDLE_TIME);
            subject.set_cache(MATRIX_CACHES[0])?;
            if let Some((_, tier)) = &subject.tier {
                let block = vec![1; self.args.block_size as usize];
                tier.write(0, &block, tidegate::device::WriteFlags::default())
                    .and_then(|()| tier.flush())
                    .map_err(subject.failed())?;
                std::thread::sleep(REST_DELAY);
                self.tiers.idle.push(IdleRow::watch(tier.summary(), IDLE_TIME));
            }
            subject.close_cache()?;
        }
        Ok(())
    }
}

/// Runs `workload` on a subject, and writes its requests to the file `path`.
fn run_traced(subject: &Subject, workload: &Workload, path: &Path) -> Result<Outcome> {
    let trace = Trace::create(subject.top(), path)?;
    let outcome = workload.run(&trace).map_err(subject.failed())?;
    trace.finish()?;
    Ok(outcome)
}

/// Runs the load of `cell` for a while on other blocks; if the cell wants a full cache, until the
/// load has overrun the cache.
fn warm_up(subject: &Subject, cell: &Cell) -> Result<()> {
    let measured = &cell.workload;
    let stop = match measured.stop {
        _ if cell.overrun && subject.tier.is_some() => {
            let slots = cell.cache_bytes / u64::from(measured.block_bytes);
            Stop::Requests(slots * 9 / 8 / measured.threads as u64)
        }
        Stop::After(time) => Stop::After(time.mul_f64(WARM_UP_SHARE)),
        Stop::Requests(requests) => Stop::Requests(requests / 10),
    };
    let (tick, seed) = (Duration::ZERO, !measured.seed);
    let workload = Workload { stop, tick, seed, ..measured.clone() };
    workload.run(&*subject.top()).map_err(subject.failed())?;
    if cell.overrun { Ok(()) } else { subject.top().flush().map_err(subject.failed()) }
}

fn describe(subject: &Subject, cell: &Cell) -> String {
    let Workload { read_pct, threads, iodepth, .. } = cell.workload;
    let op = if read_pct == 100 { Op::Read } else { Op::Write };
    let (policy, case) = (subject.policy.name(), subject.case(op, cell));
    format!("{policy} {case}, {read_pct} % reads, {threads} threads, depth {iodepth}")
}

/// Makes the subjects of `policy`.
fn open(policy: Policy, args: &BlockArgs) -> Result<Vec<Subject>> {
    Ok(match policy {
        Policy::Copy => vec![open_copy(args, COPY_ONE_FENCE)?, open_copy(args, COPY_TWO_FENCES)?],
        Policy::Raw | Policy::Btt | Policy::Tier(_) => vec![open_engine(policy, args)?],
        Policy::Libpmemblk => vec![open_libpmemblk(args)?],
    })
}

fn open_copy(args: &BlockArgs, case: &'static str) -> Result<Subject> {
    let words = args.common.size / u64::from(args.block_size) * 8;
    let region = unnamed_region(&args.common.dir, &args.common.media, args.common.size + words)?;
    let device = BareCopy::new(Arc::clone(&region), args.block_size, case == COPY_TWO_FENCES);
    let subject = Subject::new(Policy::Copy, Arc::new(device), Some(region));
    Ok(Subject { copy_case: Some(case), ..subject })
}

fn open_engine(policy: Policy, args: &BlockArgs) -> Result<Subject> {
    let bytes = pool_bytes(args.common.size);
    let region = unnamed_region(&args.common.dir, &args.common.media, bytes)?;
    let block_bytes = args.block_size.min(4096);
    let device: Arc<dyn BlockDevice> = if policy == Policy::Raw {
        let options = RawOptions { block_bytes, ..RawOptions::default() };
        raw::create(&region, &options).map_err(BenchError::device("raw"))?;
        Arc::new(RawDevice::open(Arc::clone(&region)).map_err(BenchError::device("raw"))?)
    } else {
        Arc::new(new_btt(&region, block_bytes)?)
    };
    Ok(Subject::new(policy, device, Some(region)))
}

/// Makes a BTT with blocks of `lba_bytes` in `region`, and opens it.
pub(crate) fn new_btt(region: &Arc<Region>, lba_bytes: u32) -> Result<Btt> {
    let options = BttOptions { lba_bytes, ..BttOptions::default() };
    tidegate::btt::create(region, &options).map_err(BenchError::device("btt"))?;
    Btt::open(Arc::clone(region)).map_err(BenchError::device("btt"))
}

/// Makes a log in `region`, and opens it with default options as a device before `backing`.
pub(crate) fn new_log_device(
    region: &Arc<Region>,
    backing: Arc<dyn BlockDevice>,
) -> Result<LogDevice> {
    fn failed(error: impl std::error::Error) -> BenchError {
        BenchError::program("the log", error.to_string())
    }
    log::create(region, &LogOptions::default()).map_err(failed)?;
    let pool = LogPool::open(Arc::clone(region)).map_err(failed)?;
    let options = LogDeviceOptions::default();
    LogDevice::open(pool, backing, Binding::unnamed(1), options).map_err(failed)
}

fn open_libpmemblk(args: &BlockArgs) -> Result<Subject> {
    let dir = scratch(&args.common.dir)?;
    let path = dir.path().join("libpmemblk");
    let device = PmemBlk::create(&path, pool_bytes(args.common.size), args.block_size)?;
    Ok(Subject::new(Policy::Libpmemblk, Arc::new(device), None))
}

/// Returns the size of a pool that holds a working set of `size_bytes`, with blocks in flight, map,
/// log and headers.
pub(crate) fn pool_bytes(size_bytes: u64) -> u64 {
    size_bytes + size_bytes / 64 + (16 << 20)
}

/// Creates memory of `bytes` in an unlinked file in `dir`.
///
/// # Errors
/// The file cannot be created.
pub fn unnamed_region(dir: &Path, media: &MediaModel, bytes: u64) -> Result<Arc<Region>> {
    let dir = scratch(dir)?;
    Ok(Arc::new(create_region(&dir.path().join("pool"), media, bytes)?))
}

/// Creates memory of `bytes` in a new file.
pub(crate) fn create_region(path: &Path, media: &MediaModel, bytes: u64) -> Result<Region> {
    let options = RegionOptions {
        domain: Some(Domain::Adr),
        create_bytes: Some(bytes),
        media: media.clone(),
        ..RegionOptions::default()
    };
    Ok(Region::open(path, &options)?)
}

/// Creates a directory in `dir` that is removed when the result is dropped.
pub(crate) fn scratch(dir: &Path) -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("tidegate-bench-")
        .tempdir_in(dir)
        .map_err(BenchError::os("create a directory in", dir))
}

fn fits(subject: &Subject, args: &BlockArgs) -> Result<()> {
    let geometry = subject.device.geometry();
    if geometry.size_bytes() >= args.common.size
        && args.block_size.is_multiple_of(geometry.block_bytes)
    {
        return Ok(());
    }
    let (policy, bytes, block) =
        (subject.policy.name(), geometry.size_bytes(), geometry.block_bytes);
    Err(BenchError::Usage(format!(
        "{policy} made a device of {bytes} bytes in blocks of {block}: too small for --size {} and --block-size {}",
        args.common.size, args.block_size
    )))
}
