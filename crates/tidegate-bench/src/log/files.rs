//! Writes, appends and reads by the load driver.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tidegate::log::LogPool;
use tidegate::pmem::{Region, RegionOptions};

use super::append::of_log;
use super::bed::Pool;
use super::io::{Kind, Sync, warm_up_requests};
use super::{Bench, LogArgs, Measure, Part, RUN_PREFIX, Runner, nvcache};
use crate::child::output_of;
use crate::error::Result;
use crate::fio;
use crate::measure::{Key, Op, Sample};
use crate::pattern::Pattern;
use crate::policy::name_of;
use crate::programs::parse_sample;

/// Returns the pool of all cases, except for a full log.
pub(super) fn pool(args: &LogArgs) -> Pool {
    args.pool("pool", 1 << 30)
}

/// Size of a request.
const BLOCK_BYTES: u32 = 4096;
/// Size of an append.
const APPEND_BYTES: u32 = 128;
/// Part of each file that requests use.
const FILE_BYTES: u64 = 64 << 20;
/// Requests of a thread if each write costs a sync of the disk.
const SYNCED_REQUESTS: u64 = 3000;
/// Requests of a thread if no write costs a sync: half of the log for each of two threads.
const LOGGED_REQUESTS: u64 = 100_000;
/// Requests of a reading thread.
const READ_REQUESTS: u64 = 200_000;
/// Bytes written while the log is full.
const FULL_BYTES: u64 = 1 << 30;
/// Requests in flight for the measurement of the disk itself.
const DISK_DEPTH: u32 = 32;
/// The driver's name in errors.
pub(super) const DRIVER: &str = "bench io";

/// Case of blocks to a descriptor with `O_DSYNC`.
const DSYNC: &str = "run-write-dsync";
/// Case of blocks with an `fdatasync` after each.
pub(super) const FDATASYNC: &str = "run-write-fdatasync";
/// Case of threads that share a file, with an `fdatasync` after each block.
pub(super) const ONE_FILE: &str = "run-write-fdatasync-one-file";
/// Case of small appends with an `fdatasync` after each.
pub(super) const APPEND: &str = "run-append-fdatasync";

/// Policy of the disk by itself: 32 requests in flight, around the page cache.
pub(super) const DISK: &str = "disk-depth-32";

/// A case of the load driver.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) sync: Sync,
    pub(super) pattern: Pattern,
    pub(super) threads: usize,
    pub(super) one_file: bool,
    pub(super) block_bytes: u32,
    pub(super) file_bytes: u64,
    pub(super) requests: u64,
    /// Ends the case after this time instead.
    pub(super) seconds: Option<f64>,
    /// Time from one due request to the next; zero: due when the one before is answered.
    pub(super) pace: Duration,
    pub(super) pool: Pool,
}

impl Case {
    /// Returns the arguments of the driver for this case on `files`.
    fn words(&self, files: &[PathBuf]) -> Vec<OsString> {
        let mut words: Vec<OsString> = files.iter().map(OsString::from).collect();
        words.extend(
            [
                format!("--kind={}", name_of(self.kind)),
                format!("--sync={}", name_of(self.sync)),
                format!("--pattern={}", self.pattern),
                format!("--size={}", self.file_bytes.max(u64::from(self.block_bytes))),
                format!("--block-size={}", self.block_bytes),
                format!("--threads={}", self.threads),
                format!("--requests={}", self.requests),
                format!("--pace-ns={}", self.pace.as_nanos()),
            ]
            .map(OsString::from),
        );
        words.extend(self.seconds.map(|seconds| format!("--seconds={seconds}").into()));
        words
    }

    pub(super) fn key(&self, policy: &str) -> Key {
        let key = Key::new(policy, self.name, self.kind.op(), self.block_bytes.into());
        Key { threads: self.threads, ..key }
    }

    fn files(&self) -> usize {
        if self.one_file { 1 } else { self.threads }
    }
}

fn case(name: &'static str, kind: Kind, sync: Sync, pool: Pool) -> Case {
    Case {
        name,
        kind,
        sync,
        pattern: Pattern::Uniform,
        threads: 1,
        one_file: false,
        block_bytes: BLOCK_BYTES,
        file_bytes: FILE_BYTES,
        requests: 0,
        seconds: None,
        pace: Duration::ZERO,
        pool,
    }
}

/// Makes a case of random blocks with an `fdatasync` after each, for some seconds.
pub(super) fn steady_case(name: &'static str, file_bytes: u64, seconds: f64, pool: Pool) -> Case {
    let seconds = Some(seconds);
    Case { file_bytes, seconds, ..case(name, Kind::Write, Sync::Each, pool) }
}

