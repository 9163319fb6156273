//! Opening a pool after a crash: time and memory.
//!
//! Each repetition is a real crash: a program of our own writes at random offsets until it is
//! killed with SIGKILL. Then another program opens the pool and reports the time and its peak
//! memory (`VmHWM`, which counts the touched pages of the pool).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use tidegate::btt::Btt;
use tidegate::cache::{Binding, CacheDevice, CacheDeviceOptions};
use tidegate::device::null::NullDevice;
use tidegate::device::{BlockDevice, BlockDeviceExt, DeviceError, WriteFlags};
use tidegate::pmem::{Domain, MediaModel, Region, RegionOptions};
use tidegate::size::parse_bytes;

use crate::block::scratch;
use crate::child::{Child, this_program};
use crate::error::{BenchError, Result, require};
use crate::machine::Machine;
use crate::measure::{Key, Op, Sample, Series};
use crate::nbd::{create_cache, create_pool};
use crate::output::OutputArgs;
use crate::pattern::{Pattern, Picker};
use crate::policy::name_of;
use crate::progress::Progress;

/// Case of an opening.
pub(crate) const CASE: &str = "open-after-crash";
/// Size of a page of a cache.
const PAGE_BYTES: u32 = 4096;
/// The filling of a pool may exceed its planned time by this factor: other programs use the CPUs,
/// or the memory was never touched.
const FILL_SLOWEST: u32 = 20;
/// Blocks written at once to fill a pool.
const FILL_BLOCKS: usize = 64;
/// The value of each byte of a written block.
const WRITTEN: u8 = 0x5a;

/// Results of openings besides their rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Opening {
    /// Largest peak memory of the opening programs in bytes.
    pub peak_memory_bytes: u64,
    /// Seconds from the start of each opening until a written block was read from the pool.
    pub first_hits_s: Vec<f64>,
}

/// The engine of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// The block translation table.
    Btt,
    /// The cache, before a device that keeps nothing; all of it is used before the first crash.
    Cache,
}

/// What to open.
#[derive(Debug, Clone, Args)]
pub struct OpenArgs {
    /// What the pool holds
    #[arg(long, value_enum, default_value = "btt")]
    pub engine: Engine,
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
    /// Returns the planned time of [`measure`](Self::measure).
    pub fn planned(&self) -> Duration {
        self.step_cost() * self.repetitions + self.fill_cost()
    }

    fn fill_cost(&self) -> Duration {
        match self.engine {
            Engine::Btt => Duration::ZERO,
            Engine::Cache => Duration::from_nanos(self.size / 2),
        }
    }

    /// Describes the machine of the measurement.
    pub(crate) fn machine(&self) -> Machine {
        Machine::of(&self.dir, &MediaModel::default(), 0.0, self.repetitions)
    }

    fn step_cost(&self) -> Duration {
        Duration::from_micros(2 * self.writes) + Duration::from_millis(300)
    }

    /// Crashes and opens. The running program must know [`ChildCommand`].
    ///
    /// # Errors
    /// [`BenchError::Usage`], and errors of making, writing or opening the pool.
    pub fn measure(&self, progress: &mut Progress) -> Result<(Series, Opening)> {
        require(self.repetitions > 0, "--repetitions 0: expected at least 1")?;
        let dir = scratch(&self.dir)?;
        let pool = dir.path().join("pool");
        match self.engine {
            Engine::Btt => create_pool(&pool, self.size)?,
            Engine::Cache => create_cache(&pool, self.size)?,
        }
        let mut samples = Vec::new();
        let mut opening = Opening { peak_memory_bytes: 0, first_hits_s: Vec::new() };
        for repetition in 1..=self.repetitions {
            progress.step(&format!("crash and open, run {repetition}"), self.step_cost());
            self.crash(&pool, repetition)?;
            let [elapsed_ns, peak_memory_bytes, first_hit_ns] = open_in_child(self.engine, &pool)?;
            samples.push(Sample::single(Duration::from_nanos(elapsed_ns).as_secs_f64()));
            opening.peak_memory_bytes = peak_memory_bytes.max(opening.peak_memory_bytes);
            opening.first_hits_s.push(Duration::from_nanos(first_hit_ns).as_secs_f64());
        }
        let key = Key::new(name_of(self.engine), CASE, Op::Read, self.size);
        Ok((Series { key, samples }, opening))
    }

    fn crash(&self, pool: &Path, seed: u32) -> Result<()> {
        let numbers = [self.writes.to_string(), seed.to_string()];
        let named = ["write-child".to_owned(), name_of(self.engine), pool.display().to_string()];
        let args = [&named, &numbers[..]].concat();
        // Dropping the child kills it, still writing.
        let child = Child::start(&this_program()?, args)?;
        child.wait_for_line_of("written", self.fill_cost() * FILL_SLOWEST).map(drop)
    }
}

