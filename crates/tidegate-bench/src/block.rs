//! Block devices in this process, side by side: `bench block`.
//!
//! Invariants:
//! 1. All devices are made, filled and kept open before the first run, each on a pool of its own; pools have no name
//!    any more once open, so nothing is left behind however the run ends.
//! 2. Policies take turns: repetition by repetition each runs once, so that a pair to compare ran within seconds.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tidegate::btt::{Btt, BttError, BttOptions};
use tidegate::device::{BlockDevice, DeviceError};
use tidegate::pmem::{Domain, MediaModel, Region, RegionOptions};

use crate::args::BlockArgs;
use crate::error::{BenchError, Result};
use crate::floor::BareCopy;
use crate::measure::{Collector, Key, Op, Sample, Series, Traffic};
use crate::peers::libpmemblk::PmemBlk;
use crate::progress::Progress;
use crate::workload::{Outcome, Stop, Workload};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The block translation table.
    Btt,
    /// Bare streaming copies: the floor.
    Copy,
    /// PMDK's block translation table.
    Libpmemblk,
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "btt" => Ok(Self::Btt),
            "copy" => Ok(Self::Copy),
            "peer:libpmemblk" => Ok(Self::Libpmemblk),
            _ => Err(format!("policy {text} is not known; known are btt, copy, peer:libpmemblk")),
        }
    }
}

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
    policy: &'static str,
    case: Case,
    device: Box<dyn BlockDevice>,
    /// The memory of the device, where its counters can be seen.
    region: Option<Arc<Region>>,
}

/// What the case of a subject is called.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    /// After the access pattern.
    Pattern,
    /// The floor with so many fences a write.
    Copy { fences: u8 },
}

impl Subject {
    fn case(&self, op: Op, args: &BlockArgs) -> String {
        match (self.case, op) {
            (Case::Pattern, _) => args.pattern.to_string(),
            (Case::Copy { .. }, Op::Read) => COPY_READ.to_owned(),
            (Case::Copy { fences: 1 }, _) => COPY_ONE_FENCE.to_owned(),
            (Case::Copy { .. }, _) => COPY_TWO_FENCES.to_owned(),
        }
    }

    /// Both copies read alike: one of them is enough.
    fn wants(&self, read_pct: u8) -> bool {
        read_pct == 0 || self.case != Case::Copy { fences: 1 }
    }

    fn failed(&self) -> impl FnOnce(DeviceError) -> BenchError {
        let policy = self.policy.to_owned();
        move |source| BenchError::Device { policy, source }
    }

    fn traffic(&self) -> Option<Traffic> {
        let counters = self.region.as_ref()?.counters();
        Some(Traffic {
            data_bytes: counters.bytes_streamed,
            metadata_bytes: counters.lines_written_back * 64,
            fences: counters.fences,
        })
    }
}

/// One combination of parameters, run by every subject in turn.
#[derive(Clone, Copy)]
struct Group {
    read_pct: u8,
    threads: usize,
    iodepth: u32,
}

/// Time that [`measure`] should take.
pub fn planned(args: &BlockArgs) -> Duration {
    let copies = args.policies.iter().filter(|&&policy| policy == Policy::Copy).count();
    let runs = groups(args).len() * (args.policies.len() + copies);
    step_cost(args) * u32::try_from(runs).unwrap_or(u32::MAX) * args.common.repetitions
        + fill_cost(args) * u32::try_from(args.policies.len() + copies).unwrap_or(u32::MAX)
}

fn step_cost(args: &BlockArgs) -> Duration {
    Duration::from_secs_f64(args.common.seconds * (1.0 + WARM_UP_SHARE))
}

fn fill_cost(args: &BlockArgs) -> Duration {
    Duration::from_nanos(args.common.size / 2)
}

/// Share of a run's time that is run before it without being counted.
const WARM_UP_SHARE: f64 = 0.1;

