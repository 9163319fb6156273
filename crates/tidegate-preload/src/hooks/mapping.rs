//! Hooks: files that are mapped.
//!
//! Invariants:
//! 1. Before a mapping exists that can change a file, the file is unlogged for as long as the
//!    process lives.
//! 2. Mappings that may become writable later are noted in [`NOTED`]. If that is full, the file is
//!    unlogged at once. `MADV_REMOVE` changes the file by such a mapping, too.
#![allow(unsafe_code)] // C's calling convention and pointers

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libc::{off_t, size_t, ssize_t};
use tidegate::log::FileRef;

use crate::covered::{Open, unseen};
use crate::state::process;
use crate::sys::raw::{self, words};
use crate::sys::readable;

/// A shared mapping, not writable, of a file that is open for writing.
struct Noted {
    /// 0 if the entry is free.
    start: AtomicUsize,
    end: AtomicUsize,
    file: AtomicU64,
}

static NOTED: [Noted; 128] = [const {
    Noted { start: AtomicUsize::new(0), end: AtomicUsize::new(0), file: AtomicU64::new(0) }
}; 128];
/// How many entries are in use.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The `start` of an entry that is being filled.
const BUSY: usize = usize::MAX;

impl Noted {
    fn range(&self) -> Option<(usize, usize)> {
        let start = self.start.load(Ordering::Acquire);
        let end = self.end.load(Ordering::Acquire);
        (start != 0 && start != BUSY).then_some((start, end))
    }

    fn place(&self, start: usize, end: usize) {
        self.end.store(end, Ordering::Release);
        self.start.store(start, Ordering::Release);
    }
}

/// Notes a mapping. Returns false if no entry is free.
fn note(start: usize, len: usize, file: FileRef) -> bool {
    let taken = NOTED.iter().find(|noted| {
        noted.start.compare_exchange(0, BUSY, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    });
    if let Some(noted) = taken {
        noted.file.store(file.to_word(), Ordering::Relaxed);
        noted.place(start, start + len);
        COUNT.fetch_add(1, Ordering::AcqRel);
    }
    taken.is_some()
}

/// Calls `visit` for each noted mapping that has a byte of the `len` at `start`.
fn overlapping(start: usize, len: usize, mut visit: impl FnMut(&Noted, (usize, usize))) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    for noted in &NOTED {
        if let Some(range) = noted.range()
            && range.0 < start.saturating_add(len)
            && start < range.1
        {
            visit(noted, range);
        }
    }
}

fn unmapped(start: usize, len: usize) {
    readable::unmapped(start, len);
    overlapping(start, len, |noted, range| {
        // If a part of the mapping stays, so does the whole note: too much does no harm.
        if start <= range.0 && range.1 <= start.saturating_add(len) {
            noted.start.store(0, Ordering::Release);
            COUNT.fetch_sub(1, Ordering::AcqRel);
        }
    });
}

const SHARED: c_int = libc::MAP_SHARED;

/// Returns the open file that a mapping can change, now or later.
fn shared(flags: c_int, fd: c_int) -> Option<Open> {
    // MAP_SHARED_VALIDATE has the bit of MAP_SHARED, too.
    if flags & SHARED == 0 || flags & libc::MAP_ANONYMOUS != 0 { None } else { Open::writable(fd) }
}

