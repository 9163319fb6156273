//! What a process was killed in the middle of, on one file: done by the next one that locks the file.
//!
//! Invariant: when the lock is given on, the file has the whole of the dead writer's change, or nothing says that it was
//! made. Nobody has changed the file since, because the dead held the lock.
//!
//! Entry point: [`file()`].

use std::ffi::c_int;
use std::io::IoSlice;

use tidegate::log::{FileGuard, Header, Interrupted, Log, RecordKind};

use crate::raw::{self, Errno};

/// Bytes that are copied at once, on the stack of whoever finds the dead.
const STEP_BYTES: usize = 4096;
/// Writes where it is told, whatever `O_APPEND` says; older kernels refuse it.
const RWF_NOAPPEND: c_int = 0x20;

/// Does what the former holder of the lock was killed in. `fd` is a descriptor of the file.
#[cold]
pub(crate) fn file(log: &Log, fd: c_int, guard: &FileGuard<'_>) {
    for interrupted in log.interrupted_on(guard) {
        if finish(log, fd, guard, &interrupted) {
            log.settle(&interrupted);
        }
    }
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
        RecordKind::Zero => Err(libc::ENOTSUP),
        RecordKind::Define | RecordKind::Retire | RecordKind::Settle | RecordKind::Void => Ok(()),
    };
    if redone.is_err() {
        let voided = guard.begin().and_then(|mut ticket| ticket.void(header.position));
        // Part of it may have been done.
        guard.mark_unlogged(voided.is_err());
    }
    true
}

fn write_again(log: &Log, fd: c_int, header: &Header) -> Result<(), Errno> {
    let flags = write_flags(fd)?;
    let mut buffer = [0; STEP_BYTES];
    let (mut at, end) = (0, u64::from(header.payload_bytes));
    while at < end {
        let len = usize::try_from(end - at).unwrap_or(STEP_BYTES).min(STEP_BYTES);
        let part = &mut buffer[..len];
        log.pool().read_payload(header, at, part).map_err(|_| libc::EIO)?;
        let offset = i64::try_from(header.offset + at).map_err(|_| libc::EFBIG)?;
        let done = raw::pwrite(fd, &[IoSlice::new(part)], offset, flags)?;
        if done == 0 {
            return Err(libc::EIO);
        }
        at += done as u64;
    }
    Ok(())
}

fn resize_again(fd: c_int, header: &Header) -> Result<(), Errno> {
    let size = i64::try_from(header.offset).map_err(|_| libc::EFBIG)?;
    write_flags(fd)?;
    raw::ftruncate(fd, size).map(|_| ())
}

/// What makes a descriptor write where it is told to. The program's own serves, or none: to close a second one of the file would
/// take the program's record locks away.
fn write_flags(fd: c_int) -> Result<c_int, Errno> {
    let status = raw::status_flags(fd)?;
    let writes = status & libc::O_PATH == 0 && status & libc::O_ACCMODE != libc::O_RDONLY;
    if !writes {
        return Err(libc::EBADF);
    }
    Ok(if status & libc::O_APPEND == 0 { 0 } else { RWF_NOAPPEND })
}
