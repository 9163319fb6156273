//! Commits of a file system's journal.
//!
//! A commit makes an unnamed file and syncs it. The file's inode is in the journal's running
//! transaction, so the sync commits that transaction with all earlier changes, and makes the disk
//! empty its cache. The sync writes no dirty page of another file.

use std::fs::File;
use std::io;

use rustix::fs::{Mode, OFlags, openat};
use tidegate::durable;
use tidegate::log::{FileSystemRef, Log};

use super::backlog::Known;
use super::locate;

/// Commits the journal of `file_system`, the file system of `known`. Afterwards no change is
/// pending that was counted before this call.
///
/// # Errors
/// Fails if no directory is found in the file system where this user can make a file, or if the
/// disk fails.
pub(crate) fn commit(log: &Log, file_system: FileSystemRef, known: &Known) -> io::Result<()> {
    let directory = locate::directory_on(known.device, &known.path);
    let directory = directory.ok_or(io::ErrorKind::NotFound)?;
    let seen = log.file_systems().changes(file_system);
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = File::from(openat(&directory, c".", flags, Mode::RUSR | Mode::WUSR)?);
    durable::fsync(&file)?;
    log.file_systems().committed(file_system, seen);
    Ok(())
}
