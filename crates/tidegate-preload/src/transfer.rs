//! Hooks: calls that have the kernel copy into a file.
//!
//! Invariant: the file is out of the log before the kernel begins, and until it is done.
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_uint, c_ulong};
use std::ptr;

use libc::{off_t, size_t, ssize_t};

use crate::covered::Open;
use crate::raw::words;
use crate::readable::is_readable;
use crate::synonyms::synonyms;
use crate::{cancel, metadata, next, raw};

/// Runs a call of the C library that may change the file of `fd`, unless that can be covered: then
/// the system call itself, in whose middle no thread is cancelled, as a change that no hook sees.
fn into(fd: c_int, library: impl FnOnce() -> isize, kernel: impl FnOnce() -> isize) -> isize {
    match Open::writable(fd) {
        Some(open) => {
            cancel::point();
            raw::returned(open.unseen(kernel))
        }
        None => library(),
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
    let library = || unsafe { sendfile64(to, from, offset, len) };
    // SAFETY: the program's own arguments.
    into(to, library, || unsafe { raw::call(libc::SYS_sendfile, words![to, from, offset, len]) })
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
    let arguments = words![from, from_offset, to, to_offset, len, flags];
    // SAFETY: the same function.
    let library = || unsafe { call(from, from_offset, to, to_offset, len, flags) };
    // SAFETY: the program's own arguments.
    into(to, library, || unsafe { raw::call(libc::SYS_copy_file_range, arguments) })
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
    let arguments = words![from, from_offset, to, to_offset, len, flags];
    // SAFETY: the same function.
    let library = || unsafe { splice(from, from_offset, to, to_offset, len, flags) };
    // SAFETY: the program's own arguments.
    into(to, library, || unsafe { raw::call(libc::SYS_splice, arguments) })
}

const FICLONE: c_ulong = 0x4004_9409;
const FICLONERANGE: c_ulong = 0x4020_940d;
const EXT4_IOC_MOVE_EXT: c_ulong = 0xc028_660f;

/// Requests that change the bytes, the space or the attributes of the descriptor's own file.
const CHANGING: [c_ulong; 10] = [
    0x4008_6602, // FS_IOC_SETFLAGS
    0x401c_5820, // FS_IOC_FSSETXATTR
    FICLONE,
    FICLONERANGE,
    EXT4_IOC_MOVE_EXT,
    0x4030_6628, // FS_IOC_RESVSP
    0x4030_662a, // FS_IOC_RESVSP64
    0x4030_6629, // FS_IOC_UNRESVSP
    0x4030_662b, // FS_IOC_UNRESVSP64
    0x4030_6639, // FS_IOC_ZERO_RANGE
];

/// The other descriptor that an exchange of extents is about: behind a reserved word.
fn donor_of(argument: usize) -> Option<c_int> {
    let at = ptr::with_exposed_provenance::<c_int>(argument.wrapping_add(size_of::<u32>()));
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
        return call();
    }
    // Of the two files of an exchange, both change.
    let other = (number == EXT4_IOC_MOVE_EXT).then(|| donor_of(argument)).flatten();
    let change = || match other.and_then(Open::writable) {
        Some(other) => other.unseen(|| raw::by_kernel(call() as isize)),
        None => raw::by_kernel(call() as isize),
    };
    let result = match Open::of(fd) {
        Some(open) => open.unseen(change),
        None => metadata::counted(change),
    };
    c_int::try_from(raw::returned(result)).unwrap_or(-1)
}

synonyms! {
    sendfile(to: c_int, from: c_int, offset: *mut off_t, len: size_t) -> ssize_t = sendfile64(to, from, offset, len);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_file_of_an_exchange_is_found() {
        let extent: [u32; 10] = [0, 8, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(donor_of(extent.as_ptr().expose_provenance()), Some(8));
        assert_eq!(donor_of(8), None);
    }
}