/// Returns the cases of [`writes`], in order.
pub(super) fn write_cases(args: &LogArgs) -> Vec<Case> {
    let (mut cases, pool) = (Vec::new(), pool(args));
    for &threads in &args.threads {
        for (name, sync) in [(DSYNC, Sync::Dsync), (FDATASYNC, Sync::Each)] {
            cases.push(Case { threads, ..case(name, Kind::Write, sync, pool) });
        }
        if threads > 1 {
            let shared = case(ONE_FILE, Kind::Write, Sync::Each, pool);
            cases.push(Case { threads, one_file: true, ..shared });
        }
    }
    let append = case(APPEND, Kind::Append, Sync::Each, pool);
    cases.push(Case { block_bytes: APPEND_BYTES, file_bytes: 0, ..append });
    cases
}

/// Measures durable writes: random blocks and appends.
pub(super) fn writes(bench: &mut Bench<'_>) -> Result<()> {
    bench.prepare_pool(pool(bench.args))?;
    for case in write_cases(bench.args) {
        let writers = writers(bench.args, &case);
        let name = |writer| describe(&case, policy(writer));
        bench.in_turns(Part::Write, &writers, name, |bench, writer| {
            let requests = match writer {
                Some(Runner::Plain) => SYNCED_REQUESTS,
                _ => LOGGED_REQUESTS,
            };
            let case = Case { requests: bench.args.scaled(requests, 50), ..case };
            let sample = match writer {
                Some(runner) => bench.write(runner, &case)?,
                None => match bench.write_by_peer(&case) {
                    Ok(sample) => sample,
                    Err(error) => {
                        // The peer crashes now and then; the other measurements go on.
                        let why = error.with_causes();
                        eprintln!("{}: this run is left out: {why}", nvcache::POLICY);
                        return Ok(None);
                    }
                },
            };
            Ok(Some((case.key(policy(writer)), sample)))
        })?;
    }
    Ok(())
}

/// Returns the runners of a case of writes; `None` stands for the peer, whose writes are durable
/// without a sync.
fn writers(args: &LogArgs, case: &Case) -> Vec<Option<Runner>> {
    let peer = args.nvcache.is_some() && (case.name, case.threads) == (FDATASYNC, 1);
    let ours = args.policies.iter().copied().map(Some);
    ours.chain(peer.then_some(None)).collect()
}

fn policy(writer: Option<Runner>) -> &'static str {
    writer.map_or(nvcache::POLICY, Runner::name)
}

/// Measures writes that exceed the log: sequential ones against plain writes with one sync at the
/// end, random ones against the disk itself.
pub(super) fn full(bench: &mut Bench<'_>) -> Result<()> {
    let bytes = bench.args.scaled(FULL_BYTES, 1 << 20);
    let pool = bench.args.pool("full.pool", 64 << 20);
    for pattern in [Pattern::Sequential, Pattern::Uniform] {
        let each = case(full_case(pattern), Kind::Write, Sync::Each, pool);
        let requests = bytes / u64::from(BLOCK_BYTES);
        let case = Case { pattern, file_bytes: bytes, requests, ..each };
        bench.drive_in_turns(Part::Full, &case, Sync::End)?;
        if pattern == Pattern::Uniform {
            let name = |policy| describe(&case, policy);
            bench.in_turns(Part::Full, &[DISK], name, |bench, policy| {
                let sample = bench.disk_itself(&case)?;
                Ok(Some((Key { iodepth: DISK_DEPTH, ..case.key(policy) }, sample)))
            })?;
        }
    }
    Ok(())
}

/// Returns the case of a full log.
pub(super) fn full_case(pattern: Pattern) -> &'static str {
    match pattern {
        Pattern::Sequential => "run-full-sequential",
        Pattern::Uniform | Pattern::Zipf { .. } | Pattern::Scattered { .. } => "run-full-random",
    }
}

/// Returns the case of reads.
pub(super) fn read_case(kind: Kind) -> &'static str {
    match kind {
        Kind::ReadDirty => "run-read-dirty",
        Kind::ReadOnly => "run-read-only",
        Kind::ReadClean | Kind::Write | Kind::Append => "run-read-clean",
    }
}

/// Measures reads from the page cache.
pub(super) fn reads(bench: &mut Bench<'_>) -> Result<()> {
    for kind in [Kind::ReadClean, Kind::ReadDirty, Kind::ReadOnly] {
        let requests = bench.args.scaled(READ_REQUESTS, 100);
        let case = Case { requests, ..case(read_case(kind), kind, Sync::None, pool(bench.args)) };
        bench.drive_in_turns(Part::Read, &case, Sync::None)?;
    }
    Ok(())
}

fn describe(case: &Case, policy: &str) -> String {
    let name = case.name.trim_start_matches(RUN_PREFIX);
    format!("{policy} {name}, {} threads", case.threads)
}

