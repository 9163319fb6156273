//! Pins of files that this process changes in ways that no hook sees.
//!
//! Invariants:
//! 1. Each pin of this process in the log's table is noted either with a descriptor ([`PINNED`]) or
//!    in [`pins`]. Where there is no space for a note, a second pin outlives the process.
//! 2. A forked child takes its own pins for all inherited files. Before `exec`, and when the
//!    process ends, all pins are released: by the supervisor if the process has no time.
//!
//! Entry points: [`pin`] for a file, [`about_to_change`] for one change, [`all`] for all files of
//! the process; [`release`], [`take_again`].

use std::ffi::{CStr, c_int};

use tidegate::log::cover::Cause;
use tidegate::log::{FileGuard, FileRef, Log, PlainCall};

use crate::covered::{Open, leave_closed, leave_numbers, metadata, plain};
use crate::state::descriptors::{self, Kind, PINNED};
use crate::state::process::Holding;
use crate::state::{pins, proc_fd, process, real};
use crate::sys::{query, raw};

/// Pins the open file, which may change unseen until this process ends, or until [`unpin`] is
/// called with the result. Returns `None` if the file was pinned before, or cannot be pinned.
pub(crate) fn pin(open: &Open) -> Option<FileRef> {
    if open.known.entry().is_some_and(|entry| pins::has(entry.file)) {
        return None;
    }
    let file = open.pin_until_exit()?;
    note(open.log, file);
    Some(file)
}

/// Pins a file that is not open here, until this process ends or [`unpin`] is called.
pub(crate) fn pin_closed(log: &Log, file: FileRef) {
    leave_closed(log, file, FileGuard::keep_unlogged);
    note(log, file);
}

/// Notes a file that this process has pinned. If there is no space for the note, the file stays
/// plain while the log is in use, since forked children could not pin it again.
fn note(log: &Log, file: FileRef) {
    if !pins::note(file) {
        locked(log, file, |guard| guard.mark_unlogged(true));
    }
}

/// Releases one [`pin`] of a file that was not changed after all.
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

/// Makes the file at this path leave the log before the C library or the kernel changes it. With
/// `later` the change comes at an unknown time, and the file stays plain while the log is in use.
/// Does not open the file: the close would release the program's record locks.
pub(crate) fn about_to_change(directory: c_int, path: &CStr, later: bool) {
    let Some(log) = process::log() else { return };
    if let Ok(stat) = query::fstatat(directory, path, 0) {
        leave_numbers(log, stat.st_dev, stat.st_ino, later);
    }
}

/// Runs a change of the file of `fd`, which may have no access to it (`O_PATH`), after the file has
/// left the log. Counts the change as one of metadata.
pub(crate) fn while_plain(fd: c_int, change: impl FnOnce() -> isize) -> isize {
    let (Some(log), Ok(stat)) = (process::log(), query::fstat(fd)) else { return change() };
    while_out(log, &stat, change)
}

/// Runs a change by the C library of the file at this path, as [`while_plain`] does.
pub(crate) fn while_plain_at<R>(path: &CStr, change: impl FnOnce() -> R) -> R {
    let look_up = || process::log().zip(query::fstatat(libc::AT_FDCWD, path, 0).ok());
    let stat = raw::keeping_errno(look_up);
    let Some((log, stat)) = stat else { return metadata::counted(change) };
    while_out(log, &stat, change)
}

/// Runs a change of a file after the file has left the log, as one of a plain file.
fn while_out<R>(log: &'static Log, stat: &libc::stat, change: impl FnOnce() -> R) -> R {
    let (device, inode) = (stat.st_dev, stat.st_ino);
    // Announced in the lane first: a story that begins later waits for the change.
    let in_flight = plain::in_lane(log, PlainCall::Write { device, inode });
    leave_numbers(log, device, inode, false);
    let result = metadata::counted(change);
    drop(in_flight);
    result
}

/// Runs a fork after which another process shares this process's descriptors, and changes them
/// unseen: no descriptor is noted any more.
pub(crate) fn sharing_table<N>(fork: impl FnOnce() -> N) -> N {
    if process::log().is_some() {
        all(None);
        descriptors::give_up();
    }
    fork()
}

/// Pins every file that this process has open for writing or opens later, since any may change
/// unseen. `cause` is the reason to report to the user, if any.
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

/// Releases all pins, when this process image ends.
pub(crate) fn release() {
    let Some(log) = process::log() else { return };
    if process::is_apart() {
        return;
    }
    descriptors::each(0, u32::MAX, |fd, known| Open { log, fd, known }.unpin());
    pins::each(|file| locked(log, file, FileGuard::stop_keeping));
}

/// Takes all pins again, in a forked child or if the process image did not end after all.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::World;

    /// A forked child takes the pins that are noted, and none else.
    #[test]
    fn a_pin_without_a_note_outlives_the_process() {
        let world = World::new();
        for is_full in [false, true] {
            let file = world.file(if is_full { "unnoted" } else { "noted" });
            let open = world.open(&file, 0);
            while is_full && pins::note(FileRef::from_word(u64::MAX)) {}
            let pinned = pin(&open).unwrap();
            locked(world.log, pinned, FileGuard::stop_keeping);
            assert_eq!(world.log.is_pinned(pinned), is_full);
        }
    }
}
