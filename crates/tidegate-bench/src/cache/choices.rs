//! The choices of users: modes and policies of cleaning, before a device like a flash drive.
//!
//! Each client flushes, so that all modes are equally durable at a power cut.

use tidegate::cache::CacheDevice;
use tidegate::cache::mode::Mode;
use tidegate::cache::policy::cleaning::CLEANINGS;
use tidegate::device::delay::Delays;

use super::bed::{PAGE_BYTES, Pool, reading, slow, writes};
use super::behind::{FLUSH_EVERY, LONGER};
use super::{Bench, Part};
use crate::error::Result;
use crate::pattern::Pattern;
use crate::workload::{Bursts, Stop, Workload};

/// Prefixes of the cases' names.
pub(crate) const MODES: &str = "cache-mode";
pub(crate) const CLEANING: &str = "cache-cleaning";

/// A flash drive: 80 µs a read, 20 µs a write into its buffer, 400 µs a flush, 1.4 GB/s.
const FLASH: Delays = Delays { read_ns: 80_000, write_ns: 20_000, flush_ns: 400_000, byte_ps: 714 };
/// Divisor of `--size` for the cache, and the size of its backing in sizes of the cache.
const SHARE: u64 = 8;
const BACKING_SIZES: u64 = 4;
const POPULAR: Pattern = Pattern::Zipf { theta: 0.99 };
/// Lengths of a repetition in runs, preparations included.
const RUNS_OF_MODES: f64 = 2.0 * WORKLOADS.len() as f64 * Mode::ALL.len() as f64;
const RUNS_OF_CLEANING: f64 = 2.0 * LONGER * CLEANINGS.len() as f64;

/// Workloads of modes: a name, the pattern, and reads in a hundred requests.
const WORKLOADS: [(&str, Pattern, u8); 3] = [
    ("writes", POPULAR, 0),
    ("mixed", POPULAR, 70),
    ("once", Pattern::Scattered { skipped: 0 }, 50),
];
/// The default times of `alru` in Open CAS are minutes: these are the shortest above zero.
const QUICK: [(&str, &str); 3] =
    [("alru.wake-up-s", "0"), ("alru.staleness-time-s", "1"), ("alru.activity-threshold-ms", "20")];

/// Returns the length of a repetition in runs.
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
            let stop = bench.run_time(1.0);
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
        let workload = Workload { bursts, ..scene.workload(POPULAR, bench.run_time(LONGER)) };
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
        let before = WORK.map(|work| work.pages(&cache));
        bench.turn(case, &subject, workload)?;
        let case = case.trim_start_matches("cache-");
        for (work, before) in WORK.into_iter().zip(before) {
            let after = work.pages(&cache);
            let (done, asked) = (after[0] - before[0], after[1] - before[1]);
            if asked > 0 {
                let share_pct = done as f64 * 100.0 / asked as f64;
                let measure = format!("{case}: {}", work.name);
                bench.found.backing_work.add(&measure, "%", name, share_pct);
            }
        }
        Ok(())
    }
}

/// The backing's work as a share of the requests to the cache; both are counters of the cache.
#[derive(Clone, Copy)]
struct Work {
    name: &'static str,
    done: &'static str,
    asked: &'static str,
}

const WORK: [Work; 2] = [
    Work {
        name: "pages written to the backing, of those written",
        done: "cache_core_writes",
        asked: "writes",
    },
    Work {
        name: "pages read from the backing, of those read",
        done: "cache_core_reads",
        asked: "reads",
    },
];

impl Work {
    /// Returns the pages that the backing and the cache have served so far.
    fn pages(self, cache: &CacheDevice) -> [u64; 2] {
        [self.done, self.asked].map(|name| reading(cache, name))
    }
}