impl Bench<'_> {
    /// Lets all runners take turns at a case; the plain one syncs by `plain_sync`.
    fn drive_in_turns(&mut self, part: Part, case: &Case, plain_sync: Sync) -> Result<()> {
        let runners = self.args.policies.clone();
        let name = |runner: Runner| describe(case, runner.name());
        self.in_turns(part, &runners, name, |bench, runner| {
            let sync = if runner == Runner::Plain { plain_sync } else { case.sync };
            let sample = bench.drive(runner, &Case { sync, ..*case })?;
            Ok(Some((case.key(runner.name()), sample)))
        })
    }

    /// Runs a case of writes, and notes the log space of its records.
    fn write(&mut self, runner: Runner, case: &Case) -> Result<Sample> {
        let before = self.log_ends(runner, case.pool)?;
        let sample = self.drive(runner, case)?;
        let after = self.log_ends(runner, case.pool)?;
        if let (APPEND, Some((_, limit)), Some((tail, _))) = (case.name, before, after) {
            let records = sample.ops + warm_up_requests(case.requests);
            let each = tail.saturating_sub(limit) as f64 / records as f64;
            self.found.add(Measure::LOG_BYTES, runner.name(), each);
        }
        Ok(sample)
    }

    fn write_by_peer(&self, case: &Case) -> Result<Sample> {
        let library = self.args.nvcache.as_deref().unwrap_or(Path::new("libc.so"));
        let file = self.file_of(case, 0)?;
        let numbers = [case.file_bytes, u64::from(case.block_bytes), case.requests];
        nvcache::write(self, library, &file, numbers)
    }

    /// Measures as many requests on the disk itself with fio, around the page cache, each block
    /// once.
    pub(super) fn disk_itself(&self, case: &Case) -> Result<Sample> {
        let file = self.file_of(case, 0)?;
        self.bed.sync_disk()?;
        let mut command = fio::command("disk", Op::Write, self.bed.files())?;
        command.args(["--ioengine=libaio", "--direct=1"]).args([
            format!("--filename={}", file.display()),
            format!("--bs={}", case.block_bytes),
            format!("--size={}", case.file_bytes),
            format!("--iodepth={DISK_DEPTH}"),
        ]);
        fio::parse(&output_of(command)?, Op::Write)
    }

    /// Runs the driver once.
    fn drive(&self, runner: Runner, case: &Case) -> Result<Sample> {
        let files = (0..case.files()).map(|number| self.file_of(case, number));
        let files = files.collect::<Result<Vec<_>>>()?;
        parse_sample(DRIVER, &self.drive_on(runner, case, &files)?)
    }

    /// Runs the driver once on these files; returns its output.
    pub(super) fn drive_on(
        &self,
        runner: Runner,
        case: &Case,
        files: &[PathBuf],
    ) -> Result<String> {
        self.bed.sync_disk()?;
        let mut driver = self.bed.driver(runner, case.pool);
        driver.args(case.words(files));
        output_of(driver)
    }

    /// Returns a file of the case: an empty one for appends, else a whole one on the disk and in
    /// the page cache.
    fn file_of(&self, case: &Case, number: usize) -> Result<PathBuf> {
        let name = format!("file-{}-{number}", case.file_bytes);
        let path = self.bed.file(&name);
        let has_bytes = path.metadata().is_ok_and(|found| found.len() == case.file_bytes);
        if has_bytes && case.kind != Kind::Append {
            return Ok(path);
        }
        self.bed.random_file(&name, case.file_bytes)
    }

    /// Creates the pool, and touches all of its memory once, unless this was done before.
    pub(super) fn prepare_pool(&self, pool: Pool) -> Result<()> {
        if self.bed.pool(pool).exists() || self.tidegates().is_empty() {
            return Ok(());
        }
        let requests = pool.bytes / u64::from(BLOCK_BYTES);
        let lap = Case { requests, ..case(FDATASYNC, Kind::Write, Sync::Each, pool) };
        self.drive(Runner::Run, &lap).map(drop)
    }

    /// Returns tail and limit of the log in an unused pool: the records of a run begin at the limit
    /// before the run and end at the tail after the run. Returns `None` if there is no log.
    fn log_ends(&self, runner: Runner, pool: Pool) -> Result<Option<(u64, u64)>> {
        let path = self.bed.pool(pool);
        if runner == Runner::Plain || !path.exists() {
            return Ok(None);
        }
        let options = RegionOptions { read_only: true, ..RegionOptions::default() };
        let pool = LogPool::open(Arc::new(Region::open(&path, &options)?)).map_err(of_log)?;
        Ok(Some((pool.tail()?, pool.limit()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: Pool = Pool { name: "pool", bytes: 1 << 20 };

    #[test]
    fn every_case_is_one_that_the_driver_can_be_asked_for() {
        use clap::{Parser, ValueEnum};

        #[derive(Debug, Parser)]
        struct Line {
            #[command(flatten)]
            args: super::super::io::IoArgs,
        }
        for kind in Kind::value_variants() {
            for sync in Sync::value_variants() {
                let case = Case { requests: 7, threads: 2, ..case("x", *kind, *sync, POOL) };
                let words = case.words(&[PathBuf::from("/a"), PathBuf::from("/b")]);
                let line = Line::parse_from(std::iter::once("x".into()).chain(words));
                assert_eq!((line.args.kind, line.args.sync), (*kind, *sync));
                assert_eq!(
                    (line.args.requests, line.args.threads, line.args.files.len()),
                    (7, 2, 2)
                );
            }
        }
    }
}
