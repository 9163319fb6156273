//! Hooks: writes that have flags.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::c_int;

use libc::{RWF_DSYNC, RWF_SYNC, iovec, off_t, ssize_t};

use crate::{next, place};

/// Returns the flags of a write to `fd`. They lack `RWF_SYNC` and `RWF_DSYNC` if the library
/// answers the file's syncs.
pub(crate) fn without_sync(fd: c_int, flags: c_int) -> c_int {
    let synced = RWF_DSYNC | RWF_SYNC;
    if flags & synced != 0 && place::is_answered(fd) { flags & !synced } else { flags }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pwritev64v2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    let flags = without_sync(fd, flags);
    next::call(&next::pwritev64v2, |write| {
        // SAFETY: the program's own arguments.
        unsafe { write(fd, parts, count, offset, flags) }
    })
}

tidegate_interpose::synonyms! {
    pwritev2(fd: c_int, parts: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t
        = pwritev64v2(fd, parts, count, offset, flags);
}
