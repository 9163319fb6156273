//! Random writes of 4 KiB that miss, that hit, and that evict, in mode wb.

use std::sync::Arc;

use tidegate::device::BlockDevice;
use tidegate::device::delay::Delays;
use tidegate::device::memory::MemoryDevice;

use super::bed::{PAGE_BYTES, Pool, Subject, alone, btt, copy, null, slow, writes};
use super::{Bench, CACHE, LOG, Part, peer};
use crate::error::{BenchError, Result};
use crate::pattern::Pattern;
use crate::workload::{Stop, Workload};

/// The effect of a write on the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Its page is not cached, and slots are free.
    Miss,
    /// Its page is cached, and dirty.
    Hit,
    /// Its page is not cached, and all slots are used.
    Evict,
}

/// The backing of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Behind {
    /// A device that keeps nothing.
    Null,
    /// Memory.
    Memory,
    /// A device of 20 µs a request.
    Delay,
}

/// Size of the backing, in sizes of the cache.
const BACKING_SIZES: u64 = 4;
/// Share of the cache that misses and hits use: cleaning begins at half of the cache.
const USED_PCT: u64 = 45;
/// A device of 20 µs a request.
pub(super) const SLOW: Delays = Delays::of_each(20_000);

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Miss, Self::Hit, Self::Evict];

    /// Returns the name of the case in rows, before a device that keeps nothing.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Miss => "miss",
            Self::Hit => "hit",
            Self::Evict => "evict",
        }
    }

    /// Returns the kind that `case` belongs to.
    pub(crate) fn of(case: &str) -> Option<Self> {
        let first = case.split('-').next();
        Self::ALL.into_iter().find(|kind| Some(kind.name()) == first)
    }

    /// Returns the workload that prepares a cache of `size` bytes.
    fn before(self, size: u64) -> Option<Workload> {
        let pages = size / u64::from(PAGE_BYTES);
        match self {
            Self::Miss => None,
            Self::Hit => {
                let used = Stop::Requests(pages * USED_PCT / 100);
                Some(writes(Pattern::Sequential, size * USED_PCT / 100, used))
            }
            Self::Evict => Some(scattered(0, size, Stop::Requests(overrun_pages(pages)))),
        }
    }

    /// Returns the workload that is measured, on a cache of `size` bytes by `threads`.
    fn measured(self, size: u64, threads: usize, run_time: Stop) -> Workload {
        let pages = size / u64::from(PAGE_BYTES);
        let each = Stop::Requests(pages * USED_PCT / 100 / threads as u64);
        let workload = match self {
            Self::Miss => scattered(0, size, each),
            Self::Hit => writes(Pattern::Uniform, size * USED_PCT / 100, run_time),
            Self::Evict => scattered(overrun_pages(pages), size, run_time),
        };
        Workload { threads, ..workload }
    }
}

/// Describes scattered writes to the backing of a cache of `size` bytes.
fn scattered(skipped: u64, size: u64, stop: Stop) -> Workload {
    writes(Pattern::Scattered { skipped }, size * BACKING_SIZES, stop)
}

/// Returns the number of pages that certainly fill a cache of `pages`.
fn overrun_pages(pages: u64) -> u64 {
    pages * 9 / 8
}

impl Behind {
    const ALL: [Self; 3] = [Self::Null, Self::Memory, Self::Delay];

    fn case(self, kind: Kind) -> String {
        match self {
            Self::Null => kind.name().to_owned(),
            Self::Memory => format!("{}-memory", kind.name()),
            Self::Delay => format!("{}-delay", kind.name()),
        }
    }

    fn device(self, bytes: u64) -> Result<Arc<dyn BlockDevice>> {
        let failed = || BenchError::device("memory");
        match self {
            Self::Null => null(bytes),
            Self::Memory => {
                let blocks = bytes / u64::from(PAGE_BYTES);
                let device = MemoryDevice::new(PAGE_BYTES, blocks).map_err(failed())?;
                let all = writes(Pattern::Sequential, bytes, Stop::Requests(0));
                all.fill(&device).map_err(failed())?;
                Ok(Arc::new(device))
            }
            Self::Delay => slow(bytes, SLOW),
        }
    }
}

/// Measures writes of `kind` before each backing.
pub(super) fn measure(bench: &mut Bench<'_>, part: Part, kind: Kind) -> Result<()> {
    let size = bench.args.size;
    let pool = Pool::new(bench.args, size)?;
    for behind in Behind::ALL {
        let backing = behind.device(size * BACKING_SIZES)?;
        // The floor and the BTT have no backing, and a null device has no speed of its own.
        let peers = match behind {
            Behind::Null => vec![copy(bench.args, size)?, btt(bench.args, size)?],
            _ => vec![alone(Arc::clone(&backing))],
        };
        let case = behind.case(kind);
        for threads in bench.args.threads.clone() {
            let run = Run { part, kind, case: &case, threads, pool: &pool, backing: &backing };
            run.all(bench, &peers)?;
        }
    }
    Ok(())
}

/// One case with a number of threads.
struct Run<'a> {
    part: Part,
    kind: Kind,
    case: &'a str,
    threads: usize,
    pool: &'a Pool,
    backing: &'a Arc<dyn BlockDevice>,
}

impl Run<'_> {
    fn all(&self, bench: &mut Bench<'_>, peers: &[Subject]) -> Result<()> {
        let (case, threads) = (self.case, self.threads);
        for repetition in 1..=bench.args.repetitions {
            for peer in peers {
                self.turn(bench, peer, repetition)?;
            }
            for policy in [CACHE, LOG] {
                let backing = Arc::clone(self.backing);
                let subject = match policy {
                    LOG => self.pool.log(backing)?,
                    _ => self.pool.subject(policy, backing)?,
                };
                if let Some(before) = self.kind.before(bench.args.size) {
                    subject.prepare(&before)?;
                }
                self.turn(bench, &subject, repetition)?;
            }
            if threads == 1 && case == self.kind.name() {
                peer::turn(bench, case, bench.args.size, bench.args.seconds)?;
            }
        }
        Ok(())
    }

    /// Measures one run, within the bounds of `subject`.
    fn turn(&self, bench: &mut Bench<'_>, subject: &Subject, repetition: u32) -> Result<()> {
        let Self { case, threads, .. } = *self;
        let what = format!("{} {case}, {threads} threads, run {repetition}", subject.policy);
        bench.step(self.part, 10 * bench.args.threads.len(), &what);
        let workload = self.kind.measured(bench.args.size, self.threads, bench.run_time(1.0));
        let working_set_bytes = match subject.policy {
            "copy" | "btt" => workload.working_set_bytes.min(bench.args.size),
            _ => workload.working_set_bytes,
        };
        bench.turn(case, subject, &Workload { working_set_bytes, ..workload }).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_told_by_their_names() {
        for kind in Kind::ALL {
            for behind in Behind::ALL {
                assert_eq!(Kind::of(&behind.case(kind)), Some(kind));
            }
        }
        assert_eq!(Kind::of("read-miss"), None);
        assert_eq!(Kind::of("missing"), None);
    }
}
