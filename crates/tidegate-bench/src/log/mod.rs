//! The log, and programs under `tidegate run`: `bench log`.
//!
//! Invariants:
//! 1. Compared subjects take turns, repetition by repetition, and no write of one run is written
//!    back while another run is measured: the disk is synced in between.
//! 2. A pool is kept from run to run, as a user's pool would be, so that its memory was touched
//!    before.
//! 3. Files are on a disk, pools in persistent memory; both are removed at the end.
//!
//! Map: `append` and `batch` the log in this process, `io` the load driver, `bed` and `disk`
//! directories and ways to start programs, `files` writes and reads by the driver, `steady` writes
//! by the driver for a minute, `watch` amounts other than latencies, `nvcache` a peer, `unsynced`,
//! `names`, `recovery`, `sqlite`, `rocksdb`, `postgres`, `apps`; `targets`.

pub(crate) mod append;
mod apps;
pub(crate) mod batch;
mod bed;
mod disk;
mod files;
pub mod io;
mod names;
mod nvcache;
mod postgres;
mod recovery;
mod rocksdb;
mod sqlite;
mod steady;
pub(crate) mod targets;
mod unsynced;
mod watch;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use tidegate::pmem::MediaModel;

use crate::child::{find_program, output_of};
use crate::error::{BenchError, Result, require};
use crate::machine::Machine;
use crate::measure::{Amounts, Collector, Key, Sample, Series, Spread};
use crate::output::OutputArgs;
use crate::policy::name_of;
use crate::progress::Progress;
use crate::source::CC;
use crate::table::Table;
use crate::timeline::TimelineRow;
pub use bed::Runner;
use bed::{Bed, Pool, Way};
use disk::Place;
pub(crate) use steady::table as steady_table;

/// Prefix of the names of all cases in this process.
pub(crate) const LOG_PREFIX: &str = "log-";
/// Prefix of the names of all cases of programs.
pub(crate) const RUN_PREFIX: &str = "run-";

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Appends to the log in this process.
    Append,
    /// Durable writes and appends of a program.
    Write,
    /// A full log before a file, by the batch of its cleaner.
    Batch,
    /// A program that writes sixteen times what the log holds.
    Full,
    /// Random durable writes for a minute, by second, with used and unused pools.
    Steady,
    /// The same at half of what the disk takes.
    Paced,
    /// Programs that never sync: tar, cp, cc.
    Unsynced,
    /// Reads of clean and dirty pages.
    Read,
    /// The start of a program, and programs at rest.
    Launch,
    /// What a hot set costs the disk.
    Hot,
    /// Recovery of a full log.
    Recovery,
    /// What programs do with their syncs: new files, their names, locked files, lines.
    Names,
    /// `SQLite`, each insert a transaction.
    Sqlite,
    /// `RocksDB`, each write synced.
    Rocksdb,
    /// `PostgreSQL` and pgbench.
    Postgres,
    /// Other programs that people use, by their own benchmarks.
    Apps,
}

