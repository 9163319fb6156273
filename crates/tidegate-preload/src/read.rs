//! Hooks: `read` and its kin, and `lseek`.
//!
//! Invariant: they do nothing but look at one number, unless this process absorbs some file; the page cache is right for all
//! others.
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_void};
use std::io::IoSliceMut;

use libc::{iovec, off_t, size_t, ssize_t};

use crate::absorb;
use crate::alike::alike;
use crate::descriptors::ABSORBED;
use crate::logged::{Open, Place};
use crate::next;
use crate::raw::{self, words};

/// Parts of a vector that are looked at here; before a longer one the file is settled.
const PARTS: usize = 64;

/// The absorbed file of `fd`.
#[inline]
fn absorbed(fd: c_int) -> Option<Open> {
    if absorb::any() { find(fd) } else { None }
}

#[cold]
fn find(fd: c_int) -> Option<Open> {
    Open::of(fd).filter(|open| open.known.has(ABSORBED))
}

/// Reads one buffer of an absorbed file; none: go the usual way.
///
/// # Safety
/// As for `read`.
unsafe fn one(fd: c_int, place: Place, at: *mut c_void, len: usize) -> Option<ssize_t> {
    let open = absorbed(fd)?;
    if at.is_null() || len > isize::MAX.unsigned_abs() {
        return None;
    }
    // SAFETY: the program's own buffer, which it says has so many bytes.
    let part = IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(at.cast::<u8>(), len) });
    absorb::read(&open, place, &mut [part]).map(raw::returned)
}

