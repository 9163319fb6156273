//! Checks whether memory that the program passes can be read: where the kernel returns `EFAULT`,
//! the library must not fault.
//!
//! The kernel is asked once per page, by a call that reads the page and does nothing else. A page
//! that the kernel could read counts as readable until the program takes memory away ([`changed`]).
//! So a buffer in use costs a look at one word.
//!
//! Invariants:
//! 1. A page is noted only after the kernel has read it, in the epoch that was current before the
//!    kernel read it.
//! 2. An epoch ends after each call of the program that takes memory away, or the right to read it.
//!    Memory that the C library gives back by itself (a large block that is freed) is not seen: a
//!    write from there faults as a read would.
//! 3. No lock, no memory from the heap: a note that is lost is made again.
//! 4. No page that the program has mapped from a file is noted: any process may truncate the file,
//!    and then the kernel returns `EFAULT`. The kernel is asked each time. If a file is truncated
//!    between that and the copy, the library faults as a read would.
//!
//! Entry points: [`is_readable`], [`text`], [`changed`]; [`mapped_from_file`], [`unmapped`].
#![allow(unsafe_code)] // memory of the program

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::state::process;
use crate::sys::page::PAGE_BYTES;
use crate::sys::raw::{self, words};

/// Pages in one block, which has one word.
const BLOCK_PAGES: usize = 16;
const EPOCH_SHIFT: u32 = 16;
const BLOCK_SHIFT: u32 = 32;
/// Words for blocks: number of the block (upper half), epoch, and a bit for each page.
static NOTED: [AtomicU64; 4096] = [const { AtomicU64::new(0) }; 4096];
/// The current epoch. Its lower 16 bits are noted, and 0 only while [`changed`] clears the notes.
static EPOCH: AtomicU32 = AtomicU32::new(1);

/// The end of the memory that a program can have.
const END: usize = 1 << if cfg!(target_arch = "x86_64") { 47 } else { 48 };

/// Returns whether the kernel can read the `len` bytes at `at`, or could before in this epoch.
#[inline]
pub(crate) fn is_readable(at: *const c_void, len: usize) -> bool {
    let at = at.addr();
    if len == 0 {
        return true;
    }
    if !(PAGE_BYTES..END).contains(&at) || len >= END - at {
        return false;
    }
    let last = (at + len - 1) / PAGE_BYTES;
    let mut page = at / PAGE_BYTES;
    while page <= last {
        let block = page / BLOCK_PAGES;
        let block_last = last.min(block * BLOCK_PAGES + BLOCK_PAGES - 1);
        if !is_noted(block, pages(page, block_last)) && !probe(block, page, block_last) {
            return false;
        }
        page = block_last + 1;
    }
    true
}

/// Returns a string of the program that is short enough for a path. Returns `None` if it is NULL,
/// too long, or cannot be read: the kernel or the C library then returns the error.
pub(crate) fn text<'a>(at: *const c_char) -> Option<&'a CStr> {
    text_up_to(at, PAGE_BYTES)
}

/// Returns the name of a program as [`text`] does. After the log was given up, returns the string
/// unchecked, as the C library reads it.
pub(crate) fn name_of_program<'a>(at: *const c_char) -> Option<&'a CStr> {
    if !process::has_given_up() {
        return text(at);
    }
    // SAFETY: the caller of a C function passes a terminated string.
    (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) })
}

/// Returns a string of at most `most_bytes`, its NUL included, or `None` as [`text`] does.
pub(crate) fn text_up_to<'a>(at: *const c_char, most_bytes: usize) -> Option<&'a CStr> {
    let mut seen = 0;
    while seen < most_bytes {
        let start = at.wrapping_add(seen);
        let step = (PAGE_BYTES - start.addr() % PAGE_BYTES).min(most_bytes - seen);
        if !is_readable(start.cast(), step) {
            return None;
        }
        // SAFETY: `is_readable` has checked `step` bytes. The caller of a C function keeps its
        // string for the length of the call.
        let part = unsafe { std::slice::from_raw_parts(start.cast::<u8>(), step) };
        if CStr::from_bytes_until_nul(part).is_ok() {
            // SAFETY: all bytes up to the NUL are readable.
            return Some(unsafe { CStr::from_ptr(at) });
        }
        seen += step;
    }
    None
}

/// Ends the epoch. To be called after memory of the program was taken away.
pub(crate) fn changed() {
    let epoch = EPOCH.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
    if low_half(epoch) == 0 {
        // Notes of earlier epochs would match the numbers that come again.
        for noted in &NOTED {
            noted.store(0, Ordering::SeqCst);
        }
        EPOCH.fetch_add(1, Ordering::SeqCst);
    }
}

/// Memory that the program has mapped from a file.
struct FromFile {
    /// 0 if the entry is free.
    start: AtomicUsize,
    /// Not above `start` if it is not known yet.
    end: AtomicUsize,
}

