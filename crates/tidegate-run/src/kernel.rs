//! System calls that no safe crate offers.

#![allow(unsafe_code)] // The edge to the kernel: each call stands alone here, behind a safe function.

use std::io;

/// The first descriptor after standard input, output and error.
const FIRST_OTHER: libc::c_uint = 3;

/// Closes all descriptors but the standard ones: what a daemon inherits would stay locked and open
/// with it. To be called before anything has opened one.
///
/// # Errors
/// The kernel is older than 5.9.
pub(crate) fn close_inherited() -> io::Result<()> {
    // SAFETY: no owned descriptor exists yet, which is the caller's duty; numbers are all it takes.
    let outcome =
        unsafe { libc::syscall(libc::SYS_close_range, FIRST_OTHER, libc::c_uint::MAX, 0) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
