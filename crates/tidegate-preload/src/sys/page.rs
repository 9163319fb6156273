//! Pages for the length of a call: a hook may run on a small stack, such as a signal handler's.
//!
//! Invariants:
//! 1. A page has one user from [`Page::take`] until it is dropped. No lock and no heap: a handler
//!    that interrupts the user, or a child of `vfork`, gets another page.
//! 2. A page that is in use while the process forks, or in a child of `vfork` that calls `exec`, is
//!    never given back. When no static page is free, pages are mapped.
#![allow(unsafe_code)] // shared statics, and mappings

use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sys::raw::{self, words};

/// Bytes of a page.
pub(crate) const PAGE_BYTES: usize = 4096;
/// Enough pages for the threads that usually run in hooks at once.
const PAGES: usize = 24;

#[repr(C, align(64))]
struct Pages {
    memory: UnsafeCell<[[u8; PAGE_BYTES]; PAGES]>,
    taken: [AtomicBool; PAGES],
}

// SAFETY: only the thread that has set the flag of a page uses it.
unsafe impl Sync for Pages {}

static STATIC: Pages = Pages {
    taken: [const { AtomicBool::new(false) }; PAGES],
    memory: UnsafeCell::new([[0; PAGE_BYTES]; PAGES]),
};

/// [`PAGE_BYTES`] of aligned memory with any content, or no bytes if there was no memory.
pub(crate) struct Page {
    at: *mut u8,
    /// The static page's number, if it is one.
    number: Option<usize>,
}

// SAFETY: the page owns its memory, and any thread may use it.
unsafe impl Send for Page {}
// SAFETY: a shared page is only read.
unsafe impl Sync for Page {}

impl Page {
    pub(crate) fn take() -> Self {
        let number = (0..PAGES).find(|&number| {
            !STATIC.taken[number].load(Ordering::Relaxed)
                && !STATIC.taken[number].swap(true, Ordering::Acquire)
        });
        let at = match number {
            // SAFETY: `number` is below `PAGES`.
            Some(number) => unsafe { STATIC.memory.get().cast::<u8>().add(number * PAGE_BYTES) },
            None => map(PAGE_BYTES).unwrap_or(ptr::null_mut()),
        };
        Self { at, number }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        if self.at.is_null() {
            return &[];
        }
        // SAFETY: the page owns `PAGE_BYTES` bytes there.
        unsafe { std::slice::from_raw_parts(self.at, PAGE_BYTES) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.at.is_null() {
            return &mut [];
        }
        // SAFETY: the page owns `PAGE_BYTES` bytes there.
        unsafe { std::slice::from_raw_parts_mut(self.at, PAGE_BYTES) }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        match self.number {
            Some(number) => STATIC.taken[number].store(false, Ordering::Release),
            None => unmap(self.at, PAGE_BYTES),
        }
    }
}

/// More memory than a page, for the length of a call.
pub(crate) struct Mapped {
    at: *mut u8,
    len_bytes: usize,
}

impl Mapped {
    /// Maps `len_bytes` zero bytes. Returns `None` if there is no memory.
    pub(crate) fn new(len_bytes: usize) -> Option<Self> {
        map(len_bytes).map(|at| Self { at, len_bytes })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has `len_bytes` bytes, which this value owns.
        unsafe { std::slice::from_raw_parts(self.at, self.len_bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has `len_bytes` bytes, which this value owns.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len_bytes) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        unmap(self.at, self.len_bytes);
    }
}

/// Maps zeroed memory.
pub(crate) fn map(len_bytes: usize) -> Option<*mut u8> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let arguments = words![0_usize, len_bytes, protection, flags, -1_i32, 0_usize];
    // SAFETY: new memory, at an address that the kernel chooses.
    let at = raw::checked(unsafe { raw::call(libc::SYS_mmap, arguments) }).ok()?;
    Some(ptr::with_exposed_provenance_mut(at))
}

/// Unmaps memory from [`map`], which nothing uses any more. Does nothing for a null pointer.
pub(crate) fn unmap(at: *mut u8, len_bytes: usize) {
    // SAFETY: memory from `map`. Nothing of the program is mapped at a null pointer.
    unsafe { raw::call(libc::SYS_munmap, words![at, len_bytes]) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_holder_has_a_page_of_its_own() {
        let mut pages: Vec<Page> = (0..2 * PAGES).map(|_| Page::take()).collect();
        for (number, page) in pages.iter_mut().enumerate() {
            page.bytes_mut().fill(u8::try_from(number).unwrap());
        }
        for (number, page) in pages.iter().enumerate() {
            assert_eq!(page.bytes(), [u8::try_from(number).unwrap(); PAGE_BYTES]);
        }
        assert!(pages.iter().any(|page| page.number.is_none()));
        drop(pages);
        assert!(Page::take().number.is_some(), "given back");
    }
}
