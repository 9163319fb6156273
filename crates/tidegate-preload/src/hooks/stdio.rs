//! Hooks: streams.
//!
//! Invariants:
//! 1. What the C library writes for a stream, no hook sees. So a file is pinned to the kernel path
//!    while a stream for writing is open on it, and while it is standard output or standard error.
//!    A new one may have one record until the stream is closed
//!    ([`unseal`](crate::covered::unseal)).
//! 2. `fopen` is an open by our own hook and an `fdopen`: files are made and emptied as with
//!    `open`.
#![allow(unsafe_code)] // C's calling convention and strings

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use libc::FILE;

use crate::covered::{self, Open, every_write, metadata, unseen};
use crate::hooks::close::{appeared, forget};
use crate::hooks::open::open_at;
use crate::state::descriptors::{APPEND, Kind, PINNED, SYNCHRONOUS};
use crate::state::{descriptors, process};
use crate::sys::{next, query, raw, readable};

unsafe extern "C" {
    static stdout: *mut FILE;
    static stderr: *mut FILE;
}

/// The descriptor of a stream; -1 where it has none.
///
/// # Safety
/// The stream is open.
unsafe fn fileno(stream: *mut FILE) -> c_int {
    // SAFETY: as promised.
    next::fileno.get().map_or(-1, |fileno| unsafe { fileno(stream) })
}

/// Has the C library write what it holds back for a stream: 0, or less if it could not.
///
/// # Safety
/// The stream is open, or null for all streams.
pub(crate) unsafe fn flush_stream(stream: *mut FILE) -> c_int {
    // SAFETY: as promised.
    next::fflush.get().map_or(-1, |fflush| unsafe { fflush(stream) })
}

/// Has the C library write what it holds back for standard output, if that goes to a file.
pub(crate) fn flush_standard() {
    for (fd, stream) in standard() {
        if descriptors::get(fd).has(PINNED) {
            // SAFETY: a stream that exists as long as the process.
            unsafe { flush_stream(stream) };
        }
    }
}

fn standard() -> [(c_int, *mut FILE); 2] {
    // SAFETY: set before the program begins.
    let out = unsafe { stdout };
    // SAFETY: set before the program begins.
    let err = unsafe { stderr };
    [(libc::STDOUT_FILENO, out), (libc::STDERR_FILENO, err)]
}

/// The flags of `open` that `fopen` has for a mode; none for modes that are left to the C library.
fn flags_of(mode: &[u8]) -> Option<c_int> {
    let (first, rest) = mode.split_first()?;
    if rest.contains(&b',') {
        return None;
    }
    let access = if rest.contains(&b'+') { libc::O_RDWR } else { libc::O_WRONLY };
    let mut flags = match first {
        b'r' if rest.contains(&b'+') => libc::O_RDWR,
        b'w' => access | libc::O_CREAT | libc::O_TRUNC,
        b'a' => access | libc::O_CREAT | libc::O_APPEND,
        _ => return None,
    };
    for other in rest {
        flags |= match other {
            b'x' => libc::O_EXCL,
            b'e' => libc::O_CLOEXEC,
            _ => 0,
        };
    }
    Some(flags)
}

/// The file of `fd` is written by a stream from now on.
fn pin(fd: c_int) {
    if let Some(open) = Open::writable(fd) {
        open.pin();
    }
}

/// Whether there is a log, and what `flags_of` says of the mode.
///
/// # Safety
/// `mode` is what the program gave to `fopen`.
unsafe fn wanted(mode: *const c_char) -> Option<c_int> {
    process::log()?;
    // SAFETY: a terminated string, as `fopen` wants it.
    flags_of(unsafe { CStr::from_ptr(mode) }.to_bytes())
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: as promised to this function.
    let flags = unsafe { wanted(mode) };
    match (flags, next::fopen64.get(), next::fdopen.get()) {
        (Some(flags), _, Some(fdopen)) => {
            // SAFETY: as promised to this function.
            let fd = unsafe { open_at(libc::AT_FDCWD, path, flags, 0o666) };
            if fd < 0 {
                return ptr::null_mut();
            }
            every_write::make_synchronous(fd);
            pin(fd);
            // SAFETY: a descriptor that is open, and the program's mode.
            let stream = unsafe { fdopen(fd, mode) };
            if stream.is_null() {
                forget(fd);
                let _ = raw::close(fd);
            }
            stream
        }
        (_, Some(fopen64), _) => {
            // SAFETY: the same function.
            let open = || unsafe { fopen64(path, mode) };
            // SAFETY: as promised to this function.
            unsafe { by_library(path, mode, open) }
        }
        _ => ptr::null_mut(),
    }
}