/// Arguments of `bench log`.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// How programs are started: plain, run
    #[arg(long, value_name = "A,B,..", value_delimiter = ',', default_value = "plain,run")]
    pub policies: Vec<Runner>,
    /// What to measure [default: everything but apps, which need programs of their own, batch, a
    /// figure of a paper, and paced]
    #[arg(long, value_name = "A,B,..", value_delimiter = ',', value_enum)]
    pub parts: Vec<Part>,
    /// Programs of the part `apps` [default: all]
    #[arg(
        long,
        value_name = "A,B,..",
        value_delimiter = ',',
        value_parser = PossibleValuesParser::new(apps::names())
    )]
    pub apps: Vec<String>,
    /// Medium that the memory stands for, in process: dram, optane, cxl, with ,KEY=NUMBER for other
    /// numbers
    #[arg(long, value_name = "MODEL", default_value = "dram")]
    pub media: MediaModel,
    /// Threads that append and write, one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,2")]
    pub threads: Vec<usize>,
    /// Appends of each thread issued as a batch, in process
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub iodepth: u32,
    /// Seconds of a run in process or of a database
    #[arg(long, value_name = "S", default_value = "0.8", default_value_if("quick", "true", "0.2"))]
    pub seconds: f64,
    /// Seconds of a run of `steady`, each of which is made once
    #[arg(long, value_name = "S", default_value = "60", default_value_if("quick", "true", "1"))]
    pub steady_seconds: f64,
    /// Share of the requests and bytes of the runs that have a number of them
    #[arg(
        long,
        value_name = "SHARE",
        default_value = "1.0",
        default_value_if("quick", "true", "0.1")
    )]
    pub scale: f64,
    /// Runs of each case, policies taking turns
    #[arg(long, value_name = "N", default_value = "3", default_value_if("quick", "true", "1"))]
    pub repetitions: u32,
    /// A minute instead of twenty: as --seconds 0.2 --steady-seconds 1 --scale 0.1 --repetitions 1
    #[arg(long)]
    pub quick: bool,
    /// Directory of the pools: a tmpfs, or a file system on persistent memory
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
    /// Directory of the files: on an ext4 or XFS with a UUID, and one that other users may enter
    /// [default: /var/tmp, or where that is on another file system, as root, an ext4 of 8 GiB on a
    /// loop device, its image there]
    #[arg(long)]
    pub files: Option<PathBuf>,
    /// Measure a peer too: the C library that docs/benchmarks/run.md says how to build
    #[arg(long, value_name = "FILE")]
    pub nvcache: Option<PathBuf>,
    /// Where results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl LogArgs {
    /// Describes the machine of the measurement.
    pub(crate) fn machine(&self) -> Machine {
        let machine = Machine::of(&self.dir, &self.media, self.seconds, self.repetitions);
        // Without a place, nothing is measured.
        let place = Place::of(self.files.as_deref()).map_or(String::new(), |it| format!("; {it}"));
        Machine { medium: machine.medium + &place, ..machine }
    }

    /// Returns the planned time of [`measure`](Self::measure).
    pub fn planned(&self) -> Duration {
        let plans = self.parts().into_iter().map(|part| self.plan(part));
        plans.map(|plan| plan.cost * plan.steps).sum()
    }

    /// Checks that the options make sense and the programs of [`measure`](Self::measure) exist.
    ///
    /// # Errors
    /// [`BenchError::Usage`], [`BenchError::Missing`].
    pub fn check(&self) -> Result<()> {
        let is_run_time = |seconds: f64| seconds > 0.0 && seconds < 3600.0;
        let expected = "expected more than 0 and less than an hour";
        require(is_run_time(self.seconds), &format!("--seconds: {expected}"))?;
        require(is_run_time(self.steady_seconds), &format!("--steady-seconds: {expected}"))?;
        let is_share = self.scale > 0.0 && self.scale <= 100.0;
        require(is_share, "--scale: expected more than 0, up to 100")?;
        let has_zero = self.repetitions == 0 || self.threads.contains(&0) || self.iodepth == 0;
        require(!has_zero, "--repetitions, --threads and --iodepth: expected at least 1")?;
        let (place, parts) = (Place::of(self.files.as_deref())?, self.parts());
        let has_apps = self.apps.is_empty() || parts.contains(&Part::Apps);
        require(has_apps, "--apps: expected `apps` among the --parts, too")?;
        for part in parts {
            match (part, &place) {
                (Part::Hot, Place::Directory(dir)) => drop(bed::disk_bytes(dir)?),
                (Part::Sqlite | Part::Names, _) => drop(find_program(CC.0, CC.1)?),
                (Part::Full | Part::Paced, _) => drop(find_program("fio", "fio")?),
                (Part::Rocksdb, _) => drop(find_program("db_bench", "rocksdb-tools")?),
                (Part::Unsynced, _) => unsynced::find_programs()?,
                (Part::Postgres, _) => postgres::find_programs()?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Measures all requested parts. A part that fails is noted in the report, and the other parts
    /// are measured.
    ///
    /// # Errors
    /// The directories cannot be created, or `tidegate` is not installed.
    pub fn measure(&self, progress: &mut Progress) -> Result<(Vec<Series>, LogReport)> {
        let collector = Collector::default();
        let found = LogReport { machine: Some(self.machine()), ..LogReport::default() };
        let mut bench = Bench { args: self, bed: Bed::new(self)?, progress, collector, found };
        for part in self.parts() {
            if let Err(error) = bench.measure(part) {
                let (part, error) = (name_of(part), error.with_causes());
                bench.found.failures.push(Failure { part, error });
            }
        }
        Ok((bench.collector.into_series(), bench.found))
    }

    fn parts(&self) -> Vec<Part> {
        if !self.parts.is_empty() {
            return self.parts.clone();
        }
        let all = Part::value_variants().iter().copied();
        all.filter(|part| !matches!(part, Part::Apps | Part::Batch | Part::Paced)).collect()
    }

    /// Scales `full` by the option `scale`, to at least `least`.
    fn scaled(&self, full: u64, least: u64) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count far below 2^52"
        )]
        let scaled = (full as f64 * self.scale) as u64;
        scaled.max(least)
    }

    /// Returns a pool of `full_bytes`, scaled.
    fn pool(&self, name: &'static str, full_bytes: u64) -> Pool {
        Pool { name, bytes: self.scaled(full_bytes, 8 << 20).next_multiple_of(1 << 20) }
    }

    fn plan(&self, part: Part) -> Plan {
        let count = |len| u32::try_from(len).unwrap_or(u32::MAX);
        let (runners, threads) = (count(self.policies.len()), count(self.threads.len()));
        let timed = |more_s: f64| Duration::from_secs_f64(self.seconds + more_s);
        let counted = |full_s: f64| Duration::from_secs_f64(0.2 + full_s * self.scale);
        let plan = |steps, cost| Plan { steps, cost };
        let mut all = match part {
            Part::Append => plan(4 * threads, timed(0.1)),
            Part::Write => plan(count(files::write_cases(self).len()) * runners, counted(0.8)),
            Part::Batch => batch::plan(self),
            Part::Full => plan(2 * runners + 1, counted(4.0)),
            Part::Steady => return steady::plan(self, steady::CASES.len(), steady::POOLS.len()),
            Part::Paced => return steady::plan(self, steady::PACED.len(), 1),
            Part::Unsynced => plan(3 * runners, counted(2.0)),
            Part::Read => plan(3 * runners, counted(0.3)),
            Part::Launch => plan(runners, Duration::from_secs(1)),
            Part::Hot => plan(runners.saturating_sub(1), counted(3.0)),
            Part::Recovery => plan(2, counted(5.0)),
            Part::Names => plan(count(names::cases().len()) * (2 * runners), timed(0.3)),
            Part::Sqlite => plan(4 * (2 * runners), timed(0.3)),
            Part::Rocksdb => plan(runners + 1, counted(0.6)),
            Part::Postgres => plan(runners + 1, Duration::from_secs_f64(2.0 * self.seconds + 2.0)),
            Part::Apps => plan(count(apps::names().count()) * (runners + 1), timed(3.0)),
        };
        all.steps *= self.repetitions;
        all
    }
}

