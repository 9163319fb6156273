//! What a descriptor is, found out when it is first used, or by the hook that has just opened it.
//!
//! Invariant: a descriptor that nothing is known of is looked at before its next write, and at once
//! where its file is to be pinned ([`is_to_be_pinned`]).

use std::ffi::c_int;

use super::Open;
use crate::state::descriptors::{self, Kind, Known, READ_ONLY};
use crate::state::files::{self, Seen};
use crate::state::process;
use crate::sys::query;
use crate::sys::raw::Errno;

/// What `fd` is: as noted, or found out now.
#[inline]
pub(crate) fn known(fd: c_int) -> Known {
    let known = descriptors::get(fd);
    if known.kind == Kind::Unknown { find_out(fd) } else { known }
}

/// Asks the kernel what `fd` is, and notes it.
#[cold]
pub(crate) fn find_out(fd: c_int) -> Known {
    if process::log().is_none() {
        return Known::IGNORED;
    }
    // A descriptor that cannot be examined is not noted: the next call will fail as this one.
    Seen::of(fd).map_or(Known::IGNORED, |seen| note(fd, &seen, || query::status_flags(fd)))
}

/// Notes what `fd` is; `status` are its status flags.
pub(crate) fn note(fd: c_int, seen: &Seen, status: impl FnOnce() -> Result<c_int, Errno>) -> Known {
    let Some(log) = process::log() else { return Known::IGNORED };
    let Ok(known) = files::examine(fd, seen, status) else { return Known::IGNORED };
    descriptors::set(fd, known);
    if known.kind == Kind::File && is_to_be_pinned(fd, known) {
        return Open { log, fd, known }.pin();
    }
    known
}

/// Whether a descriptor that is given out now is to be looked at at once, and its file pinned.
pub(crate) fn is_to_be_pinned(fd: c_int, known: Known) -> bool {
    !known.has(READ_ONLY) && (process::writes_unseen() || descriptors::is_standard(fd))
}

/// Looks at what the standard streams write to.
pub(crate) fn note_standard() {
    known(libc::STDOUT_FILENO);
    known(libc::STDERR_FILENO);
}
