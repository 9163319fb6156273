//! Hooks that open files. They remove `O_SYNC` and `O_DSYNC` from files whose syncs are answered.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_char, c_int, c_uint};

use libc::AT_FDCWD;

use crate::{flags, next, place};

/// Opens the file at `path` by `open`, which gets the flags that remain.
///
/// # Safety
/// As for `openat`.
unsafe fn opened(
    (directory, path): (c_int, *const c_char),
    wanted: c_int,
    open: impl FnOnce(c_int) -> c_int,
) -> c_int {
    let is_synced = wanted & libc::O_SYNC != 0 && wanted & libc::O_PATH == 0;
    // SAFETY: the caller passes the arguments of an `openat`.
    let is_taken = is_synced && unsafe { place::is_answered_at(directory, path, wanted) };
    let taken = if is_taken { wanted & libc::O_SYNC } else { 0 };
    let fd = open(wanted & !taken);
    flags::note(fd, taken);
    fd
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn open64(
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    // SAFETY: the program's own arguments.
    let open = |flags| next::call(&next::open64, |open| unsafe { open(path, flags, mode) });
    // SAFETY: the program's own arguments.
    unsafe { opened((AT_FDCWD, path), flags, open) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn openat64(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    // SAFETY: the program's own arguments.
    let open =
        |flags| next::call(&next::openat64, |open| unsafe { open(directory, path, flags, mode) });
    // SAFETY: the program's own arguments.
    unsafe { opened((directory, path), flags, open) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __open64_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the program's own arguments.
    let open = |flags| next::call(&next::__open64_2, |open| unsafe { open(path, flags) });
    // SAFETY: the program's own arguments.
    unsafe { opened((AT_FDCWD, path), flags, open) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __openat64_2(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
) -> c_int {
    // SAFETY: the program's own arguments.
    let open =
        |flags| next::call(&next::__openat64_2, |open| unsafe { open(directory, path, flags) });
    // SAFETY: the program's own arguments.
    unsafe { opened((directory, path), flags, open) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn mkostemps64(
    template: *mut c_char,
    suffix_bytes: c_int,
    flags: c_int,
) -> c_int {
    let open = |flags| {
        next::call(&next::mkostemps64, |open| {
            // SAFETY: the program's own arguments.
            unsafe { open(template, suffix_bytes, flags) }
        })
    };
    // SAFETY: the template is a terminated path, whose file does not exist yet.
    unsafe { opened((AT_FDCWD, template), flags, open) }
}

tidegate_interpose::synonyms! {
    open(path: *const c_char, flags: c_int, mode: c_uint) = open64(path, flags, mode);
    __open(path: *const c_char, flags: c_int, mode: c_uint) = open64(path, flags, mode);
    __open64(path: *const c_char, flags: c_int, mode: c_uint) = open64(path, flags, mode);
    __open_2(path: *const c_char, flags: c_int) = __open64_2(path, flags);
    openat(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint)
        = openat64(directory, path, flags, mode);
    __openat_2(directory: c_int, path: *const c_char, flags: c_int)
        = __openat64_2(directory, path, flags);
    mkostemps(template: *mut c_char, suffix_bytes: c_int, flags: c_int)
        = mkostemps64(template, suffix_bytes, flags);
    mkostemp(template: *mut c_char, flags: c_int) = mkostemps64(template, 0, flags);
    mkostemp64(template: *mut c_char, flags: c_int) = mkostemps64(template, 0, flags);
}