/// Measures all combinations that `args` name.
///
/// # Errors
/// [`BenchError::Usage`] for combinations that make no sense, and those of the devices.
pub fn measure(args: &BlockArgs, progress: &mut Progress) -> Result<Vec<Series>> {
    check(args)?;
    let mut subjects = Vec::new();
    for &policy in &args.policies {
        open(policy, args, &mut subjects)?;
    }
    for subject in &subjects {
        progress.step(&format!("{}: write every block once", subject.policy), fill_cost(args));
        fits(subject, args)?;
        workload(args, groups(args)[0]).fill(&*subject.device).map_err(subject.failed())?;
    }
    let mut collector = Collector::default();
    for group in groups(args) {
        for repetition in 1..=args.common.repetitions {
            for subject in subjects.iter().filter(|subject| subject.wants(group.read_pct)) {
                progress.step(&describe(subject, args, group, repetition), step_cost(args));
                run(subject, args, group, &mut collector)?;
            }
        }
    }
    Ok(collector.into_series())
}

fn check(args: &BlockArgs) -> Result<()> {
    args.common.check()?;
    let usage = |message: String| Err(BenchError::Usage(message));
    if args.threads.contains(&0) || args.iodepth.contains(&0) {
        return usage("--threads and --iodepth: expected at least 1".to_owned());
    }
    if let Some(pct) = args.read_pct.iter().find(|&&pct| pct > 100) {
        return usage(format!("--read-pct {pct}: expected 0 to 100"));
    }
    if args.block_size < 512 || u64::from(args.block_size) > args.common.size {
        return usage(format!("--block-size {}: expected 512 up to --size", args.block_size));
    }
    if args.common.media != MediaModel::default() && args.policies.contains(&Policy::Libpmemblk) {
        return usage(format!(
            "--media {}: libpmemblk runs on the memory as it is; leave it out",
            args.common.media
        ));
    }
    Ok(())
}

fn groups(args: &BlockArgs) -> Vec<Group> {
    let mut groups = Vec::new();
    for &read_pct in &args.read_pct {
        for &iodepth in &args.iodepth {
            groups.extend(args.threads.iter().map(|&threads| Group { read_pct, threads, iodepth }));
        }
    }
    groups
}

fn workload(args: &BlockArgs, group: Group) -> Workload {
    Workload {
        pattern: args.pattern,
        read_pct: group.read_pct,
        block_bytes: args.block_size,
        working_set_bytes: args.common.size,
        threads: group.threads,
        iodepth: group.iodepth,
        stop: Stop::After(Duration::from_secs_f64(args.common.seconds)),
        flush_every: args.flush_every,
        think: Duration::from_nanos(args.think_ns),
        seed: args.seed,
    }
}

fn describe(subject: &Subject, args: &BlockArgs, group: Group, repetition: u32) -> String {
    let op = if group.read_pct == 100 { Op::Read } else { Op::Write };
    let (policy, case) = (subject.policy, subject.case(op, args));
    let Group { read_pct, threads, iodepth } = group;
    let of = args.common.repetitions;
    format!(
        "{policy} {case}, {read_pct} % reads, {threads} threads, depth {iodepth}, run {repetition} of {of}"
    )
}

/// Runs `group` once on `subject`, after a short run that is not counted.
fn run(subject: &Subject, args: &BlockArgs, group: Group, collector: &mut Collector) -> Result<()> {
    let measured = workload(args, group);
    let warm_up = Duration::from_secs_f64(args.common.seconds * WARM_UP_SHARE);
    let warm_up = Workload { stop: Stop::After(warm_up), seed: !args.seed, ..measured.clone() };
    warm_up.run(&*subject.device).map_err(subject.failed())?;
    let before = subject.traffic();
    let outcome = measured.run(&*subject.device).map_err(subject.failed())?;
    let traffic = subject.traffic().zip(before).map(|(after, before)| after.since(before));
    collect(subject, args, group, &outcome, traffic, collector);
    Ok(())
}

