//! What is known of each descriptor of this process.
//!
//! Invariants:
//! 1. Nothing known is always right: what needs to know asks the kernel then ([`crate::files::of`]), and notes it here.
//! 2. A descriptor's entry is cleared before the kernel gives its number up, and after the kernel gave a number out.
//! 3. The table belongs to the process: a child of `vfork`, which borrows this memory but has descriptors of its own, neither
//!    reads nor writes it. Nor does a thread that may only read and write: to it, all is unknown.
//! 4. No lock, no allocation: an entry is two words, which belong together as long as the program does not use a
//!    descriptor in one thread while it closes it in another.
//!
//! Entry points: [`get`], [`set`], [`clear`], [`each`]; [`make`] at load.
#![allow(unsafe_code)] // the table is mapped memory

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use tidegate::log::FileRef;

use crate::{process, raw};

/// Descriptors from this number on are never noted, only asked for.
const LIMIT: usize = 1 << 20;

/// What a descriptor refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Not asked yet.
    Unknown = 0,
    /// Nothing that is logged: pipe, socket, terminal, device, a file in memory, a file that is excluded.
    Ignored = 1,
    /// A regular file with an entry in the log's file table.
    File = 2,
    /// A directory whose `fsync` the log may answer.
    Directory = 3,
}

/// Opened with `O_APPEND`.
pub(crate) const APPEND: u32 = 1 << 0;
/// Opened with `O_SYNC`, which was taken away since the log makes writes durable.
pub(crate) const SYNC: u32 = 1 << 1;
/// Opened with `O_DSYNC`, which was taken away since the log makes writes durable.
pub(crate) const DATA_SYNC: u32 = 1 << 2;
/// Not open for writing.
pub(crate) const READ_ONLY: u32 = 1 << 3;
/// This descriptor keeps its file unlogged: somebody writes to it in ways that the hooks do not see.
pub(crate) const STICKY: u32 = 1 << 4;
/// Writes go past the log: `O_DIRECT`, or the user does not want the file in the log.
pub(crate) const DIRECT: u32 = 1 << 5;
/// Writes are absorbed: reads and moves have to know of them.
pub(crate) const ABSORBED: u32 = 1 << 6;
/// Writes are never to be absorbed: others share the description, or a mapping does, or it was tried.
pub(crate) const NEVER: u32 = 1 << 7;
/// Not open for reading.
pub(crate) const WRITE_ONLY: u32 = 1 << 8;
/// `O_SYNC` or `O_DSYNC` was taken away.
pub(crate) const STRIPPED: u32 = SYNC | DATA_SYNC;

/// What is known of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) kind: Kind,
    pub(crate) flags: u32,
    /// The file's entry in the log's table, as a word.
    file: u64,
}

impl Known {
    /// Nothing.
    pub(crate) const UNKNOWN: Self = Self::of_kind(Kind::Unknown);
    /// Not for the log.
    pub(crate) const IGNORED: Self = Self::of_kind(Kind::Ignored);

    /// Something that has no entry in the log's file table.
    pub(crate) const fn of_kind(kind: Kind) -> Self {
        Self { kind, flags: 0, file: 0 }
    }

    /// A regular file with this entry.
    pub(crate) fn of_file(file: FileRef, flags: u32) -> Self {
        Self { kind: Kind::File, flags, file: file.to_word() }
    }

    /// The file's entry, if it is a file.
    #[inline]
    pub(crate) fn file(&self) -> Option<FileRef> {
        (self.kind == Kind::File).then(|| FileRef::from_word(self.file))
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

    fn packed(&self) -> u64 {
        u64::from(self.flags) << 8 | self.kind as u64
    }

    #[inline]
    fn unpacked(state: u64, file: u64) -> Self {
        let kind = match state & 0xff {
            1 => Kind::Ignored,
            2 => Kind::File,
            3 => Kind::Directory,
            _ => Kind::Unknown,
        };
        #[allow(clippy::cast_possible_truncation)] // shifted and masked to fit
        let flags = (state >> 8) as u32;
        let file = if kind == Kind::File { file } else { 0 };
        Self { kind, flags, file }
    }
}

/// One descriptor's entry. All zero: unknown.
struct Slot {
    state: AtomicU64,
    file: AtomicU64,
    /// Writes since it was noted.
    writes: AtomicU32,
    /// The [`epoch`](EPOCH) in which this process opened it, 0: somebody else may have.
    opened: AtomicU32,
}

static TABLE: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
/// Begins anew whenever all open descriptors get to another process.
static EPOCH: AtomicU32 = AtomicU32::new(1);
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
    let Some(slot) = slot(fd) else { return Known::UNKNOWN };
    let state = slot.state.load(Ordering::Acquire);
    Known::unpacked(state, slot.file.load(Ordering::Relaxed))
}

