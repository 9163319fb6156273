//! Absorbed files: which process keeps their writes from the kernel, and what only it knows of them.
//!
//! Invariants:
//! 1. A file is absorbed only while nobody else can have it open: the supervisor holds a write lease on its only open
//!    description, and one process uses that. So the kernel's stale bytes, size and place are seen by nobody but through
//!    that process, which knows better.
//! 2. All words here change under the file's lock. The supervisor settles a file under it too: an operation that
//!    gets the lock finds the file absorbed, or settled in full.
//! 3. Before a file is absorbed no more, the kernel has all its bytes, its size and its place, and the log says so
//!    ([`Ticket::settle`](super::Ticket::settle)): older absorbed records are not brought into the file again.

use super::Log;
use super::append::FileGuard;
use super::table::{self, FileRef, flag};
use crate::sync::Ordering;

/// Set in the place of a description that was not moved there.
const OWED: u64 = 1 << 63;

impl FileGuard<'_> {
    /// The process that absorbs writes to the file, 0 if none does.
    pub fn absorber(&self) -> u32 {
        u32::try_from(self.entry().absorber().load(Ordering::SeqCst)).unwrap_or(0)
    }

    /// Writes to the file are absorbed by `process` from now on. Its size and the place of its only open description are
    /// as the kernel says.
    pub fn start_absorbing(&self, process: u32, size: u64, place: u64) {
        self.entry().size().store(size, Ordering::Relaxed);
        self.entry().place().store(place, Ordering::Relaxed);
        self.entry().modified_ns().store(0, Ordering::Relaxed);
        self.entry().absorber().store(u64::from(process), Ordering::SeqCst);
        self.log().control.absorbed().fetch_add(1, Ordering::SeqCst);
    }

    /// Somebody waits for the file to be settled: see [`Log::want_settled`].
    pub fn is_wanted(&self) -> bool {
        self.entry().flags().load(Ordering::Relaxed) & flag::WANTED != 0
    }

    /// The kernel has all of the file, and the log says so.
    pub fn stop_absorbing(&self) {
        self.entry().flags().fetch_and(!flag::WANTED, Ordering::SeqCst);
        // After the kernel got all, before anybody can see that the file is absorbed no more: see `Log::settled`.
        self.log().control.settled().fetch_add(1, Ordering::SeqCst);
        if self.entry().absorber().swap(0, Ordering::SeqCst) != 0 {
            self.log().control.absorbed().fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Size of an absorbed file in bytes.
    pub fn size(&self) -> u64 {
        self.entry().size().load(Ordering::Relaxed)
    }

    /// An absorbed write has made the file at least `size` bytes long, at `now_ns` since 1970.
    pub fn grow(&self, size: u64, now_ns: u64) {
        self.entry().modified_ns().store(now_ns, Ordering::Relaxed);
        // Changed under the lock only. Who asks for the size without it, after the write, finds this, and the time before it.
        if size > self.size() {
            self.entry().size().store(size, Ordering::Release);
        }
    }

    /// Where the next read or write through the only open description of an absorbed file begins.
    pub fn place(&self) -> u64 {
        self.entry().place().load(Ordering::Relaxed) & !OWED
    }

    /// The file was settled by somebody who does not have its description: its absorber has to move that.
    pub fn owe_place(&self) {
        self.entry().place().fetch_or(OWED, Ordering::SeqCst);
    }

    /// The place that the description of a settled file was not given yet.
    pub fn take_owed_place(&self) -> Option<u64> {
        let place = self.entry().place().fetch_and(!OWED, Ordering::SeqCst);
        (place & OWED != 0).then_some(place & !OWED)
    }

    /// Moves that place.
    pub fn set_place(&self, place: u64) {
        self.entry().place().store(place, Ordering::Relaxed);
    }
}

impl Log {
    /// The size of the file, if it is absorbed: the kernel's may be smaller.
    pub fn absorbed_size(&self, file: FileRef) -> Option<u64> {
        let entry = table::entry(&self.control, file.index);
        let is_its = || entry.generation().load(Ordering::SeqCst) == u64::from(file.generation);
        let absorbed = is_its() && entry.absorber().load(Ordering::SeqCst) != 0;
        let size = entry.size().load(Ordering::SeqCst);
        (absorbed && is_its()).then_some(size)
    }

    /// Any file is absorbed, by whatever process.
    #[inline]
    pub fn absorbs(&self) -> bool {
        self.control.absorbed().load(Ordering::Relaxed) != 0
    }

    /// Counts the files that were absorbed and are no more. Where it is the same before the kernel is asked about a file and after
    /// [`absorbed_of`](Self::absorbed_of) has found that nobody absorbs it, the kernel's answer was right.
    ///
    /// Why: had the file been absorbed when the kernel was asked, [`FileGuard::stop_absorbing`] would have ended that between the
    /// question and the look. It counts before it does so; and had it counted before the number was read for the first time,
    /// the kernel would have had all of the file when it was asked.
    #[inline]
    pub fn settled(&self) -> u64 {
        self.control.settled().load(Ordering::SeqCst)
    }

    /// Size of the file with these numbers, if it is absorbed, and when it was [modified](Self::modified_ns).
    pub fn absorbed_of(&self, device: u64, inode: u64) -> Option<(u64, u64)> {
        let file = table::absorbed(&self.control, device, inode)?;
        Some((self.absorbed_size(file)?, self.modified_ns(file)))
    }

    /// When the absorbed file was written last, in nanoseconds since 1970: what the kernel says is as old as what it has. 0 if
    /// it was not written since it is absorbed.
    pub fn modified_ns(&self, file: FileRef) -> u64 {
        table::entry(&self.control, file.index).modified_ns().load(Ordering::Relaxed)
    }

    /// The process that absorbs writes to the file, 0 if none does.
    pub fn absorber_of(&self, file: FileRef) -> u32 {
        let entry = table::entry(&self.control, file.index);
        let absorber = entry.absorber().load(Ordering::SeqCst);
        let is_its = entry.generation().load(Ordering::SeqCst) == u64::from(file.generation);
        if is_its { u32::try_from(absorber).unwrap_or(0) } else { 0 }
    }

    /// Has the supervisor settle the file, some time: for who cannot ask it.
    pub fn want_settled(&self, file: FileRef) {
        let entry = table::entry(&self.control, file.index);
        if entry.generation().load(Ordering::SeqCst) == u64::from(file.generation) {
            entry.flags().fetch_or(flag::WANTED, Ordering::SeqCst);
            self.wake_cleaner();
        }
    }

    /// The absorbed files for which [`want_settled`](Self::want_settled) was called.
    pub fn wanted_settled(&self) -> Vec<FileRef> {
        if !self.absorbs() {
            return Vec::new();
        }
        let wanted = table::all(&self.control).filter(|(_, entry)| {
            entry.flags().load(Ordering::SeqCst) & flag::WANTED != 0
                && entry.absorber().load(Ordering::SeqCst) != 0
        });
        wanted.map(|(file, _)| file).collect()
    }

    /// The files that `process` absorbs writes to, or that any does.
    pub fn absorbed_by(&self, process: Option<u32>) -> impl Iterator<Item = FileRef> {
        table::all(&self.control).filter_map(move |(file, entry)| {
            let absorber = entry.absorber().load(Ordering::SeqCst);
            let is_wanted = process.is_none_or(|process| u64::from(process) == absorber);
            (absorber != 0 && is_wanted).then_some(file)
        })
    }
}
