//! fio's own `pmemblk` engine on the original libpmemblk and on Tidegate's, side by side: `bench
//! pmemblk`.
//!
//! Invariants:
//! 1. fio is the same program with the same options; only the library that its loader finds
//!    differs.
//! 2. Each library has a pool of its own, which is filled once before the first run that counts, so
//!    that reads copy data.
//! 3. The libraries take turns: each is measured once in a repetition.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use tempfile::TempDir;

use crate::block::{pool_bytes, scratch};
use crate::child::{find_program, output_of, this_program};
use crate::common::CommonArgs;
use crate::error::{BenchError, Result, require};
use crate::fio;
use crate::measure::{Collector, Key, Op, Sample, Series};
use crate::output::OutputArgs;
use crate::progress::Progress;

/// Case of random requests by fio.
pub(crate) const RANDOM: &str = "pmemblk-random";
/// The policy of Tidegate's library.
const OURS: &str = "libpmemblk";
/// The policy of the original.
pub(crate) const ORIGINAL: &str = "peer:libpmemblk";

/// Size of fio's requests and of a block, in bytes.
const BLOCK_BYTES: u64 = 4096;

/// Arguments of `bench pmemblk`.
#[derive(Debug, Clone, Args)]
pub struct PmemblkArgs {
    /// Threads of fio, one case for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,2")]
    pub threads: Vec<usize>,
    /// Directory of Tidegate's libpmemblk.so.1, which scripts/link-capi makes [default: the
    /// installed one, ../lib/tidegate/pmemblk beside this program]
    #[arg(long, value_name = "DIR")]
    pub library: Option<PathBuf>,
    /// What all measurements share.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// A library, and the file of its pool.
struct Subject {
    policy: &'static str,
    /// The directory where the loader looks first.
    library: Option<PathBuf>,
    pool: PathBuf,
}

/// Returns the planned time of [`measure`].
pub(crate) fn planned(args: &PmemblkArgs) -> Duration {
    let runs = u32::try_from(groups(args).len()).unwrap_or(u32::MAX) * args.common.repetitions;
    (fill_cost(args) + step_cost(args) * runs) * 2
}

fn fill_cost(args: &PmemblkArgs) -> Duration {
    Duration::from_nanos(args.common.size)
}

fn step_cost(args: &PmemblkArgs) -> Duration {
    // fio starts and stops in half a second, and runs once more before the time that counts.
    Duration::from_secs_f64(args.common.seconds() * 2.0 + 0.5)
}

/// Measures random writes and reads on both libraries.
///
/// # Errors
/// [`BenchError::Missing`] without fio; [`BenchError::Program`] without Tidegate's library, or if
/// fio fails.
pub(crate) fn measure(args: &PmemblkArgs, progress: &mut Progress) -> Result<Vec<Series>> {
    args.common.check()?;
    require(!args.threads.contains(&0), "--threads: expected at least 1")?;
    let library = library(args)?;
    let dir = scratch(&args.common.dir)?;
    // fio takes a colon in a name for the end of the name.
    let subjects = [(OURS, Some(library), "ours"), (ORIGINAL, None, "original")]
        .map(|(policy, library, name)| Subject { policy, library, pool: dir.path().join(name) });
    for subject in &subjects {
        progress.step(&format!("{}: fill", subject.policy), fill_cost(args));
        let mut command = command(args, subject, Op::Write, &dir)?;
        command.args(["--rw=write", "--numjobs=1"]);
        output_of(command)?;
    }
    let mut collector = Collector::default();
    for group in groups(args) {
        for repetition in 1..=args.common.repetitions {
            for subject in &subjects {
                let key = Key { policy: subject.policy.to_owned(), ..group.clone() };
                let (kind, threads) = (key.op.name(), key.threads);
                let what = format!("{} {kind}, {threads} threads, run {repetition}", key.policy);
                progress.step(&what, step_cost(args));
                let sample = random(args, subject, &key, &dir)?;
                collector.add(key, sample);
            }
        }
    }
    Ok(collector.into_series())
}

/// Returns the workloads for each library, as keys without a policy.
fn groups(args: &PmemblkArgs) -> Vec<Key> {
    let of = |op| move |&threads| Key { threads, ..Key::new("", RANDOM, op, BLOCK_BYTES) };
    let (writes, reads) = (args.threads.iter().map(of(Op::Write)), args.threads.iter());
    writes.chain(reads.map(of(Op::Read))).collect()
}

fn random(args: &PmemblkArgs, subject: &Subject, key: &Key, dir: &TempDir) -> Result<Sample> {
    let mut command = command(args, subject, key.op, dir)?;
    command.args(["--time_based", "--norandommap", "--randrepeat=0", "--group_reporting"]);
    command.arg(format!("--numjobs={}", key.threads));
    // The first access of a process to each page is a fault: as long again, which does not count.
    let runtime_ms = (args.common.seconds() * 1e3).round();
    command.args(["runtime", "ramp_time"].map(|name| format!("--{name}={runtime_ms}ms")));
    fio::parse(&output_of(command)?, key.op)
}

/// Makes a command of fio on the pool of `subject`, which fio creates if it is not there.
fn command(args: &PmemblkArgs, subject: &Subject, op: Op, dir: &TempDir) -> Result<Command> {
    let mut command = fio::command("pmemblk", op, dir.path())?;
    let pool_mib = pool_bytes(args.common.size).div_ceil(1 << 20);
    command.args(["--ioengine=pmemblk", "--thread=1", "--direct=1"]).args([
        format!("--filename={},{BLOCK_BYTES},{pool_mib}", subject.pool.display()),
        format!("--bs={BLOCK_BYTES}"),
        format!("--size={}", args.common.size),
    ]);
    // Without it the original calls msync for each store; Tidegate's library does not read it.
    command.env("PMEM_IS_PMEM_FORCE", "1");
    match &subject.library {
        Some(library) => command.env("LD_LIBRARY_PATH", library),
        None => command.env_remove("LD_LIBRARY_PATH"),
    };
    Ok(command)
}

/// Returns the directory of Tidegate's library.
fn library(args: &PmemblkArgs) -> Result<PathBuf> {
    find_program("fio", "fio")?;
    let installed = || -> Result<PathBuf> {
        Ok(this_program()?.parent().unwrap_or(Path::new("/")).join("../lib/tidegate/pmemblk"))
    };
    let library = args.library.clone().map_or_else(installed, Ok)?;
    let file = library.join("libpmemblk.so.1");
    if file.is_file() {
        // A relative path would not hold where fio runs.
        return std::path::absolute(&library).map_err(BenchError::os("find", &library));
    }
    let found = "is not there; link it by scripts/link-capi, and name its directory by --library";
    Err(BenchError::program(&file.display().to_string(), found))
}
