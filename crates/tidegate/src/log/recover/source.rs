//! The source of a plan's records and data: the pool.

use std::io;

use crc_fast::{CrcAlgorithm, checksum};

use super::apply::{ApplyOptions, FileSystem, Outcome, Progress, apply_noting};
use super::carry_out::{Naming, Notes};
use super::parallel;
use super::plan::{Payload, Plan, Planner};
use crate::log::layout::{DefinitionBytes, HANDLE_BYTES_MAX, PATH_BYTES_MAX};
use crate::log::pool::names::HEAD_BYTES_MAX;
use crate::log::{Header, LogError, LogPool, NO_BOOT, RecordKind, Scanner};

/// The longest part of a payload that a plan needs, in bytes: of a file that can be created again.
const PLANNED_BYTES_MAX: usize = HEAD_BYTES_MAX;
const _: () = {
    let definition = size_of::<DefinitionBytes>() + HANDLE_BYTES_MAX + PATH_BYTES_MAX;
    assert!(definition <= PLANNED_BYTES_MAX);
};
/// Records per unit of work of a thread that checks payloads.
const CHUNK: usize = 1024;
/// The most threads that check payloads.
const CHECKERS_MOST: usize = 8;

/// Result of a recovery.
#[derive(Debug)]
pub struct Recovered {
    /// Result of applying the plan.
    pub outcome: Outcome,
    /// Bytes of the log that could not be read.
    pub unreadable_bytes: u64,
}

impl Notes for LogPool {
    fn note(&self, kind: RecordKind, offset: u64, payload: &[u8]) -> io::Result<()> {
        self.append_note(kind, offset, payload).map_err(io::Error::other)
    }

    fn note_recovery(&self) -> io::Result<()> {
        Self::note_recovery(self).map_err(io::Error::other)
    }

    fn reserved_name(&self, identity: u64) -> Vec<u8> {
        let salted = [self.salt().to_le_bytes(), identity.to_le_bytes()].concat();
        format!(".tidegate-{:016x}", checksum(CrcAlgorithm::Crc64Nvme, &salted)).into_bytes()
    }
}

/// Applies a pool's records to `files`. Returns `None` if there was nothing to do. No other process
/// may use the pool meanwhile.
///
/// Before recovery changes the first file, it notes which files it is about to change. So the next
/// recovery does not take changes of an interrupted one for changes from outside. If the log has no
/// space for the note, or the time of the boot is unknown, the pool's session becomes [`NO_BOOT`].
///
/// The log's tail may move only if the outcome is complete.
///
/// # Errors
/// [`LogError::Pmem`]; [`LogError::OfDevice`]: the log belongs to a device.
pub fn recover_pool<F: FileSystem>(
    pool: &LogPool,
    files: &F,
    options: ApplyOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Option<Recovered>, LogError> {
    let (plan, unreadable_bytes) = plan_pool(pool)?;
    if plan.is_empty() && unreadable_bytes == 0 {
        return Ok(None);
    }
    if let Some(name) = plan.device() {
        return Err(LogError::OfDevice { backing: String::from_utf8_lossy(name).into_owned() });
    }
    let mut begin = || pool.set_session(NO_BOOT).map_err(io::Error::other);
    let plan_of_pool = (&plan, unreadable_bytes);
    let outcome =
        apply_noting(plan_of_pool, (pool, Some(pool)), files, options, progress, &mut begin);
    Ok(Some(Recovered { outcome, unreadable_bytes }))
}

/// Removes the reserved names that an incomplete recovery of `plan` has left in `files`, for a log
/// that is given up. A name that cannot be removed stays.
pub fn remove_reserved<F: FileSystem>(pool: &LogPool, plan: &Plan, files: &F) {
    if let Some(system) = files.names() {
        Naming::of(plan.names(), system, pool).release_all();
    }
}

/// Returns the plan of all records in a pool, and the number of unreadable bytes of the log that
/// may have been records.
///
/// The header alone tells where a record ends. So all headers are found first, then several threads
/// check the payloads.
///
/// # Errors
/// [`LogError::Pmem`].
pub fn plan_pool(pool: &LogPool) -> Result<(Plan, u64), LogError> {
    let mut scanner = Scanner::of_finished(pool, pool.tail()?, pool.limit()?);
    let headers: Vec<_> = scanner.by_ref().collect();
    let chunks: Vec<_> = headers.chunks(CHUNK).collect();
    // Reading the number of CPUs takes longer than checking a short log.
    let checkers = match chunks.len() {
        0 | 1 => 1,
        _ => std::thread::available_parallelism().map_or(1, usize::from).min(CHECKERS_MOST),
    };
    let checked = parallel::map(checkers, &chunks, |chunk| {
        chunk.iter().map(|header| pool.is_whole(header).ok()).collect::<Vec<_>>()
    });
    let mut planner =
        Planner::with_losses(scanner.losses.finished(), scanner.losses.missing().collect())
            .with_heartbeat(pool.heartbeat()?);
    let mut payload = Vec::new();
    for (header, is_whole) in headers.iter().zip(checked.into_iter().flatten()) {
        planner.add(header, payload_of(pool, header, is_whole, &mut payload));
    }
    Ok((planner.finish(), scanner.unreadable_bytes()))
}

/// Reads the part of the payload that a plan needs. `is_whole` is `None` if the memory failed.
fn payload_of<'a>(
    pool: &LogPool,
    header: &Header,
    is_whole: Option<bool>,
    buf: &'a mut Vec<u8>,
) -> Payload<'a> {
    buf.clear();
    match is_whole {
        None => return Payload::Unreadable,
        Some(false) => return Payload::Torn,
        Some(true) => {}
    }
    let payload_bytes = header.payload_bytes as usize;
    let planned_bytes = match header.kind {
        RecordKind::Make => payload_bytes.min(PLANNED_BYTES_MAX),
        // A payload that is too long is invalid: it is passed on empty, and then ignored.
        RecordKind::Define
        | RecordKind::Name
        | RecordKind::Decided
        | RecordKind::Done
        | RecordKind::Begun
        | RecordKind::Restored
            if payload_bytes <= PLANNED_BYTES_MAX =>
        {
            payload_bytes
        }
        _ => 0,
    };
    if planned_bytes > 0 {
        buf.resize(planned_bytes, 0);
        if pool.read_payload(header, 0, buf).is_err() {
            return Payload::Unreadable;
        }
    }
    Payload::Whole(buf)
}