/// Has the C library open a stream by itself, which may make or empty the file.
///
/// # Safety
/// As for `fopen`, but that `path` may be null.
pub(crate) unsafe fn by_library(
    path: *const c_char,
    mode: *const c_char,
    open: impl FnOnce() -> *mut FILE,
) -> *mut FILE {
    // SAFETY: as promised.
    if process::log().is_none() || !unsafe { may_write(mode) } {
        let stream = open();
        opened(stream, false);
        return stream;
    }
    if let Some(path) = readable::text(path) {
        unseen::about_to_change(libc::AT_FDCWD, path, false);
    }
    let stream = metadata::counted(open);
    opened(stream, true);
    stream
}

fn opened(stream: *mut FILE, writes: bool) {
    if stream.is_null() || process::log().is_none() {
        return;
    }
    // SAFETY: a stream that was just opened.
    let fd = unsafe { fileno(stream) };
    if fd >= 0 {
        appeared(fd);
        if writes {
            every_write::make_synchronous(fd);
            pin(fd);
        }
    }
}

/// Whether a stream of this mode can be written to.
///
/// # Safety
/// `mode` is what the program gave to `fopen`.
unsafe fn may_write(mode: *const c_char) -> bool {
    // SAFETY: a terminated string, as `fopen` wants it.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    mode.first() != Some(&b'r') || mode.contains(&b'+')
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    let Some(fdopen) = next::fdopen.get() else { return ptr::null_mut() };
    pin(fd);
    let appended = appends(fd);
    // SAFETY: the same function.
    let stream = unsafe { fdopen(fd, mode) };
    if !appended && appends(fd) {
        // With the mode "a" the C library makes the description append: copies of it elsewhere,
        // too.
        if let Some(open) = Open::writable(fd) {
            descriptors::set(fd, open.known.with(APPEND));
            open.mark();
        }
    }
    stream
}