/// Opens the pool in a program of its own. Returns the nanoseconds of the opening, the peak memory
/// of the program in bytes, and the nanoseconds until the first hit.
fn open_in_child(engine: Engine, pool: &Path) -> Result<[u64; 3]> {
    let args = ["open-child".to_owned(), name_of(engine), pool.display().to_string()];
    let program = this_program()?;
    let line = Child::start(&program, args)?.wait_for_line("opened")?;
    let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    numbers.try_into().map_err(|_| {
        let found = format!("printed \"{line}\", expected three numbers");
        BenchError::program(&program.display().to_string(), found)
    })
}

/// The parts played by programs of their own.
#[derive(Debug, Clone, Subcommand)]
pub enum ChildCommand {
    /// Write at random offsets, say so after a number of writes, and go on until killed
    #[command(hide = true)]
    WriteChild {
        /// Its engine.
        engine: Engine,
        /// The pool.
        pool: PathBuf,
        /// Writes before saying so.
        writes: u64,
        /// Seed of the offsets.
        seed: u64,
    },
    /// Open a pool, print nanoseconds, peak memory in bytes, and nanoseconds until the first hit
    #[command(hide = true)]
    OpenChild {
        /// Its engine.
        engine: Engine,
        /// The pool.
        pool: PathBuf,
    },
}

impl ChildCommand {
    /// Runs the child's part.
    ///
    /// # Errors
    /// Errors of the pool.
    pub fn run(&self) -> Result<()> {
        match self {
            Self::WriteChild { engine, pool, writes, seed } => {
                write_until_killed(*engine, pool, *writes, *seed)
            }
            Self::OpenChild { engine, pool } => open_and_tell(*engine, pool),
        }
    }
}

impl Engine {
    fn failed<E: Into<DeviceError>>(self) -> impl FnOnce(E) -> BenchError {
        BenchError::device(name_of(self))
    }

    fn open(self, pool: &Path) -> Result<Box<dyn BlockDevice>> {
        let options = RegionOptions { domain: Some(Domain::Adr), ..RegionOptions::default() };
        let region = Arc::new(Region::open(pool, &options)?);
        match self {
            Self::Btt => Ok(Box::new(Btt::open(region).map_err(self.failed())?)),
            Self::Cache => {
                // The device behind is as large as the pool, which has slightly fewer slots.
                let pages = region.len_bytes() / u64::from(PAGE_BYTES);
                let backing = NullDevice::new(PAGE_BYTES, pages).map_err(self.failed())?;
                let binding = Binding { identity: 1, name: "null".to_owned(), pages };
                let options = CacheDeviceOptions::default();
                Ok(Box::new(CacheDevice::open(region, Arc::new(backing), binding, options)?))
            }
        }
    }
}

fn write_until_killed(engine: Engine, pool: &Path, writes: u64, seed: u64) -> Result<()> {
    let device = engine.open(pool)?;
    let geometry = device.geometry();
    let data = vec![WRITTEN; geometry.block_bytes as usize];
    let write = |block: u64| {
        let offset = block * u64::from(geometry.block_bytes);
        device.write(offset, &data, WriteFlags::default()).map_err(engine.failed())
    };
    if engine == Engine::Cache && seed == 1 {
        fill(&*device).map_err(engine.failed())?;
    }
    let mut picker = Picker::new(Pattern::Uniform, geometry.blocks, seed, 0, 1);
    for written in 1u64.. {
        write(picker.next_block())?;
        if written == writes {
            println!("written");
        }
    }
    Ok(())
}

/// Writes all blocks in order, many at once.
fn fill(device: &dyn BlockDevice) -> std::result::Result<(), DeviceError> {
    let geometry = device.geometry();
    let data = vec![WRITTEN; FILL_BLOCKS * geometry.block_bytes as usize];
    for first in (0..geometry.size_bytes()).step_by(data.len()) {
        let left = usize::try_from(geometry.size_bytes() - first).unwrap_or(usize::MAX);
        device.write(first, &data[..left.min(data.len())], WriteFlags::default())?;
    }
    Ok(())
}

fn open_and_tell(engine: Engine, pool: &Path) -> Result<()> {
    let begun = Instant::now();
    let device = engine.open(pool)?;
    let (elapsed_ns, peak_memory_bytes) = (begun.elapsed().as_nanos(), peak_memory_bytes()?);
    let reading = Instant::now();
    read_until_hit(&*device).map_err(engine.failed())?;
    let first_hit_ns = elapsed_ns + reading.elapsed().as_nanos();
    println!("opened {elapsed_ns} {peak_memory_bytes} {first_hit_ns}");
    drop(device);
    Ok(())
}

/// Reads blocks in order until the first written one: blocks that the pool lacks read as zeroes.
fn read_until_hit(device: &dyn BlockDevice) -> std::result::Result<(), DeviceError> {
    let geometry = device.geometry();
    let mut block = vec![0; geometry.block_bytes as usize];
    for number in 0..geometry.blocks {
        device.read(number * u64::from(geometry.block_bytes), &mut block)?;
        if block.first() == Some(&WRITTEN) {
            break;
        }
    }
    Ok(())
}

/// Returns `VmHWM` of this process.
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
