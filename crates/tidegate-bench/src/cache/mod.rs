//! The cache: `bench cache`.
//!
//! Invariants:
//! 1. Compared subjects take turns, repetition by repetition.
//! 2. Each measurement of a cache begins with a new pool, in memory that was touched before. The
//!    device is dropped afterwards, so that nothing is cleaned while another one is measured.
//! 3. A device that stands for the backing alone is as durable as the cache: each write is forced.
//!
//! Map: `bed` devices and turns; `cases` misses, hits and evictions; `study` the matrix of "When
//! Caching Systems Meet Emerging Storage Devices" (`HotStorage` 2023); `behind` slow backings;
//! `choices` modes and cleaning; `cost` the setting `cost=auto`; `zipf` the hit ratio; `served`
//! hits over NBD; `opening` after a crash; `peer` OCF; `targets`, `tables`.

mod bed;
mod behind;
mod cases;
pub(crate) mod choices;
pub(crate) mod cost;
mod opening;
mod peer;
mod served;
pub(crate) mod study;
pub(crate) mod tables;
mod targets;
mod zipf;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tidegate::pmem::MediaModel;
use tidegate::size::parse_bytes;

use crate::error::{Result, require};
use crate::machine::{Machine, is_tmpfs};
use crate::measure::{Amounts, Collector, Key, Series};
use crate::nbd;
use crate::output::OutputArgs;
use crate::progress::Progress;
pub(crate) use targets::verdicts;

/// The policy of the engine in rows.
pub(crate) const CACHE: &str = "cache";
/// The policy of the log before the same backings in rows.
pub(crate) const LOG: &str = "log";
/// The policy of the backing alone in rows.
pub(crate) const BACKING: &str = "backing";
/// Prefixes of the names of all cases, except misses, hits and evictions.
const PREFIXES: [&str; 2] = ["cache-", study::PREFIX];

/// Returns whether `key` belongs to a measurement of this module.
pub(crate) fn is_cache(key: &Key) -> bool {
    let named = PREFIXES.iter().any(|prefix| key.case.starts_with(prefix));
    named || cases::Kind::of(&key.case).is_some()
}

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Writes that miss.
    Miss,
    /// Writes of pages that are cached.
    Hit,
    /// Writes into a full cache.
    Evict,
    /// The matrix of the Open CAS study.
    Study,
    /// Hits over NBD.
    Nbd,
    /// A full cache before a file and before a slow device.
    Full,
    /// Reads that miss.
    Read,
    /// The hit ratio of reads by popularity.
    Zipf,
    /// Modes.
    Modes,
    /// Policies of cleaning.
    Cleaning,
    /// Opening after a crash.
    Open,
    /// The setting `cost=auto`, on memories of its own.
    Cost,
}

/// Arguments of `bench cache`.
#[derive(Debug, Clone, Args)]
pub struct CacheArgs {
    /// What to measure [default: everything but cost]
    #[arg(long, value_name = "CASE,..", value_delimiter = ',', value_enum)]
    pub only: Vec<Part>,
    /// Medium that the memory stands for: dram, optane, cxl, with ,KEY=NUMBER for other numbers
    #[arg(long, value_name = "MODEL", default_value = "dram")]
    pub media: MediaModel,
    /// Threads that write, one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,2")]
    pub threads: Vec<usize>,
    /// Seconds of a run that has no number of requests
    #[arg(long, value_name = "S", default_value_t = 0.2)]
    pub seconds: f64,
    /// Runs of each case, policies taking turns
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub repetitions: u32,
    /// Size of the cache; the study's is a quarter of it
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_bytes)]
    pub size: u64,
    /// Size of the pool that is opened after a crash, all of it used
    /// [default: 8G, or 4G where less than 10 GiB of memory are free]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub open_size: Option<u64>,
    /// Directory of the pools: a tmpfs, or a file system on persistent memory
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
    /// Directory of the file behind a full cache: on a disk
    #[arg(long, default_value = "/var/tmp")]
    pub files: PathBuf,
    /// Program that measures OCF, the library in Open CAS, beside misses, hits, evictions and a
    /// full cache before a file; docs/benchmarks/cache.md has its arguments and what it prints
    #[arg(long, value_name = "PROGRAM")]
    pub peer_ocf: Option<PathBuf>,
    /// Where results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The smallest cache that is measured, so that a quarter of this size has slots for a large write.
const SIZE_MIN_BYTES: u64 = 16 << 20;

impl CacheArgs {
    /// Describes the machine of the measurement.
    pub(crate) fn machine(&self) -> Machine {
        Machine::of(&self.dir, &self.media, self.seconds, self.repetitions)
    }

    /// Returns the planned time of [`measure`](Self::measure).
    pub fn planned(&self) -> Duration {
        self.parts().into_iter().map(|part| self.planned_for(part)).sum()
    }

    /// Checks that the options make sense and the programs of [`measure`](Self::measure) exist.
    ///
    /// # Errors
    /// [`BenchError::Usage`](crate::error::BenchError::Usage),
    /// [`BenchError::Missing`](crate::error::BenchError::Missing).
    pub fn check(&self) -> Result<()> {
        let is_run_time = self.seconds > 0.0 && self.seconds < 3600.0;
        require(is_run_time, "--seconds: expected more than 0 and less than an hour")?;
        let has_zero = self.repetitions == 0 || self.threads.contains(&0);
        require(!has_zero, "--repetitions and --threads: expected at least 1")?;
        let smallest = self.size.min(self.open_size.unwrap_or(u64::MAX));
        require(smallest >= SIZE_MIN_BYTES, "--size and --open-size: expected at least 16M")?;
        let (parts, dir) = (self.parts(), self.files.display());
        let is_on_tmpfs = parts.contains(&Part::Full) && is_tmpfs(&self.files);
        require(!is_on_tmpfs, &format!("--files {dir}: is a tmpfs; name a directory on a disk"))?;
        if parts.contains(&Part::Nbd) { nbd::find_programs(&served::options(self)) } else { Ok(()) }
    }

