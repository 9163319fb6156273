//! Hooks: `write` and its kin.
//!
//! Invariants:
//! 1. A write to a descriptor that cannot be covered is forwarded to the C library's function; if
//!    that is not resolved yet, to the kernel.
//! 2. A write to a plain file goes to the kernel in the file's lane.
//! 3. A buffer that cannot be read is left to the kernel, which refuses it or writes the bytes
//!    before the fault.
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_void};
use std::io::IoSlice;

use libc::{iovec, off_t, size_t, ssize_t};
use tidegate_interpose::cancel;

use crate::covered::{Open, Place, Request, every_write, plain_as_opened, write_as_opened};
use crate::sys::next;
use crate::sys::page::Page;
use crate::sys::raw::{self, words};
use crate::sys::readable::is_readable;

/// The most parts of a vector that are read here. With more, the file leaves the log.
const PARTS: usize = 64;

/// Flags of `pwritev2` that change nothing about the records. For the sync flags, the kernel syncs.
const HARMLESS: c_int = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND;

/// Returns the program's buffer, or `None` if the kernel cannot read all its bytes.
///
/// # Safety
/// The buffer stays mapped while the result lives.
unsafe fn part<'a>(at: *const c_void, len: usize) -> Option<IoSlice<'a>> {
    if len == 0 {
        return Some(IoSlice::new(&[]));
    }
    // SAFETY: `is_readable` has checked `len` bytes. Other threads may write to them meanwhile, as
    // they may while the kernel copies.
    is_readable(at, len)
        .then(|| IoSlice::new(unsafe { std::slice::from_raw_parts(at.cast(), len) }))
}

