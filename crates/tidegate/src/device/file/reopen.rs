//! A file or disk that is opened again after a failure: one that went away may be back.
//!
//! Invariants:
//! 1. It is opened again before the request behind a failure; where that cannot be done, a second
//!    later at the earliest.
//! 2. Only the same file or disk takes the place of the old one, with at least the size that it
//!    had. Requests that run meanwhile end with the file that they began with.
//! 3. What an earlier failure may have lost is not this module's: the caller keeps what it wrote
//!    until a flush has succeeded, and was told of the one that did not.

#![expect(clippy::disallowed_methods, reason = "the rest between two attempts is made of time")]

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;

use super::{Backing, FileOptions, errno_of, open_at};
use crate::sync::{AtomicBool, Ordering};

/// The least time between two attempts that fail.
const REST: Duration = Duration::from_secs(1);

/// How and when a file is opened again.
pub(super) struct Reopening {
    options: FileOptions,
    /// Something failed since the file was opened.
    is_due: AtomicBool,
    /// Locked during an attempt: the last one that failed.
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
    /// A request failed: the file is opened again before the next one.
    pub(super) fn suspect(&self) {
        if let Some(reopening) = &self.reopening {
            reopening.is_due.store(true, Ordering::Release);
        }
    }

    /// Opens the file again if something failed since it was opened.
    pub(super) fn reopen_where_due(&self) {
        let due = |it: &&Reopening| it.is_due.load(Ordering::Acquire);
        let Some(reopening) = self.reopening.as_ref().filter(due) else { return };
        // While another request does it, this one goes on with the file of before.
        let Some(mut failed) = reopening.failed.try_lock() else { return };
        if failed.is_some_and(|failed| failed.elapsed() < REST) {
            return;
        }
        // Before the file is opened: a failure from now on is one of the new file, or comes again.
        reopening.is_due.store(false, Ordering::Release);
        if self.reopen(&reopening.options) {
            self.gate.reopen();
            *failed = None;
        } else {
            self.suspect();
            *failed = Some(Instant::now());
        }
    }

    /// True if the file is the one that it was, and open.
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
            // A disk that is there: this process has it.
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
