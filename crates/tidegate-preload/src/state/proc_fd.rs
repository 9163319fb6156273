//! All open descriptors of the process, as the kernel lists them.
#![allow(unsafe_code)] // system calls

use std::ffi::c_int;

use tidegate_interpose::entries::numbers;

use crate::sys::page::Page;
use crate::sys::path::Opened;
use crate::sys::raw::{self, words};

const DESCRIPTORS_LIKELY: c_int = 4096;

/// Calls `visit` for each open descriptor, noted or not.
pub(crate) fn each(mut visit: impl FnMut(c_int)) {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY;
    let Ok(directory) = Opened::open(libc::AT_FDCWD, c"/proc/self/fd", flags) else {
        // Without /proc: the numbers that a program is likely to use.
        return (0..DESCRIPTORS_LIKELY).for_each(visit);
    };
    let mut entries = Page::take();
    loop {
        let (at, space) = (entries.bytes_mut().as_mut_ptr(), entries.bytes().len());
        // SAFETY: `at` is memory of `space` bytes, aligned for the entries.
        let result =
            unsafe { raw::call(libc::SYS_getdents64, words![directory.number(), at, space]) };
        match raw::checked(result) {
            Ok(1..) => {
                numbers(entries.bytes().get(..result.unsigned_abs()).unwrap_or_default(), |fd| {
                    if fd != directory.number() {
                        visit(fd);
                    }
                });
            }
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn every_open_descriptor_is_visited() {
        let files: Vec<_> = (0..300).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let mut seen = Vec::new();
        each(|fd| seen.push(fd));
        assert!(files.iter().all(|file| seen.contains(&file.as_raw_fd())));
        assert!(seen.iter().all(|fd| *fd >= 0));
    }
}