/// Maps memory as `mmap` does, and unlogs or notes the file.
///
/// # Safety
/// As for `mmap`.
pub(crate) unsafe fn map(
    at: *mut c_void,
    len: size_t,
    protection: c_int,
    (flags, fd, offset): (c_int, c_int, off_t),
) -> *mut c_void {
    let open = shared(flags, fd);
    let writable = open.filter(|_| protection & libc::PROT_WRITE != 0);
    let pinned = writable.and_then(|open| Some((open.log, unseen::pin(&open)?)));
    let arguments = words![at, len, protection, flags, fd, offset];
    // SAFETY: the caller vouches for the arguments, as for `mmap`.
    let mapped = raw::returned(unsafe { raw::call(libc::SYS_mmap, arguments) });
    if let Ok(start) = usize::try_from(mapped) {
        // If the address was fixed, the mapping has replaced any other there.
        unmapped(start, len);
        if flags & libc::MAP_FIXED != 0 {
            readable::changed();
        }
        if flags & libc::MAP_ANONYMOUS == 0 {
            readable::mapped_from_file(start, len);
        }
        if let Some(open) = open.filter(|_| protection & libc::PROT_WRITE == 0)
            && !open.entry().is_some_and(|entry| note(start, len, entry.file))
        {
            unseen::pin(&open);
        }
    } else if let Some((log, file)) = pinned {
        // The kernel has refused the mapping, as it refuses `MAP_SYNC` on most disks.
        unseen::unpin(log, file);
    }
    ptr::with_exposed_provenance_mut(mapped.cast_unsigned())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn munmap(at: *mut c_void, len: size_t) -> c_int {
    // Noted before the call: another thread may get these addresses as soon as they are free.
    unmapped(at.addr(), len);
    // SAFETY: the caller gives the memory up.
    let result = unsafe { raw::call(libc::SYS_munmap, words![at, len]) };
    readable::changed();
    raw::returned_int(result)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn shmdt(at: *const c_void) -> c_int {
    // SAFETY: the caller gives the memory up.
    let result = unsafe { raw::call(libc::SYS_shmdt, words![at]) };
    readable::changed();
    raw::returned_int(result)
}

/// Notes that `mremap` has moved the first range to the second.
fn moved((old, old_len): (usize, usize), (new, new_len): (usize, usize)) {
    overlapping(old, old_len.max(1), |noted, (start, end)| {
        if old <= start && end <= old.saturating_add(old_len) {
            noted.place(new, new + new_len);
        } else if new == old {
            noted.place(start, end.max(new + new_len));
        } else {
            // The rest stays at its address: too much of a note does no harm.
            let file = FileRef::from_word(noted.file.load(Ordering::Relaxed));
            if !note(new, new_len, file)
                && let Some(log) = process::log()
            {
                unseen::pin_closed(log, file);
            }
        }
    });
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn mremap(
    at: *mut c_void,
    len: size_t,
    new_len: size_t,
    flags: c_int,
    new_at: *mut c_void,
) -> *mut c_void {
    let arguments = words![at, len, new_len, flags, new_at];
    // SAFETY: the caller gives the old memory up. The kernel ignores a `new_at` that is not given.
    let mapped = raw::returned(unsafe { raw::call(libc::SYS_mremap, arguments) });
    readable::changed();
    if let Ok(start) = usize::try_from(mapped) {
        const STAYS: c_int = libc::MREMAP_DONTUNMAP;
        // A length of 0 maps a shared mapping a second time.
        let old_len = if flags & STAYS == 0 { len } else { 0 };
        if readable::is_from_file(at.addr(), len.max(1)) {
            readable::mapped_from_file(start, new_len);
        }
        moved((at.addr(), old_len), (start, new_len));
    }
    ptr::with_exposed_provenance_mut(mapped.cast_unsigned())
}

/// Unlogs the files whose noted mappings in this range become writable, or are advised to lose
/// their pages.
fn becomes_writable(start: usize, len: usize) {
    let Some(log) = process::log() else { return };
    overlapping(start, len, |noted, _| {
        unseen::pin_closed(log, FileRef::from_word(noted.file.load(Ordering::Relaxed)));
        noted.start.store(0, Ordering::Release);
        COUNT.fetch_sub(1, Ordering::AcqRel);
    });
}

/// Changes the access to memory, by `kernel`.
fn protect(
    at: *mut c_void,
    len: size_t,
    protection: c_int,
    kernel: impl FnOnce() -> isize,
) -> c_int {
    if protection & libc::PROT_WRITE != 0 {
        becomes_writable(at.addr(), len);
    }
    let result = kernel();
    if protection & libc::PROT_READ == 0 {
        readable::changed();
    }
    raw::returned_int(result)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn mprotect(
    at: *mut c_void,
    len: size_t,
    protection: c_int,
) -> c_int {
    // SAFETY: the caller vouches for the access that it takes or gives.
    protect(at, len, protection, || unsafe {
        raw::call(libc::SYS_mprotect, words![at, len, protection])
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pkey_mprotect(
    at: *mut c_void,
    len: size_t,
    protection: c_int,
    key: c_int,
) -> c_int {
    // Without a key it is `mprotect`, also on machines without keys.
    let (number, key) =
        if key == -1 { (libc::SYS_mprotect, 0) } else { (libc::SYS_pkey_mprotect, key) };
    // SAFETY: the caller vouches for the access that it takes or gives.
    protect(at, len, protection, || unsafe { raw::call(number, words![at, len, protection, key]) })
}

/// Advises the kernel about memory, by `kernel`. `MADV_REMOVE` punches a hole in the file, even by
/// a mapping that is not writable but may become so.
fn advise(at: *mut c_void, len: size_t, advice: c_int, kernel: impl FnOnce() -> isize) -> isize {
    if advice == libc::MADV_REMOVE {
        becomes_writable(at.addr(), len);
    }
    kernel()
}

/// Returns `-errno` if the kernel refuses.
fn madvised(at: *mut c_void, len: size_t, advice: c_int) -> isize {
    // SAFETY: the caller vouches for the memory that it gives up.
    advise(at, len, advice, || unsafe { raw::call(libc::SYS_madvise, words![at, len, advice]) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn madvise(
    at: *mut c_void,
    len: size_t,
    advice: c_int,
) -> c_int {
    raw::returned_int(madvised(at, len, advice))
}

/// Returns the error instead of setting `errno`. The C library passes unknown advice on.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn posix_madvise(at: *mut c_void, len: size_t, advice: c_int) -> c_int {
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    c_int::try_from(-madvised(at, len, advice)).unwrap_or(libc::EIO)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn process_madvise(
    process: c_int,
    parts: *const libc::iovec,
    count: size_t,
    advice: c_int,
    flags: c_uint,
) -> ssize_t {
    let arguments = words![process, parts, count, advice, flags];
    // Any mapping may be among the parts.
    // SAFETY: the caller vouches for the memory that it gives up.
    raw::returned(advise(ptr::null_mut(), usize::MAX, advice, || unsafe {
        raw::call(libc::SYS_process_madvise, arguments)
    }))
}

tidegate_interpose::synonyms! {
    mmap(at: *mut c_void, len: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void = map(at, len, protection, (flags, fd, offset));
    mmap64(at: *mut c_void, len: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void = map(at, len, protection, (flags, fd, offset));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_noted_until_all_of_them_is_gone() {
        let seen = |start, len| {
            let mut files = Vec::new();
            overlapping(start, len, |noted, _| files.push(noted.file.load(Ordering::Relaxed)));
            files
        };
        let file = FileRef::from_word(1 << 32 | 9);
        assert!(note(0x10_0000, 0x4000, file));
        assert_eq!(seen(0x10_3fff, 1), [file.to_word()]);
        assert!(seen(0x10_4000, 0x1000).is_empty() && seen(0xf_0000, 0x1_0000).is_empty());
        unmapped(0x10_0000, 0x1000);
        assert_eq!(seen(0x10_1000, 1), [file.to_word()], "a part of it stays");
        unmapped(0xf_f000, 0x1_0000);
        assert!(seen(0x10_0000, 0x4000).is_empty());
    }

    #[test]
    fn a_mapping_that_is_moved_in_parts_is_noted_at_all_of_its_places() {
        let seen = |start, len| {
            let mut count = 0;
            overlapping(start, len, |_, _| count += 1);
            count
        };
        let places = |ranges: &[(usize, usize)]| {
            ranges.iter().map(|(start, len)| seen(*start, *len)).collect::<Vec<_>>()
        };
        let (old, new, copy) = (0x20_0000, 0x30_0000, 0x40_0000);
        assert!(note(old, 0x4000, FileRef::from_word(1 << 32 | 7)));
        moved((old + 0x1000, 0x1000), (new, 0x1000));
        moved((old, 0), (copy, 0x4000));
        let all = [(old, 0x1000), (old + 0x2000, 0x2000), (new, 0x1000), (copy, 0x4000)];
        assert_eq!(places(&all), [1; 4]);
        moved((new, 0x1000), (new, 0x3000));
        moved((copy, 0x4000), (copy + 0x10_0000, 0x4000));
        assert_eq!(places(&[(new + 0x2000, 0x1000), (copy, 0x4000)]), [1, 0]);
        for at in [old, new, copy + 0x10_0000] {
            unmapped(at, 0x4000);
        }
    }
}
