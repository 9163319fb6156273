//! The facts about each descriptor of this process.
//!
//! Invariants:
//! 1. "Unknown" is always correct: a hook that needs the facts asks the kernel then
//!    ([`crate::covered::Open::of`]), and notes them here.
//! 2. A descriptor's entry is cleared before the kernel releases its number, and after the kernel
//!    has assigned the number.
//! 3. The table belongs to the process: a child of `vfork`, which borrows this memory but has
//!    descriptors of its own, neither reads nor writes it. To the child all is unknown.
//! 4. No lock, no allocation: the words of an entry are consistent unless the program uses a
//!    descriptor in one thread while it closes the descriptor in another.
//!
//! Entry points: [`get`], [`set`], [`clear`], [`each`]; [`make`] at load.
#![allow(unsafe_code)] // the table is mapped memory

use std::ffi::c_int;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use tidegate::log::{FileRef, FileSystemRef};

use crate::state::process;
use crate::sys::raw;

/// Descriptors from this number on are never noted: the kernel is asked each time.
const LIMIT: usize = 1 << 16;

/// The kind of file that a descriptor refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The kernel was not asked yet.
    Unknown = 0,
    /// Never covered: a pipe, socket, terminal, device, or a file in memory.
    Ignored = 1,
    /// A regular file on a file system whose files can be covered.
    File = 2,
    /// A regular file on a disk whose file system is not covered.
    Elsewhere = 3,
    /// A directory.
    Directory = 4,
}

/// Opened with `O_APPEND`.
pub(crate) const APPEND: u32 = 1 << 0;
/// Not open for writing.
pub(crate) const READ_ONLY: u32 = 1 << 1;
/// Opened with `O_DIRECT`.
pub(crate) const DIRECT: u32 = 1 << 2;
/// The descriptor pins its file, which is written through it in ways that no hook sees.
pub(crate) const PINNED: u32 = 1 << 3;
/// Opened with `O_SYNC` or `O_DSYNC`.
pub(crate) const SYNCHRONOUS: u32 = 1 << 4;
/// Opened for writing only.
pub(crate) const WRITE_ONLY: u32 = 1 << 5;
/// Opened with `O_SYNC`, which includes `O_DSYNC`.
pub(crate) const FULLY_SYNCHRONOUS: u32 = 1 << 6;

/// Facts about a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) kind: Kind,
    pub(crate) flags: u32,
    /// Device and inode number of a regular file or directory.
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// The file's entry in the log's table, as a word; 0 before it is looked up.
    file: u64,
    /// Number of the file system in the log, once the entry is known.
    file_system: u32,
}

/// A file's entry in the log's table, and its file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) file: FileRef,
    pub(crate) file_system: FileSystemRef,
}

impl Known {
    /// A descriptor without known facts.
    pub(crate) const UNKNOWN: Self = Self::of_kind(Kind::Unknown);
    /// A descriptor whose calls are the kernel's alone.
    pub(crate) const IGNORED: Self = Self::of_kind(Kind::Ignored);

    const fn of_kind(kind: Kind) -> Self {
        Self { kind, flags: 0, device: 0, inode: 0, file: 0, file_system: 0 }
    }

    /// Returns the facts about a regular file with these numbers.
    pub(crate) fn of_file(device: u64, inode: u64, flags: u32) -> Self {
        Self { kind: Kind::File, flags, device, inode, ..Self::IGNORED }
    }

    /// Returns the facts about a file or directory that is never covered, but may be synced.
    pub(crate) fn of_uncovered(kind: Kind, device: u64, inode: u64) -> Self {
        Self { kind, device, inode, ..Self::IGNORED }
    }

    /// Returns the file's entry, if it was looked up.
    #[inline]
    pub(crate) fn entry(&self) -> Option<Entry> {
        let file_system = FileSystemRef::from_number(self.file_system);
        (self.file != 0).then(|| Entry { file: FileRef::from_word(self.file), file_system })
    }

    /// Returns whether one of `flags` is set.
    #[inline]
    pub(crate) fn has(&self, flags: u32) -> bool {
        self.flags & flags != 0
    }

    /// Returns these facts with `flags` set, too.
    pub(crate) fn with(mut self, flags: u32) -> Self {
        self.flags |= flags;
        self
    }

