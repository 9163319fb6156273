//! Files that this process changes in ways that no hook sees: for how long, and what keeps count.
//!
//! Invariants:
//! 1. Each pin of this process in the log's table is noted either with a descriptor ([`PINNED`]) or
//!    in [`pins`]; or it is meant to outlive the process.
//! 2. A forked child has pins of its own for all that it inherits; before `exec`, and when the
//!    process ends, all are given back: by the supervisor, where the process has no time for it.
//!
//! Entry points: [`pin`] for a file, [`about_to_change`] for one change of it, [`all`] for
//! whatever is written; [`release`], [`take_again`].

use std::ffi::{CStr, c_int};

use tidegate::log::cover::Cause;
use tidegate::log::{FileGuard, FileRef, Log, PlainCall};

use crate::covered::{Open, leave_closed, leave_numbers, metadata, plain};
use crate::state::descriptors::{self, Kind, PINNED};
use crate::state::process::Holding;
use crate::state::{pins, proc_fd, process, real};
use crate::sys::{query, raw};

/// Pins the open file, which may change unseen until this process ends, or until [`unpin`] is
/// called with the result. None: the file was pinned before, or cannot be.
pub(crate) fn pin(open: &Open) -> Option<FileRef> {
    if open.known.entry().is_some_and(|entry| pins::has(entry.file)) {
        return None;
    }
    let file = open.pin_until_exit()?;
    pins::note(file);
    Some(file)
}

/// As [`pin`], for a file that this process has not open.
pub(crate) fn pin_closed(log: &Log, file: FileRef) {
    leave_closed(log, file, FileGuard::keep_unlogged);
    pins::note(file);
}

/// Takes one [`pin`] back: the file was not changed.
pub(crate) fn unpin(log: &Log, file: FileRef) {
    if pins::forget(file) {
        locked(log, file, FileGuard::stop_keeping);
    }
}

fn locked<'l>(log: &'l Log, file: FileRef, run: impl FnOnce(&FileGuard<'l>)) {
    if let (Some(_holding), Ok(guard)) = (Holding::new(), log.lock(file)) {
        run(&guard);
    }
}

/// The C library or the kernel is about to change the file under this path: it leaves the log
/// first. With `later` that is done at some time, and the file does not come back while the log is
/// in use. The file is not opened for that: closed again, it would take the program's record locks
/// along.
pub(crate) fn about_to_change(directory: c_int, path: &CStr, later: bool) {
    let Some(log) = process::log() else { return };
    if let Ok(stat) = query::fstatat(directory, path, 0) {
        leave_numbers(log, stat.st_dev, stat.st_ino, later);
    }
}

/// Runs a change of the file that `fd`, which only names it, refers to: as a plain one, of a file
/// that has left the log. Counted as a change of metadata.
pub(crate) fn while_plain(fd: c_int, change: impl FnOnce() -> isize) -> isize {
    let (Some(log), Ok(stat)) = (process::log(), query::fstat(fd)) else { return change() };
    while_out(log, &stat, change)
}

/// Runs a change of the file under this path by the C library: as a plain one, of a file that has
/// left the log. Counted as a change of metadata.
pub(crate) fn while_plain_at<R>(path: &CStr, change: impl FnOnce() -> R) -> R {
    let errno = raw::errno();
    let stat = process::log().zip(query::fstatat(libc::AT_FDCWD, path, 0).ok());
    raw::set_errno(errno);
    let Some((log, stat)) = stat else { return metadata::counted(change) };
    while_out(log, &stat, change)
}

/// Runs a change of a file while it is out of the log, as a plain one.
fn while_out<R>(log: &'static Log, stat: &libc::stat, change: impl FnOnce() -> R) -> R {
    let (device, inode) = (stat.st_dev, stat.st_ino);
    // In the lane first: a story that begins later waits for the change.
    let in_flight = plain::in_lane(log, PlainCall::Write { device, inode });
    leave_numbers(log, device, inode, false);
    let result = metadata::counted(change);
    drop(in_flight);
    result
}

/// Runs a fork after which another process shares the descriptors of this one, and changes them
/// unseen: from now on nothing is noted of any.
pub(crate) fn sharing_table<N>(fork: impl FnOnce() -> N) -> N {
    if process::log().is_some() {
        all(None);
        descriptors::give_up();
    }
    fork()
}

/// Whatever this process has open, or opens, may be changed unseen, for a reason that the user may
/// want to know.
pub(crate) fn all(cause: Option<Cause>) {
    if process::log().is_none() || process::writes_unseen() {
        return;
    }
    real::note_unseen(cause);
    process::set_writes_unseen();
    proc_fd::each(|fd| {
        if let Some(open) = Open::writable(fd) {
            open.pin();
        }
    });
}

/// Runs a call after which this thread has descriptors of its own, unless its result is negative.
pub(crate) fn leaving_table<N: PartialOrd + From<bool>>(call: impl FnOnce() -> N) -> N {
    if process::log().is_none() || process::is_apart() {
        return call();
    }
    all(None);
    let result = call();
    if result >= N::from(false) {
        process::set_own_descriptors();
    }
    result
}

/// Gives all pins back: this memory, and what writes from it, ends.
pub(crate) fn release() {
    let Some(log) = process::log() else { return };
    if process::is_apart() {
        return;
    }
    descriptors::each(0, u32::MAX, |fd, known| Open { log, fd, known }.unpin());
    pins::each(|file| locked(log, file, FileGuard::stop_keeping));
}

/// Takes all pins again: it did not end after all, or this is a forked child.
pub(crate) fn take_again() {
    let Some(log) = process::log() else { return };
    if process::in_vfork_child() {
        return;
    }
    descriptors::each(0, u32::MAX, |fd, known| {
        if known.kind == Kind::File && known.has(PINNED) {
            Open { log, fd, known: known.without(PINNED) }.pin();
        }
    });
    pins::each(|file| locked(log, file, FileGuard::keep_unlogged));
}
