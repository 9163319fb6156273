//! System calls that no safe crate offers.

#![allow(unsafe_code)] // The edge to the kernel: each call stands alone here, behind a safe function.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// The first descriptor after standard input, output and error.
const FIRST_OTHER: libc::c_uint = 3;

/// Closes all descriptors but the standard ones: what a daemon inherits would stay locked and open with it. To be called
/// before anything has opened one.
///
/// # Errors
/// The kernel is older than 5.9.
pub(crate) fn close_inherited() -> io::Result<()> {
    // SAFETY: no owned descriptor exists yet, which is the caller's duty; numbers are all it takes.
    let outcome =
        unsafe { libc::syscall(libc::SYS_close_range, FIRST_OTHER, libc::c_uint::MAX, 0) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes a write lease on `file` for this process, which hears of it by `SIGIO` when somebody wants the file.
///
/// # Errors
/// Somebody else has the file open, it is another user's, or its file system has no leases.
pub(crate) fn take_lease(file: &File) -> io::Result<()> {
    let owner = rustix::process::getpid().as_raw_nonzero().get();
    fcntl(file, libc::F_SETOWN, owner)?;
    fcntl(file, libc::F_SETLEASE, libc::F_WRLCK).map(drop)
}

/// The lease on `file` is held, and nobody wants the file.
pub(crate) fn holds_lease(file: &File) -> bool {
    fcntl(file, libc::F_GETLEASE, 0).is_ok_and(|lease| lease == libc::F_WRLCK)
}

/// Gives the lease on `file` back.
///
/// # Errors
/// There is none.
pub(crate) fn give_lease_back(file: &File) -> io::Result<()> {
    fcntl(file, libc::F_SETLEASE, libc::F_UNLCK).map(drop)
}

fn fcntl(file: &File, command: libc::c_int, argument: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: a system call on an open descriptor, with a number for an argument.
    let outcome = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(outcome) }
}
