//! Hooks: `write` and its kin.
//!
//! Invariants: what is no file that can be covered goes to the C library's function, with all it
//! does; where that is not known yet, to the kernel. A write to a plain file goes to the kernel in
//! its lane. A buffer that cannot be read is left to the kernel, which refuses it or writes what
//! comes before.
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

/// Parts of a vector that are looked at here; with more, the file leaves the log.
const PARTS: usize = 64;

/// `pwritev2` flags that change nothing about what the log has to say: the kernel syncs where it is
/// told to.
const HARMLESS: c_int = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND;

/// The program's buffer; none where the kernel could not read all of it.
///
/// # Safety
/// Nobody takes it away meanwhile.
unsafe fn part<'a>(at: *const c_void, len: usize) -> Option<IoSlice<'a>> {
    if len == 0 {
        return Some(IoSlice::new(&[]));
    }
    // SAFETY: it is readable. Others may write to it meanwhile, as they may while the kernel copies
    // it.
    is_readable(at, len)
        .then(|| IoSlice::new(unsafe { std::slice::from_raw_parts(at.cast(), len) }))
}

/// Runs `run` with the parts of the program's vector that have bytes; none where it cannot be
/// looked at.
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
    // SAFETY: so many are readable.
    let vector = unsafe { std::slice::from_raw_parts(vector, count) };
    let mut page = Page::take();
    // A page is aligned for anything.
    let memory = page.bytes_mut().as_mut_ptr().cast::<c_void>().cast::<IoSlice<'_>>();
    let mut used = 0;
    if page.bytes().len() < PARTS * size_of::<IoSlice<'_>>() {
        return None;
    }
    for given in vector.iter().filter(|given| given.iov_len > 0) {
        // SAFETY: as for `writev`.
        let part = unsafe { part(given.iov_base, given.iov_len) }?;
        // SAFETY: the page has places for all parts.
        let place = unsafe { memory.add(used) };
        // SAFETY: the place is in the page, which is aligned.
        unsafe { place.write(part) };
        used += 1;
    }
    // SAFETY: so many were written.
    Some(run(unsafe { std::slice::from_raw_parts(memory, used) }))
}

/// A write of one buffer.
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
        // SAFETY: as for `write`.
        match unsafe { part(at, len) } {
            Some(part) => write_as_opened(open, &Request { parts: &[part], place }, &kernel),
            None => open.unseen_write(|| kernel(open.fd)),
        }
    };
    let plain = open.write_plain(|| kernel(open.fd));
    raw::returned(plain.map_or_else(by_entry, |result| plain_as_opened(open, place, result)))
}

/// A write of several buffers.
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
        // SAFETY: as for `writev`.
        unsafe { with_parts(vector, count, write) }
            .unwrap_or_else(|| open.unseen_write(|| kernel(open.fd)))
    };
    let plain = open.write_plain(|| kernel(open.fd));
    raw::returned(plain.map_or_else(by_entry, |result| plain_as_opened(open, place, result)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn write(fd: c_int, at: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: the program's own arguments.
    let kernel = |fd: c_int| unsafe { raw::call(libc::SYS_write, words![fd, at, len]) };
    match (Open::writable(fd), next::write.resolved()) {
        // SAFETY: as promised to this function.
        (Some(open), _) => unsafe { one(&open, Place::Current, at, len, kernel) },
        // SAFETY: the same function.
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
    // SAFETY: the program's own arguments.
    let kernel = |fd: c_int| unsafe { raw::call(libc::SYS_pwrite64, words![fd, at, len, offset]) };
    let open = Open::writable(fd).zip(u64::try_from(offset).ok());
    match (open, next::pwrite64.resolved()) {
        // SAFETY: as promised to this function.
        (Some((open, offset)), _) => unsafe { one(&open, Place::At(offset), at, len, kernel) },
        (None, Some(pwrite64)) => {
            // SAFETY: the same function.
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
    // SAFETY: the program's own arguments.
    let kernel = |fd: c_int| unsafe { raw::call(libc::SYS_writev, words![fd, vector, count]) };
    match (Open::writable(fd), next::writev.resolved()) {
        // SAFETY: as promised to this function.
        (Some(open), _) => unsafe { several(&open, Place::Current, vector, count, kernel) },
        // SAFETY: the same function.
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
    // SAFETY: the program's own arguments. All of the offset is in the first half of the pair.
    let kernel =
        |fd: c_int| unsafe { raw::call(libc::SYS_pwritev, words![fd, vector, count, offset]) };
    let open = Open::writable(fd).zip(u64::try_from(offset).ok());
    match (open, next::pwritev64.resolved()) {
        (Some((open, offset)), _) => {
            // SAFETY: as promised to this function.
            unsafe { several(&open, Place::At(offset), vector, count, kernel) }
        }
        (None, Some(pwritev64)) => {
            // SAFETY: the same function.
            every_write::returned(fd, unsafe { pwritev64(fd, vector, count, offset) })
        }
        (None, None) => every_write::returned(fd, raw::returned(kernel(fd))),
    }
}

/// Where `pwritev2` writes; none for what the log does not take.
fn place_of(offset: off_t, flags: c_int) -> Option<Place> {
    if flags & !HARMLESS != 0 {
        return None;
    }
    match (flags & libc::RWF_APPEND != 0, offset) {
        // To the end, and the position moves there.
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
        // SAFETY: the program's own arguments.
        unsafe { raw::call(libc::SYS_pwritev2, arguments) }
    };
    match (Open::writable(fd), next::pwritev64v2.resolved()) {
        (Some(open), _) => match place_of(offset, flags) {
            // SAFETY: as promised to this function.
            Some(place) => unsafe { several(&open, place, vector, count, kernel) },
            None => raw::returned(open.unseen_write(|| kernel(fd))),
        },
        (None, Some(pwritev64v2)) => {
            // SAFETY: the same function.
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
        // SAFETY: a count that no vector has is not followed.
        assert_eq!(unsafe { with_parts(vector.as_ptr(), -1, |_| ()) }, None);
    }
}