    /// Returns these facts without `flags`.
    pub(crate) fn without(mut self, flags: u32) -> Self {
        self.flags &= !flags;
        self
    }

    /// Returns these facts with the file's entry.
    pub(crate) fn with_entry(mut self, entry: Entry) -> Self {
        self.file = entry.file.to_word();
        self.file_system = entry.file_system.to_number();
        self
    }

    fn packed(&self) -> u64 {
        u64::from(self.file_system) << 32 | u64::from(self.flags) << 8 | self.kind as u64
    }
}

/// The entry of a descriptor, which is unknown if all words are zero.
#[repr(align(64))]
struct Slot {
    state: AtomicU64,
    device: AtomicU64,
    inode: AtomicU64,
    file: AtomicU64,
    /// Real syncs through the descriptor since it was noted.
    syncs: AtomicU32,
}

impl Slot {
    #[inline]
    fn load(&self) -> Known {
        let state = self.state.load(Ordering::Acquire);
        let kind = match state & 0xff {
            1 => Kind::Ignored,
            2 => Kind::File,
            3 => Kind::Elsewhere,
            4 => Kind::Directory,
            _ => return Known::UNKNOWN,
        };
        if kind == Kind::Ignored {
            return Known::IGNORED;
        }
        let half = |number: u64| u32::try_from(number & 0xffff_ffff).unwrap_or(0);
        let (flags, file_system) = (half(state & 0xffff_ffff) >> 8, half(state >> 32));
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (device, inode, file) = (word(&self.device), word(&self.inode), word(&self.file));
        Known { kind, flags, device, inode, file, file_system }
    }
}

static TABLE: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
/// The highest descriptor ever noted.
static HIGHEST: AtomicU32 = AtomicU32::new(0);

/// Maps the table, unless it is mapped. Only the used part of the address space takes memory.
pub(crate) fn make() -> Result<(), raw::Errno> {
    if !TABLE.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    let len_bytes = LIMIT * size_of::<Slot>();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let arguments = raw::words![0_usize, len_bytes, protection, flags, -1_i32, 0_usize];
    // SAFETY: without an address the kernel chooses one, so that no mapping is replaced.
    let at = raw::checked(unsafe { raw::call(libc::SYS_mmap, arguments) })?;
    TABLE.store(ptr::with_exposed_provenance_mut(at), Ordering::Release);
    Ok(())
}

/// Ends all notes, in all threads: another process shares the descriptors, and changes them.
pub(crate) fn give_up() {
    TABLE.store(ptr::null_mut(), Ordering::SeqCst);
}

/// Returns the addresses of the table, empty if there is none.
pub(crate) fn memory() -> Range<usize> {
    let start = TABLE.load(Ordering::Acquire).addr();
    if start == 0 { 0..0 } else { start..start + LIMIT * size_of::<Slot>() }
}

#[inline]
fn slot(fd: c_int) -> Option<&'static Slot> {
    let at = usize::try_from(fd).ok().filter(|at| *at < LIMIT)?;
    let table = TABLE.load(Ordering::Acquire);
    if table.is_null() || process::is_apart() {
        return None;
    }
    // SAFETY: `at` is below `LIMIT`, the length of the table.
    let slot = unsafe { table.add(at) };
    // SAFETY: the table was mapped with zeroes, which are valid slots, and is never unmapped.
    Some(unsafe { &*slot })
}

/// Returns the facts about `fd`.
#[inline]
pub(crate) fn get(fd: c_int) -> Known {
    slot(fd).map_or(Known::UNKNOWN, Slot::load)
}

/// Returns whether facts about `fd` can be noted. The limit of open files is mostly lower.
pub(crate) fn has_place(fd: c_int) -> bool {
    usize::try_from(fd).is_ok_and(|at| at < LIMIT)
}

/// Notes the facts about `fd`.
pub(crate) fn set(fd: c_int, known: Known) {
    let Some(slot) = slot(fd) else { return };
    HIGHEST.fetch_max(fd.unsigned_abs(), Ordering::Relaxed);
    slot.state.store(0, Ordering::Relaxed);
    slot.device.store(known.device, Ordering::Release);
    slot.inode.store(known.inode, Ordering::Release);
    slot.file.store(known.file, Ordering::Release);
    slot.state.store(known.packed(), Ordering::Release);
}

