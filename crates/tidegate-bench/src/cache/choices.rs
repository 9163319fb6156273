//! What users choose: the modes and the policies of cleaning, before a device like a flash drive.
//!
//! Each client flushes, so that all modes leave as much behind after a power cut.

use tidegate::cache::CacheDevice;
use tidegate::cache::mode::Mode;
use tidegate::cache::policy::cleaning::CLEANINGS;
use tidegate::device::delay::Delays;

use super::bed::{PAGE_BYTES, Pool, reading, slow, writes};
use super::behind::{FLUSH_EVERY, LONGER, run_time};
use super::{Bench, Part};
use crate::error::Result;
use crate::pattern::Pattern;
use crate::workload::{Bursts, Stop, Workload};

/// What the names of the cases begin with.
pub(crate) const MODES: &str = "cache-mode";
pub(crate) const CLEANING: &str = "cache-cleaning";

/// A flash drive: 80 µs a read, 20 µs a write into its buffer, 400 µs a flush, 1.4 GB/s.
const FLASH: Delays = Delays { read_ns: 80_000, write_ns: 20_000, flush_ns: 400_000, byte_ps: 714 };
/// The share of `--size` that the cache has, and the size of its backing in sizes of that.
const SHARE: u64 = 8;
const BACKING_SIZES: u64 = 4;
const POPULAR: Pattern = Pattern::Zipf { theta: 0.99 };
/// Runs of a repetition, with what comes before each.
const RUNS_OF_MODES: f64 = 2.0 * WORKLOADS.len() as f64 * Mode::ALL.len() as f64;
const RUNS_OF_CLEANING: f64 = 2.0 * LONGER * CLEANINGS.len() as f64;

/// Workloads of modes: a name, the pattern, and reads in a hundred requests.
const WORKLOADS: [(&str, Pattern, u8); 3] = [
    ("writes", POPULAR, 0),
    ("mixed", POPULAR, 70),
    ("once", Pattern::Scattered { skipped: 0 }, 50),
];
/// Open CAS's times of `alru` are minutes: the shortest that are more than nothing.
const QUICK: [(&str, &str); 3] =
    [("alru.wake-up-s", "0"), ("alru.staleness-time-s", "1"), ("alru.activity-threshold-ms", "20")];

/// Time of a repetition in runs.
pub(super) fn runs(part: Part) -> f64 {
    if part == Part::Modes { RUNS_OF_MODES } else { RUNS_OF_CLEANING }
}

/// Measures each mode under each workload.
pub(super) fn modes(bench: &mut Bench<'_>) -> Result<()> {
    let scene = Scene::new(bench)?;
    for repetition in 1..=bench.args.repetitions {
        for (name, pattern, read_pct) in WORKLOADS {
            let case = format!("{MODES}-{name}");
            bench.step(Part::Modes, WORKLOADS.len(), &format!("{case}, run {repetition}"));
            let stop = bench.run_time();
            let workload = Workload { read_pct, ..scene.workload(pattern, stop) };
            for &mode in Mode::ALL {
                scene.turn(bench, &case, mode.name(), &[("mode", mode.name())], &workload)?;
            }
        }
    }
    Ok(())
}

/// Measures each policy of cleaning: bursts of writes that fill half of the cache, then rests.
pub(super) fn cleaning(bench: &mut Bench<'_>) -> Result<()> {
    let scene = Scene::new(bench)?;
    let case = format!("{CLEANING}-bursts");
    let bursts = Some(Bursts { requests: scene.pages() / 2, duty_pct: 20 });
    for repetition in 1..=bench.args.repetitions {
        bench.step(Part::Cleaning, 1, &format!("{case}, run {repetition}"));
        let workload = Workload { bursts, ..scene.workload(POPULAR, run_time(bench)) };
        for entry in &CLEANINGS {
            let settings = [&QUICK[..], &[("cleaning", entry.name)]].concat();
            scene.turn(bench, &case, entry.name, &settings, &workload)?;
        }
    }
    Ok(())
}

/// A cache before a flash drive of four times its size.
struct Scene {
    size: u64,
    pool: Pool,
}

impl Scene {
    fn new(bench: &Bench<'_>) -> Result<Self> {
        let size = bench.args.size / SHARE;
        Ok(Self { size, pool: Pool::new(bench.args, size)? })
    }

    fn pages(&self) -> u64 {
        self.size / u64::from(PAGE_BYTES)
    }

    fn workload(&self, pattern: Pattern, stop: Stop) -> Workload {
        let workload = writes(pattern, self.size * BACKING_SIZES, stop);
        Workload { flush_every: FLUSH_EVERY, ..workload }
    }

    /// Runs `workload` on a cache with `settings`, once to fill it and once measured.
    fn turn(
        &self,
        bench: &mut Bench<'_>,
        case: &str,
        name: &'static str,
        settings: &[(&str, &str)],
        workload: &Workload,
    ) -> Result<()> {
        let (subject, cache) =
            self.pool.with_settings(name, settings, slow(self.size * BACKING_SIZES, FLASH)?)?;
        let (pattern, seed) = (POPULAR, !workload.seed);
        subject.prepare(&Workload { pattern, seed, bursts: None, ..workload.clone() })?;
        let before = Work::of(&cache);
        bench.turn(case, &subject, workload)?;
        Work::of(&cache).since(&before).add_to(bench, case, name);
        Ok(())
    }
}

/// What a cache was asked for, and what it had its backing do, in pages.
struct Work {
    reads: u64,
    writes: u64,
    backing_reads: u64,
    backing_writes: u64,
}

impl Work {
    fn of(cache: &CacheDevice) -> Self {
        let of = |name| reading(cache, name);
        Self {
            reads: of("reads"),
            writes: of("writes"),
            backing_reads: of("cache_core_reads"),
            backing_writes: of("cache_core_writes"),
        }
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            reads: self.reads - before.reads,
            writes: self.writes - before.writes,
            backing_reads: self.backing_reads - before.backing_reads,
            backing_writes: self.backing_writes - before.backing_writes,
        }
    }

    fn add_to(&self, bench: &mut Bench<'_>, case: &str, name: &str) {
        let case = case.trim_start_matches("cache-");
        let mut add = |what: &str, part: u64, whole: u64| {
            if whole > 0 {
                let share_pct = part as f64 * 100.0 / whole as f64;
                bench.found.backing_work.add(&format!("{case}: {what}"), "%", name, share_pct);
            }
        };
        add("pages written to the backing, of those written", self.backing_writes, self.writes);
        add("pages read from the backing, of those read", self.backing_reads, self.reads);
    }
}
