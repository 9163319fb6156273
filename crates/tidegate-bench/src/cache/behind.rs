//! Caches before slow backings: a full one before a file and before a disk of 20 µs, and reads that
//! miss.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate::device::file::{FileDevice, FileOptions};
use tidegate::device::{self, BlockDevice, Geometry, Operation, Request, WriteFlags};

use super::bed::{DISK, PAGE_BYTES, Pool, Subject, Variant, alone, null, slow, writes};
use super::cases::SLOW;
use super::{BACKING, Bench, CACHE, Part, peer};
use crate::block::scratch;
use crate::error::{BenchError, Result};
use crate::pattern::Pattern;
use crate::workload::{Stop, Workload};

/// Writes into a full cache before a file.
pub(super) const FULL_FILE: &str = "cache-full-file";
/// Writes into a full cache before a slow device.
pub(super) const FULL_DISK: &str = "cache-full-disk";
/// Writes into an empty cache until it is dirty to nine tenths.
pub(super) const FILL: &str = "cache-fill-90pct";
/// Reads of pages that are not cached.
pub(super) const READ: &str = "cache-read-miss";
/// Reads in order of pages that are not cached: a line also loads the pages that are read next.
const READ_IN_ORDER: &str = "cache-read-in-order";
/// The cache before a device that keeps nothing.
pub(super) const BEFORE_NULL: &str = "cache-null";
/// The backing alone, flushed after as many writes as the cache cleans at once.
pub(super) const BATCHES: &str = "backing-512";

/// Divisor of `--size` for the cache, and the size of its backing in sizes of the cache.
const SHARE: u64 = 2;
const BACKING_SIZES: u64 = 4;
/// These runs take this many times as long as others: now and then a backing gets hundreds of pages
/// at once.
pub(super) const LONGER: f64 = 5.0;
/// Writes between two flushes of the client.
pub(super) const FLUSH_EVERY: u64 = 32;
/// Pages that are cleaned at once.
const BATCH_PAGES: u64 = 512;

/// Measures the filling of a cache, and a full cache, before a file and a slow device.
pub(super) fn full(bench: &mut Bench<'_>) -> Result<()> {
    let size = bench.args.size / SHARE;
    let pool = Pool::new(bench.args, size)?;
    let file = file(bench, size * BACKING_SIZES)?;
    let disk = slow(size * BACKING_SIZES, DISK)?;
    for repetition in 1..=bench.args.repetitions {
        for (case, backing) in [(FULL_FILE, &file), (FULL_DISK, &disk)] {
            bench.step(Part::Full, 2, &format!("{case}, run {repetition}"));
            let scene = Scene { size, pool: &pool, backing, case };
            scene.fill(bench)?;
            scene.full(bench)?;
            if case == FULL_FILE {
                peer::turn(bench, case, size, bench.args.seconds * LONGER)?;
            }
            scene.alone(bench)?;
        }
    }
    Ok(())
}

/// Creates an unlinked file on the disk, and writes all of its blocks.
fn file(bench: &mut Bench<'_>, bytes: u64) -> Result<Arc<dyn BlockDevice>> {
    let dir = scratch(&bench.args.files)?;
    let failed = || BenchError::device(BACKING);
    let options = FileOptions { create_bytes: Some(bytes), ..FileOptions::default() };
    let device = FileDevice::open(&dir.path().join("backing"), &options).map_err(failed())?;
    let workload = writes(Pattern::Sequential, bytes, Stop::Requests(0));
    Workload { block_bytes: 1 << 20, ..workload }.fill(&device).map_err(failed())?;
    Ok(Arc::new(device))
}

/// A cache of `size` before one backing.
struct Scene<'a> {
    size: u64,
    pool: &'a Pool,
    backing: &'a Arc<dyn BlockDevice>,
    case: &'static str,
}

