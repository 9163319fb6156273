//! Descriptors that a program inherits which runs without the library, or which must know what they were opened as.
#![allow(unsafe_code)] // system calls

use std::ffi::{CStr, c_int};

use super::environment::SYNC_ALL;
use crate::descriptors::{self, Known};
use crate::logged::Open;
use crate::page::Page;
use crate::path::{Opened, decimal};
use crate::process;
use crate::raw::{self, words};

/// The files behind the descriptors that a program without the library will have: from now on they may change unseen, for as
/// long as the log is in use. With `all`, those too that are closed on `exec`, since there is no telling what else happens
/// in between.
pub(super) fn mark_inherited(all: bool) {
    each_inherited(all, |open| open.mark());
}

/// Takes [`mark_inherited`] back: there is no such program.
pub(super) fn unmark_inherited(all: bool) {
    each_inherited(all, |open| {
        if let Ok(guard) = open.log.lock(open.file) {
            guard.release_sticky();
        }
    });
}

fn each_inherited(all: bool, visit: impl Fn(Open)) {
    each_open(|fd| {
        if all || is_inherited(fd) {
            Open::writable(fd).into_iter().for_each(&visit);
        }
    });
}

const DESCRIPTORS_LIKELY: c_int = 4096;

fn is_inherited(fd: c_int) -> bool {
    raw::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|flags| flags & 1 == 0)
}

/// Calls `visit` for each open descriptor, noted or not.
pub(crate) fn each_open(mut visit: impl FnMut(c_int)) {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY;
    let Ok(directory) = Opened::open(libc::AT_FDCWD, c"/proc/self/fd", flags) else {
        // Without /proc: the numbers that a program is likely to have.
        return (0..DESCRIPTORS_LIKELY).for_each(visit);
    };
    let mut entries = Page::take();
    loop {
        let (at, room) = (entries.bytes_mut().as_mut_ptr(), entries.bytes().len());
        // SAFETY: room for the answer, aligned for its entries.
        let result =
            unsafe { raw::call(libc::SYS_getdents64, words![directory.number(), at, room]) };
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

/// Calls `visit` for each entry of a directory whose name is a number. An entry is: inode 8 bytes, offset 8, its own
/// length 2, type 1, name.
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

/// Bytes that numbers of descriptors may take in the environment; with more, the program is told that all are meant.
pub(super) const LIST_BYTES: usize = 512;

/// A list of descriptors: "3,7d", where `d` is for `O_DSYNC`; or what stands for all.
pub(super) struct List {
    bytes: [u8; LIST_BYTES],
    len_bytes: usize,
}

impl List {
    pub(super) const EMPTY: Self = Self { bytes: [0; LIST_BYTES], len_bytes: 0 };

    /// The descriptors that a program will inherit whose `O_SYNC` was taken away. With `moved` they may get other numbers.
    pub(super) fn of_stripped(moved: bool) -> Self {
        let mut list = Self::EMPTY;
        if moved || process::in_vfork_child() {
            if descriptors::any(descriptors::STRIPPED) {
                list.set(SYNC_ALL);
            }
            return list;
        }
        descriptors::each(0, u32::MAX, |fd, known: Known| {
            if known.has(descriptors::STRIPPED) && is_inherited(fd) {
                list.push(fd, known.has(descriptors::SYNC));
            }
        });
        list
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len_bytes]
    }

    pub(super) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }

    fn set(&mut self, text: &[u8]) {
        self.bytes.fill(0);
        self.bytes[..text.len()].copy_from_slice(text);
        self.len_bytes = text.len();
    }

    fn push(&mut self, fd: c_int, is_sync: bool) {
        if self.as_bytes() == SYNC_ALL {
            return;
        }
        let mut digits = [0; 10];
        let digits = decimal(fd.unsigned_abs(), &mut digits);
        let comma = if self.len_bytes > 0 { &b","[..] } else { b"" };
        let kind = if is_sync { &b""[..] } else { b"d" };
        let before = self.len_bytes;
        let fits = [comma, digits, kind].iter().all(|part| self.append(part));
        if !fits {
            self.len_bytes = before;
            self.set(SYNC_ALL);
        }
    }

    fn append(&mut self, part: &[u8]) -> bool {
        let end = self.len_bytes + part.len();
        // One byte stays: the end of the string.
        let Some(room) = self.bytes[..LIST_BYTES - 1].get_mut(self.len_bytes..end) else {
            return false;
        };
        room.copy_from_slice(part);
        self.len_bytes = end;
        true
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
        each_open(|fd| seen.push(fd));
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

    #[test]
    fn a_list_has_numbers_until_they_are_too_many() {
        let mut list = List::EMPTY;
        list.push(3, true);
        list.push(77, false);
        assert_eq!(list.as_bytes(), b"3,77d");
        (0..1000).for_each(|fd| list.push(fd, false));
        assert_eq!(list.as_bytes(), SYNC_ALL);
        assert_eq!(list.as_c_str().to_bytes(), SYNC_ALL);
    }
}
