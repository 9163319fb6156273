//! Whether a file's bytes are all written and allocated, so that overwriting them changes no metadata.
#![allow(unsafe_code)] // a request of the kernel that no crate has

use std::ffi::c_int;
use std::mem::size_of;

use crate::raw::{self, words};

/// `FS_IOC_FIEMAP`.
const FIEMAP: u64 = 0xc020_660b;
/// Flags of an extent whose bytes can be overwritten in place: the last one, and one that was merged.
/// Others are unwritten, not allocated yet, shared with another file, inline, or compressed.
const IN_PLACE: u32 = 0x0001 | 0x1000;
const LAST: u32 = 0x0001;
/// Extents that are asked for at once, on the stack.
const EXTENTS: usize = 32;

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    start: u64,
    physical: u64,
    len: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved_too: [u32; 3],
}

/// `struct fiemap`, with room for some extents.
#[repr(C)]
struct Map {
    start: u64,
    len: u64,
    flags: u32,
    found: u32,
    room: u32,
    reserved: u32,
    extents: [Extent; EXTENTS],
}

const _: () = assert!(size_of::<Extent>() == 56 && size_of::<Map>() == 32 + EXTENTS * 56);

/// Whether each of the first `size` bytes of the open file is in an extent that is written, and the file's
/// alone. False where the file system does not tell. What was not written back counts as not written.
pub(crate) fn are_dense(fd: c_int, size: u64) -> bool {
    let mut at = 0;
    while at < size {
        let Some(map) = extents_from(fd, at, size - at) else { return false };
        let found = usize::try_from(map.found).unwrap_or(0).min(EXTENTS);
        let Some(end) = dense_end(&map.extents[..found], at) else { return false };
        let is_last = map.extents[..found].last().is_none_or(|extent| extent.flags & LAST != 0);
        if end == at || (is_last && end < size) {
            return false;
        }
        at = end;
    }
    true
}

fn extents_from(fd: c_int, start: u64, len: u64) -> Option<Map> {
    let extents = [Extent::default(); EXTENTS];
    let room = u32::try_from(EXTENTS).unwrap_or(0);
    let mut map = Map { start, len, flags: 0, found: 0, room, reserved: 0, extents };
    let arguments = words![fd, FIEMAP, &raw mut map];
    // SAFETY: the request's structure, with room for as many extents as it says.
    raw::checked(unsafe { raw::call(libc::SYS_ioctl, arguments) }).ok()?;
    Some(map)
}

/// Where the bytes end that follow each other from `at` on in extents that can be overwritten in place; none
/// where there is a hole, or another kind of extent.
fn dense_end(extents: &[Extent], at: u64) -> Option<u64> {
    extents.iter().try_fold(at, |at, extent| {
        let is_dense = extent.flags & !IN_PLACE == 0 && extent.start <= at;
        is_dense.then(|| at.max(extent.start.saturating_add(extent.len)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, len: u64, flags: u32) -> Extent {
        Extent { start, len, flags, ..Extent::default() }
    }

    #[test]
    fn extents_are_dense_up_to_a_hole_or_one_that_is_not_written() {
        const UNWRITTEN: u32 = 0x800;
        let dense = [extent(0, 4096, 0), extent(4096, 8192, LAST)];
        assert_eq!(dense_end(&dense, 0), Some(12_288));
        assert_eq!(dense_end(&dense[1..], 5000), Some(12_288), "asked in the middle of one");
        assert_eq!(dense_end(&dense[1..], 0), None, "a hole");
        assert_eq!(dense_end(&[extent(0, 4096, UNWRITTEN)], 0), None);
        assert_eq!(dense_end(&[extent(0, 4096, 0x2000)], 0), None, "shared");
        assert_eq!(dense_end(&[], 0), Some(0));
    }

    #[test]
    fn an_empty_file_is_dense_and_a_hole_is_not() {
        use std::os::fd::AsRawFd;

        let file = tempfile::tempfile().unwrap();
        assert!(are_dense(file.as_raw_fd(), 0));
        file.set_len(1 << 20).unwrap();
        assert!(!are_dense(file.as_raw_fd(), 1 << 20));
    }
}