fn collect(
    subject: &Subject,
    args: &BlockArgs,
    group: Group,
    outcome: &Outcome,
    traffic: Option<Traffic>,
    collector: &mut Collector,
) {
    let kinds =
        [(Op::Write, &outcome.write), (Op::Read, &outcome.read), (Op::Flush, &outcome.flush)];
    for (op, latencies) in kinds.into_iter().filter(|(_, latencies)| !latencies.is_empty()) {
        let key = Key {
            policy: subject.policy.to_owned(),
            case: subject.case(op, args),
            op,
            threads: group.threads,
            iodepth: group.iodepth,
            block_bytes: u64::from(args.block_size),
        };
        // Of a mix, what was stored belongs to the writes.
        let traffic = traffic.filter(|_| op == Op::Write || outcome.write.is_empty());
        collector.add(key, Sample::new(latencies, outcome.elapsed.as_secs_f64(), traffic));
    }
}

/// Makes the subjects of `policy`.
fn open(policy: Policy, args: &BlockArgs, subjects: &mut Vec<Subject>) -> Result<()> {
    match policy {
        Policy::Copy => {
            subjects.push(open_copy(args, 1)?);
            subjects.push(open_copy(args, 2)?);
        }
        Policy::Btt => subjects.push(open_btt(args)?),
        Policy::Libpmemblk => subjects.push(open_libpmemblk(args)?),
    }
    Ok(())
}

fn open_copy(args: &BlockArgs, fences: u8) -> Result<Subject> {
    let words = args.common.size / u64::from(args.block_size) * 8;
    let region = unnamed_region(args, args.common.size + words)?;
    let device = BareCopy::new(Arc::clone(&region), args.block_size, fences == 2);
    Ok(Subject {
        policy: "copy",
        case: Case::Copy { fences },
        device: Box::new(device),
        region: Some(region),
    })
}

fn open_btt(args: &BlockArgs) -> Result<Subject> {
    let region = unnamed_region(args, pool_bytes(args.common.size))?;
    let options = BttOptions { lba_bytes: args.block_size.min(4096), ..BttOptions::default() };
    let failed =
        |source: BttError| BenchError::Device { policy: "btt".to_owned(), source: source.into() };
    tidegate::btt::create(&region, &options).map_err(failed)?;
    let device = Btt::open(Arc::clone(&region)).map_err(failed)?;
    Ok(Subject {
        policy: "btt",
        case: Case::Pattern,
        device: Box::new(device),
        region: Some(region),
    })
}

fn open_libpmemblk(args: &BlockArgs) -> Result<Subject> {
    let dir = scratch(args)?;
    let path = dir.path().join("libpmemblk");
    let device = PmemBlk::create(&path, pool_bytes(args.common.size), args.block_size)?;
    Ok(Subject {
        policy: "peer:libpmemblk",
        case: Case::Pattern,
        device: Box::new(device),
        region: None,
    })
}

/// Size of a pool that holds a working set of `size_bytes`: blocks in flight, map, log and headers come on top.
pub(crate) fn pool_bytes(size_bytes: u64) -> u64 {
    size_bytes + size_bytes / 64 + (16 << 20)
}

/// A region on a file that has no name any more.
fn unnamed_region(args: &BlockArgs, bytes: u64) -> Result<Arc<Region>> {
    let dir = scratch(args)?;
    let media = args.common.media.clone();
    let options = RegionOptions {
        domain: Some(Domain::Adr),
        create_bytes: Some(bytes),
        media,
        ..RegionOptions::default()
    };
    Ok(Arc::new(Region::open(&dir.path().join("pool"), &options)?))
}

fn scratch(args: &BlockArgs) -> Result<tempfile::TempDir> {
    let dir = &args.common.dir;
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
    let (policy, bytes, block) = (subject.policy, geometry.size_bytes(), geometry.block_bytes);
    Err(BenchError::Usage(format!(
        "{policy} made a device of {bytes} bytes in blocks of {block}: too small for --size {} and --block-size {}",
        args.common.size, args.block_size
    )))
}
