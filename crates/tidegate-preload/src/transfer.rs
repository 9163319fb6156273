//! Hooks: calls that have the kernel copy into a file.
//!
//! Invariant: the file is out of the log before the kernel begins, and until it is done.
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_uint, c_ulong};
use std::ptr;

use libc::{off_t, size_t, ssize_t};

use crate::alike::alike;
use crate::logged::Open;
use crate::raw::Errno;
use crate::readable::is_readable;
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

const FICLONE: c_ulong = 0x4004_9409;
const FICLONERANGE: c_ulong = 0x4020_940d;
const EXT4_IOC_MOVE_EXT: c_ulong = 0xc028_660f;

/// Requests that change the bytes of the descriptor's own file.
const CHANGING: [c_ulong; 8] = [
    FICLONE,
    FICLONERANGE,
    EXT4_IOC_MOVE_EXT,
    0x4030_6628, // FS_IOC_RESVSP
    0x4030_662a, // FS_IOC_RESVSP64
    0x4030_6629, // FS_IOC_UNRESVSP
    0x4030_662b, // FS_IOC_UNRESVSP64
    0x4030_6639, // FS_IOC_ZERO_RANGE
];

/// The other descriptor that a request of these is about: a word, or the first of a structure's, at a 64-bit or a 32-bit number.
fn source_of(request: c_ulong, argument: usize) -> Option<c_int> {
    if request == FICLONE {
        return c_int::try_from(argument).ok();
    }
    let place = match request {
        FICLONERANGE => argument,
        // Behind a reserved word.
        EXT4_IOC_MOVE_EXT => argument.wrapping_add(size_of::<u32>()),
        _ => return None,
    };
    let at = ptr::with_exposed_provenance::<c_int>(place);
    // SAFETY: readable.
    is_readable(at.cast(), size_of::<c_int>()).then(|| unsafe { at.read_unaligned() })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn ioctl(
    fd: c_int,
    request: c_ulong,
    argument: usize,
) -> c_int {
    let Some(ioctl) = next::ioctl.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the same function; an argument that is not given is not looked at.
    let call = || unsafe { ioctl(fd, request, argument) };
    let number = request & 0xffff_ffff;
    if !CHANGING.contains(&number) {
        // Some tell of a file's extents, or where its end is.
        return from(fd).map_or_else(raw::failed_int, |()| call());
    }
    let call = || call() as ssize_t;
    let result = match source_of(number, argument) {
        Some(source) => copy(source, fd, call),
        None => into(fd, call),
    };
    c_int::try_from(result).unwrap_or(-1)
}

alike! {
    sendfile(to: c_int, from: c_int, offset: *mut off_t, len: size_t) -> ssize_t = sendfile64(to, from, offset, len);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_that_is_cloned_is_found() {
        let range: [u64; 4] = [7, 0, 0, 0];
        let extent: [u32; 10] = [0, 8, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(source_of(FICLONE, 6), Some(6));
        assert_eq!(source_of(FICLONERANGE, range.as_ptr().expose_provenance()), Some(7));
        assert_eq!(source_of(EXT4_IOC_MOVE_EXT, extent.as_ptr().expose_provenance()), Some(8));
        assert_eq!(source_of(FICLONERANGE, 8), None);
        assert_eq!(source_of(0x4030_6639, range.as_ptr().expose_provenance()), None);
    }
}
