//! Completes what a process was killed in the middle of on one file: done by the lock's next owner.
//!
//! Invariant: when the lock is given on, the file has the whole of a killed writer's change, or the
//! record is voided. Nobody has changed the file since: that process held the lock, and each
//! next owner asks [`FileGuard::owner_died`] first.
//!
//! Entry point: [`file()`].

use std::ffi::c_int;
use std::io;

use tidegate::durable;
use tidegate::log::{Change, FileGuard, Header, Interrupted, Log, RecordKind, copy_to_file};

use crate::raw;

/// Bytes that are copied at once, on the stack of the lock's next owner.
const STEP_BYTES: usize = 4096;

/// Completes or voids what the former holder of the lock was killed in. `fd` is a descriptor of the
/// file.
#[cold]
pub(super) fn file(log: &Log, fd: c_int, guard: &FileGuard<'_>) {
    for interrupted in log.interrupted_on(guard) {
        complete(log, fd, guard, &interrupted);
        log.complete(&interrupted);
    }
    guard.repaired();
}

fn complete(log: &Log, fd: c_int, guard: &FileGuard<'_>, interrupted: &Interrupted) {
    let Some(header) = interrupted.header.filter(|_| guard.is_logged()) else { return };
    let completed = match header.kind {
        RecordKind::Write => write_again(log, fd, &header),
        RecordKind::SetSize => resize_again(fd, &header),
        // These are done with their record.
        RecordKind::Define
        | RecordKind::Mark
        | RecordKind::End
        | RecordKind::Void
        | RecordKind::Make => return,
        RecordKind::Name => return leave(fd, guard),
        RecordKind::Zero | RecordKind::Decided | RecordKind::Done | RecordKind::Gap => {
            Err(io::ErrorKind::Unsupported.into())
        }
    };
    if completed.is_err() {
        // Part of it may have been done: the next sync is real.
        let _ = guard.begin().and_then(|mut ticket| ticket.void(header.position));
        guard.mark_unlogged(false);
        return;
    }
    let size = raw::size(fd).unwrap_or(0);
    if header.kind == RecordKind::SetSize {
        guard.note_size(size, header.grows);
    }
    let (bytes, grew) = (u64::from(header.payload_bytes), true);
    guard.note_change(Change { bytes, grew, journaled: None, size });
}

/// Whether the kernel has changed the file's names is not known: once they are durable as they are,
/// no record of them counts.
fn leave(fd: c_int, guard: &FileGuard<'_>) {
    guard.mark_unlogged(false);
    match durable::fsync(raw::borrowed(fd)) {
        // Without space for its end the story goes on, and the next sync is real.
        Ok(()) => drop(guard.end_story()),
        Err(_) => guard.note_failure(),
    }
}

fn write_again(log: &Log, fd: c_int, header: &Header) -> io::Result<()> {
    let mut buffer = [0; STEP_BYTES];
    let (position, len) = (header.data_position(), u64::from(header.payload_bytes));
    // The program's own descriptor serves, or none: to close a second one of the file would take
    // the program's record locks away.
    let file = raw::borrowed(fd);
    copy_to_file(log.pool(), position, len, file, header.offset, &mut buffer)
}

fn resize_again(fd: c_int, header: &Header) -> io::Result<()> {
    let size = i64::try_from(header.offset).map_err(|_| io::ErrorKind::FileTooLarge)?;
    raw::ftruncate(fd, size).map(drop).map_err(io::Error::from_raw_os_error)
}
