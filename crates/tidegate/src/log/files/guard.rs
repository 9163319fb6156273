//! The lock of a file, and the state of the file that processes share.
//!
//! Invariants:
//! 1. Records of one file are appended under its lock. The holder keeps the lock until the kernel
//!    has done the operation too: records have the order of the changes of the page cache.

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

    /// Locks the file of an entry. Waits at most `timeout`.
    ///
    /// # Errors
    /// [`LockError`]; the operation then goes on without the log.
    #[inline]
    pub fn lock_within(
        &self,
        file: FileRef,
        timeout: Duration,
    ) -> Result<FileGuard<'_>, LockError> {
        let locked = table::lock(&self.ring.control, file, timeout)?;
        Ok(FileGuard { log: self, file, entry: self.entry(file), _locked: locked })
    }

    /// Counts a change of the file that is made around the log, without the file's lock. The caller
    /// calls this before the change and after it: a sync in between does not cover the change.
    pub fn mark_unlogged(&self, file: FileRef) {
        let entry = self.entry(file);
        if entry.is_of(file) {
            entry.unlogged().fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl FileGuard<'_> {
    /// Returns whether a holder of the lock was killed, so that the file must be
    /// [repaired](super::Operations::repair).
    #[inline]
    pub fn owner_died(&self) -> bool {
        self.entry.has(flag::ORPHANED)
    }

    /// Returns the file's entry.
    pub fn file(&self) -> FileRef {
        self.file
    }

    /// Returns whether the file has a story, so that its changes are logged.
    #[inline]
    pub fn is_logged(&self) -> bool {
        self.entry.has(flag::LOGGED)
    }

    /// Returns whether the log has records of the file that are not retired yet.
    pub fn is_live(&self) -> bool {
        self.entry.last_end().load(Ordering::Relaxed) > self.log.ring.tail()
    }

    /// Returns whether the log has unretired changes of the file's bytes, size or names.
    pub fn has_live_changes(&self) -> bool {
        let changed_end = self.entry.changed_end().load(Ordering::Relaxed);
        changed_end.max(self.entry.names_end().load(Ordering::Relaxed)) > self.log.ring.tail()
    }

    /// Notes that a real sync has made durable all that the log has promised of the file. Later
    /// records of the file are promised by the next [answered](Log::note_sync_skipped) sync.
    pub fn note_retired(&self) {
        let last_end = self.entry.last_end().load(Ordering::Relaxed);
        self.entry.retired_end().store(last_end, Ordering::Relaxed);
    }

    /// Returns whether the disk may lack something that the log has promised of the file: neither
    /// the tail nor a real sync has retired the file's last record, or a write-back failed.
    pub fn needs_sync(&self) -> bool {
        let retired_end = self.entry.retired_end().load(Ordering::Relaxed);
        let is_unretired = self.entry.last_end().load(Ordering::Relaxed) > retired_end;
        self.is_live() && is_unretired || self.entry.has(flag::FAILED | flag::DROPPED)
    }

    /// Returns the number of pins: reasons why the file may change at any time without a record.
    pub fn pins(&self) -> u64 {
        self.entry.pins().load(Ordering::SeqCst)
    }

    /// Returns whether a pinned file has a story: one record of the whole file as of its answered
    /// sync. Until the story has ended, only the end of the pin is allowed.
    #[inline]
    pub fn is_sealed(&self) -> bool {
        self.pins() > 0 && self.is_logged()
    }

    /// Removes the only pin of a sealed file, which this process must own: the file has not changed
    /// around the log since [`unlogged`](Self::unlogged) was `unlogged`. Returns `false`, and keeps
    /// the pin, if another process has marked the file since.
    pub fn unseal(&self, unlogged: u64) -> bool {
        let is_as_sealed = self.is_sealed() && self.pins() == 1 && self.unlogged() == unlogged;
        if is_as_sealed {
            keepers::forget(&self.log.ring.control, self.file, current_process());
            self.entry.synced().fetch_max(unlogged, Ordering::SeqCst);
            self.entry.pins().fetch_sub(1, Ordering::SeqCst);
        }
        is_as_sealed
    }

    /// Counts a change around the log, made or imminent; with `pin`, changes at any time until
    /// [`release_pin`](Self::release_pin). The file's records must be retired before the change.
    pub fn mark_unlogged(&self, pin: bool) {
        if pin {
            self.entry.pins().fetch_add(1, Ordering::SeqCst);
        }
        self.entry.unlogged().fetch_add(1, Ordering::SeqCst);
    }

    /// Removes one pin. The next real sync may admit the file to the log again.
    pub fn release_pin(&self) {
        let less = |pin: u64| Some(pin.saturating_sub(1));
        let _ = self.entry.pins().fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        self.entry.unlogged().fetch_add(1, Ordering::SeqCst);
    }

    /// Pins the file, since it may change at any time without a record, until
    /// [`stop_keeping`](Self::stop_keeping) or the end of this process.
    pub fn keep_unlogged(&self) {
        self.mark_unlogged(true);
        keepers::note(&self.log.ring.control, self.file, current_process());
    }

    /// Undoes one [`keep_unlogged`](Self::keep_unlogged) of this process.
    pub fn stop_keeping(&self) {
        keepers::forget(&self.log.ring.control, self.file, current_process());
        self.release_pin();
    }

    /// Returns the count of changes around the log, for [`cover`](Self::cover).
    pub fn unlogged(&self) -> u64 {
        self.entry.unlogged().load(Ordering::SeqCst)
    }

    /// Notes that a write-back of the file failed.
    pub fn note_failure(&self) {
        self.log.ring.distrust_kernel();
        self.entry.set(flag::FAILED | flag::DROPPED);
    }

    /// Notes that a sync failed and reported it. The cleaner must write the file's records again.
    pub fn note_dropped(&self) {
        self.log.ring.distrust_kernel();
        self.entry.set(flag::DROPPED);
    }

    /// Takes a failed write-back of the file. Returns whether one failed since the last call: the
    /// sync that calls this has to report it.
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
