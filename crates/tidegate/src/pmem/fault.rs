//! Memory of another process that is mapped here, and that its owner may shorten.

use super::poison::PoisonWatch;

/// Watches a mapping of another process's file. An access to a page that the file no longer has
/// finds zeroes, and is noted; without the watch it would end this process.
pub struct FaultWatch(PoisonWatch);

impl FaultWatch {
    /// Watches the `len` bytes at `start`, a mapping whose pages have `page_bytes`, until this is
    /// dropped. The mapping has to outlive the watch. Returns `None` if this process watches as
    /// many mappings as it can.
    pub fn new(start: usize, len: usize, page_bytes: usize) -> Option<Self> {
        PoisonWatch::new(start, len, page_bytes).map(Self)
    }

    /// Returns whether each access so far has found its page.
    pub fn is_whole(&self) -> bool {
        self.0.is_whole()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_file_that_is_cut_while_it_is_mapped_ends_no_process() {
        let page_bytes = rustix::param::page_size();
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * page_bytes as u64).unwrap();
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let len = 2 * page_bytes;
        // SAFETY: makes a new mapping.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        let watch = FaultWatch::new(at.addr(), len, page_bytes).unwrap();
        file.set_len(page_bytes as u64).unwrap();
        let bytes: *mut u8 = at.cast();
        let read = |page: usize| {
            let byte = bytes.wrapping_add(page * page_bytes);
            // SAFETY: the mapping has two pages; the handler stands in for the one that is gone.
            unsafe { byte.read_volatile() }
        };
        assert_eq!((read(0), watch.is_whole()), (0, true));
        assert_eq!((read(1), watch.is_whole()), (0, false));
        drop(watch);
        // SAFETY: the mapping was made above, and is not used any more.
        unsafe { libc::munmap(at, len) };
    }
}