/// Reads several buffers of an absorbed file; none: go the usual way.
///
/// # Safety
/// As for `readv`.
unsafe fn several(fd: c_int, place: Place, vector: *const iovec, count: c_int) -> Option<ssize_t> {
    let open = absorbed(fd)?;
    let count = usize::try_from(count).ok().filter(|count| *count <= PARTS);
    let Some(count) = count.filter(|_| !vector.is_null()) else {
        return absorb::settle_patiently(open.log, open.file, fd).err().map(raw::failed);
    };
    // SAFETY: the program says that so many are there.
    let vector = unsafe { std::slice::from_raw_parts(vector, count) };
    let mut parts: [IoSliceMut<'_>; PARTS] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
    for (part, given) in parts.iter_mut().zip(vector.iter().filter(|given| given.iov_len > 0)) {
        // SAFETY: the program's own buffers.
        *part = IoSliceMut::new(unsafe {
            std::slice::from_raw_parts_mut(given.iov_base.cast::<u8>(), given.iov_len)
        });
    }
    absorb::read(&open, place, &mut parts).map(raw::returned)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn read(fd: c_int, at: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: as promised to this function.
    if let Some(result) = unsafe { one(fd, Place::Current, at, len) } {
        return result;
    }
    match next::read.resolved() {
        // SAFETY: the same function.
        Some(read) => unsafe { read(fd, at, len) },
        // SAFETY: the program's own arguments.
        None => raw::returned(unsafe { raw::call(libc::SYS_read, words![fd, at, len]) }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __read_chk(
    fd: c_int,
    at: *mut c_void,
    len: size_t,
    room: size_t,
) -> ssize_t {
    match next::__read_chk.get() {
        // It ends the program.
        // SAFETY: the same function.
        Some(refuse) if len > room => unsafe { refuse(fd, at, len, room) },
        // SAFETY: it fits.
        _ => unsafe { read(fd, at, len) },
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pread64(
    fd: c_int,
    at: *mut c_void,
    len: size_t,
    offset: off_t,
) -> ssize_t {
    if let Ok(offset) = u64::try_from(offset)
        // SAFETY: as promised to this function.
        && let Some(result) = unsafe { one(fd, Place::At(offset), at, len) }
    {
        return result;
    }
    match next::pread64.resolved() {
        // SAFETY: the same function.
        Some(pread64) => unsafe { pread64(fd, at, len, offset) },
        // SAFETY: the program's own arguments.
        None => raw::returned(unsafe { raw::call(libc::SYS_pread64, words![fd, at, len, offset]) }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __pread64_chk(
    fd: c_int,
    at: *mut c_void,
    len: size_t,
    offset: off_t,
    room: size_t,
) -> ssize_t {
    match next::__pread64_chk.get() {
        // It ends the program.
        // SAFETY: the same function.
        Some(refuse) if len > room => unsafe { refuse(fd, at, len, offset, room) },
        // SAFETY: it fits.
        _ => unsafe { pread64(fd, at, len, offset) },
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn readv(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: as promised to this function.
    if let Some(result) = unsafe { several(fd, Place::Current, vector, count) } {
        return result;
    }
    match next::readv.resolved() {
        // SAFETY: the same function.
        Some(readv) => unsafe { readv(fd, vector, count) },
        // SAFETY: the program's own arguments.
        None => raw::returned(unsafe { raw::call(libc::SYS_readv, words![fd, vector, count]) }),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn preadv64v2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    let place = match u64::try_from(offset) {
        Ok(offset) => Some(Place::At(offset)),
        Err(_) => (offset == -1).then_some(Place::Current),
    };
    // SAFETY: as promised to this function.
    let absorbed = place.and_then(|place| unsafe { several(fd, place, vector, count) });
    if let Some(result) = absorbed {
        return result;
    }
    if let Some(preadv64v2) = next::preadv64v2.resolved() {
        // SAFETY: the same function.
        return unsafe { preadv64v2(fd, vector, count, offset, flags) };
    }
    let arguments = words![fd, vector, count, offset, 0_usize, flags];
    // SAFETY: the program's own arguments.
    raw::returned(unsafe { raw::call(libc::SYS_preadv2, arguments) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn preadv64(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
    if let Ok(place) = u64::try_from(offset).map(Place::At)
        // SAFETY: as promised to this function.
        && let Some(result) = unsafe { several(fd, place, vector, count) }
    {
        return result;
    }
    match next::preadv64.resolved() {
        // SAFETY: the same function.
        Some(preadv64) => unsafe { preadv64(fd, vector, count, offset) },
        None => {
            // SAFETY: the program's own arguments.
            raw::returned(unsafe { raw::call(libc::SYS_preadv, words![fd, vector, count, offset]) })
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn lseek64(fd: c_int, offset: off_t, whence: c_int) -> off_t {
    if let Some(open) = absorbed(fd)
        && let Some(result) = absorb::seek(&open, offset, whence)
    {
        return raw::returned(result) as off_t;
    }
    // SAFETY: no pointers.
    raw::returned(unsafe { raw::call(libc::SYS_lseek, words![fd, offset, whence]) }) as off_t
}

#[unsafe(no_mangle)]
extern "C-unwind" fn lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t {
    lseek64(fd, offset, whence)
}

#[unsafe(no_mangle)]
extern "C-unwind" fn __lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t {
    lseek64(fd, offset, whence)
}

alike! {
    __read(fd: c_int, at: *mut c_void, len: size_t) -> ssize_t = read(fd, at, len);
    pread(fd: c_int, at: *mut c_void, len: size_t, offset: off_t) -> ssize_t = pread64(fd, at, len, offset);
    __pread64(fd: c_int, at: *mut c_void, len: size_t, offset: off_t) -> ssize_t = pread64(fd, at, len, offset);
    __pread_chk(fd: c_int, at: *mut c_void, len: size_t, offset: off_t, room: size_t) -> ssize_t = __pread64_chk(fd, at, len, offset, room);
    preadv2(fd: c_int, vector: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t = preadv64v2(fd, vector, count, offset, flags);
    preadv(fd: c_int, vector: *const iovec, count: c_int, offset: off_t) -> ssize_t = preadv64(fd, vector, count, offset);
}
