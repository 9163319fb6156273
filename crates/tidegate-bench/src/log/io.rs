//! The load driver: a program that reads or writes files and reports the time. Plain and under
//! `tidegate run`, it shows the costs and savings of `tidegate run`.
//!
//! Invariants:
//! 1. Files are used through the C library's own functions, which the preload library replaces:
//!    `std` calls them, other crates may make system calls of their own.
//! 2. The requests are a [`Workload`], so latencies are taken as everywhere else: from answer to
//!    answer, including the sync that follows a write.
//!
//! Entry point: [`IoArgs::run`], the hidden command `bench io`.

use std::cell::Cell;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use tidegate::device::{self, BlockDevice, DeviceError, DeviceErrorKind, Geometry, Operation};
use tidegate::size::parse_bytes;

use crate::error::{BenchError, Result};
use crate::floor::geometry;
use crate::measure::{Op, Sample};
use crate::pattern::Pattern;
use crate::timeline::TimelineRow;
use crate::workload::{Outcome, Stop, Workload};

/// The interval of a [`Measured::timeline`].
const SECOND: Duration = Duration::from_secs(1);
/// Warm-up requests in 1000 counted ones.
const WARM_UP_PER_MILLE: u64 = 20;

/// Returns the number of a thread's warm-up requests before `requests` counted ones.
pub(super) fn warm_up_requests(requests: u64) -> u64 {
    requests * WARM_UP_PER_MILLE / 1000
}

/// The use of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Blocks are written.
    Write,
    /// Blocks are appended, through descriptors with `O_APPEND`.
    Append,
    /// Blocks are read that no process has changed.
    ReadClean,
    /// Blocks are read that this process has written and not synced.
    ReadDirty,
    /// Reads of clean pages through a descriptor that cannot write.
    ReadOnly,
}

impl Kind {
    /// Returns the measured kind of request.
    pub(super) fn op(self) -> Op {
        match self {
            Self::Write | Self::Append => Op::Write,
            Self::ReadClean | Self::ReadDirty | Self::ReadOnly => Op::Read,
        }
    }
}

/// How writes are made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sync {
    /// They are not.
    None,
    /// By an `fdatasync` of all at the end, whose time counts.
    End,
    /// By an `fdatasync` after each.
    Each,
    /// By `O_DSYNC`.
    Dsync,
}

/// Arguments of the load driver.
#[derive(Debug, Clone, Args)]
pub struct IoArgs {
    /// The files, which exist; thread n uses file n, around and around
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// What to do to them
    #[arg(long, value_enum, default_value_t = Kind::Write)]
    pub kind: Kind,
    /// How to make writes durable
    #[arg(long, value_enum, default_value_t = Sync::Each)]
    pub sync: Sync,
    /// Which blocks: uniform, sequential
    #[arg(long, default_value = "uniform")]
    pub pattern: Pattern,
    /// Part of each file in use
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_bytes)]
    pub size: u64,
    /// Size of a request
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    pub block_size: u32,
    /// Threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: usize,
    /// Requests of each thread
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub requests: u64,
    /// Go on for so long instead, from the first request on, and print what each second had
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,
    /// From when a request of a thread is due until the next one is; a latency counts from then
    #[arg(long, value_name = "NS", default_value_t = 0)]
    pub pace_ns: u64,
    /// Stay after the result was printed, doing nothing, until standard input ends
    #[arg(long)]
    pub linger: bool,
}

impl IoArgs {
    /// Runs the load, and prints the measurements as a JSON object in one line.
    ///
    /// # Errors
    /// Fails if an operation on a file fails.
    ///
    /// # Panics
    /// Never: a sample is made of numbers.
    pub fn run(&self) -> Result<()> {
        let measured = self.measure()?;
        let line = serde_json::to_string(&measured).expect("numbers are JSON");
        println!("{line}");
        if self.linger {
            let input = "standard input";
            std::io::stdin().read_to_end(&mut Vec::new()).map_err(BenchError::os("read", input))?;
        }
        Ok(())
    }

