//! Hooks: sizes and space of files, `truncate`, `fallocate` and their kin.
//!
//! Invariants: a truncation goes through the file's lane or entry. The file leaves the log before
//! space is allocated or given back, which no record describes.
#![allow(unsafe_code)] // C's functions
#![allow(clippy::missing_safety_doc)] // the manual page of each function says it

use std::ffi::{CStr, c_char, c_int};

use libc::off_t;

use crate::covered::{self, Open, metadata, unseen};
use crate::state::process;
use crate::sys::path::{LINK_BYTES, Opened, proc_link};
use crate::sys::raw::{self, words};
use crate::sys::{next, readable};

fn truncate_path(path: *const c_char, size: off_t) -> c_int {
    let result = match readable::text(path).filter(|_| process::log().is_some()) {
        Some(path) => truncate_name(path, size),
        None => truncate_by_kernel(path, size),
    };
    c_int::try_from(raw::returned(result)).unwrap_or(-1)
}

fn truncate_by_kernel(path: *const c_char, size: off_t) -> isize {
    // SAFETY: the caller's arguments go to the kernel as they are.
    unsafe { raw::call(libc::SYS_truncate, words![path, size]) }
}

/// Truncates the file at a path through a descriptor that names it. So the file that leaves the log
/// is the one that is truncated, whatever happens to its name.
fn truncate_name(path: &CStr, size: off_t) -> isize {
    let Ok(opened) = Opened::path(libc::AT_FDCWD, path, 0) else {
        // The path is wrong, and the kernel returns the error; or no descriptor is free.
        unseen::about_to_change(libc::AT_FDCWD, path, false);
        return metadata::counted(|| truncate_by_kernel(path.as_ptr(), size));
    };
    let mut link = [0; LINK_BYTES];
    let place = proc_link(opened.number(), &mut link).as_ptr();
    unseen::while_plain(opened.number(), || truncate_by_kernel(place, size))
}

fn truncate_descriptor(fd: c_int, size: off_t) -> c_int {
    let kernel = || raw::ftruncate(fd, size).map_or_else(|errno| -(errno as isize), |_| 0);
    let result = match Open::writable(fd).zip(u64::try_from(size).ok()) {
        Some((open, size)) => covered::truncate(&open, size, kernel),
        None => metadata::counted(kernel),
    };
    c_int::try_from(raw::returned(result)).unwrap_or(-1)
}

/// Changes the space of the file of `fd`, by `kernel`.
fn change_space(fd: c_int, kernel: impl FnOnce() -> isize) -> isize {
    match Open::writable(fd) {
        Some(open) => open.unseen(kernel),
        None => metadata::counted(kernel),
    }
}

fn allocate(fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int {
    let arguments = words![fd, mode, offset, len];
    // SAFETY: the call takes no pointers.
    let result = change_space(fd, || unsafe { raw::call(libc::SYS_fallocate, arguments) });
    c_int::try_from(raw::returned(result)).unwrap_or(-1)
}

/// Allocates space by the C library, which writes to the file if the file system cannot allocate.
/// Returns 0 or the error's number.
fn allocate_anyhow(fd: c_int, offset: off_t, len: off_t) -> c_int {
    let result = change_space(fd, || match next::posix_fallocate.get() {
        // SAFETY: the C library's function of this type, which takes no pointers.
        Some(allocate) => -(unsafe { allocate(fd, offset, len) } as isize),
        None => -(libc::ENOSYS as isize),
    });
    c_int::try_from(-result).unwrap_or(libc::EIO)
}

macro_rules! hooks {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> c_int $body
    )*};
}

hooks! {
    truncate(path: *const c_char, size: off_t) {
        truncate_path(path, size)
    }
    truncate64(path: *const c_char, size: off_t) {
        truncate_path(path, size)
    }
    ftruncate(fd: c_int, size: off_t) {
        truncate_descriptor(fd, size)
    }
    ftruncate64(fd: c_int, size: off_t) {
        truncate_descriptor(fd, size)
    }
    fallocate(fd: c_int, mode: c_int, offset: off_t, len: off_t) {
        allocate(fd, mode, offset, len)
    }
    fallocate64(fd: c_int, mode: c_int, offset: off_t, len: off_t) {
        allocate(fd, mode, offset, len)
    }
    posix_fallocate(fd: c_int, offset: off_t, len: off_t) {
        allocate_anyhow(fd, offset, len)
    }
    posix_fallocate64(fd: c_int, offset: off_t, len: off_t) {
        allocate_anyhow(fd, offset, len)
    }
}