/// Runs `run` with the parts of the program's vector that have bytes. Returns `None` if there are
/// more than `PARTS` iovecs, if the iovecs or their buffers cannot be read, or if there is no
/// memory.
///
/// # Safety
/// As for `writev`.
unsafe fn with_parts<R>(
    vector: *const iovec,
    count: c_int,
    run: impl FnOnce(&[IoSlice<'_>]) -> R,
) -> Option<R> {
    let count = usize::try_from(count).ok().filter(|count| *count <= PARTS)?;
    if count == 0 {
        return Some(run(&[]));
    }
    if !is_readable(vector.cast(), count * size_of::<iovec>()) {
        return None;
    }
    // SAFETY: `is_readable` has checked `count` iovecs.
    let vector = unsafe { std::slice::from_raw_parts(vector, count) };
    let mut page = Page::take();
    // The page is aligned for any type.
    let memory = page.bytes_mut().as_mut_ptr().cast::<c_void>().cast::<IoSlice<'_>>();
    let mut used = 0;
    if page.bytes().len() < PARTS * size_of::<IoSlice<'_>>() {
        return None;
    }
    for given in vector.iter().filter(|given| given.iov_len > 0) {
        // SAFETY: the caller of `writev` keeps the buffers mapped.
        let part = unsafe { part(given.iov_base, given.iov_len) }?;
        // SAFETY: at most `PARTS` parts are used, and the page has space for `PARTS`.
        let place = unsafe { memory.add(used) };
        // SAFETY: the address is in the page and aligned.
        unsafe { place.write(part) };
        used += 1;
    }
    // SAFETY: the loop has written `used` parts there.
    Some(run(unsafe { std::slice::from_raw_parts(memory, used) }))
}

/// Writes one buffer.
///
/// # Safety
/// As for `write`.
#[inline]
unsafe fn one(
    open: &Open,
    place: Place,
    at: *const c_void,
    len: usize,
    kernel: impl Fn(c_int) -> isize,
) -> ssize_t {
    cancel::point();
    let by_entry = || {
        // SAFETY: the caller of `write` keeps the buffer mapped.
        match unsafe { part(at, len) } {
            Some(part) => write_as_opened(open, &Request { parts: &[part], place }, &kernel),
            None => open.unseen_write(|| kernel(open.fd)),
        }
    };
    let plain = open.write_plain(|| kernel(open.fd));
    raw::returned(plain.map_or_else(by_entry, |result| plain_as_opened(open, place, result)))
}

/// Writes several buffers.
///
/// # Safety
/// As for `writev`.
unsafe fn several(
    open: &Open,
    place: Place,
    vector: *const iovec,
    count: c_int,
    kernel: impl Fn(c_int) -> isize,
) -> ssize_t {
    cancel::point();
    let by_entry = || {
        let write =
            |parts: &[IoSlice<'_>]| write_as_opened(open, &Request { parts, place }, &kernel);
        // SAFETY: the caller of `writev` keeps the buffers mapped.
        unsafe { with_parts(vector, count, write) }
            .unwrap_or_else(|| open.unseen_write(|| kernel(open.fd)))
    };
    let plain = open.write_plain(|| kernel(open.fd));
    raw::returned(plain.map_or_else(by_entry, |result| plain_as_opened(open, place, result)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn write(fd: c_int, at: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: the caller's arguments go to the kernel as they are.
    let kernel = |fd: c_int| unsafe { raw::call(libc::SYS_write, words![fd, at, len]) };
    match (Open::writable(fd), next::write.resolved()) {
        // SAFETY: the caller keeps its buffers mapped during the call.
        (Some(open), _) => unsafe { one(&open, Place::Current, at, len, kernel) },
        // SAFETY: the C library's function of this type, with the caller's arguments.
        (None, Some(write)) => every_write::returned(fd, unsafe { write(fd, at, len) }),
        (None, None) => every_write::returned(fd, raw::returned(kernel(fd))),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pwrite64(
    fd: c_int,
    at: *const c_void,
    len: size_t,
    offset: off_t,
) -> ssize_t {
    // SAFETY: the caller's arguments go to the kernel as they are.
    let kernel = |fd: c_int| unsafe { raw::call(libc::SYS_pwrite64, words![fd, at, len, offset]) };
    let open = Open::writable(fd).zip(u64::try_from(offset).ok());
    match (open, next::pwrite64.resolved()) {
        // SAFETY: the caller keeps its buffers mapped during the call.
        (Some((open, offset)), _) => unsafe { one(&open, Place::At(offset), at, len, kernel) },
        (None, Some(pwrite64)) => {
            // SAFETY: the C library's function of this type, with the caller's arguments.
            every_write::returned(fd, unsafe { pwrite64(fd, at, len, offset) })
        }
        (None, None) => every_write::returned(fd, raw::returned(kernel(fd))),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn writev(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments go to the kernel as they are.
    let kernel = |fd: c_int| unsafe { raw::call(libc::SYS_writev, words![fd, vector, count]) };
    match (Open::writable(fd), next::writev.resolved()) {
        // SAFETY: the caller keeps its buffers mapped during the call.
        (Some(open), _) => unsafe { several(&open, Place::Current, vector, count, kernel) },
        // SAFETY: the C library's function of this type, with the caller's arguments.
        (None, Some(writev)) => every_write::returned(fd, unsafe { writev(fd, vector, count) }),
        (None, None) => every_write::returned(fd, raw::returned(kernel(fd))),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pwritev64(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
    // SAFETY: the caller's arguments; the first word of the pair holds the whole offset.
    let kernel =
        |fd: c_int| unsafe { raw::call(libc::SYS_pwritev, words![fd, vector, count, offset]) };
    let open = Open::writable(fd).zip(u64::try_from(offset).ok());
    match (open, next::pwritev64.resolved()) {
        (Some((open, offset)), _) => {
            // SAFETY: the caller keeps its buffers mapped during the call.
            unsafe { several(&open, Place::At(offset), vector, count, kernel) }
        }
        (None, Some(pwritev64)) => {
            // SAFETY: the C library's function of this type, with the caller's arguments.
            every_write::returned(fd, unsafe { pwritev64(fd, vector, count, offset) })
        }
        (None, None) => every_write::returned(fd, raw::returned(kernel(fd))),
    }
}

/// Returns the [`Place`] where `pwritev2` writes, or `None` for a write that the log does not take.
fn place_of(offset: off_t, flags: c_int) -> Option<Place> {
    if flags & !HARMLESS != 0 {
        return None;
    }
    match (flags & libc::RWF_APPEND != 0, offset) {
        // This write appends and also moves the position.
        (true, -1) => None,
        (true, _) => Some(Place::End),
        (false, -1) => Some(Place::Current),
        (false, offset) => u64::try_from(offset).ok().map(Place::At),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pwritev64v2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    let kernel = |fd: c_int| {
        let arguments = words![fd, vector, count, offset, 0_usize, flags];
        // SAFETY: the caller's arguments go to the kernel as they are.
        unsafe { raw::call(libc::SYS_pwritev2, arguments) }
    };
    match (Open::writable(fd), next::pwritev64v2.resolved()) {
        (Some(open), _) => match place_of(offset, flags) {
            // SAFETY: the caller keeps its buffers mapped during the call.
            Some(place) => unsafe { several(&open, place, vector, count, kernel) },
            None => raw::returned(open.unseen_write(|| kernel(fd))),
        },
        (None, Some(pwritev64v2)) => {
            // SAFETY: the C library's function of this type, with the caller's arguments.
            every_write::returned(fd, unsafe { pwritev64v2(fd, vector, count, offset, flags) })
        }
        (None, None) => every_write::returned(fd, raw::returned(kernel(fd))),
    }
}

tidegate_interpose::synonyms! {
    __write(fd: c_int, at: *const c_void, len: size_t) -> ssize_t = write(fd, at, len);
    pwrite(fd: c_int, at: *const c_void, len: size_t, offset: off_t) -> ssize_t = pwrite64(fd, at, len, offset);
    __pwrite64(fd: c_int, at: *const c_void, len: size_t, offset: off_t) -> ssize_t = pwrite64(fd, at, len, offset);
    pwritev(fd: c_int, vector: *const iovec, count: c_int, offset: off_t) -> ssize_t = pwritev64(fd, vector, count, offset);
    pwritev2(fd: c_int, vector: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t = pwritev64v2(fd, vector, count, offset, flags);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pwritev2_says_where_it_writes() {
        assert_eq!(place_of(-1, 0), Some(Place::Current));
        assert_eq!(place_of(7, libc::RWF_DSYNC), Some(Place::At(7)));
        assert_eq!(place_of(7, libc::RWF_APPEND), Some(Place::End));
        assert_eq!(place_of(-1, libc::RWF_APPEND), None);
        assert_eq!(place_of(7, libc::RWF_NOWAIT), None);
        assert_eq!(place_of(-2, 0), None);
    }

    #[test]
    fn empty_parts_are_left_out() {
        let word = *b"word";
        let vector = [
            iovec { iov_base: std::ptr::null_mut(), iov_len: 0 },
            iovec { iov_base: word.as_ptr().cast_mut().cast(), iov_len: 4 },
        ];
        // SAFETY: a vector of two parts.
        let found = unsafe { with_parts(vector.as_ptr(), 2, |parts| parts[0].to_vec()) };
        assert_eq!(found.as_deref(), Some(&word[..]));
        // SAFETY: a count that no vector has; the vector is not read.
        assert_eq!(unsafe { with_parts(vector.as_ptr(), -1, |_| ()) }, None);
    }
}
