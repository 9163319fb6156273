//! The facts about each descriptor of this process.
//!
//! Invariants:
//! 1. Nothing known is always right: a hook that needs to know asks the kernel then
//!    ([`crate::covered::Open::of`]), and notes it here.
//! 2. A descriptor's entry is cleared before the kernel gives its number up, and after the kernel
//!    gave a number out.
//! 3. The table belongs to the process: a child of `vfork`, which borrows this memory but has
//!    descriptors of its own, neither reads nor writes it. To it, all is unknown.
//! 4. No lock, no allocation: the words of an entry belong together as long as the program does not
//!    use a descriptor in one thread while it closes it in another.
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

/// Descriptors from this number on are never noted, only asked for.
const LIMIT: usize = 1 << 16;

/// What a descriptor refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Not asked yet.
    Unknown = 0,
    /// Nothing that can be covered: pipe, socket, terminal, device, a file in memory.
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
/// This descriptor pins its file to the kernel path: it is written in ways that the hooks do not
/// see.
pub(crate) const PINNED: u32 = 1 << 3;
/// Opened with `O_SYNC` or `O_DSYNC`.
pub(crate) const SYNCHRONOUS: u32 = 1 << 4;
/// Opened for writing only.
pub(crate) const WRITE_ONLY: u32 = 1 << 5;
/// Opened with `O_SYNC`, which is more than `O_DSYNC`.
pub(crate) const FULLY_SYNCHRONOUS: u32 = 1 << 6;

/// Facts about a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) kind: Kind,
    pub(crate) flags: u32,
    /// Device and inode number of a regular file or directory.
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// The file's entry in the log's table, as a word; 0: not looked up.
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
    /// Nothing.
    pub(crate) const UNKNOWN: Self = Self::of_kind(Kind::Unknown);
    /// Not for the log.
    pub(crate) const IGNORED: Self = Self::of_kind(Kind::Ignored);

    const fn of_kind(kind: Kind) -> Self {
        Self { kind, flags: 0, device: 0, inode: 0, file: 0, file_system: 0 }
    }

    /// A regular file with these numbers.
    pub(crate) fn of_file(device: u64, inode: u64, flags: u32) -> Self {
        Self { kind: Kind::File, flags, device, inode, ..Self::IGNORED }
    }

    /// Never covered, but synced.
    pub(crate) fn of_uncovered(kind: Kind, device: u64, inode: u64) -> Self {
        Self { kind, device, inode, ..Self::IGNORED }
    }

    /// The file's entry, if it was looked up.
    #[inline]
    pub(crate) fn entry(&self) -> Option<Entry> {
        let file_system = FileSystemRef::from_number(self.file_system);
        (self.file != 0).then(|| Entry { file: FileRef::from_word(self.file), file_system })
    }

    /// Whether one of `flags` is set.
    #[inline]
    pub(crate) fn has(&self, flags: u32) -> bool {
        self.flags & flags != 0
    }

    /// With `flags` set too.
    pub(crate) fn with(mut self, flags: u32) -> Self {
        self.flags |= flags;
        self
    }

    /// Without `flags`.
    pub(crate) fn without(mut self, flags: u32) -> Self {
        self.flags &= !flags;
        self
    }

    /// With this entry.
    pub(crate) fn with_entry(mut self, entry: Entry) -> Self {
        self.file = entry.file.to_word();
        self.file_system = entry.file_system.to_number();
        self
    }

    fn packed(&self) -> u64 {
        u64::from(self.file_system) << 32 | u64::from(self.flags) << 8 | self.kind as u64
    }
}

/// One descriptor's entry. All zero: unknown.
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
/// The highest descriptor that was ever noted.
static HIGHEST: AtomicU32 = AtomicU32::new(0);

/// Makes the table: address space of which only what is used becomes memory.
pub(crate) fn make() -> Result<(), raw::Errno> {
    if !TABLE.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    let len_bytes = LIMIT * size_of::<Slot>();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let arguments = raw::words![0_usize, len_bytes, protection, flags, -1_i32, 0_usize];
    // SAFETY: fresh memory where the kernel likes it.
    let at = raw::checked(unsafe { raw::call(libc::SYS_mmap, arguments) })?;
    TABLE.store(ptr::with_exposed_provenance_mut(at), Ordering::Release);
    Ok(())
}

/// Notes nothing any more, in no thread: another process has these descriptors too, and gives their
/// numbers to other files.
pub(crate) fn give_up() {
    TABLE.store(ptr::null_mut(), Ordering::SeqCst);
}

/// Where the table is; nowhere if there is none.
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
    // SAFETY: below LIMIT, so inside the table.
    let slot = unsafe { table.add(at) };
    // SAFETY: the table is zeroed memory, which makes slots, and is never unmapped.
    Some(unsafe { &*slot })
}

/// What is known of `fd`.
#[inline]
pub(crate) fn get(fd: c_int) -> Known {
    slot(fd).map_or(Known::UNKNOWN, Slot::load)
}

/// Notes what `fd` is.
pub(crate) fn set(fd: c_int, known: Known) {
    let Some(slot) = slot(fd) else { return };
    HIGHEST.fetch_max(fd.unsigned_abs(), Ordering::Relaxed);
    slot.state.store(0, Ordering::Relaxed);
    slot.device.store(known.device, Ordering::Release);
    slot.inode.store(known.inode, Ordering::Release);
    slot.file.store(known.file, Ordering::Release);
    slot.state.store(known.packed(), Ordering::Release);
}

/// Notes the entry of the file of `fd`, if that is noted as `known`.
pub(crate) fn set_entry(fd: c_int, known: Known, entry: Entry) {
    if get(fd) == known {
        set(fd, known.with_entry(entry));
    }
}

/// Counts a real sync: how many there were since `fd` was noted, 0 where that is not known.
pub(crate) fn count_sync(fd: c_int) -> u32 {
    let Some(slot) = slot(fd) else { return 0 };
    let syncs = slot.syncs.load(Ordering::Relaxed).saturating_add(1);
    slot.syncs.store(syncs, Ordering::Relaxed);
    syncs
}

/// Begins to count the syncs of `fd` anew.
pub(crate) fn forget_syncs(fd: c_int) {
    if let Some(slot) = slot(fd) {
        slot.syncs.store(0, Ordering::Relaxed);
    }
}

/// Forgets `fd`; what was known of it.
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

/// A descriptor that is noted for the file with these numbers.
pub(crate) fn find(device: u64, inode: u64) -> Option<c_int> {
    let mut found = None;
    each(0, u32::MAX, |fd, known| {
        let is_it = known.kind == Kind::File && (known.device, known.inode) == (device, inode);
        found = if is_it { Some(fd) } else { found };
    });
    found
}

/// A descriptor that is noted for some file or directory on a device.
pub(crate) fn find_on(device: u64) -> Option<c_int> {
    let mut found = None;
    each(0, u32::MAX, |fd, known| {
        if known.kind != Kind::Ignored && known.device == device {
            found = Some(fd);
        }
    });
    found
}

/// Whether the C library has a stream for writing on this descriptor from the start.
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
