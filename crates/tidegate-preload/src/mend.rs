//! What a process was killed in the middle of, on one file: done by the next one that locks the file.
//!
//! Invariant: when the lock is given on, the file has the whole of the dead writer's change, or nothing says that it was
//! made. Nobody has changed the file since: the dead held the lock, and who changes a file asks [`FileGuard::owner_died`] first.
//!
//! Entry point: [`file()`].
#![allow(unsafe_code)] // a descriptor of the program

use std::ffi::c_int;
use std::io;
use std::os::fd::BorrowedFd;

use tidegate::log::{FileGuard, Header, Interrupted, Log, RecordKind, copy_to_file};

use crate::raw;

/// Bytes that are copied at once, on the stack of whoever finds the dead.
const STEP_BYTES: usize = 4096;

/// Does what the former holder of the lock was killed in. `fd` is a descriptor of the file.
#[cold]
pub(crate) fn file(log: &Log, fd: c_int, guard: &FileGuard<'_>) {
    for interrupted in log.interrupted_on(guard) {
        if finish(log, fd, guard, &interrupted) {
            log.settle(&interrupted);
        }
    }
    guard.mended();
}

/// Whether nothing is left to do.
fn finish(log: &Log, fd: c_int, guard: &FileGuard<'_>, interrupted: &Interrupted) -> bool {
    let Some(header) = interrupted.header else { return true };
    let redone = match header.kind {
        // What was absorbed is for the supervisor to bring.
        RecordKind::Write if header.absorbed => Ok(()),
        RecordKind::Write => write_again(log, fd, &header),
        RecordKind::SetSize => resize_again(fd, &header),
        // What the names' lock tells of is mended by its next holder; the rest needs no doing.
        RecordKind::Rename | RecordKind::Unlink | RecordKind::Link => return false,
        RecordKind::Zero => Err(io::ErrorKind::Unsupported.into()),
        RecordKind::Define | RecordKind::Retire | RecordKind::Settle | RecordKind::Void => Ok(()),
    };
    if redone.is_err() {
        let voided = guard.begin().and_then(|mut ticket| ticket.void(header.position));
        // Part of it may have been done.
        guard.mark_unlogged(voided.is_err());
    }
    true
}

fn write_again(log: &Log, fd: c_int, header: &Header) -> io::Result<()> {
    let mut buffer = [0; STEP_BYTES];
    let (position, len) = (header.data_position(), u64::from(header.payload_bytes));
    // The program's own descriptor serves, or none: to close a second one of the file would take the program's record locks
    // away.
    // SAFETY: open for the time of this call.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    copy_to_file(log.pool(), position, len, file, header.offset, &mut buffer)
}

fn resize_again(fd: c_int, header: &Header) -> io::Result<()> {
    let size = i64::try_from(header.offset).map_err(|_| io::ErrorKind::FileTooLarge)?;
    raw::ftruncate(fd, size).map(drop).map_err(io::Error::from_raw_os_error)
}
