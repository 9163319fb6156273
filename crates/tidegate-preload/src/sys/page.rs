//! Pages for the length of a call, since a hook may run on a stack that has no free space for them:
//! a signal handler's, say.
//!
//! Invariants:
//! 1. A page is one caller's from [`Page::take`] until it is dropped. No lock and no heap: a
//!    handler that interrupts a holder, or a child of `vfork`, gets another one.
//! 2. What is held while the process forks, or by a child of `vfork` that calls `exec`, is never
//!    given back. With the static pages gone, pages are mapped.
#![allow(unsafe_code)] // shared statics, and mappings

use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sys::raw::{self, words};

/// Bytes of a page.
pub(crate) const PAGE_BYTES: usize = 4096;
/// More than a few threads hold at once.
const PAGES: usize = 24;

#[repr(C, align(64))]
struct Pages {
    memory: UnsafeCell<[[u8; PAGE_BYTES]; PAGES]>,
    taken: [AtomicBool; PAGES],
}

// SAFETY: a page is used by the thread alone that has set its flag.
unsafe impl Sync for Pages {}

static STATIC: Pages = Pages {
    taken: [const { AtomicBool::new(false) }; PAGES],
    memory: UnsafeCell::new([[0; PAGE_BYTES]; PAGES]),
};

/// Memory of [`PAGE_BYTES`], aligned, of any content; or of none, where there is none.
pub(crate) struct Page {
    at: *mut u8,
    /// The static page's number, if it is one.
    number: Option<usize>,
}

// SAFETY: its memory is nobody else's, whichever thread has it.
unsafe impl Send for Page {}
// SAFETY: what is shared is only read.
unsafe impl Sync for Page {}

impl Page {
    pub(crate) fn take() -> Self {
        let number = (0..PAGES).find(|&number| {
            !STATIC.taken[number].load(Ordering::Relaxed)
                && !STATIC.taken[number].swap(true, Ordering::Acquire)
        });
        let at = match number {
            // SAFETY: below the number of pages.
            Some(number) => unsafe { STATIC.memory.get().cast::<u8>().add(number * PAGE_BYTES) },
            None => map(PAGE_BYTES).unwrap_or(ptr::null_mut()),
        };
        Self { at, number }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        if self.at.is_null() {
            return &[];
        }
        // SAFETY: so many bytes, which nobody else uses.
        unsafe { std::slice::from_raw_parts(self.at, PAGE_BYTES) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.at.is_null() {
            return &mut [];
        }
        // SAFETY: so many bytes, which nobody else uses.
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
    /// So many zero bytes; none where there is no memory.
    pub(crate) fn new(len_bytes: usize) -> Option<Self> {
        map(len_bytes).map(|at| Self { at, len_bytes })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes, which nobody else uses.
        unsafe { std::slice::from_raw_parts(self.at, self.len_bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: so many bytes, which nobody else uses.
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
    // SAFETY: new memory where the kernel likes it.
    let at = raw::checked(unsafe { raw::call(libc::SYS_mmap, arguments) }).ok()?;
    Some(ptr::with_exposed_provenance_mut(at))
}

/// Unmaps what [`map`] gave, which nobody uses any more.
pub(crate) fn unmap(at: *mut u8, len_bytes: usize) {
    // SAFETY: memory of our own; NULL is refused by the kernel or was never mapped.
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
