//! The kind of a descriptor, found out at its first use, or by the hook that has just opened it.
//!
//! Invariant: an unknown descriptor is examined before its next write, and at once if its file is
//! to be pinned ([`is_to_be_pinned`]).

use std::ffi::c_int;

use super::Open;
use crate::state::descriptors::{self, Kind, Known, READ_ONLY};
use crate::state::files::{self, Seen};
use crate::state::process;
use crate::sys::query;
use crate::sys::raw::Errno;

/// Returns the facts about `fd`: those noted, or else those that the kernel gives now.
#[inline]
pub(crate) fn known(fd: c_int) -> Known {
    let known = descriptors::get(fd);
    if known.kind == Kind::Unknown { find_out(fd) } else { known }
}

/// Asks the kernel for the facts about `fd`, and notes and returns them.
#[cold]
pub(crate) fn find_out(fd: c_int) -> Known {
    if process::log().is_none() {
        return Known::IGNORED;
    }
    // A descriptor that cannot be examined is not noted: the next call will fail, too.
    Seen::of(fd).map_or(Known::IGNORED, |seen| note(fd, &seen, || query::status_flags(fd)))
}

/// Notes and returns the facts about `fd`, whose file was `seen`; `status` returns its status
/// flags. Pins the file if it [is to be pinned](is_to_be_pinned).
pub(crate) fn note(fd: c_int, seen: &Seen, status: impl FnOnce() -> Result<c_int, Errno>) -> Known {
    let Some(log) = process::log() else { return Known::IGNORED };
    let Ok(known) = files::examine(fd, seen, status) else { return Known::IGNORED };
    descriptors::set(fd, known);
    if known.kind == Kind::File && is_to_be_pinned(fd, known) {
        return Open { log, fd, known }.pin();
    }
    known
}

/// Returns whether the file of a new descriptor is to be pinned at once, since the process may
/// write by the descriptor in ways that no hook sees.
pub(crate) fn is_to_be_pinned(fd: c_int, known: Known) -> bool {
    !known.has(READ_ONLY) && (process::writes_unseen() || descriptors::is_standard(fd))
}

/// Examines the descriptors of standard output and standard error.
pub(crate) fn note_standard() {
    known(libc::STDOUT_FILENO);
    known(libc::STDERR_FILENO);
}