    fn measure(&self) -> Result<Measured> {
        let failed = || BenchError::device("a file");
        let files = Files::open(self)?;
        if self.kind == Kind::ReadDirty {
            self.workload(1).fill(&files).map_err(failed())?;
        }
        if self.seconds.is_none() {
            let warm_up = Stop::Requests(warm_up_requests(self.requests));
            Workload { stop: warm_up, ..self.workload(2) }.run(&files).map_err(failed())?;
        }
        let mut outcome = self.workload(1).run(&files).map_err(failed())?;
        if self.sync == Sync::End {
            let begun = Instant::now();
            files.sync_all().map_err(failed())?;
            outcome.elapsed += begun.elapsed();
        }
        let timeline = self.seconds.map(|_| outcome.timeline.row("", ""));
        let Outcome { read, write, elapsed, .. } = &outcome;
        let latencies = if self.kind.op() == Op::Read { read } else { write };
        Ok(Measured { sample: Sample::new(latencies, elapsed.as_secs_f64(), None), timeline })
    }

    fn workload(&self, seed: u64) -> Workload {
        let (stop, tick) = match self.seconds {
            Some(seconds) => (Stop::After(Duration::from_secs_f64(seconds)), SECOND),
            None => (Stop::Requests(self.requests), Duration::ZERO),
        };
        let writes = Workload::writes(self.pattern, self.block_size, self.size, stop);
        let read_pct = if self.kind.op() == Op::Read { 100 } else { 0 };
        let pace = Duration::from_nanos(self.pace_ns);
        Workload { read_pct, threads: self.threads, pace, tick, seed, ..writes }
    }
}

/// The output of the driver.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Measured {
    /// All requests.
    #[serde(flatten)]
    pub(super) sample: Sample,
    /// The requests of each second, if a time limits the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) timeline: Option<TimelineRow>,
}

/// Numbers the threads that use a device, from 0. A thread keeps its number until it uses another
/// device.
pub(super) struct ThreadNumbers {
    device: usize,
    taken: AtomicUsize,
}

impl ThreadNumbers {
    pub(super) fn new() -> Self {
        static DEVICES: AtomicUsize = AtomicUsize::new(0);
        Self { device: DEVICES.fetch_add(1, Ordering::Relaxed), taken: AtomicUsize::new(0) }
    }

    pub(super) fn of_thread(&self) -> usize {
        thread_local! {
            static NUMBER: Cell<(usize, usize)> = const { Cell::new((usize::MAX, 0)) };
        }
        NUMBER.with(|known| {
            let (device, number) = known.get();
            if device == self.device {
                return number;
            }
            let number = self.taken.fetch_add(1, Ordering::Relaxed);
            known.set((self.device, number));
            number
        })
    }
}

/// Open files as a device; each thread uses one file.
struct Files {
    open: Vec<File>,
    threads: ThreadNumbers,
    kind: Kind,
    sync: Sync,
}

impl Files {
    fn open(args: &IoArgs) -> Result<Self> {
        let IoArgs { kind, sync, .. } = *args;
        let mut options = File::options();
        options.read(true).write(kind != Kind::ReadOnly && kind != Kind::Append);
        options.append(kind == Kind::Append);
        if sync == Sync::Dsync {
            options.custom_flags(i32::try_from(rustix::fs::OFlags::DSYNC.bits()).unwrap_or(0));
        }
        let open = |path: &PathBuf| options.open(path).map_err(BenchError::os("open", path));
        let open = args.files.iter().map(open).collect::<Result<_>>()?;
        Ok(Self { open, threads: ThreadNumbers::new(), kind, sync })
    }

    fn mine(&self) -> &File {
        &self.open[self.threads.of_thread() % self.open.len()]
    }

    fn sync_all(&self) -> device::Result<()> {
        self.open.iter().try_for_each(|file| file.sync_data().map_err(failed("fdatasync")))
    }
}

fn failed(what: &'static str) -> impl FnOnce(std::io::Error) -> DeviceError {
    move |error| DeviceError::new(DeviceErrorKind::Io, format!("{what} failed: {error}"))
}

