//! Where a plan's records and data come from: the pool.
//!
//! A record counts only if its payload is whole. [`plan_pool`] looks at all payloads. [`recover_pool`] reads data once: it makes a
//! *hasty* plan, which takes each header for a record, and finds out what is torn while it copies. Until then such a plan has
//! done nothing that is wrong:
//! 1. Names, and which file is meant, come from records whose payloads were looked at when the plan was made.
//! 2. A byte is copied from the newest record that has it, and only if that one is whole. What is the newest of all is so of the whole
//!    ones too.
//! 3. Sizes, and bytes of records that are not copied in one piece, come from records that were looked at before the first file
//!    was touched ([`Plan::unproved`]).
//! 4. What lies under newer records is neither copied nor looked at: it changes nothing else.
//!
//! Where a payload is torn, or anything else is not complete, a plan of whole records follows, as after a crash.

use std::collections::HashSet;
use std::io::{self, IoSlice};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use parking_lot::Mutex;

use super::apply::{ApplyOptions, FileSystem, NewIdentity, Outcome, Progress, apply};
use super::parallel;
use super::plan::{Plan, Planner};
use crate::log::layout::{PATH_BYTES_MAX, RECORD_ALIGN_BYTES};
use crate::log::record::payload_checksum;
use crate::log::{Definition, Header, LogError, LogPool, Scanner};
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

/// A pool's data for a hasty plan: payloads are looked at when they are copied.
pub(super) struct Proving<'a>(pub(super) &'a LogPool);

impl LogData for Proving<'_> {
    fn read(&self, position: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read(position, buf)?;
        let header = header_at(self.0, position.saturating_sub(RECORD_ALIGN_BYTES));
        let header = header.map_err(io::Error::other)?;
        // Of what is no record's whole payload, the record was looked at before.
        let whole = header.filter(|header| header.payload_bytes as usize == buf.len());
        match whole {
            Some(header) if header.payload_checksum != payload_checksum(&[IoSlice::new(buf)]) => {
                Err(io::ErrorKind::InvalidData.into())
            }
            _ => Ok(()),
        }
    }
}

/// The header at a position that may be in the middle of a record.
fn header_at(pool: &LogPool, position: u64) -> Result<Option<Header>, PmemError> {
    if position.is_multiple_of(RECORD_ALIGN_BYTES) { pool.read_header(position) } else { Ok(None) }
}

/// What a recovery did.
#[derive(Debug)]
pub struct Recovered {
    /// What became of the files.
    pub outcome: Outcome,
    /// Bytes of the log that could not be read: what they said is lost.
    pub unreadable_bytes: u64,
}

/// Brings what a pool has into `files`, `workers` of them at once; none, where there was nothing to do. New identities are noted in
/// the log. Nobody else uses the pool.
///
/// Only if the outcome is complete may the log's tail move.
///
/// # Errors
/// [`LogError::Pmem`].
pub fn recover_pool<F: FileSystem>(
    pool: &LogPool,
    files: &F,
    workers: usize,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Option<Recovered>, LogError> {
    let options = ApplyOptions { pool: pool.superblock().uuid, workers };
    let mut note = |new: NewIdentity<'_>| {
        let NewIdentity { file, identity, path, mode, uid, gid } = new;
        // Numbers of the file system are hints only: recovery goes by the identity.
        let (device, inode, born) = (0, 0, true);
        let definition = Definition { identity, device, inode, mode, uid, gid, born, path };
        pool.note_definition(file, &definition).map_err(io::Error::other)
    };
    let hasty = plan_hastily(pool)?.filter(|(plan, _)| is_proved(pool, plan, workers));
    if let Some((plan, unreadable_bytes)) = hasty {
        if plan.is_empty() && unreadable_bytes == 0 {
            return Ok(None);
        }
        let outcome = apply(&plan, &Proving(pool), files, options, progress, &mut note);
        if outcome.is_complete() {
            return Ok(Some(Recovered { outcome, unreadable_bytes }));
        }
    }
    let (plan, unreadable_bytes) = plan_pool(pool)?;
    if plan.is_empty() && unreadable_bytes == 0 {
        return Ok(None);
    }
    let outcome = apply(&plan, pool, files, options, progress, &mut note);
    Ok(Some(Recovered { outcome, unreadable_bytes }))
}

/// The plan of all headers; none, where a payload that it needs is not whole.
pub(super) fn plan_hastily(pool: &LogPool) -> Result<Option<(Plan, u64)>, LogError> {
    let mut planner = Planner::new();
    let mut scanner = Scanner::of_finished(pool, pool.tail()?, pool.limit()?);
    let mut payload = Vec::with_capacity(PLANNED_BYTES_MAX);
    for header in scanner.by_ref() {
        payload.clear();
        if Planner::needs_payload(header.kind) {
            let whole = pool.is_whole(&header).unwrap_or(false);
            if !whole || read_payload(pool, &header, &mut payload).is_err() {
                return Ok(None);
            }
        }
        planner.add(&header, &payload);
    }
    Ok(Some((planner.finish(), scanner.unreadable_bytes())))
}

/// Whether all records are whole that copying does not look at.
pub(super) fn is_proved(pool: &LogPool, plan: &Plan, workers: usize) -> bool {
    let whole = |position: &u64| {
        // Where no header is, data of a record was parted that had been parted before, and is looked at for that.
        header_at(pool, *position)
            .and_then(|header| header.map_or(Ok(true), |it| pool.is_whole(&it)))
    };
    let chunks: Vec<_> = plan.unproved.chunks(CHUNK).collect();
    let checked = parallel::map(workers, &chunks, |chunk| {
        chunk.iter().all(|position| whole(position).unwrap_or(false))
    });
    checked.into_iter().all(|whole| whole)
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
