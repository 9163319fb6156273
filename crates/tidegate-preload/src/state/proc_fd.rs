//! All open descriptors of the process, as the kernel lists them.
#![allow(unsafe_code)] // system calls

use std::ffi::c_int;

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

/// Calls `visit` for each directory entry whose name is a number. An entry has 8 bytes of inode, 8
/// of offset, 2 of the entry's length, 1 of type, and the name.
fn numbers(mut entries: &[u8], mut visit: impl FnMut(c_int)) {
    while let Some(&[low, high]) = entries.get(16..18) {
        let len_bytes = usize::from(u16::from_le_bytes([low, high]));
        let Some((entry, rest)) = entries.split_at_checked(len_bytes) else { return };
        let name = entry.get(19..).unwrap_or_default();
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        if let Some(number) = number(name) {
            visit(number);
        }
        if len_bytes == 0 {
            return;
        }
        entries = rest;
    }
}

fn number(name: &[u8]) -> Option<c_int> {
    std::str::from_utf8(name).ok()?.parse().ok()
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

    #[test]
    fn damaged_entries_end_the_list() {
        let mut entries = vec![0; 24];
        entries[16] = 24;
        entries[19] = b'7';
        let seen = |entries: &[u8]| {
            let mut seen = Vec::new();
            numbers(entries, |fd| seen.push(fd));
            seen
        };
        assert_eq!(seen(&entries), [7]);
        assert_eq!(seen(&entries[..20]), Vec::<c_int>::new());
        entries[16] = 0;
        assert_eq!(seen(&entries), Vec::<c_int>::new());
        entries[16] = 3;
        assert!(seen(&entries).len() <= 1);
    }
}
