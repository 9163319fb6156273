//! `--every-write`: each write is synced before it returns. This module makes the real syncs after
//! writes to files that are not in the log.
//!
//! Invariant: only writes to regular files on a disk are synced, except excluded files. A program
//! that filters its system calls syncs for itself, since the library makes no call of its own then.
//!
//! Entry points: [`synced`], [`returned`] after a write; [`make_synchronous`] for a stream.
#![allow(unsafe_code)] // system calls

use std::ffi::c_int;

use crate::covered::{self, Open};
use crate::state::descriptors::{self, Kind};
use crate::state::{files, process, record_locks};
use crate::sys::path::{LINK_BYTES, Opened, proc_link};
use crate::sys::query;
use crate::sys::raw::{self, words};

/// Syncs a file that is not in the log after a write with the kernel's `result`, if the user wants
/// that. Returns `result`, or the error of the sync.
pub(crate) fn synced(fd: c_int, result: isize) -> isize {
    if result <= 0 || !process::every_write() || !is_wanted(fd) {
        return result;
    }
    let synced = raw::keeping_errno(|| match Open::of(fd) {
        Some(open) => open.sync(covered::Sync::Data),
        None => covered::sync_by_kernel(fd, covered::Sync::Data),
    });
    if synced < 0 { synced } else { result }
}

/// Syncs a file after a write by the C library, as [`synced`] does. Returns the C library's
/// `result`, or -1 with the sync's error in `errno`.
pub(crate) fn returned(fd: c_int, result: isize) -> isize {
    if result <= 0 { result } else { raw::returned(synced(fd, result)) }
}

/// Returns whether `fd` is a regular file on a disk that the user has not excluded.
fn is_wanted(fd: c_int) -> bool {
    match covered::known(fd).kind {
        Kind::File | Kind::Elsewhere => files::is_wanted(fd),
        // Without a log no descriptor is noted.
        Kind::Ignored if process::log().is_none() => {
            query::fstat(fd).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFREG)
                && files::is_wanted(fd)
        }
        _ => false,
    }
}

/// Makes the kernel sync each write of a stream: replaces its descriptor `fd` by one with
/// `O_DSYNC`. To be called while no other descriptor shares the open file description.
pub(crate) fn make_synchronous(fd: c_int) {
    if !process::every_write() || !is_wanted(fd) {
        return;
    }
    let known = covered::known(fd);
    if record_locks::may_have(known.device, known.inode) {
        // Closing the old descriptor would release the record lock.
        return;
    }
    let (Ok(status), Ok(flags)) = (query::status_flags(fd), raw::fcntl(fd, libc::F_GETFD, 0))
    else {
        return;
    };
    let mut link = [0; LINK_BYTES];
    let status = status & (libc::O_ACCMODE | libc::O_APPEND) | libc::O_DSYNC;
    let opened = Opened::open(libc::AT_FDCWD, proc_link(fd, &mut link), status);
    let Ok(opened) = opened else { return };
    // If the new descriptor cannot be had, `fflush` makes the syncs.
    let at = query::position(fd).unwrap_or(0);
    let _ = raw::lseek(opened.number(), at.cast_signed(), libc::SEEK_SET);
    let is_closed_by_exec = flags & libc::FD_CLOEXEC as usize != 0;
    let flags = if is_closed_by_exec { libc::O_CLOEXEC } else { 0 };
    descriptors::clear(fd);
    // SAFETY: no pointers.
    unsafe { raw::call(libc::SYS_dup3, words![opened.number(), fd, flags]) };
}