    /// Measures all requested parts.
    ///
    /// # Errors
    /// Errors of [`check`](Self::check), and errors of the devices.
    pub fn measure(&self, progress: &mut Progress) -> Result<(Vec<Series>, CacheReport)> {
        self.check()?;
        let collector = Collector::default();
        let found = CacheReport { machine: Some(self.machine()), ..CacheReport::default() };
        let mut bench = Bench { args: self, progress, collector, found };
        for part in self.parts() {
            bench.measure(part)?;
        }
        Ok((bench.collector.into_series(), bench.found))
    }

    fn parts(&self) -> Vec<Part> {
        if !self.only.is_empty() {
            return self.only.clone();
        }
        Part::value_variants().iter().copied().filter(|part| *part != Part::Cost).collect()
    }

    fn planned_for(&self, part: Part) -> Duration {
        // Each page of the cache is written a few times in a repetition.
        let pages = Duration::from_nanos(self.size / 4096 * 1000);
        let runs = |count: f64| Duration::from_secs_f64(self.seconds * count);
        let threads = u32::try_from(self.threads.len()).unwrap_or(u32::MAX);
        // The peer's run fills a cache, too.
        let peer = self.peer_ocf.as_ref().map_or(Duration::ZERO, |_| pages * 10 + runs(1.0));
        let each = match part {
            Part::Miss => pages * 6 * threads + peer,
            Part::Hit | Part::Evict => (pages * 6 + runs(10.0)) * threads + peer,
            Part::Study => pages * 175,
            Part::Nbd => return nbd::planned_hits(&served::options(self)),
            Part::Full => pages * 40 + runs(6.0 * behind::LONGER) + peer * 2,
            Part::Read => runs(6.0),
            Part::Zipf => pages * 40,
            Part::Modes | Part::Cleaning => runs(choices::runs(part)),
            Part::Open => return opening::options(self).planned(),
            Part::Cost => pages * 120 + runs(cost::runs()),
        };
        each * self.repetitions
    }
}

/// Results about caches besides latencies; empty where they were not measured.
#[derive(Debug, Clone, Default)]
pub struct CacheReport {
    /// The machine of the measurement.
    pub machine: Option<Machine>,
    /// Numbers that are no latencies.
    pub amounts: Amounts,
    /// Work of the backing, by mode and policy of cleaning.
    pub backing_work: Amounts,
    /// The machine of `cost=auto`; the rows name the memories.
    pub machine_by_cost: Option<Machine>,
    /// Shares of requests that the backing served by cost.
    pub shares_of_backing: Amounts,
}

/// A run through the parts.
struct Bench<'a> {
    args: &'a CacheArgs,
    progress: &'a mut Progress,
    collector: Collector,
    found: CacheReport,
}

impl Bench<'_> {
    fn measure(&mut self, part: Part) -> Result<()> {
        match part {
            Part::Miss => cases::measure(self, part, cases::Kind::Miss),
            Part::Hit => cases::measure(self, part, cases::Kind::Hit),
            Part::Evict => cases::measure(self, part, cases::Kind::Evict),
            Part::Study => study::measure(self),
            Part::Nbd => served::measure(self),
            Part::Full => behind::full(self),
            Part::Read => behind::reads(self),
            Part::Zipf => zipf::measure(self),
            Part::Modes => choices::modes(self),
            Part::Cleaning => choices::cleaning(self),
            Part::Open => opening::measure(self),
            Part::Cost => cost::measure(self),
        }
    }

    /// Announces the next step; a repetition of `part` has `steps` steps.
    fn step(&mut self, part: Part, steps: usize, what: &str) {
        let steps = u32::try_from(steps).unwrap_or(u32::MAX).saturating_mul(self.args.repetitions);
        self.progress.step(what, self.args.planned_for(part) / steps.max(1));
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: CacheArgs,
    }

    fn args(line: &str) -> CacheArgs {
        Line::try_parse_from(std::iter::once("x").chain(line.split_whitespace())).unwrap().args
    }

    #[test]
    fn the_whole_takes_less_than_three_minutes() {
        let planned = args("").planned();
        assert!(planned < Duration::from_secs(180), "{planned:?}");
    }

    #[test]
    fn cases_can_be_chosen() {
        assert_eq!(args("--only miss,evict").parts(), [Part::Miss, Part::Evict]);
        assert_eq!(args("--only cost").parts(), [Part::Cost]);
        let whole = args("").parts();
        assert_eq!(whole.len(), Part::value_variants().len() - 1);
        assert!(!whole.contains(&Part::Cost), "it takes as long as the others together");
    }

    #[test]
    fn numbers_that_measure_nothing_are_refused() {
        for line in
            ["--seconds 0", "--repetitions 0", "--threads 0", "--size 1M", "--files /dev/shm"]
        {
            let wrong = args(&format!("--only full {line}")).check();
            assert!(wrong.is_err_and(|error| error.is_usage()), "{line}");
        }
    }
}