fn appends(fd: c_int) -> bool {
    process::log().is_some()
        && query::status_flags(fd).is_ok_and(|flags| flags & libc::O_APPEND != 0)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn freopen64(
    path: *const c_char,
    mode: *const c_char,
    stream: *mut FILE,
) -> *mut FILE {
    let Some(freopen64) = next::freopen64.get() else { return ptr::null_mut() };
    if process::log().is_some() {
        // SAFETY: the program's own stream.
        forget(unsafe { fileno(stream) });
    }
    // SAFETY: the same function.
    let open = || unsafe { freopen64(path, mode, stream) };
    // SAFETY: as promised to this function.
    unsafe { by_library(path, mode, open) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fclose(stream: *mut FILE) -> c_int {
    let Some(fclose) = next::fclose.get() else { return raw::failed_int(libc::ENOSYS) };
    if !stream.is_null() && (process::log().is_some() || process::every_write()) {
        // SAFETY: the program's own stream.
        unsafe { about_to_close(stream) };
    }
    // SAFETY: the same function.
    unsafe { fclose(stream) }
}

/// Forgets the descriptor of a stream, which has then written what it holds back for a pinned file.
///
/// # Safety
/// The stream is open.
pub(crate) unsafe fn about_to_close(stream: *mut FILE) {
    let errno = raw::errno();
    // SAFETY: as promised.
    let fd = unsafe { fileno(stream) };
    if descriptors::get(fd).has(PINNED) || process::every_write() {
        // SAFETY: as promised.
        unsafe { flush_pinned(stream) };
    }
    forget(fd);
    raw::set_errno(errno);
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fflush(stream: *mut FILE) -> c_int {
    let Some(fflush) = next::fflush.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the same function.
    let result = unsafe { fflush(stream) };
    if result != 0 || !process::every_write() {
        return result;
    }
    if !stream.is_null() {
        // SAFETY: the program's own stream.
        return synced(unsafe { fileno(stream) });
    }
    let mut result = 0;
    descriptors::each(0, u32::MAX, |fd, known| {
        if matches!(known.kind, Kind::File | Kind::Elsewhere) {
            result = result.min(synced(fd));
        }
    });
    result
}

/// Syncs what a stream has written, where the kernel has not done so: 0, or -1.
fn synced(fd: c_int) -> c_int {
    let is_synced = descriptors::get(fd).has(SYNCHRONOUS);
    if is_synced || every_write::returned(fd, 1) > 0 { 0 } else { -1 }
}

/// Has a stream that is about to be closed write what it holds back while its file is still pinned.
///
/// # Safety
/// The stream is open.
unsafe fn flush_pinned(stream: *mut FILE) {
    // SAFETY: as promised.
    let is_writing = next::__fwriting.get().is_some_and(|writing| unsafe { writing(stream) } != 0);
    // SAFETY: as promised.
    if is_writing && unsafe { flush_stream(stream) } != 0 {
        // It tries again when it is closed.
        return;
    }
    // SAFETY: as promised.
    if let Some(open) = Open::of(unsafe { fileno(stream) }) {
        covered::unseal(&open);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pclose(stream: *mut FILE) -> c_int {
    let Some(pclose) = next::pclose.get() else { return raw::failed_int(libc::ENOSYS) };
    if process::log().is_some() && !stream.is_null() {
        // SAFETY: the program's own stream.
        forget(unsafe { fileno(stream) });
    }
    // SAFETY: the same function.
    unsafe { pclose(stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fcloseall() -> c_int {
    let Some(fcloseall) = next::fcloseall.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the same function. It flushes the streams, and leaves their descriptors open.
    unsafe { fcloseall() }
}

/// Formatted output to a descriptor, by a stream that the C library makes for it.
fn printed(fd: c_int, print: impl FnOnce() -> c_int) -> c_int {
    match Open::writable(fd) {
        Some(open) => raw::returned_int(open.unseen_write(|| raw::by_kernel(print() as isize))),
        None => c_int::try_from(every_write::returned(fd, print() as isize)).unwrap_or(-1),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn vdprintf(
    fd: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    let Some(vdprintf) = next::vdprintf.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the same function.
    printed(fd, || unsafe { vdprintf(fd, format, arguments) })
}

/// Written by the C library, without a stream.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn backtrace_symbols_fd(
    frames: *const *mut c_void,
    count: c_int,
    fd: c_int,
) {
    let Some(write) = next::backtrace_symbols_fd.get() else { return };
    // SAFETY: the same function.
    let write = || unsafe { write(frames, count, fd) };
    match Open::writable(fd) {
        Some(open) => drop(open.unseen(|| {
            write();
            0
        })),
        None => write(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __vdprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    let Some(print) = next::__vdprintf_chk.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the same function.
    printed(fd, || unsafe { print(fd, flag, format, arguments) })
}

tidegate_interpose::synonyms! {
    fopen(path: *const c_char, mode: *const c_char) -> *mut FILE = fopen64(path, mode);
    freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE = freopen64(path, mode, stream);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_open_as_the_manual_says() {
        let create = libc::O_CREAT;
        let cases: [(&str, Option<c_int>); 9] = [
            ("r", None),
            ("rb", None),
            ("r+", Some(libc::O_RDWR)),
            ("rb+", Some(libc::O_RDWR)),
            ("w", Some(libc::O_WRONLY | create | libc::O_TRUNC)),
            ("w+xe", Some(libc::O_RDWR | create | libc::O_TRUNC | libc::O_EXCL | libc::O_CLOEXEC)),
            ("a", Some(libc::O_WRONLY | create | libc::O_APPEND)),
            ("w,ccs=UTF-8", None),
            ("", None),
        ];
        for (mode, expected) in cases {
            assert_eq!(flags_of(mode.as_bytes()), expected, "{mode:?}");
        }
    }
}
