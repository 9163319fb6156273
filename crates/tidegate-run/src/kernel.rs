//! System calls that no safe crate offers.

#![allow(unsafe_code)] // The edge to the kernel: each call stands alone here, behind a safe function.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// The first descriptor after standard input, output and error.
const FIRST_OTHER: libc::c_uint = 3;

/// Closes all descriptors but the standard ones, so that a daemon does not keep inherited files
/// locked and open. The caller has opened no descriptor yet.
///
/// # Errors
/// Fails if the kernel is older than 5.9.
pub(crate) fn close_inherited() -> io::Result<()> {
    // SAFETY: the call takes numbers only. By the caller's duty no owned descriptor exists yet.
    let outcome =
        unsafe { libc::syscall(libc::SYS_close_range, FIRST_OTHER, libc::c_uint::MAX, 0) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A wanted state of the lock of a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ByteLock {
    Taken,
    Free,
}

/// Takes or frees the lock of a byte of `file` for its open description, without waiting. Returns
/// `false` if another description has the lock.
///
/// # Errors
/// Fails with the kernel's error.
pub(crate) fn lock_byte(file: &File, byte: i64, wanted: ByteLock) -> io::Result<bool> {
    let kind = if wanted == ByteLock::Taken { libc::F_WRLCK } else { libc::F_UNLCK };
    let lock = libc::flock {
        l_type: kind.try_into().unwrap_or(0),
        l_whence: libc::SEEK_SET.try_into().unwrap_or(0),
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: an open descriptor, and a lock that outlives the call.
    let outcome = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        _ if outcome == 0 => Ok(true),
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}
