//! Extents of a file: whether all bytes are written and allocated, so that overwrites change no
//! metadata, or whether some have no blocks yet.

use std::ffi::c_int;

use tidegate::log::recover::{MappedExtent, MappedExtents};
use tidegate::log::{FileSystemRef, Log};

use crate::state::process::Holding;
use crate::sys::raw;

/// Flags that an extent may have if its bytes can be overwritten in place: "last" and "merged". The
/// others mean unwritten, not allocated yet, shared with another file, inline, or compressed.
const IN_PLACE: u32 = 0x0001 | 0x1000;
/// Flag of an extent whose blocks are not allocated yet.
const DELAYED: u32 = 0x0004;
/// Flag of an extent whose location is unknown, as before its blocks are allocated.
const UNKNOWN: u32 = 0x0002;
/// Number of extents of one request, kept on the stack.
const EXTENTS: usize = 32;

/// Returns whether the first `size` bytes of the open file are dense: each is in an extent that is
/// written back and not shared with another file. Returns `false` if the file system does not tell.
pub(crate) fn are_dense(fd: c_int, size: u64) -> bool {
    are_in_extents(fd, size, IN_PLACE)
}

/// Returns the count of changes of the file system, if a real sync of the open file from now on
/// commits all of these changes: it allocates blocks for some of the file's first `bytes`, in a
/// transaction that is not older than any counted change.
pub(crate) fn commits_all(
    log: &Log,
    file_system: FileSystemRef,
    (fd, bytes): (c_int, u64),
) -> Option<u64> {
    let _holding = Holding::new()?;
    // Counted before the file system is asked.
    let changes = log.file_systems().changes(file_system);
    are_delayed(fd, bytes).then_some(changes)
}

/// Returns whether a sync from now on makes the first `size` bytes of the open file
/// [dense](are_dense). Returns `false` if the file system does not tell.
pub(crate) fn become_dense(fd: c_int, size: u64) -> bool {
    are_in_extents(fd, size, IN_PLACE | DELAYED | UNKNOWN)
}

/// Returns whether each of the first `size` bytes is in an extent without flags other than `flags`.
fn are_in_extents(fd: c_int, size: u64, flags: u32) -> bool {
    let file = raw::borrowed(fd);
    let mut at = 0;
    while at < size {
        let Ok(map) = MappedExtents::<EXTENTS>::of(file, at, size - at) else { return false };
        let Some(end) = dense_end(map.as_slice(), at, flags) else { return false };
        let is_last = map.as_slice().last().is_none_or(MappedExtent::is_last);
        if end == at || (is_last && end < size) {
            return false;
        }
        at = end;
    }
    true
}

/// Returns the end of the bytes from `at` on that are contiguous in extents without flags other
/// than `flags`, or `None` if there is a hole, or an extent with another flag.
fn dense_end(extents: &[MappedExtent], at: u64, flags: u32) -> Option<u64> {
    extents.iter().try_fold(at, |at, extent| {
        let is_dense = extent.flags & !flags == 0 && extent.start <= at;
        is_dense.then(|| at.max(extent.end()))
    })
}

/// Returns whether write-back of the first `size` bytes allocates blocks, so that a sync from now
/// on changes the file's metadata. Looks at the first [`EXTENTS`] extents only. Returns `false` if
/// the file system does not tell.
pub(crate) fn are_delayed(fd: c_int, size: u64) -> bool {
    let map = MappedExtents::<EXTENTS>::of(raw::borrowed(fd), 0, size.max(1));
    map.is_ok_and(|map| map.as_slice().iter().any(|extent| extent.flags & DELAYED != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, len: u64, flags: u32) -> MappedExtent {
        MappedExtent::new(start, len, flags)
    }

    #[test]
    fn extents_are_dense_up_to_a_hole_or_one_that_is_not_written() {
        const LAST: u32 = 0x0001;
        const UNWRITTEN: u32 = 0x800;
        let dense = [extent(0, 4096, 0), extent(4096, 8192, LAST)];
        assert_eq!(dense_end(&dense, 0, IN_PLACE), Some(12_288));
        assert_eq!(
            dense_end(&dense[1..], 5000, IN_PLACE),
            Some(12_288),
            "asked in the middle of one"
        );
        assert_eq!(dense_end(&dense[1..], 0, IN_PLACE), None, "a hole");
        assert_eq!(dense_end(&[extent(0, 4096, UNWRITTEN)], 0, IN_PLACE), None);
        assert_eq!(dense_end(&[extent(0, 4096, 0x2000)], 0, IN_PLACE), None, "shared");
        assert_eq!(dense_end(&[], 0, IN_PLACE), Some(0));
    }

    #[test]
    fn extents_become_dense_that_wait_for_their_blocks_alone() {
        let ending = |flags| dense_end(&[extent(0, 4096, flags)], 0, IN_PLACE | DELAYED | UNKNOWN);
        assert_eq!(ending(DELAYED | UNKNOWN), Some(4096));
        assert_eq!(ending(0), Some(4096));
        for (flags, what) in [(0x800, "unwritten"), (0x2000, "shared"), (0x200, "inline")] {
            assert_eq!(ending(flags), None, "{what}");
        }
    }

    #[test]
    fn what_was_written_becomes_dense() {
        use std::io::Write;
        use std::os::fd::AsRawFd;

        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 5000]).unwrap();
        assert!(become_dense(file.as_raw_fd(), 5000));
    }

    /// On ext4 and XFS files get blocks at write-back, on other file systems at once.
    #[test]
    fn what_was_synced_has_its_blocks() {
        use std::io::Write;
        use std::os::fd::AsRawFd;

        let mut file = tempfile::tempfile().unwrap();
        assert!(!are_delayed(file.as_raw_fd(), 0));
        file.write_all(&[1; 5000]).unwrap();
        println!("delayed: {}", are_delayed(file.as_raw_fd(), 5000));
        file.sync_all().unwrap();
        assert!(!are_delayed(file.as_raw_fd(), 5000));
    }

    #[test]
    fn an_empty_file_is_dense_and_a_hole_is_not() {
        use std::os::fd::AsRawFd;

        let file = tempfile::tempfile().unwrap();
        assert!(are_dense(file.as_raw_fd(), 0));
        assert!(become_dense(file.as_raw_fd(), 0));
        file.set_len(1 << 20).unwrap();
        assert!(!are_dense(file.as_raw_fd(), 1 << 20));
        assert!(!become_dense(file.as_raw_fd(), 1 << 20));
    }
}
