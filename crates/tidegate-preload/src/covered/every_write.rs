//! Each write is synced when it returns, if the user wants that (`--every-write`): here are the
//! writes of files that the log does not have, which are synced for real.
//!
//! Invariant: excluded files are as without the library, and so is what is no regular file on a
//! disk. A program that has its system calls filtered syncs for itself: no other call may be made.
//!
//! Entry points: [`synced`], [`returned`] behind a write; [`make_synchronous`] for a stream.
#![allow(unsafe_code)] // system calls

use std::ffi::c_int;

use crate::covered::{self, Open};
use crate::state::descriptors::{self, Kind};
use crate::state::{files, process, record_locks};
use crate::sys::path::{LINK_BYTES, Opened, proc_link};
use crate::sys::query;
use crate::sys::raw::{self, words};

/// The kernel's result of a write to what is not in the log, which is synced first.
pub(crate) fn synced(fd: c_int, result: isize) -> isize {
    if result <= 0 || !process::every_write() || !is_wanted(fd) {
        return result;
    }
    let errno = raw::errno();
    let synced = match Open::of(fd) {
        Some(open) => open.sync(covered::Sync::Data),
        None => covered::sync_by_kernel(fd, covered::Sync::Data),
    };
    raw::set_errno(errno);
    if synced < 0 { synced } else { result }
}

/// As [`synced`], of what the C library returned.
pub(crate) fn returned(fd: c_int, result: isize) -> isize {
    if result <= 0 { result } else { raw::returned(synced(fd, result)) }
}

/// The file of a descriptor is a regular one on a disk, and not excluded.
fn is_wanted(fd: c_int) -> bool {
    match covered::known(fd).kind {
        Kind::File | Kind::Elsewhere => files::is_wanted(fd),
        // The log is not in use: nothing is known.
        Kind::Ignored if process::log().is_none() => {
            query::fstat(fd).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFREG)
                && files::is_wanted(fd)
        }
        _ => false,
    }
}

/// Has the kernel sync each write by a descriptor of a stream, which only the C library writes to:
/// by another description of the file in its place. To be called while nothing else has this one.
pub(crate) fn make_synchronous(fd: c_int) {
    if !process::every_write() || !is_wanted(fd) {
        return;
    }
    let known = covered::known(fd);
    if record_locks::may_have(known.device, known.inode) {
        // A close would take the lock away.
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
    // What it lacks, `fflush` does.
    let at = query::position(fd).unwrap_or(0);
    let _ = raw::lseek(opened.number(), at.cast_signed(), libc::SEEK_SET);
    let is_closed_by_exec = flags & libc::FD_CLOEXEC as usize != 0;
    let flags = if is_closed_by_exec { libc::O_CLOEXEC } else { 0 };
    descriptors::clear(fd);
    // SAFETY: no pointers.
    unsafe { raw::call(libc::SYS_dup3, words![opened.number(), fd, flags]) };
}