/// Notes the entry of the file of `fd`, if `known` is still noted for `fd`.
pub(crate) fn set_entry(fd: c_int, known: Known, entry: Entry) {
    if get(fd) == known {
        set(fd, known.with_entry(entry));
    }
}

/// Counts a real sync of `fd`. Returns the count since `fd` was noted, or 0 if it is not counted.
pub(crate) fn count_sync(fd: c_int) -> u32 {
    let Some(slot) = slot(fd) else { return 0 };
    let syncs = slot.syncs.load(Ordering::Relaxed).saturating_add(1);
    slot.syncs.store(syncs, Ordering::Relaxed);
    syncs
}

/// Resets the count of syncs of `fd`.
pub(crate) fn forget_syncs(fd: c_int) {
    if let Some(slot) = slot(fd) {
        slot.syncs.store(0, Ordering::Relaxed);
    }
}

/// Forgets `fd`, and returns its facts.
#[inline]
pub(crate) fn clear(fd: c_int) -> Known {
    let Some(slot) = slot(fd) else { return Known::UNKNOWN };
    if slot.state.load(Ordering::Relaxed) == 0 {
        return Known::UNKNOWN;
    }
    let known = slot.load();
    slot.syncs.store(0, Ordering::Relaxed);
    slot.state.store(0, Ordering::Release);
    known
}

/// Calls `visit` for each noted descriptor from `first` to `last`.
pub(crate) fn each(first: u32, last: u32, mut visit: impl FnMut(c_int, Known)) {
    for fd in first..=last.min(HIGHEST.load(Ordering::Relaxed)) {
        let Ok(fd) = c_int::try_from(fd) else { return };
        let known = get(fd);
        if known.kind != Kind::Unknown {
            visit(fd, known);
        }
    }
}

/// Finds a descriptor that is noted for the file with these numbers.
pub(crate) fn find(device: u64, inode: u64) -> Option<c_int> {
    let mut found = None;
    each(0, u32::MAX, |fd, known| {
        let is_it = known.kind == Kind::File && (known.device, known.inode) == (device, inode);
        found = if is_it { Some(fd) } else { found };
    });
    found
}

/// Finds a descriptor that is noted for any file or directory on a device.
pub(crate) fn find_on(device: u64) -> Option<c_int> {
    let mut found = None;
    each(0, u32::MAX, |fd, known| {
        if known.kind != Kind::Ignored && known.device == device {
            found = Some(fd);
        }
    });
    found
}

/// Returns whether the C library has a stream for writing on this descriptor from the start.
#[inline]
pub(crate) fn is_standard(fd: c_int) -> bool {
    fd == libc::STDOUT_FILENO || fd == libc::STDERR_FILENO
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Known {
        let file_system = FileSystemRef::from_number(63);
        let entry = Entry { file: FileRef::from_word(77 << 32 | 5), file_system };
        Known::of_file(3, 77, APPEND | DIRECT).with_entry(entry)
    }

    #[test]
    fn what_is_noted_comes_back_until_it_is_cleared() {
        make().unwrap();
        set(900, file());
        set(901, Known::IGNORED);
        assert_eq!((get(900), get(901), get(902)), (file(), Known::IGNORED, Known::UNKNOWN));
        let mut seen = Vec::new();
        each(900, u32::MAX, |fd, known| seen.push((fd, known.kind)));
        assert_eq!(seen, [(900, Kind::File), (901, Kind::Ignored)]);
        assert_eq!((count_sync(900), count_sync(900)), (1, 2));
        assert_eq!(clear(900), file());
        assert_eq!((clear(900), get(900)), (Known::UNKNOWN, Known::UNKNOWN));
        assert_eq!(count_sync(900), 1, "a new descriptor has not synced");
        clear(901);
    }

    #[test]
    fn numbers_outside_the_table_are_unknown() {
        make().unwrap();
        for fd in [-1, c_int::MIN, c_int::MAX, 1 << 16] {
            set(fd, file());
            assert_eq!((get(fd), clear(fd), count_sync(fd)), (Known::UNKNOWN, Known::UNKNOWN, 0));
        }
    }

    #[test]
    fn flags_are_added_and_removed() {
        let known = file().with(PINNED).without(DIRECT);
        assert!(known.has(APPEND) && known.has(PINNED | DIRECT) && !known.has(DIRECT));
        assert_eq!(known.entry(), file().entry());
    }
}