impl Files {
    fn write(&self, offset: u64, data: &[u8]) -> device::Result<()> {
        let mut file = self.mine();
        match self.kind {
            Kind::Append => file.write_all(data).map_err(failed("write"))?,
            _ => file.write_all_at(data, offset).map_err(failed("pwrite"))?,
        }
        if self.sync == Sync::Each {
            file.sync_data().map_err(failed("fdatasync"))?;
        }
        Ok(())
    }
}

impl BlockDevice for Files {
    fn geometry(&self) -> Geometry {
        let read_only = self.kind == Kind::ReadOnly;
        let whole = geometry(1, u64::MAX);
        Geometry { preferred_bytes: 4096, read_only, volatile_cache: true, ..whole }
    }

    fn run(&self, operation: &mut Operation<'_>) -> device::Result<()> {
        match *operation {
            Operation::Read { offset, ref mut buf } => {
                self.mine().read_exact_at(buf, offset).map_err(failed("pread"))
            }
            Operation::Write { offset, data, .. } => self.write(offset, data),
            Operation::Flush | Operation::Discard { .. } => Ok(()),
            _ => {
                let (offset, len) = operation.range();
                Err(DeviceError::out_of_range(offset, len, 0))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: IoArgs,
    }

    fn args(line: &str, files: &[PathBuf]) -> IoArgs {
        let words = std::iter::once("x").chain(line.split(' ')).map(PathBuf::from);
        Line::parse_from(words.chain(files.iter().cloned())).args
    }

    fn files(dir: &Path, bytes: u64) -> Vec<PathBuf> {
        let paths = ["one", "two"].map(|name| dir.join(name));
        for path in &paths {
            File::create(path).unwrap().set_len(bytes).unwrap();
        }
        paths.into()
    }

    fn has_data(path: &Path) -> bool {
        std::fs::read(path).unwrap().iter().any(|byte| *byte != 0)
    }

    #[test]
    fn each_thread_writes_a_file_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path(), 64 << 10);
        let args = args("--size 64K --threads 2 --requests 100 --sync dsync", &files);
        let sample = args.measure().unwrap().sample;
        assert_eq!(sample.ops, 200);
        assert!(files.iter().all(|path| has_data(path)));
        assert!(sample.p50_ns <= sample.max_ns && sample.ops_per_s > 0.0);
    }

    #[test]
    fn appends_go_to_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path(), 0);
        let args = args("--kind append --block-size 128 --requests 1000", &files[..1]);
        assert_eq!(args.measure().unwrap().sample.ops, 1000);
        assert_eq!(files[0].metadata().unwrap().len(), 128 * 1020, "20 are the warm-up");
    }

    #[test]
    fn dirty_pages_are_written_before_they_are_read_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path(), 64 << 10);
        for (kind, dirty) in [("read-only", false), ("read-clean", false), ("read-dirty", true)] {
            let line = format!("--size 64K --requests 100 --kind {kind} --sync none");
            assert_eq!(args(&line, &files[..1]).measure().unwrap().sample.ops, 100);
            assert_eq!(has_data(&files[0]), dirty, "{kind}");
        }
    }

    #[test]
    fn a_load_for_a_time_says_what_each_interval_had() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path(), 64 << 10);
        let printed = args("--size 64K --seconds 0.05 --sync none", &files[..1]).measure().unwrap();
        let line = serde_json::to_string(&printed).unwrap();
        let read: Measured = serde_json::from_str(&line).unwrap();
        let timeline = read.timeline.unwrap();
        assert_eq!((timeline.tick_ns, timeline.requests), (1_000_000_000, vec![read.sample.ops]));
        assert!(read.sample.ops > 10 && timeline.max_ns[0] > 0, "{line}");
    }

    #[test]
    fn files_that_are_not_there_are_told() {
        let missing = [PathBuf::from("/nonexistent/file")];
        let error = args("--sync end", &missing).measure().unwrap_err().to_string();
        assert!(error.contains("/nonexistent/file"), "{error}");
    }
}
