//! Hooks: calls that have the kernel copy into a file.
//!
//! Invariant: the file is out of the log before the kernel begins, and until it is done.
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_uint, c_ulong};

use libc::{off_t, size_t, ssize_t};

use crate::alike::alike;
use crate::logged::Open;
use crate::raw::Errno;
use crate::{absorb, next, raw};

/// The kernel is about to read the file of `fd`.
fn from(fd: c_int) -> Result<(), Errno> {
    if absorb::any()
        && let Some(open) = Open::of(fd)
    {
        return absorb::settle_patiently(open.log, open.file, fd);
    }
    Ok(())
}

/// Runs a call of the C library that may change the file of `fd`, and read that of `source`.
fn copy(source: c_int, fd: c_int, call: impl FnOnce() -> ssize_t) -> ssize_t {
    match from(source) {
        Ok(()) => into(fd, call),
        Err(errno) => raw::failed(errno),
    }
}

/// Runs a call of the C library that may change the file of `fd`.
fn into(fd: c_int, call: impl FnOnce() -> ssize_t) -> ssize_t {
    match Open::writable(fd) {
        Some(open) => raw::returned(open.unseen(|| raw::by_kernel(call()))),
        None => call(),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn sendfile64(
    to: c_int,
    from: c_int,
    offset: *mut off_t,
    len: size_t,
) -> ssize_t {
    let Some(sendfile64) = next::sendfile64.get() else { return raw::failed(libc::ENOSYS) };
    // SAFETY: the same function.
    copy(from, to, || unsafe { sendfile64(to, from, offset, len) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn copy_file_range(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let Some(call) = next::copy_file_range.get() else { return raw::failed(libc::ENOSYS) };
    // SAFETY: the same function.
    copy(from, to, || unsafe { call(from, from_offset, to, to_offset, len, flags) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let Some(splice) = next::splice.get() else { return raw::failed(libc::ENOSYS) };
    // SAFETY: the same function.
    copy(from, to, || unsafe { splice(from, from_offset, to, to_offset, len, flags) })
}

/// Requests that change the bytes of the descriptor's own file.
const CHANGING: [c_ulong; 8] = [
    0x4004_9409, // FICLONE
    0x4020_940d, // FICLONERANGE
    0xc028_660f, // EXT4_IOC_MOVE_EXT
    0x4030_6628, // FS_IOC_RESVSP
    0x4030_662a, // FS_IOC_RESVSP64
    0x4030_6629, // FS_IOC_UNRESVSP
    0x4030_662b, // FS_IOC_UNRESVSP64
    0x4030_6639, // FS_IOC_ZERO_RANGE
];

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ioctl(
    fd: c_int,
    request: c_ulong,
    argument: usize,
) -> c_int {
    let Some(ioctl) = next::ioctl.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the same function; an argument that is not given is not looked at.
    let call = || unsafe { ioctl(fd, request, argument) };
    if !CHANGING.contains(&(request & 0xffff_ffff)) {
        // Some tell of a file's extents, or where its end is.
        return from(fd).map_or_else(raw::failed_int, |()| call());
    }
    c_int::try_from(into(fd, || call() as ssize_t)).unwrap_or(-1)
}

alike! {
    sendfile(to: c_int, from: c_int, offset: *mut off_t, len: size_t) -> ssize_t = sendfile64(to, from, offset, len);
}