impl Scene<'_> {
    fn pages(&self) -> u64 {
        self.size / u64::from(PAGE_BYTES)
    }

    /// Describes writes of different pages in scattered order.
    fn writes(&self, skipped: u64, stop: Stop) -> Workload {
        writes(Pattern::Scattered { skipped }, self.size * BACKING_SIZES, stop)
    }

    /// Fills two empty caches to nine tenths, before a device that costs nothing and the backing.
    fn fill(&self, bench: &mut Bench<'_>) -> Result<()> {
        let workload = self.writes(0, Stop::Requests(self.pages() * 9 / 10));
        let case = format!("{FILL}{}", self.case.trim_start_matches("cache-full"));
        let nothing = null(self.size * BACKING_SIZES)?;
        for (policy, backing) in [(BEFORE_NULL, &nothing), (CACHE, self.backing)] {
            let cache = self.pool.subject(policy, Arc::clone(backing))?;
            bench.turn(&case, &cache, &workload)?;
        }
        Ok(())
    }

    /// Overruns a cache, then measures it.
    fn full(&self, bench: &mut Bench<'_>) -> Result<()> {
        let cache = self.pool.subject(CACHE, Arc::clone(self.backing))?;
        let overrun = self.pages() * 9 / 8;
        cache.prepare(&self.writes(0, Stop::Requests(overrun)))?;
        let measured = self.writes(overrun, bench.run_time(LONGER));
        bench.turn(self.case, &cache, &Workload { flush_every: FLUSH_EVERY, ..measured }).map(drop)
    }

    /// Measures the scattered writes on the backing alone, each durable by itself, and in batches.
    fn alone(&self, bench: &mut Bench<'_>) -> Result<()> {
        let measured = self.writes(0, bench.run_time(LONGER));
        bench.turn(self.case, &alone(Arc::clone(self.backing)), &measured)?;
        let batches = Arc::new(Batches::before(Arc::clone(self.backing)));
        let measured = Workload { flush_every: BATCH_PAGES, ..measured };
        bench.turn(self.case, &Subject::plain(BATCHES, batches), &measured).map(drop)
    }
}

/// A device that is given writes together, at a flush: the most that it takes.
pub(super) struct Batches {
    below: Arc<dyn BlockDevice>,
    waiting: Mutex<Vec<(u64, Vec<u8>)>>,
}

impl Batches {
    pub(super) fn before(below: Arc<dyn BlockDevice>) -> Self {
        Self { below, waiting: Mutex::default() }
    }
}

impl Batches {
    fn waiting(&self) -> MutexGuard<'_, Vec<(u64, Vec<u8>)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_all(&self) -> device::Result<()> {
        let mut waiting = self.waiting();
        waiting.sort_unstable_by_key(|(offset, _)| *offset);
        let mut requests: Vec<_> = waiting.iter().map(|(at, data)| write_of(*at, data)).collect();
        self.below.submit(&mut requests);
        requests.iter_mut().try_for_each(|it| it.take_result().unwrap_or(Ok(())))?;
        drop(requests);
        waiting.clear();
        Ok(())
    }
}

impl BlockDevice for Batches {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> device::Result<()> {
        match operation {
            Operation::Write { offset, data, .. } => {
                self.waiting().push((*offset, data.to_vec()));
                return Ok(());
            }
            Operation::Flush => self.write_all()?,
            _ => {}
        }
        self.below.run(operation)
    }
}

fn write_of(offset: u64, data: &[u8]) -> Request<'_> {
    Request::new(Operation::Write { offset, data, flags: WriteFlags::default() })
}

/// Measures reads that miss, beside the backing alone.
pub(super) fn reads(bench: &mut Bench<'_>) -> Result<()> {
    let size = bench.args.size;
    let pool = Pool::new(bench.args, size)?;
    let backing = slow(size * BACKING_SIZES, SLOW)?;
    for repetition in 1..=bench.args.repetitions {
        bench.step(Part::Read, 1, &format!("{READ}, run {repetition}"));
        let pattern = Pattern::Scattered { skipped: 0 };
        let workload = writes(pattern, size * BACKING_SIZES, bench.run_time(1.0));
        let workload = Workload { read_pct: 100, ..workload };
        bench.turn(READ, &alone(Arc::clone(&backing)), &workload)?;
        bench.turn(READ, &pool.subject(CACHE, Arc::clone(&backing))?, &workload)?;
        let workload = Workload { pattern: Pattern::Sequential, ..workload };
        bench.turn(READ_IN_ORDER, &alone(Arc::clone(&backing)), &workload)?;
        bench.turn(READ_IN_ORDER, &pool.subject(CACHE, Arc::clone(&backing))?, &workload)?;
        for variant in Variant::LINES {
            let cache = pool.variant(&variant, Arc::clone(&backing))?;
            bench.turn(READ_IN_ORDER, &cache, &workload)?;
        }
    }
    Ok(())
}
