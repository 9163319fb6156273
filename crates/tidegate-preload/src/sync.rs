//! Hooks: `fsync` and its kin.
//!
//! Invariants: a sync is skipped only where all that it would make durable is in the log or on the disk. A sync of everything is
//! always made, and then retires what the log has, since what was changed past the log may lie over it.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_uint};
use std::time::Duration;

use libc::off_t;
use tidegate::log::Log;

use crate::logged::{Open, Sync};
use crate::names::Folder;
use crate::raw::{self, words};
use crate::{cancel, files, next, process};

/// How long a sync of everything waits for the cleaner.
const PATIENCE: Duration = Duration::from_secs(60);

/// Makes the file or directory of `fd` durable; `function` is the C library's for that.
#[inline]
fn synced(
    fd: c_int,
    wanted: Sync,
    function: &next::Next<unsafe extern "C-unwind" fn(c_int) -> c_int>,
) -> c_int {
    let log = process::log();
    let (known, seen) = files::look(fd);
    if let Some((log, file)) = log.zip(known.file()) {
        cancel::point();
        return raw::returned_int(Open { log, fd, known, file }.sync(wanted));
    }
    let folder = log.and_then(|log| Folder::of(log, fd, known.kind, seen));
    if folder.as_ref().is_some_and(Folder::is_covered) {
        return 0;
    }
    let result = match function.resolved() {
        // SAFETY: the C library's function; no pointers.
        Some(function) => unsafe { function(fd) },
        None => raw::returned_int(wanted.run(fd)),
    };
    if let Some(folder) = folder.filter(|_| result == 0) {
        folder.synced();
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fsync(fd: c_int) -> c_int {
    synced(fd, Sync::All, &next::fsync)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fdatasync(fd: c_int) -> c_int {
    synced(fd, Sync::Data, &next::fdatasync)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sync_file_range(
    fd: c_int,
    offset: off_t,
    len: off_t,
    flags: c_uint,
) -> c_int {
    // It promises nothing about a crash; for what the log has, there is nothing to start early.
    if Open::of(fd).is_some_and(|open| open.log.is_covered(open.file)) {
        return 0;
    }
    match next::sync_file_range.get() {
        // SAFETY: the same function.
        Some(sync_file_range) => unsafe { sync_file_range(fd, offset, len, flags) },
        None => raw::returned_int(-38),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn syncfs(fd: c_int) -> c_int {
    // SAFETY: no pointers.
    let result = raw::returned_int(unsafe { raw::call(libc::SYS_syncfs, words![fd]) });
    if let Some(log) = process::log() {
        log.checkpoint(PATIENCE);
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sync() {
    let log = process::log();
    let seen = log.map(Log::names_unlogged);
    // SAFETY: no arguments.
    unsafe { raw::call(libc::SYS_sync, words![]) };
    if let Some((log, names)) = log.zip(seen) {
        log.names_synced(names);
        log.checkpoint(PATIENCE);
    }
}