static FROM_FILES: [FromFile; 64] =
    [const { FromFile { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; 64];
/// A range over all mappings of files that found no free entry.
static OTHERS: FromFile =
    FromFile { start: AtomicUsize::new(usize::MAX), end: AtomicUsize::new(0) };

impl FromFile {
    fn range(&self) -> (usize, usize) {
        (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst))
    }

    /// Takes the entry for a range, if it is free.
    fn take(&self, start: usize, end: usize) -> bool {
        let order = Ordering::SeqCst;
        let is_free = self.start.compare_exchange(0, start, order, Ordering::Relaxed).is_ok();
        if is_free {
            self.end.store(end, order);
        }
        is_free
    }
}

/// Notes that the program has mapped a file here.
pub(crate) fn mapped_from_file(start: usize, len: usize) {
    let end = start.saturating_add(len);
    if !FROM_FILES.iter().any(|place| place.take(start, end)) {
        OTHERS.end.fetch_max(end, Ordering::SeqCst);
        OTHERS.start.fetch_min(start, Ordering::SeqCst);
    }
    // Notes of the memory that lay there before end with the epoch.
    changed();
}

/// Notes that nothing is mapped here any more.
pub(crate) fn unmapped(start: usize, len: usize) {
    for place in &FROM_FILES {
        let (own_start, own_end) = place.range();
        let is_known = own_start < own_end;
        // If a part stays mapped, so does the entry: too large a range only costs time.
        if is_known && start <= own_start && own_end <= start.saturating_add(len) {
            place.end.store(0, Ordering::SeqCst);
            place.start.store(0, Ordering::SeqCst);
        }
    }
}

/// Returns whether the program has mapped a file in this range.
pub(crate) fn is_from_file(start: usize, len: usize) -> bool {
    FROM_FILES.iter().chain([&OTHERS]).any(|place| {
        let (own_start, own_end) = place.range();
        own_start < start.saturating_add(len) && start < own_end
    })
}

fn low_half(number: u32) -> u64 {
    u64::from(number & 0xffff)
}

/// Returns the bits of these pages of a block.
#[inline]
fn pages(first: usize, last: usize) -> u64 {
    let (first, last) = (first % BLOCK_PAGES, last % BLOCK_PAGES);
    (2 << last) - (1 << first)
}

#[inline]
fn place(block: usize) -> &'static AtomicU64 {
    &NOTED[(block ^ block >> 12) % NOTED.len()]
}

/// Returns the word of a block without readable pages.
#[inline]
fn empty(block: usize, epoch: u32) -> u64 {
    (block as u64) << BLOCK_SHIFT | low_half(epoch) << EPOCH_SHIFT
}

#[inline]
fn is_noted(block: usize, wanted: u64) -> bool {
    let noted = place(block).load(Ordering::Acquire);
    noted & !(pages(0, BLOCK_PAGES - 1) & !wanted) == empty(block, epoch()) | wanted
}

#[inline]
fn epoch() -> u32 {
    EPOCH.load(Ordering::SeqCst)
}

/// Asks the kernel, and notes the pages that it could read. Returns false without asking once the
/// log was given up: a filter of system calls may kill for the call, and the caller then leaves the
/// pointer to the kernel.
#[cold]
fn probe(block: usize, first: usize, last: usize) -> bool {
    if process::has_given_up() {
        return false;
    }
    let none = empty(block, epoch());
    let mut noted = place(block).load(Ordering::Acquire);
    if noted & !pages(0, BLOCK_PAGES - 1) != none {
        noted = none;
    }
    for page in first..=last {
        let bit = pages(page, page);
        if noted & bit == 0 && !kernel_reads(page * PAGE_BYTES) {
            return false;
        }
        noted |= bit;
    }
    if is_from_file(first * PAGE_BYTES, (last + 1 - first) * PAGE_BYTES) {
        return true;
    }
    place(block).store(noted, Ordering::Release);
    true
}

/// Returns whether the program runs under valgrind, which checks the arguments of system calls. It
/// would report the probe below as a mistake of the program. It finds bad pointers itself.
fn is_judged() -> bool {
    /// `RUNNING_ON_VALGRIND`.
    const REQUEST: [usize; 6] = [0x1001, 0, 0, 0, 0, 0];
    let mut answer = 0_usize;
    // SAFETY: no effect but for valgrind, which takes them as a request and sets `answer`.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            inout("rdx") answer, in("rax") REQUEST.as_ptr(),
        );
    }
    // SAFETY: no effect but for valgrind, which takes them as a request and sets `answer`.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!(
            "ror x12, x12, #3", "ror x12, x12, #13", "ror x12, x12, #51", "ror x12, x12, #61",
            "orr x10, x10, x10",
            inout("x3") answer, in("x4") REQUEST.as_ptr(), out("x12") _,
        );
    }
    answer != 0
}

