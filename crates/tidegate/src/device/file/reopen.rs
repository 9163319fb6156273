//! Opens a file or disk again after a failure: a disk that went away may be back.
//!
//! Invariants:
//! 1. The request after a failure opens the file again. After a failed attempt, the next one comes
//!    a second later at the earliest.
//! 2. Only the same file or disk replaces the old one, with at least its old size. A disk that was
//!    attached again has another number, so it is recognized by the identity that it tells.
//!    Requests that run meanwhile end with the file that they began with.
//! 3. This module does not restore lost data: the caller keeps its data until a flush has
//!    succeeded, and gets the error of a flush that fails. The page cache of a file outlasts the
//!    reopening, unless the file system was mounted again; that of a disk that was attached again
//!    does not. Where it does not, the writes that are not flushed count as lost.

#![expect(clippy::disallowed_methods, reason = "the rest between two attempts is made of time")]

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;

use super::{Backing, FileOptions, errno_of, open_at};
use crate::sync::{AtomicBool, Ordering};

/// Least time from a failed attempt to the next one.
const REST: Duration = Duration::from_secs(1);

/// How and when a file is opened again.
pub(super) struct Reopening {
    options: FileOptions,
    /// What told the disk from others when it was opened.
    identity: Option<u64>,
    /// Something failed since the file was opened.
    is_due: AtomicBool,
    /// Locked during an attempt; the time of the last failed attempt.
    failed: Mutex<Option<Instant>>,
}

impl Reopening {
    /// Describes how the disk or file `file`, opened with `options`, is opened again.
    pub(super) fn new(options: &FileOptions, file: &File) -> Self {
        let options = FileOptions { create_bytes: None, ..options.clone() };
        let identity = options.identify.filter(|_| is_disk(file)).and_then(|it| it(file));
        Self { options, identity, is_due: AtomicBool::new(false), failed: Mutex::default() }
    }

    /// Returns whether the disk `new` tells the identity that the disk had at first. Returns `None`
    /// if the disk told none.
    fn is_same_disk(&self, new: &File) -> Option<bool> {
        let (identity, identify) = self.identity.zip(self.options.identify)?;
        Some(identify(new) == Some(identity))
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
        if self.reopen(reopening) {
            self.gate.reopen();
            *failed = None;
        } else {
            self.suspect();
            *failed = Some(Instant::now());
        }
    }

    /// Opens the path again. Returns whether the device has its old file or disk open.
    fn reopen(&self, reopening: &Reopening) -> bool {
        let old = self.file();
        match open_at(&self.path, &reopening.options) {
            Ok(new) => {
                let is_same = self.is_same(reopening, &old, &new);
                if is_same {
                    self.replace(&old, new);
                }
                is_same
            }
            // Busy, because this process itself has the disk open: the disk is there.
            Err(error) => errno_of(&error) == Errno::BUSY && is_disk(&old),
        }
    }

    fn is_same(&self, reopening: &Reopening, old: &File, new: &File) -> bool {
        let (Ok(before), Ok(now)) = (old.metadata(), new.metadata()) else { return false };
        let is_disk = |it: &Metadata| it.file_type().is_block_device();
        let are_one = match (is_disk(&before), is_disk(&now)) {
            (true, true) => {
                reopening.is_same_disk(new).unwrap_or_else(|| before.rdev() == now.rdev())
            }
            (false, false) => (before.dev(), before.ino()) == (now.dev(), now.ino()),
            _ => false,
        };
        let end = rustix::fs::seek(new, rustix::fs::SeekFrom::End(0));
        are_one && end.is_ok_and(|bytes| bytes >= self.geometry.size_bytes())
    }

    /// Puts `new` in place of `old`.
    fn replace(&self, old: &File, new: File) {
        let shares_pages = page_cache_of(old).is_some_and(|it| page_cache_of(&new) == Some(it));
        let replace = || *self.file.write() = Arc::new(new);
        if shares_pages { replace() } else { self.gate.lose_with(replace) }
    }
}

/// Returns numbers that tell the page cache of an open file or disk from that of another one at the
/// same path: of the disk, or of the mount. They stay in use while the file is open.
fn page_cache_of(file: &File) -> Option<(bool, u64)> {
    let metadata = file.metadata().ok()?;
    if metadata.file_type().is_block_device() {
        return Some((true, metadata.rdev()));
    }
    let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    let has_mount = found.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    has_mount.then_some((false, found.stx_mnt_id))
}

fn is_disk(file: &File) -> bool {
    file.metadata().is_ok_and(|it| it.file_type().is_block_device())
}
