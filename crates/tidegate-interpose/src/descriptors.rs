//! All open descriptors of the process, as the kernel lists them.
#![allow(unsafe_code)] // system calls

use std::ffi::c_int;

use crate::raw::{self, words};

const DESCRIPTORS_LIKELY: c_int = 4096;

/// Calls `visit` for each open descriptor of the process. `entries` is memory for the kernel's
/// list, which is read in parts: at least 280 bytes.
pub fn each(entries: &mut [u64], mut visit: impl FnMut(c_int)) {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let path = c"/proc/self/fd";
    // SAFETY: a terminated path.
    let opened = unsafe {
        raw::call(libc::SYS_openat, words![libc::AT_FDCWD, path.as_ptr(), flags, 0])
    };
    let Some(directory) = raw::checked(opened).ok().and_then(|fd| c_int::try_from(fd).ok()) else {
        // Without /proc: the numbers that a program is likely to use.
        return (0..DESCRIPTORS_LIKELY).for_each(visit);
    };
    loop {
        let arguments = words![directory, entries.as_mut_ptr(), size_of_val(entries)];
        // SAFETY: memory of this length, aligned for the entries.
        let Ok(len @ 1..) = raw::checked(unsafe { raw::call(libc::SYS_getdents64, arguments) })
        else {
            break;
        };
        // SAFETY: the kernel has written this many bytes there.
        let bytes = unsafe { std::slice::from_raw_parts(entries.as_ptr().cast(), len) };
        numbers(bytes, |fd| {
            if fd != directory {
                visit(fd);
            }
        });
    }
    // SAFETY: no pointers; the descriptor is this function's.
    unsafe { raw::call(libc::SYS_close, words![directory]) };
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
        each(&mut [0; 64], |fd| seen.push(fd));
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