/// The planned time of a part.
#[derive(Debug, Clone, Copy)]
struct Plan {
    steps: u32,
    cost: Duration,
}

/// Results about the log besides latencies; empty where they were not measured.
#[derive(Debug, Clone, Default)]
pub struct LogReport {
    /// The machine of the measurement, if requested.
    pub machine: Option<Machine>,
    /// Amounts other than latencies.
    pub amounts: Amounts,
    /// Steady loads by second.
    pub timelines: Vec<TimelineRow>,
    /// Parts that could not be measured to their end.
    pub failures: Vec<Failure>,
}

/// A part that could not be measured to its end.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The part.
    pub part: String,
    /// The reason.
    pub error: String,
}

impl LogReport {
    fn add(&mut self, Measure(name, unit): Measure, policy: &str, value: f64) {
        self.amounts.add(name, unit, policy, value);
    }

    fn find(&self, Measure(name, _): Measure, policy: &str) -> Option<Spread> {
        self.amounts.find(name, policy)
    }

    /// Checks that all parts were measured.
    ///
    /// # Errors
    /// Names the first part that was not measured.
    pub(crate) fn whole(&self) -> Result<()> {
        let Some(Failure { part, error }) = self.failures.first() else { return Ok(()) };
        Err(BenchError::program(&format!("part {part}"), format!("was not measured: {error}")))
    }

    /// Makes the table of the amounts.
    pub(crate) fn table(&self) -> Table {
        self.amounts.table("run-amounts", "Programs under run: other numbers")
    }
}

/// An amount's name, and its unit.
#[derive(Debug, Clone, Copy)]
struct Measure(&'static str, &'static str);

impl Measure {
    const LOG_BYTES: Self = Self("log of an append of 128 bytes", "bytes");
    const LAUNCH: Self = Self("start and end, more than plain", "ms");
    const IDLE_CPU: Self = Self("CPU at rest, program and supervisor", "%");
    const HOT_SET: Self = Self("hot set rewritten 100 times: on the disk / its size", "times");
}

/// A run through the parts.
struct Bench<'a> {
    args: &'a LogArgs,
    bed: Bed,
    progress: &'a mut Progress,
    collector: Collector,
    found: LogReport,
}