/// Returns whether the kernel can read the word at an address.
fn kernel_reads(at: usize) -> bool {
    /// An invalid way to change the signal mask: the kernel reads the mask, and the call fails.
    const NO_WAY: c_int = -1;
    const FAULT: isize = -(libc::EFAULT as isize);
    if is_judged() {
        return true;
    }
    let arguments = words![NO_WAY, at, 0_usize, size_of::<u64>()];
    // SAFETY: the kernel reads a mask, if it can, and changes nothing.
    unsafe { raw::call(libc::SYS_rt_sigprocmask, arguments) != FAULT }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::ptr;

    use super::*;
    use crate::sys::page::{map, unmap};

    fn address(at: usize) -> *const c_void {
        ptr::without_provenance(at)
    }

    /// Takes the access to these pages away. They stay mapped, so that no other memory comes there.
    fn take_away(start: *mut u8, bytes: usize) {
        // SAFETY: pages of this test, which nothing refers to.
        assert_eq!(unsafe { libc::mprotect(start.cast(), bytes, libc::PROT_NONE) }, 0);
        changed();
    }

    #[test]
    fn pointers_that_no_program_has_are_not_readable() {
        let byte = 0_u8;
        assert!(is_readable((&raw const byte).cast(), 1));
        for bad in [0_usize, 1, 4095, 1 << 62, usize::MAX] {
            assert!(!is_readable(address(bad), 1), "{bad:#x}");
        }
        assert!(!is_readable((&raw const byte).cast(), usize::MAX));
    }

    #[test]
    fn memory_is_readable_up_to_its_end_and_until_it_is_taken_away() {
        const PAGES: usize = 3 * BLOCK_PAGES;
        let start = map((PAGES + 1) * PAGE_BYTES).unwrap();
        take_away(start.wrapping_add(PAGES * PAGE_BYTES), PAGE_BYTES);
        for _ in 0..2 {
            assert!(is_readable(start.cast(), PAGES * PAGE_BYTES));
            assert!(is_readable(start.wrapping_add(PAGES * PAGE_BYTES - 1).cast(), 1));
            assert!(!is_readable(start.wrapping_add(PAGES * PAGE_BYTES - 1).cast(), 2));
            assert!(!is_readable(start.cast(), PAGES * PAGE_BYTES + 1));
        }
        take_away(start, PAGES * PAGE_BYTES);
        assert!(!is_readable(start.cast(), 1));
        unmap(start, (PAGES + 1) * PAGE_BYTES);
    }

    /// Maps so many pages of a file as the hook of `mmap` does.
    fn map_file(file: &File, pages: usize) -> usize {
        let (len, fd) = (pages * PAGE_BYTES, file.as_raw_fd());
        let arguments = words![0_usize, len, libc::PROT_READ, libc::MAP_SHARED, fd, 0_usize];
        // SAFETY: new memory, at an address that the kernel chooses.
        let start = raw::checked(unsafe { raw::call(libc::SYS_mmap, arguments) }).unwrap();
        mapped_from_file(start, len);
        start
    }

    fn unmap_file(start: usize, pages: usize) {
        unmapped(start, pages * PAGE_BYTES);
        unmap(ptr::with_exposed_provenance_mut(start), pages * PAGE_BYTES);
        changed();
    }

    #[test]
    fn a_mapped_file_is_readable_until_it_is_cut() {
        let file = tempfile::tempfile().unwrap();
        let whole = 2 * PAGE_BYTES as u64;
        file.set_len(whole).unwrap();
        // One more than there are entries.
        let starts: Vec<_> = (0..=FROM_FILES.len()).map(|_| map_file(&file, 2)).collect();
        let all_are = |wanted: bool| {
            let last = starts.iter().map(|start| address(start + PAGE_BYTES));
            last.map(|at| is_readable(at, 1)).all(|found| found == wanted)
        };
        assert!(all_are(true) && all_are(true));
        file.set_len(1).unwrap();
        assert!(all_are(false));
        file.set_len(whole).unwrap();
        assert!(all_are(true));
        for start in &starts {
            assert!(is_from_file(start + PAGE_BYTES, 1));
            unmap_file(*start, 2);
        }
        assert!(FROM_FILES.iter().all(|place| place.range() == (0, 0)));
    }

    #[test]
    fn strings_end_before_what_cannot_be_read() {
        let start = map(2 * PAGE_BYTES).unwrap();
        take_away(start.wrapping_add(PAGE_BYTES), PAGE_BYTES);
        let last = start.wrapping_add(PAGE_BYTES - 4);
        // SAFETY: the last four bytes of the first page, which is accessible.
        unsafe { ptr::copy_nonoverlapping(c"abc".as_ptr().cast(), last, 4) };
        assert_eq!(text(last.cast()), Some(c"abc"));
        // SAFETY: the last byte of the first page.
        unsafe { last.wrapping_add(3).write(b'd') };
        assert_eq!(text(last.cast()), None);
        assert_eq!(text(ptr::null()), None);
        let long = vec![b'x'; PAGE_BYTES];
        assert_eq!(text(long.as_ptr().cast()), None);
        unmap(start, 2 * PAGE_BYTES);
    }

    #[test]
    fn epochs_end_and_their_numbers_come_again() {
        let byte = 0_u8;
        assert!(is_readable((&raw const byte).cast(), 1));
        for _ in 0..70_000 {
            changed();
            assert_ne!(low_half(epoch()), 0);
        }
        assert!(is_readable((&raw const byte).cast(), 1));
    }
}
