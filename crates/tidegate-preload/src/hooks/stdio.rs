//! Hooks: streams.
//!
//! Invariants:
//! 1. No hook sees the C library write a stream. So a file is pinned to the kernel path while a
//!    stream for writing is open on it, and while it is standard output or standard error. A new
//!    file may have one record until its stream is closed ([`unseal`](crate::covered::unseal)).
//! 2. `fopen` is an open by our own hook and an `fdopen`: files are created and emptied as by
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

/// Returns the descriptor of a stream, or -1 if it has none.
///
/// # Safety
/// The stream is open.
unsafe fn fileno(stream: *mut FILE) -> c_int {
    // SAFETY: the caller keeps the stream open.
    next::fileno.get().map_or(-1, |fileno| unsafe { fileno(stream) })
}

/// Flushes the buffer of a stream. Returns 0, or a negative number if that failed.
///
/// # Safety
/// The stream is open, or null for all streams.
pub(crate) unsafe fn flush_stream(stream: *mut FILE) -> c_int {
    // SAFETY: the stream is open, or null.
    next::fflush.get().map_or(-1, |fflush| unsafe { fflush(stream) })
}

/// Flushes standard output and standard error, if they go to a pinned file.
pub(crate) fn flush_standard() {
    for (fd, stream) in standard() {
        if descriptors::get(fd).has(PINNED) {
            // SAFETY: a stream that exists as long as the process.
            unsafe { flush_stream(stream) };
        }
    }
}

fn standard() -> [(c_int, *mut FILE); 2] {
    // SAFETY: the C library sets it before the program begins.
    let out = unsafe { stdout };
    // SAFETY: the C library sets it before the program begins.
    let err = unsafe { stderr };
    [(libc::STDOUT_FILENO, out), (libc::STDERR_FILENO, err)]
}

/// Returns the flags of `open` for a mode of `fopen`, or `None` if the C library is to open it.
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

/// Returns whether `fopen` leaves the position at the start of the file: all but appending streams
/// without reads.
///
/// # Safety
/// `mode` is the mode that the program gave to `fopen`.
unsafe fn begins_at_start(mode: *const c_char) -> bool {
    // SAFETY: `fopen` takes a terminated string.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    mode.first() != Some(&b'a') || mode.contains(&b'+')
}

/// Moves a descriptor to the end of its file, as `fopen` does. A pipe has no end. Returns false
/// with the error in `errno`.
fn goes_to_end(fd: c_int) -> bool {
    match raw::lseek(fd, 0, libc::SEEK_END) {
        Ok(_) | Err(libc::ESPIPE) => true,
        Err(error) => {
            raw::set_errno(error);
            false
        }
    }
}

/// Pins the file of `fd`, which a stream writes from now on.
fn pin(fd: c_int) {
    if let Some(open) = Open::writable(fd) {
        open.pin();
    }
}

/// Returns the flags of `open` for a mode as `flags_of` does, or `None` without a log.
///
/// # Safety
/// `mode` is the mode that the program gave to `fopen`.
unsafe fn wanted(mode: *const c_char) -> Option<c_int> {
    process::log()?;
    // SAFETY: `fopen` takes a terminated string.
    flags_of(unsafe { CStr::from_ptr(mode) }.to_bytes())
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: the caller's mode.
    let flags = unsafe { wanted(mode) };
    match (flags, next::fopen64.get(), next::fdopen.get()) {
        (Some(flags), _, Some(fdopen)) => {
            // SAFETY: the caller's path.
            let fd = unsafe { open_at(libc::AT_FDCWD, path, flags, 0o666) };
            if fd < 0 {
                return ptr::null_mut();
            }
            // SAFETY: the mode was read by `wanted`.
            let is_at_place = unsafe { begins_at_start(mode) } || goes_to_end(fd);
            every_write::make_synchronous(fd);
            pin(fd);
            // SAFETY: an open descriptor, and the caller's mode.
            let stream = is_at_place.then(|| unsafe { fdopen(fd, mode) });
            let stream = stream.unwrap_or(ptr::null_mut());
            if stream.is_null() {
                forget(fd);
                let _ = raw::close(fd);
            }
            stream
        }
        (_, Some(fopen64), _) => {
            // SAFETY: the C library's function of this type, with the caller's arguments.
            let open = || unsafe { fopen64(path, mode) };
            // SAFETY: the caller's arguments.
            unsafe { by_library(path, mode, open) }
        }
        _ => ptr::null_mut(),
    }
}

/// Opens a stream by the C library, which may create or empty the file.
///
/// # Safety
/// As for `fopen`, but `path` may be null.
pub(crate) unsafe fn by_library(
    path: *const c_char,
    mode: *const c_char,
    open: impl FnOnce() -> *mut FILE,
) -> *mut FILE {
    // SAFETY: a mode of `fopen`.
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
    // SAFETY: the C library has just opened the stream.
    let fd = unsafe { fileno(stream) };
    if fd >= 0 {
        appeared(fd);
        if writes {
            every_write::make_synchronous(fd);
            pin(fd);
        }
    }
}

