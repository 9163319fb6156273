//! Opens a file or disk again after a failure: a disk that went away may be back.
//!
//! Invariants:
//! 1. The request after a failure opens the file again. After a failed attempt, the next one comes
//!    a second later at the earliest.
//! 2. Only the same file or disk replaces the old one, with at least its old size. Requests that
//!    run meanwhile end with the file that they began with.
//! 3. This module does not restore lost data: the caller keeps its data until a flush has
//!    succeeded, and gets the error of a flush that fails.

#![expect(clippy::disallowed_methods, reason = "the rest between two attempts is made of time")]

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;

use super::{Backing, FileOptions, errno_of, open_at};
use crate::sync::{AtomicBool, Ordering};

/// Least time from a failed attempt to the next one.
const REST: Duration = Duration::from_secs(1);

/// How and when a file is opened again.
pub(super) struct Reopening {
    options: FileOptions,
    /// Something failed since the file was opened.
    is_due: AtomicBool,
    /// Locked during an attempt; the time of the last failed attempt.
    failed: Mutex<Option<Instant>>,
}

impl Reopening {
    pub(super) fn new(options: &FileOptions) -> Self {
        let options = FileOptions { create_bytes: None, ..options.clone() };
        Self { options, is_due: AtomicBool::new(false), failed: Mutex::default() }
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn forget_failed(&self) {
        *self.failed.lock() = None;
    }
}

impl Backing {
    /// Marks the file to be opened again before the next request, after a failed one.
    pub(super) fn suspect(&self) {
        if let Some(reopening) = &self.reopening {
            reopening.is_due.store(true, Ordering::Release);
        }
    }

    /// Opens the file again if something failed since it was opened.
    pub(super) fn reopen_where_due(&self) {
        let due = |it: &&Reopening| it.is_due.load(Ordering::Acquire);
        let Some(reopening) = self.reopening.as_ref().filter(due) else { return };
        // While another request reopens the file, this one goes on with the old file.
        let Some(mut failed) = reopening.failed.try_lock() else { return };
        if failed.is_some_and(|failed| failed.elapsed() < REST) {
            return;
        }
        // Cleared before the file is opened: a later failure is of the new file, or comes again.
        reopening.is_due.store(false, Ordering::Release);
        if self.reopen(&reopening.options) {
            self.gate.reopen();
            *failed = None;
        } else {
            self.suspect();
            *failed = Some(Instant::now());
        }
    }

    /// Opens the path again. Returns whether the device has its old file or disk open.
    fn reopen(&self, options: &FileOptions) -> bool {
        let old = Arc::clone(&self.file.read());
        match open_at(&self.path, options) {
            Ok(new) => {
                let is_same = self.is_same(&old, &new);
                if is_same {
                    *self.file.write() = Arc::new(new);
                }
                is_same
            }
            // Busy, because this process itself has the disk open: the disk is there.
            Err(error) => errno_of(&error) == Errno::BUSY && is_disk(&old),
        }
    }

    fn is_same(&self, old: &File, new: &File) -> bool {
        let number = |it: Metadata| {
            let is_disk = it.file_type().is_block_device();
            if is_disk { (is_disk, it.rdev(), 0) } else { (is_disk, it.dev(), it.ino()) }
        };
        let old = old.metadata().map(number);
        let are_one = new.metadata().is_ok_and(|new| old.is_ok_and(|old| old == number(new)));
        let end = rustix::fs::seek(new, rustix::fs::SeekFrom::End(0));
        are_one && end.is_ok_and(|bytes| bytes >= self.geometry.size_bytes())
    }
}

fn is_disk(file: &File) -> bool {
    file.metadata().is_ok_and(|it| it.file_type().is_block_device())
}
