//! Opening a BTT after a crash: time and memory.
//!
//! Each repetition is a real crash: a program of our own writes at random offsets until it is
//! killed with SIGKILL, then another opens the pool and reports how long that took and its peak
//! memory (`VmHWM`, which counts the pages of the pool that it touched).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde::Serialize;
use tidegate::btt::{Btt, BttError};
use tidegate::device::{BlockDevice, WriteFlags};
use tidegate::pmem::{Domain, MediaModel, Region, RegionOptions};
use tidegate::size::parse_bytes;

use crate::child::Child;
use crate::error::{BenchError, Result};
use crate::machine::Machine;
use crate::measure::{Key, Op, Sample, Series};
use crate::nbd::create_pool;
use crate::output::OutputArgs;
use crate::pattern::{Pattern, Picker};
use crate::progress::Progress;

/// Case of an opening.
pub(crate) const CASE: &str = "open-after-crash";

/// What cannot be said in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Opening {
    /// Largest peak memory of the opening programs in bytes.
    pub peak_memory_bytes: u64,
}

/// What to open.
#[derive(Debug, Clone, Args)]
pub struct OpenArgs {
    /// Directory of the pool
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
    /// Size of the pool; only what is written takes up memory
    #[arg(long, value_name = "SIZE", default_value = "8G", value_parser = parse_bytes)]
    pub size: u64,
    /// Writes at random offsets before each crash
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    pub writes: u64,
    /// Crashes
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repetitions: u32,
    /// Where results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl OpenArgs {
    /// Time that [`measure`](Self::measure) should take.
    pub fn planned(&self) -> Duration {
        self.step_cost() * self.repetitions
    }

    /// What the measurement runs on.
    pub(crate) fn machine(&self) -> Machine {
        Machine::of(&self.dir, &MediaModel::default(), 0.0, self.repetitions)
    }

    fn step_cost(&self) -> Duration {
        Duration::from_micros(2 * self.writes) + Duration::from_millis(300)
    }

    /// Crashes and opens. The running program must know [`ChildCommand`].
    ///
    /// # Errors
    /// [`BenchError::Usage`], and what making, writing or opening the pool reports.
    pub fn measure(&self, progress: &mut Progress) -> Result<(Series, Opening)> {
        if self.repetitions == 0 {
            return Err(BenchError::Usage("--repetitions 0: expected at least 1".to_owned()));
        }
        let dir = tempfile::Builder::new().prefix("tidegate-bench-").tempdir_in(&self.dir);
        let dir = dir.map_err(BenchError::os("create a directory in", &self.dir))?;
        let pool = dir.path().join("pool");
        create_pool(&pool, self.size)?;
        let mut samples = Vec::new();
        let mut peak_memory_bytes = 0;
        for repetition in 1..=self.repetitions {
            progress.step(&format!("crash and open, run {repetition}"), self.step_cost());
            self.crash(&pool, repetition)?;
            let (elapsed_s, peak) = open_in_child(&pool)?;
            samples.push(Sample::single(elapsed_s));
            peak_memory_bytes = peak.max(peak_memory_bytes);
        }
        Ok((Series { key: self.key(), samples }, Opening { peak_memory_bytes }))
    }

    fn key(&self) -> Key {
        let (policy, case) = ("btt".to_owned(), CASE.to_owned());
        Key { policy, case, op: Op::Read, threads: 1, iodepth: 1, block_bytes: self.size }
    }

    fn crash(&self, pool: &Path, seed: u32) -> Result<()> {
        let numbers = [self.writes.to_string(), seed.to_string()];
        let args = [&["write-child".to_owned(), pool.display().to_string()], &numbers[..]].concat();
        // Dropping the child kills it, still writing.
        Child::start(&this_program()?, &args)?.wait_for_line("written").map(drop)
    }
}

fn open_in_child(pool: &Path) -> Result<(f64, u64)> {
    let args = ["open-child".to_owned(), pool.display().to_string()];
    let program = this_program()?;
    let line = Child::start(&program, &args)?.wait_for_line("opened")?;
    let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    let &[elapsed_ns, peak_memory_bytes] = numbers.as_slice() else {
        let found = format!("printed \"{line}\", expected two numbers");
        return Err(BenchError::program(&program.display().to_string(), found));
    };
    Ok((Duration::from_nanos(elapsed_ns).as_secs_f64(), peak_memory_bytes))
}

fn this_program() -> Result<PathBuf> {
    std::env::current_exe().map_err(BenchError::os("find", "/proc/self/exe"))
}

/// The parts played by programs of their own.
#[derive(Debug, Clone, Subcommand)]
pub enum ChildCommand {
    /// Write at random offsets, say so after a number of writes, and go on until killed
    #[command(hide = true)]
    WriteChild {
        /// The pool.
        pool: PathBuf,
        /// Writes before saying so.
        writes: u64,
        /// Seed of the offsets.
        seed: u64,
    },
    /// Open a pool, print nanoseconds and peak memory in bytes
    #[command(hide = true)]
    OpenChild {
        /// The pool.
        pool: PathBuf,
    },
}

impl ChildCommand {
    /// Plays the part.
    ///
    /// # Errors
    /// What the pool reports.
    pub fn run(&self) -> Result<()> {
        match self {
            Self::WriteChild { pool, writes, seed } => write_until_killed(pool, *writes, *seed),
            Self::OpenChild { pool } => open_and_tell(pool),
        }
    }
}

fn open(pool: &Path) -> Result<Btt> {
    let options = RegionOptions { domain: Some(Domain::Adr), ..RegionOptions::default() };
    let failed =
        |source: BttError| BenchError::Device { policy: "btt".to_owned(), source: source.into() };
    Btt::open(Arc::new(Region::open(pool, &options)?)).map_err(failed)
}

fn write_until_killed(pool: &Path, writes: u64, seed: u64) -> Result<()> {
    let device = open(pool)?;
    let geometry = device.geometry();
    let mut picker = Picker::new(Pattern::Uniform, geometry.blocks, seed, 0, 1);
    let data = vec![0x5a; geometry.block_bytes as usize];
    for written in 1u64.. {
        let offset = picker.next_block() * u64::from(geometry.block_bytes);
        let result = device.write(offset, &data, WriteFlags::default());
        result.map_err(|source| BenchError::Device { policy: "btt".to_owned(), source })?;
        if written == writes {
            println!("written");
        }
    }
    Ok(())
}

fn open_and_tell(pool: &Path) -> Result<()> {
    let begun = Instant::now();
    let device = open(pool)?;
    let elapsed_ns = begun.elapsed().as_nanos();
    println!("opened {elapsed_ns} {}", peak_memory_bytes()?);
    drop(device);
    Ok(())
}

/// `VmHWM` of this process.
fn peak_memory_bytes() -> Result<u64> {
    let path = "/proc/self/status";
    let status = std::fs::read_to_string(path).map_err(BenchError::os("read", path))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| BenchError::program(path, "has no VmHWM in kB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_memory_covers_what_was_touched() {
        let before = peak_memory_bytes().unwrap();
        let memory = vec![1u8; 64 << 20];
        assert!(memory.iter().all(|&byte| byte == 1));
        assert!(peak_memory_bytes().unwrap() >= before.max(64 << 20));
    }
}