/// Returns whether a stream of this mode can be written to.
///
/// # Safety
/// `mode` is the mode that the program gave to `fopen`.
unsafe fn may_write(mode: *const c_char) -> bool {
    // SAFETY: `fopen` takes a terminated string.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    mode.first() != Some(&b'r') || mode.contains(&b'+')
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    let Some(fdopen) = next::fdopen.get() else { return ptr::null_mut() };
    pin(fd);
    let appended = appends(fd);
    // SAFETY: the C library's function of this type, with the caller's arguments.
    let stream = unsafe { fdopen(fd, mode) };
    if !appended && appends(fd) {
        // For the mode "a" the C library sets `O_APPEND` for all copies of the descriptor.
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
        // SAFETY: the program's open stream.
        forget(unsafe { fileno(stream) });
    }
    // SAFETY: the C library's function of this type, with the caller's arguments.
    let open = || unsafe { freopen64(path, mode, stream) };
    // SAFETY: the caller's arguments.
    unsafe { by_library(path, mode, open) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fclose(stream: *mut FILE) -> c_int {
    let Some(fclose) = next::fclose.get() else { return raw::failed_int(libc::ENOSYS) };
    let is_seen = !stream.is_null() && (process::log().is_some() || process::every_write());
    // SAFETY: the program's open stream.
    let synced = if is_seen { unsafe { about_to_close(stream) } } else { 0 };
    // SAFETY: the C library's function of this type, with the caller's arguments.
    let closed = unsafe { fclose(stream) };
    if closed == 0 && synced < 0 { raw::returned_int(synced) } else { closed }
}

/// Forgets the descriptor of a stream, after the stream has flushed its buffer to a pinned file.
/// Returns 0, or the negative error number of the sync that the user wants after each write.
///
/// # Safety
/// The stream is open.
pub(crate) unsafe fn about_to_close(stream: *mut FILE) -> isize {
    raw::keeping_errno(|| {
        // SAFETY: the caller keeps the stream open.
        let fd = unsafe { fileno(stream) };
        let is_flushed = descriptors::get(fd).has(PINNED) || process::every_write();
        // SAFETY: the caller keeps the stream open.
        let synced = if is_flushed { unsafe { flush_pinned(stream) } } else { 0 };
        forget(fd);
        synced
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fflush(stream: *mut FILE) -> c_int {
    let Some(fflush) = next::fflush.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the C library's function of this type, with the caller's arguments.
    let result = unsafe { fflush(stream) };
    if result != 0 || !process::every_write() {
        return result;
    }
    // SAFETY: the program's open stream, or null.
    let synced = if stream.is_null() { sync_all() } else { sync(unsafe { fileno(stream) }) };
    raw::returned_int(synced)
}

/// Flushes all streams, and syncs their bytes as the user wants it after each write. Returns 0, or
/// a negative error number.
pub(crate) fn flush_and_sync_all() -> isize {
    // SAFETY: null stands for all streams.
    unsafe { flush_stream(ptr::null_mut()) };
    sync_all()
}

fn sync_all() -> isize {
    let mut result = 0;
    descriptors::each(0, u32::MAX, |fd, known| {
        if matches!(known.kind, Kind::File | Kind::Elsewhere) {
            result = result.min(sync(fd));
        }
    });
    result
}

/// Syncs the bytes that a stream may have written, unless the kernel has done so. Returns 0, or a
/// negative error number.
fn sync(fd: c_int) -> isize {
    let writes = |flags: c_int| flags & libc::O_ACCMODE != libc::O_RDONLY;
    let is_due = process::every_write()
        && !descriptors::get(fd).has(SYNCHRONOUS)
        && query::status_flags(fd).is_ok_and(writes);
    if is_due { every_write::synced(fd, 1).min(0) } else { 0 }
}

/// Flushes a stream that is about to be closed while its file is pinned, syncs its bytes if the
/// user wants that, and unseals the file. Returns 0, or the negative error number of the sync.
///
/// # Safety
/// The stream is open.
unsafe fn flush_pinned(stream: *mut FILE) -> isize {
    // SAFETY: the caller keeps the stream open.
    let is_writing = next::__fwriting.get().is_some_and(|writing| unsafe { writing(stream) } != 0);
    // SAFETY: the caller keeps the stream open.
    if is_writing && unsafe { flush_stream(stream) } != 0 {
        // The stream tries again when it is closed.
        return 0;
    }
    // SAFETY: the caller keeps the stream open.
    let fd = unsafe { fileno(stream) };
    // A stream whose buffer was full has written before.
    let synced = sync(fd);
    if let Some(open) = Open::of(fd) {
        covered::unseal(&open);
    }
    synced
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pclose(stream: *mut FILE) -> c_int {
    let Some(pclose) = next::pclose.get() else { return raw::failed_int(libc::ENOSYS) };
    if process::log().is_some() && !stream.is_null() {
        // SAFETY: the program's open stream.
        forget(unsafe { fileno(stream) });
    }
    // SAFETY: the C library's function of this type, with the caller's arguments.
    unsafe { pclose(stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fcloseall() -> c_int {
    let Some(fcloseall) = next::fcloseall.get() else { return raw::failed_int(libc::ENOSYS) };
    if process::every_write() && flush_and_sync_all() < 0 {
        return -1;
    }
    // SAFETY: it takes no arguments. It flushes the streams and leaves their descriptors open.
    unsafe { fcloseall() }
}

/// Prints to a descriptor, through a stream that the C library makes for this call.
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
    // SAFETY: the C library's function of this type, with the caller's arguments.
    printed(fd, || unsafe { vdprintf(fd, format, arguments) })
}

/// Writes by the C library, which uses no stream.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn backtrace_symbols_fd(
    frames: *const *mut c_void,
    count: c_int,
    fd: c_int,
) {
    let Some(write) = next::backtrace_symbols_fd.get() else { return };
    // SAFETY: the C library's function of this type, with the caller's arguments.
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
    // SAFETY: the C library's function of this type, with the caller's arguments.
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
