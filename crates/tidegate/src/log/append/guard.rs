//! The lock of a file, and what processes tell each other of the file.
//!
//! Invariants:
//! 1. Records of one file are appended under its lock, which is held until the kernel has done the operation too: the
//!    order of records is the order in which the page cache changed.

use std::time::Duration;

use super::super::Log;
use super::super::control::PATIENCE;
use super::super::error::LockError;
use super::super::keepers;
use super::super::owner::current_process;
use super::super::table::{self, Entry, FileRef, flag};
use crate::pmem::Locked;
use crate::sync::Ordering;

/// A file, locked.
pub struct FileGuard<'a> {
    pub(super) log: &'a Log,
    pub(super) file: FileRef,
    pub(super) entry: Entry<'a>,
    _locked: Locked<'a>,
}

impl Log {
    /// Locks the file of an entry. Waits a second at most.
    ///
    /// # Errors
    /// [`LockError`]; the operation then goes on without the log.
    #[inline]
    pub fn lock(&self, file: FileRef) -> Result<FileGuard<'_>, LockError> {
        self.lock_within(file, PATIENCE)
    }

    /// The same, for who has less patience, or more.
    ///
    /// # Errors
    /// As for [`lock`](Self::lock).
    #[inline]
    pub fn lock_within(
        &self,
        file: FileRef,
        patience: Duration,
    ) -> Result<FileGuard<'_>, LockError> {
        let locked = table::lock(&self.control, file, patience)?;
        let entry = table::entry(&self.control, file.index);
        Ok(FileGuard { log: self, file, entry, _locked: locked })
    }

    /// The word at which a file's data is all in the log or on the disk.
    ///
    /// Needs no lock: what is written at the same time is not covered by the caller's sync.
    #[inline]
    pub fn is_covered(&self, file: FileRef) -> bool {
        let entry = table::entry(&self.control, file.index);
        let covered = is_covered(&entry);
        covered && entry.generation().load(Ordering::SeqCst) == u64::from(file.generation)
    }

    /// A change of the file was or will be made without its lock and that the log does not have. To be called before the
    /// change and after it: a sync in between does not cover it.
    pub fn mark_unlogged(&self, file: FileRef) {
        let entry = table::entry(&self.control, file.index);
        if entry.generation().load(Ordering::SeqCst) == u64::from(file.generation) {
            entry.unlogged().fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn is_covered(entry: &Entry<'_>) -> bool {
    let flags = entry.flags().load(Ordering::SeqCst);
    flags & flag::NAMELESS != 0
        || flags & (flag::COVERED | flag::FAILED) == flag::COVERED
            && entry.sticky().load(Ordering::SeqCst) == 0
            && entry.unlogged().load(Ordering::SeqCst) == entry.synced().load(Ordering::SeqCst)
}

impl FileGuard<'_> {
    /// A former holder of the lock was killed while it held it, and nobody has called [`mended`](Self::mended) since: see
    /// [`Log::interrupted_on`].
    #[inline]
    pub fn owner_died(&self) -> bool {
        self.has(flag::ORPHANED)
    }

    /// What former holders of the lock were killed in was done or undone.
    pub fn mended(&self) {
        self.entry.flags().fetch_and(!flag::ORPHANED, Ordering::SeqCst);
    }

    pub(in crate::log) fn log(&self) -> &Log {
        self.log
    }

    pub(in crate::log) fn entry(&self) -> &Entry<'_> {
        &self.entry
    }

    /// The file's entry.
    pub fn file(&self) -> FileRef {
        self.file
    }

    /// The file's id in the log, 0 if it has none yet.
    pub fn id(&self) -> u64 {
        self.entry.id().load(Ordering::Relaxed)
    }

    /// All of the file is in the log or on the disk: a sync has nothing to do.
    pub fn is_covered(&self) -> bool {
        is_covered(&self.entry)
    }

    /// The log has records of the file that are not retired yet.
    pub fn is_live(&self) -> bool {
        self.entry.last_end().load(Ordering::Relaxed)
            > self.log.control.tail().load(Ordering::SeqCst)
    }

    /// The log has changes of the file's bytes or size that are not retired yet.
    pub fn has_live_changes(&self) -> bool {
        self.entry.changed_end().load(Ordering::Relaxed)
            > self.log.control.tail().load(Ordering::SeqCst)
    }

    /// The log has records of the file that neither the tail nor a record of its own has retired.
    pub fn has_unretired(&self) -> bool {
        let retired_end = self.entry.retired_end().load(Ordering::Relaxed);
        self.is_live() && self.entry.last_end().load(Ordering::Relaxed) > retired_end
    }

    /// The file may change at any time in ways that are not logged.
    pub fn is_sticky(&self) -> bool {
        self.entry.sticky().load(Ordering::Relaxed) > 0
    }

    /// The file has no name any more: nothing of it outlives the processes that have it open.
    pub fn is_nameless(&self) -> bool {
        self.has(flag::NAMELESS)
    }

    /// The file was made under Tidegate.
    pub fn is_born(&self) -> bool {
        self.has(flag::BORN)
    }

    /// The file has just been made, by this process: all that is to come of it can be logged.
    pub fn mark_born(&self) {
        self.set(flag::BORN | flag::COVERED);
    }

    /// The file lost its last name.
    pub fn mark_nameless(&self) {
        self.set(flag::NAMELESS);
    }

    /// The file lost a name that the log may know it by alone: what comes next is preceded by a definition with one that it has.
    pub fn forget_definition(&self) {
        self.entry.defined_at().store(0, Ordering::Relaxed);
    }

    /// The file got a name again.
    pub fn mark_named(&self) {
        self.entry.flags().fetch_and(!flag::NAMELESS, Ordering::SeqCst);
    }

    /// A change that the log does not have was or will be made; with `sticky`, at any time until
    /// [`release_sticky`](Self::release_sticky). The file's records must be retired before the change.
    pub fn mark_unlogged(&self, sticky: bool) {
        if sticky {
            self.entry.sticky().fetch_add(1, Ordering::SeqCst);
        }
        self.entry.unlogged().fetch_add(1, Ordering::SeqCst);
    }

    /// Takes back one sticky mark; the next real sync brings the file back into the log.
    pub fn release_sticky(&self) {
        let less = |sticky: u64| Some(sticky.saturating_sub(1));
        let _ = self.entry.sticky().fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        self.entry.unlogged().fetch_add(1, Ordering::SeqCst);
    }

    /// It is a directory, in which names were or will be changed in ways that the log does not have.
    pub fn mark_names_unlogged(&self) {
        self.set(flag::FOLDER);
        self.entry.unlogged().fetch_add(1, Ordering::SeqCst);
    }

    /// The file may change at any time in ways that are not logged, until [`stop_keeping`](Self::stop_keeping), or until this
    /// process has ended.
    pub fn keep_unlogged(&self) {
        self.mark_unlogged(true);
        keepers::note(&self.log.control, self.file, current_process());
    }

    /// Takes one [`keep_unlogged`](Self::keep_unlogged) of this process back.
    pub fn stop_keeping(&self) {
        keepers::forget(&self.log.control, self.file, current_process());
        self.release_sticky();
    }

    /// A number of changes that the log does not have, to be given to [`synced`](Self::synced).
    pub fn unlogged(&self) -> u64 {
        self.entry.unlogged().load(Ordering::SeqCst)
    }

    /// A real sync that began after [`unlogged`](Self::unlogged) was `seen` has succeeded.
    pub fn synced(&self, seen: u64) {
        self.entry.synced().fetch_max(seen, Ordering::SeqCst);
        self.set(flag::COVERED);
    }

    /// Notes that a write-back of the file failed.
    pub fn note_failure(&self) {
        self.log.distrust_kernel();
        self.set(flag::FAILED | flag::DROPPED);
    }

    /// A sync of the file failed, and its caller was told: the cleaner has to write once more what the log has.
    pub fn note_dropped(&self) {
        self.log.distrust_kernel();
        self.set(flag::DROPPED);
    }

    /// Notes the mount through which the file is about to be defined, 0 if it is not known. While the log has records of the
    /// file the oldest one counts: numbers of mounts only grow, and the first records were made on that one.
    pub fn note_mount(&self, mount: u64) {
        let word = self.entry.mount();
        let oldest = if self.is_live() { mount.min(word.load(Ordering::Relaxed)) } else { mount };
        word.store(oldest, Ordering::Relaxed);
    }

    /// A write-back of the file failed since this was asked last: the sync that asks has to report it.
    pub fn take_failure(&self) -> bool {
        self.entry.flags().fetch_and(!flag::FAILED, Ordering::SeqCst) & flag::FAILED != 0
    }

    fn has(&self, bit: u64) -> bool {
        self.entry.flags().load(Ordering::SeqCst) & bit != 0
    }

    fn set(&self, bits: u64) {
        self.entry.flags().fetch_or(bits, Ordering::SeqCst);
    }
}
