//! Hooks: `fsync` and its kin.
//!
//! Invariants: a sync is skipped only where all that it would make durable is in the log or on the disk. A sync of everything is
//! always made, and then retires what the log has, since what was changed past the log may lie over it.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_uint};
use std::time::Duration;

use libc::off_t;
use tidegate::log::Log;

use crate::descriptors::Kind;
use crate::logged::{Open, Sync};
use crate::raw::{self, words};
use crate::{cancel, files, next, process};

/// How long a sync of everything waits for the cleaner.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether the names in a directory are all in the log or on the disk.
fn is_covered_directory(fd: c_int) -> bool {
    process::log().is_some_and(Log::names_covered) && files::of(fd).kind == Kind::Directory
}

#[inline]
fn sync_file(open: &Open, wanted: Sync) -> c_int {
    cancel::point();
    raw::returned_int(open.sync(wanted))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fsync(fd: c_int) -> c_int {
    if let Some(open) = Open::of(fd) {
        return sync_file(&open, Sync::All);
    }
    if is_covered_directory(fd) {
        return 0;
    }
    match next::fsync.resolved() {
        // SAFETY: the same function.
        Some(fsync) => unsafe { fsync(fd) },
        None => raw::returned_int(Sync::All.run(fd)),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fdatasync(fd: c_int) -> c_int {
    if let Some(open) = Open::of(fd) {
        return sync_file(&open, Sync::Data);
    }
    if is_covered_directory(fd) {
        return 0;
    }
    match next::fdatasync.resolved() {
        // SAFETY: the same function.
        Some(fdatasync) => unsafe { fdatasync(fd) },
        None => raw::returned_int(Sync::Data.run(fd)),
    }
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
    let seen = log.map(|log| (log.names_unlogged(), log.folders_unlogged()));
    // SAFETY: no arguments.
    unsafe { raw::call(libc::SYS_sync, words![]) };
    if let Some((log, (names, folders))) = log.zip(seen) {
        log.names_synced(names);
        log.folders_synced(folders);
        log.checkpoint(PATIENCE);
    }
}
