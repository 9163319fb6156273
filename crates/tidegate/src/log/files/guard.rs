//! The lock of a file, and what processes tell each other of the file.
//!
//! Invariants:
//! 1. Records of one file are appended under its lock, which is held until the kernel has done the
//!    operation too: the order of records is the order in which the page cache changed.

use std::time::Duration;

use super::{Log, keepers};
use crate::log::control::TIMEOUT;
use crate::log::control::owner::current_process;
use crate::log::control::table::{self, Entry, FileRef, flag};
use crate::log::error::{AppendError, LockError};
use crate::log::ring::Ticket;
use crate::pmem::Locked;
use crate::sync::Ordering;

/// A file, locked.
pub struct FileGuard<'a> {
    pub(in crate::log) log: &'a Log,
    pub(in crate::log) file: FileRef,
    pub(in crate::log) entry: Entry<'a>,
    _locked: Locked<'a>,
}

impl Log {
    /// Locks the file of an entry. Waits a second at most.
    ///
    /// # Errors
    /// [`LockError`]; the operation then goes on without the log.
    #[inline]
    pub fn lock(&self, file: FileRef) -> Result<FileGuard<'_>, LockError> {
        self.lock_within(file, TIMEOUT)
    }

    /// As [`lock`](Self::lock), but waits `timeout` at most.
    ///
    /// # Errors
    /// As for [`lock`](Self::lock).
    #[inline]
    pub fn lock_within(
        &self,
        file: FileRef,
        timeout: Duration,
    ) -> Result<FileGuard<'_>, LockError> {
        let locked = table::lock(&self.ring.control, file, timeout)?;
        Ok(FileGuard { log: self, file, entry: self.entry(file), _locked: locked })
    }

    /// A change of the file was or will be made without its lock and that the log does not have. To
    /// be called before the change and after it: a sync in between does not cover it.
    pub fn mark_unlogged(&self, file: FileRef) {
        let entry = self.entry(file);
        if entry.is_of(file) {
            entry.unlogged().fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl FileGuard<'_> {
    /// A former holder of the lock was killed while it held it, and the file is to be
    /// [repaired](super::Operations::repair).
    #[inline]
    pub fn owner_died(&self) -> bool {
        self.entry.has(flag::ORPHANED)
    }

    /// The file's entry.
    pub fn file(&self) -> FileRef {
        self.file
    }

    /// The file's changes are logged: its story has begun.
    #[inline]
    pub fn is_logged(&self) -> bool {
        self.entry.has(flag::LOGGED)
    }

    /// The log has records of the file that are not retired yet.
    pub fn is_live(&self) -> bool {
        self.entry.last_end().load(Ordering::Relaxed) > self.log.ring.tail()
    }

    /// The log has changes of the file's bytes, size or names that are not retired yet.
    pub fn has_live_changes(&self) -> bool {
        let changed_end = self.entry.changed_end().load(Ordering::Relaxed);
        changed_end.max(self.entry.names_end().load(Ordering::Relaxed)) > self.log.ring.tail()
    }

    /// A real sync has made durable all that the log has promised of the file. It may have more,
    /// which the next [answered](Log::note_sync_skipped) sync promises.
    pub fn note_retired(&self) {
        let last_end = self.entry.last_end().load(Ordering::Relaxed);
        self.entry.retired_end().store(last_end, Ordering::Relaxed);
    }

    /// Returns whether the disk may lack something that the log has promised of the file: neither
    /// the tail nor a record of the file has retired its last record, or a write-back failed.
    pub fn needs_sync(&self) -> bool {
        let retired_end = self.entry.retired_end().load(Ordering::Relaxed);
        let is_unretired = self.entry.last_end().load(Ordering::Relaxed) > retired_end;
        self.is_live() && is_unretired || self.entry.has(flag::FAILED | flag::DROPPED)
    }

    /// How many may change the file at any time in ways that are not logged.
    pub fn pins(&self) -> u64 {
        self.entry.pins().load(Ordering::SeqCst)
    }

    /// A pinned file has a story: one record of all that it was when its sync was answered. Nothing
    /// but the end of the pin may be done with it before the story has ended.
    #[inline]
    pub fn is_sealed(&self) -> bool {
        self.pins() > 0 && self.is_logged()
    }

    /// Takes the one pin of a sealed file back, which belongs to this process: nothing was changed
    /// around the log since [`unlogged`](Self::unlogged) was as given. Whether the story goes on
    /// as one of a covered file: not where another process marked the file since.
    pub fn unseal(&self, unlogged: u64) -> bool {
        let is_as_sealed = self.is_sealed() && self.pins() == 1 && self.unlogged() == unlogged;
        if is_as_sealed {
            keepers::forget(&self.log.ring.control, self.file, current_process());
            self.entry.synced().fetch_max(unlogged, Ordering::SeqCst);
            self.entry.pins().fetch_sub(1, Ordering::SeqCst);
        }
        is_as_sealed
    }

    /// A change that the log does not have was or will be made; with `pin`, at any time until
    /// [`release_pin`](Self::release_pin). The file's records must be retired before the change.
    pub fn mark_unlogged(&self, pin: bool) {
        if pin {
            self.entry.pins().fetch_add(1, Ordering::SeqCst);
        }
        self.entry.unlogged().fetch_add(1, Ordering::SeqCst);
    }

    /// Takes back one pin; the next real sync brings the file back into the log.
    pub fn release_pin(&self) {
        let less = |pin: u64| Some(pin.saturating_sub(1));
        let _ = self.entry.pins().fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        self.entry.unlogged().fetch_add(1, Ordering::SeqCst);
    }

    /// The file may change at any time in ways that are not logged, until
    /// [`stop_keeping`](Self::stop_keeping), or until this process has ended.
    pub fn keep_unlogged(&self) {
        self.mark_unlogged(true);
        keepers::note(&self.log.ring.control, self.file, current_process());
    }

    /// Takes one [`keep_unlogged`](Self::keep_unlogged) of this process back.
    pub fn stop_keeping(&self) {
        keepers::forget(&self.log.ring.control, self.file, current_process());
        self.release_pin();
    }

    /// A number of changes that the log does not have, to be given to [`cover`](Self::cover).
    pub fn unlogged(&self) -> u64 {
        self.entry.unlogged().load(Ordering::SeqCst)
    }

    /// Notes that a write-back of the file failed.
    pub fn note_failure(&self) {
        self.log.ring.distrust_kernel();
        self.entry.set(flag::FAILED | flag::DROPPED);
    }

    /// A sync of the file failed, and its caller was told: the cleaner has to write once more what
    /// the log has.
    pub fn note_dropped(&self) {
        self.log.ring.distrust_kernel();
        self.entry.set(flag::DROPPED);
    }

    /// A write-back of the file failed since this was asked last: the sync that asks has to report
    /// it.
    pub fn take_failure(&self) -> bool {
        self.entry.flags().fetch_and(!flag::FAILED, Ordering::SeqCst) & flag::FAILED != 0
    }

    /// Takes a slot for an operation on the file.
    ///
    /// # Errors
    /// [`AppendError::NoSlot`].
    #[inline]
    pub fn begin(&self) -> Result<Ticket<'_>, AppendError> {
        self.log.ring.begin(self.file)
    }
}
