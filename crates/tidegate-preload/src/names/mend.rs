//! What a process left that was killed in the middle of an operation on names.
//!
//! Its record is in the log; whether the kernel has done the operation, the file system tells. If not, the record is voided:
//! nobody was told that it succeeded.

use std::ffi::CStr;

use tidegate::log::{AppendError, Header, Interrupted, Log, RecordKind, has_happened};

use super::target::Name;
use crate::path::{PATH_BYTES, PathBuffer};

/// Mends all half done operations on names. The caller holds the lock of names, whose former holder was killed.
#[cold]
pub(super) fn half_done(log: &Log) {
    log.mark_names_unlogged();
    for interrupted in log.in_the_middle() {
        if !is_of_names(&interrupted) {
            continue;
        }
        let Some(file) = log.file_of(&interrupted) else {
            let void = |position| log.begin_on_names()?.void(position);
            one(log, interrupted.header.map_or(0, |header| header.aux), &interrupted, void);
            continue;
        };
        let Ok(guard) = log.lock(file) else { continue };
        let identity = log.key_of(guard.file()).identity;
        // Again, under the lock: the supervisor minds the dead too.
        for interrupted in log.interrupted_on(&guard).filter(is_of_names) {
            one(log, identity, &interrupted, |position| guard.begin()?.void(position));
        }
    }
}

fn is_of_names(interrupted: &Interrupted) -> bool {
    let kind = interrupted.header.map(|header| header.kind);
    matches!(kind, Some(RecordKind::Link | RecordKind::Rename | RecordKind::Unlink))
}

fn one(
    log: &Log,
    identity: u64,
    interrupted: &Interrupted,
    void: impl Fn(u64) -> Result<u64, AppendError>,
) {
    let Some(header) = interrupted.header else { return };
    let done = is_done(log, identity, &header).unwrap_or(true);
    if done || void(header.position).is_ok() {
        log.settle(interrupted);
    }
}

/// Whether the kernel has done the operation; none where that cannot be seen.
fn is_done(log: &Log, identity: u64, header: &Header) -> Option<bool> {
    let mut payload = [0; 2 * PATH_BYTES + 64];
    let payload = payload.get_mut(..usize::try_from(header.payload_bytes).ok()?)?;
    log.pool().read_payload(header, 0, payload).ok()?;
    has_happened(header.kind, payload, |path| Some(identity_at(path)? == identity))
}

/// The identity of what stands under an absolute path, 0 where nothing does; none where that cannot be seen.
fn identity_at(path: &[u8]) -> Option<u64> {
    let mut buffer = PathBuffer::new();
    buffer.push(path).ok()?;
    let path: &CStr = buffer.as_c_str();
    match (Name { directory: libc::AT_FDCWD, path }).look(libc::O_NOFOLLOW) {
        Ok(target) => target.key().ok().map(|key| key.identity),
        Err(libc::ENOENT | libc::ENOTDIR) => Some(0),
        Err(_) => None,
    }
}
