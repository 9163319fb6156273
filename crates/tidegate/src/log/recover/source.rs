//! Where a plan's records and data come from: the pool.

use std::collections::HashSet;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use parking_lot::Mutex;

use super::plan::{Plan, Planner};
use crate::log::layout::PATH_BYTES_MAX;
use crate::log::{Header, LogError, LogPool, Scanner};
use crate::pmem::PmemError;

/// The longest payload that has to be read for a plan: two paths and what is before them.
const PLANNED_BYTES_MAX: usize = 2 * PATH_BYTES_MAX + 64;
/// Records whose payloads are checked in one go.
const CHUNK: usize = 1024;
/// Of a log of fewer bytes all payloads are checked by the thread that plans.
const SMALL_BYTES: u64 = 16 << 20;
/// Chunks that may wait to be checked: at least as many as a small log can have of records of 64 bytes.
const CHUNKS_WAITING: usize = 256;
/// Most threads that check payloads beside the one that plans.
const CHECKERS_MOST: usize = 8;

/// The data that a plan's extents point to.
pub trait LogData: Sync {
    /// Copies `buf.len()` bytes from `position` of the log on.
    ///
    /// # Errors
    /// The memory failed there.
    fn read(&self, position: u64, buf: &mut [u8]) -> io::Result<()>;
}

impl LogData for LogPool {
    fn read(&self, position: u64, buf: &mut [u8]) -> io::Result<()> {
        self.region().read(self.region_offset(position), buf).map_err(io::Error::other)
    }
}

/// The plan of all records in a pool; also how many bytes of the log could not be read.
///
/// Where a record ends is said by its header alone. So the plan is made of all headers while other threads look whether the
/// payloads are whole. Nearly always all are; else the plan is made once more, without those that are not.
///
/// # Errors
/// [`LogError::Pmem`].
pub fn plan_pool(pool: &LogPool) -> Result<(Plan, u64), LogError> {
    let (chunks, to_check) = sync_channel(CHUNKS_WAITING);
    let to_check = Mutex::new(to_check);
    let checkers = checkers(pool.limit()?.saturating_sub(pool.tail()?));
    let (planned, broken) = std::thread::scope(|scope| {
        let checkers = (0..checkers).map(|_| scope.spawn(|| check_all(pool, &to_check)));
        let checkers: Vec<_> = checkers.collect();
        let planned = plan_without(pool, &HashSet::new(), Some(chunks));
        let mut broken = check_all(pool, &to_check);
        for checker in checkers {
            let found = checker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            broken.merge(found);
        }
        (planned, broken)
    });
    if broken.positions.is_empty() {
        return planned;
    }
    let (plan, unreadable_bytes) = plan_without(pool, &broken.positions, None)?;
    Ok((plan, unreadable_bytes + broken.unreadable_bytes))
}

/// Threads for a log of so many bytes.
fn checkers(log_bytes: u64) -> usize {
    if log_bytes < SMALL_BYTES {
        return 0;
    }
    std::thread::available_parallelism().map_or(1, |cpus| cpus.get().min(CHECKERS_MOST))
}

/// Records that do not count.
#[derive(Default)]
struct Broken {
    positions: HashSet<u64>,
    unreadable_bytes: u64,
}

impl Broken {
    fn check(&mut self, pool: &LogPool, header: &Header) {
        let whole = pool.is_whole(header);
        if whole.is_err() {
            self.unreadable_bytes += header.record_bytes();
        }
        if !whole.unwrap_or(false) {
            self.positions.insert(header.position);
        }
    }

    fn merge(&mut self, other: Self) {
        self.positions.extend(other.positions);
        self.unreadable_bytes += other.unreadable_bytes;
    }
}

/// Checks payloads until there are no more to come.
fn check_all(pool: &LogPool, to_check: &Mutex<Receiver<Vec<Header>>>) -> Broken {
    let mut broken = Broken::default();
    loop {
        let next = to_check.lock().recv();
        let Ok(chunk) = next else { return broken };
        for header in &chunk {
            broken.check(pool, header);
        }
    }
}

/// The plan of all records but those at the positions in `broken`; all of them are given to `chunks` to be checked.
fn plan_without(
    pool: &LogPool,
    broken: &HashSet<u64>,
    chunks: Option<SyncSender<Vec<Header>>>,
) -> Result<(Plan, u64), LogError> {
    let mut planner = Planner::new();
    let mut scanner = Scanner::of_finished(pool, pool.tail()?, pool.limit()?);
    let (mut chunk, mut payload) = (Vec::new(), Vec::with_capacity(PLANNED_BYTES_MAX));
    let mut failed_bytes = 0;
    let send = |chunk: &mut Vec<Header>| {
        let chunk = std::mem::take(chunk);
        // The receiver lives longer than this.
        chunks.as_ref().map(|chunks| chunks.send(chunk))
    };
    for header in scanner.by_ref().filter(|header| !broken.contains(&header.position)) {
        chunk.push(header);
        if chunk.len() == CHUNK {
            send(&mut chunk);
        }
        payload.clear();
        if Planner::needs_payload(header.kind) && read_payload(pool, &header, &mut payload).is_err()
        {
            failed_bytes += header.record_bytes();
            continue;
        }
        planner.add(&header, &payload);
    }
    send(&mut chunk);
    // Who checks need not wait for the plan.
    drop(chunks);
    Ok((planner.finish(), scanner.unreadable_bytes() + failed_bytes))
}

/// What is too long makes no sense: it stays empty, and is then ignored as such.
fn read_payload(pool: &LogPool, header: &Header, payload: &mut Vec<u8>) -> Result<(), PmemError> {
    let len = usize::try_from(header.payload_bytes).unwrap_or(usize::MAX);
    if len <= PLANNED_BYTES_MAX {
        payload.resize(len, 0);
        pool.read_payload(header, 0, payload)?;
    }
    Ok(())
}
