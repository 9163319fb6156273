//! Programs on an ext4 file system over the NBD export: `tidegate-bench programs`.
//!
//! `db_bench` of `RocksDB`, fio, the YCSB core workloads A and F on `RocksDB` (`programs/ycsb.cc`,
//! compiled here) and Filebench's personalities (`programs/filebench.c`, too), with and without
//! DRAM tiers before the same BTT. Needs root, since a file system is mounted.
//!
//! Invariants:
//! 1. Each run has a pool, a server and a file system of its own, which are removed at its end.
//! 2. Policies take turns, repetition by repetition.
//!
//! Map: `file_system` the mount and its lower parts, `run` the programs and their output.

mod file_system;
mod run;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tidegate::pmem::MediaModel;
use tidegate::size::parse_bytes;

use crate::block::scratch;
use crate::child::{find_program, output_of};
use crate::error::{BenchError, Result, require};
use crate::machine::Machine;
use crate::measure::{Collector, Series};
use crate::output::OutputArgs;
use crate::policy::Policy;
use crate::progress::Progress;
use file_system::FileSystem;
pub(crate) use file_system::{Loop, Mount};
use run::{Programs, Run};
pub(crate) use run::{db_bench_options, parse_db_bench, parse_sample};

/// Prefix of the names of all cases.
pub(crate) const CASE_PREFIX: &str = "program-";

/// Which programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// `db_bench`: fill, overwrite and read, and fill with a sync of each write
    Rocksdb,
    /// YCSB's load, and its workloads A and F
    Ycsb,
    /// Filebench's fileserver, varmail, webproxy and webserver
    Filebench,
    /// Random requests of 4 KiB around the page cache
    Fio,
}

/// What to measure.
#[derive(Debug, Clone, Args)]
pub struct ProgramsArgs {
    /// Only these programs
    #[arg(long, value_name = "A,B,..", value_delimiter = ',')]
    pub parts: Vec<Part>,
    /// What serves the file system's disk: btt, or a DRAM tier over it
    #[arg(
        long,
        value_name = "A,B,..",
        value_delimiter = ',',
        default_value = "btt,transit,lru,pmbd"
    )]
    pub policies: Vec<Policy>,
    /// Medium that the memory stands for: dram, optane, cxl, with ,KEY=NUMBER for other numbers
    #[arg(long, value_name = "MODEL", default_value = "optane")]
    pub media: MediaModel,
    /// Size of the DRAM tiers
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_bytes)]
    pub cache: u64,
    /// Size of the disk
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = parse_bytes)]
    pub size: u64,
    /// Data of each database, of fio's file and of Filebench's files
    #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = parse_bytes)]
    pub data: u64,
    /// Seconds of a run of fio, and of Filebench
    #[arg(long, value_name = "S", default_value_t = 3.0)]
    pub seconds: f64,
    /// Runs of each case, policies taking turns
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub repetitions: u32,
    /// Directory of the pools: a tmpfs, or a file system on persistent memory
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
    /// Where results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl ProgramsArgs {
    /// Describes the machine of the measurement.
    pub(crate) fn machine(&self) -> Machine {
        Machine::of(&self.dir, &self.media, self.seconds, self.repetitions)
    }

    /// Measures all requested programs.
    ///
    /// # Errors
    /// [`BenchError::Usage`], and errors of the programs.
    pub(crate) fn measure(&self) -> Result<Vec<Series>> {
        self.check()?;
        let scratch = scratch(&self.dir)?;
        let programs = Programs::find(scratch.path())?;
        let step = self.step_cost();
        let runs = u32::try_from(self.policies.len()).unwrap_or(u32::MAX) * self.repetitions;
        let mut progress = Progress::new(step * runs);
        let mut collector = Collector::default();
        for repetition in 1..=self.repetitions {
            for &policy in &self.policies {
                let what = format!("{}, run {repetition} of {}", policy.name(), self.repetitions);
                progress.step(&what, step);
                let file_system = FileSystem::new(self, policy)?;
                let path = file_system.path();
                let into = &mut collector;
                Run { args: self, programs: &programs, path, policy, into }.all()?;
                file_system.unmount()?;
            }
        }
        Ok(collector.into_series())
    }

    fn parts(&self) -> &[Part] {
        if self.parts.is_empty() { Part::value_variants() } else { &self.parts }
    }

    /// Returns the rough time of all programs once.
    fn step_cost(&self) -> Duration {
        let of_part = |part: &Part| match part {
            Part::Rocksdb => Duration::from_nanos(self.data * 150),
            Part::Ycsb => Duration::from_nanos(self.data * 60),
            Part::Filebench => Duration::from_secs_f64(self.seconds * 4.0 + 4.0),
            Part::Fio => Duration::from_secs_f64(self.seconds * 3.0),
        };
        Duration::from_secs(2) + self.parts().iter().map(of_part).sum::<Duration>()
    }

    fn check(&self) -> Result<()> {
        if let Some(policy) = self.policies.iter().find(|p| !p.has_tier() && **p != Policy::Btt) {
            let message = format!("--policies {}: expected btt or a DRAM tier", policy.name());
            return Err(BenchError::Usage(message));
        }
        let is_run = self.repetitions > 0 && self.seconds > 0.0 && self.seconds < 86_400.0;
        require(is_run, "--repetitions and --seconds: expected more than 0")?;
        let fits = self.data >= 1 << 20 && self.size / 8 >= self.data;
        require(fits, "--data: expected from 1M to an eighth of --size")?;
        require(rustix::process::geteuid().is_root(), "mounting a file system needs root")
    }
}

/// Runs `program` of `package` with `args`, and returns its output.
pub(crate) fn call(program: &str, package: &'static str, args: &[&str]) -> Result<String> {
    let mut command = Command::new(find_program(program, package)?);
    command.args(args);
    output_of(command)
}