impl Bench<'_> {
    fn measure(&mut self, part: Part) -> Result<()> {
        match part {
            Part::Append => append::measure(self),
            Part::Write => files::writes(self),
            Part::Batch => batch::measure(self),
            Part::Full => files::full(self),
            Part::Steady => steady::measure(self),
            Part::Paced => steady::measure_paced(self),
            Part::Unsynced => unsynced::measure(self),
            Part::Read => files::reads(self),
            Part::Launch => watch::launch(self),
            Part::Hot => watch::hot_set(self),
            Part::Recovery => recovery::measure(self),
            Part::Names => names::measure(self),
            Part::Sqlite => sqlite::measure(self),
            Part::Rocksdb => rocksdb::measure(self),
            Part::Postgres => postgres::measure(self),
            Part::Apps => apps::measure(self),
        }
    }

    /// Lets all `subjects` take turns, repetition by repetition; a turn may return a sample.
    fn in_turns<S: Copy>(
        &mut self,
        part: Part,
        subjects: &[S],
        name: impl Fn(S) -> String,
        mut turn: impl FnMut(&mut Self, S) -> Result<Option<(Key, Sample)>>,
    ) -> Result<()> {
        let (cost, of) = (self.args.plan(part).cost, self.args.repetitions);
        for repetition in 1..=of {
            for &subject in subjects {
                let what = format!("{}, run {repetition} of {of}", name(subject));
                self.progress.step(&what, cost);
                if let Some((key, sample)) = turn(self, subject)? {
                    self.collector.add(key, sample);
                }
            }
        }
        Ok(())
    }

    /// Runs one of our drivers once on a file or directory, and returns its output.
    fn run_driver(&self, way: Way, driver: &Path, on: &Path, pattern: &str) -> Result<String> {
        let mut command = self.bed.command(way.runner, files::pool(self.args), driver);
        command.arg(on).args([pattern, if way.syncs { "full" } else { "off" }]);
        command.arg(self.args.seconds.to_string());
        output_of(command)
    }

    /// Returns the requested runners other than plain.
    fn tidegates(&self) -> Vec<Runner> {
        let all = self.args.policies.iter().copied();
        all.filter(|runner| *runner != Runner::Plain).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: LogArgs,
    }

    pub(super) fn args(line: &str) -> LogArgs {
        Line::try_parse_from(std::iter::once("x").chain(line.split_whitespace())).unwrap().args
    }

    #[test]
    fn the_whole_takes_less_than_twenty_minutes_and_a_share_of_it_less_than_one() {
        assert!(args("").planned() < Duration::from_secs(1200), "{:?}", args("").planned());
        let quick = args("--quick").planned();
        assert!(quick < Duration::from_secs(60), "{quick:?}");
    }

    #[test]
    fn numbers_that_measure_nothing_are_refused() {
        for line in [
            "--seconds 0",
            "--steady-seconds 0",
            "--scale 0",
            "--repetitions 0",
            "--threads 0",
            "--files /dev/shm",
            "--apps dpkg",
        ] {
            assert!(args(line).check().is_err_and(|error| error.is_usage()), "{line}");
        }
    }

    #[test]
    fn parts_and_policies_can_be_chosen() {
        let args = args("--parts read,hot --policies plain,run --scale 0.5");
        assert_eq!(args.parts(), [Part::Read, Part::Hot]);
        assert_eq!(args.policies, [Runner::Plain, Runner::Run]);
        assert_eq!((args.scaled(100, 10), args.scaled(10, 8)), (50, 8));
    }

    #[test]
    fn a_part_that_failed_is_told_at_the_end() {
        let (part, error) = (name_of(Part::Postgres), "no space".to_owned());
        let report = LogReport { failures: vec![Failure { part, error }], ..LogReport::default() };
        let told = report.whole().unwrap_err().to_string();
        assert!(told.contains("part postgres") && told.contains("no space"), "{told}");
    }

    #[test]
    fn amounts_collect_under_their_names() {
        let mut report = LogReport::default();
        for value in [1.0, 3.0, 2.0] {
            report.add(Measure::LAUNCH, "run", value);
        }
        report.add(Measure::HOT_SET, "run", 1.5);
        report.whole().unwrap();
        assert_eq!(report.find(Measure::LAUNCH, "run").map(|spread| spread.median), Some(2.0));
        assert_eq!(report.find(Measure::LAUNCH, "plain"), None);
        let text = report.table().to_string();
        assert!(text.contains("1.00-3.00") && text.contains("times"), "{text}");
    }
}