/// Notes what `fd` is.
pub(crate) fn set(fd: c_int, known: Known) {
    let Some(slot) = slot(fd) else { return };
    HIGHEST.fetch_max(fd.unsigned_abs(), Ordering::Relaxed);
    slot.state.store(0, Ordering::Relaxed);
    slot.file.store(known.file, Ordering::Release);
    slot.state.store(known.packed(), Ordering::Release);
}

/// Changes the flags of `fd`, if it still is noted as `known`.
pub(crate) fn change(fd: c_int, known: Known, to: Known) {
    let Some(slot) = slot(fd) else { return };
    let (from, to) = (known.packed(), to.packed());
    let changed = slot.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed);
    if changed.is_ok() && slot.file.load(Ordering::Acquire) != known.file {
        // Another file's by now, which had the same flags.
        let _ = slot.state.compare_exchange(to, from, Ordering::SeqCst, Ordering::Relaxed);
    }
}

/// This process has just opened `fd`: no other has it.
#[inline]
pub(crate) fn opened(fd: c_int) {
    if let Some(slot) = slot(fd) {
        slot.opened.store(EPOCH.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// `copy` is open wherever `original` is.
pub(crate) fn opened_with(original: c_int, copy: c_int) {
    if let (Some(original), Some(copy)) = (slot(original), slot(copy)) {
        copy.opened.store(original.opened.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Another process gets all descriptors that are open now.
pub(crate) fn share_all() {
    EPOCH.fetch_add(1, Ordering::SeqCst);
}

/// Other processes may have the open file of `fd`, too.
pub(crate) fn is_shared(fd: c_int) -> bool {
    slot(fd).is_none_or(|slot| slot.opened.load(Ordering::Relaxed) != EPOCH.load(Ordering::SeqCst))
}

/// Nobody else has the open file of `fd`, and no other descriptor of this process its file.
pub(crate) fn is_only(fd: c_int) -> bool {
    let file = get(fd).file();
    let mut is_only = !is_shared(fd);
    each(0, u32::MAX, |other, known| is_only &= other == fd || known.file() != file);
    is_only
}

/// Counts a write: how many there were since `fd` was given out.
#[inline]
pub(crate) fn count_write(fd: c_int) -> u32 {
    let Some(slot) = slot(fd) else { return 0 };
    let writes = slot.writes.load(Ordering::Relaxed).saturating_add(1);
    slot.writes.store(writes, Ordering::Relaxed);
    writes
}

/// Forgets `fd`; what was known of it.
#[inline]
pub(crate) fn clear(fd: c_int) -> Known {
    let Some(slot) = slot(fd) else { return Known::UNKNOWN };
    let file = slot.file.load(Ordering::Relaxed);
    slot.writes.store(0, Ordering::Relaxed);
    slot.opened.store(0, Ordering::Relaxed);
    if slot.state.load(Ordering::Relaxed) == 0 {
        return Known::UNKNOWN;
    }
    Known::unpacked(slot.state.swap(0, Ordering::AcqRel), file)
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

/// Whether some noted descriptor has one of `flags`; also for a child of `vfork`, of its parent's descriptors.
pub(crate) fn any(flags: u32) -> bool {
    let table = TABLE.load(Ordering::Acquire);
    let count = if table.is_null() { 0 } else { HIGHEST.load(Ordering::Relaxed) as usize + 1 };
    (0..count.min(LIMIT)).any(|at| {
        // SAFETY: below LIMIT, so inside the table.
        let slot = unsafe { table.add(at) };
        // SAFETY: the table is zeroed memory, which makes slots, and is never unmapped.
        let state = unsafe { &*slot }.state.load(Ordering::Acquire);
        Known::unpacked(state, 0).has(flags)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Known {
        Known::of_file(FileRef::from_word(77 << 32 | 5), APPEND | SYNC)
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
        assert_eq!(clear(900), file());
        assert_eq!((clear(900), get(900)), (Known::UNKNOWN, Known::UNKNOWN));
    }

    #[test]
    fn numbers_outside_the_table_are_unknown() {
        make().unwrap();
        for fd in [-1, c_int::MIN, c_int::MAX, 1 << 20] {
            set(fd, file());
            assert_eq!((get(fd), clear(fd)), (Known::UNKNOWN, Known::UNKNOWN));
        }
    }

    #[test]
    fn flags_are_added_and_removed() {
        let known = file().with(STICKY).without(SYNC);
        assert!(known.has(APPEND) && known.has(STICKY | SYNC) && !known.has(STRIPPED));
        assert_eq!(known.file(), file().file());
    }
}
