//! Directories in which names were changed past the log: the next `fsync` of each is real.
//!
//! A directory has an entry in the log's table for as long as that counts. Where none can be had, or it is not known which directory it
//! is, all directories count as changed, until a sync of everything.
//!
//! Entry points: [`unlogged_in`] around a change; [`appeared`] after one; [`Folder`] for the sync.

use std::ffi::c_int;

use tidegate::log::{Counter, FileRef, Log};

use super::target::Name;
use crate::descriptors::Kind;
use crate::file_systems;
use crate::files::{self, Seen};
use crate::path::{self, Opened, PathBuffer};
use crate::raw::Errno;

/// Runs an operation of the kernel that changes a name in its directory, and that the log does not have.
pub(super) fn unlogged_in(log: &Log, name: Name<'_>, operation: impl FnOnce() -> isize) -> isize {
    let directory = parent(name);
    let mark = || mark(log, directory.as_ref().ok());
    mark();
    let result = operation();
    if result >= 0 {
        mark();
    }
    result
}

/// The same for the making of a directory. A sync of that one makes it durable, too.
pub(super) fn folder_made(log: &Log, name: Name<'_>, operation: impl FnOnce() -> isize) -> isize {
    let result = unlogged_in(log, name, operation);
    if result >= 0 {
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
        mark(log, Opened::path(name.directory, name.path, flags).as_ref().ok());
    }
    result
}

/// The file of `fd` may have got its name by this process just now, which the log does not have.
pub(crate) fn appeared(log: &Log, fd: c_int) {
    let system = Seen::of(fd).and_then(|seen| file_systems::of(fd, seen.mount));
    if system.is_ok_and(|found| !found.is_for_log) {
        return;
    }
    let mut path = PathBuffer::new();
    let directory = path::of_descriptor(fd, &mut path)
        .and_then(|()| parent(Name { directory: libc::AT_FDCWD, path: path.as_c_str() }));
    mark(log, directory.as_ref().ok());
}

/// The directory that has, or will have, the name.
fn parent(name: Name<'_>) -> Result<Opened, Errno> {
    let (parent, _) = path::split(name.path.to_bytes()).ok_or(libc::EINVAL)?;
    if parent.is_empty() {
        return Opened::path(name.directory, c".", libc::O_DIRECTORY);
    }
    let mut path = PathBuffer::new();
    path.push(parent)?;
    Opened::path(name.directory, path.as_c_str(), libc::O_DIRECTORY)
}

/// Names in the directory, or in some where it is not known, change past the log.
fn mark(log: &Log, directory: Option<&Opened>) {
    if directory.and_then(|directory| mark_one(log, directory.number())).is_none() {
        log.mark_names_unlogged();
    }
}

fn mark_one(log: &Log, fd: c_int) -> Option<()> {
    let seen = Seen::of(fd).ok()?;
    if !file_systems::of(fd, seen.mount).ok()?.is_for_log {
        // Its syncs are always real.
        return Some(());
    }
    let key = files::key_of(fd, &seen).ok()?;
    log.lock(log.entry_for(&key).ok()?).ok()?.mark_names_unlogged();
    Some(())
}

/// A directory that is to be synced.
pub(crate) struct Folder {
    log: &'static Log,
    /// Its entry, if it has one, and what was counted there.
    file: Option<(FileRef, u64)>,
    is_covered: bool,
}

impl Folder {
    /// The directory of `fd`, if it is one whose sync the log may answer; `seen` is what the kernel has said of it, if it was asked.
    pub(crate) fn of(log: &'static Log, fd: c_int, kind: Kind, seen: Option<Seen>) -> Option<Self> {
        if kind != Kind::Directory {
            return None;
        }
        let seen = match seen {
            Some(seen) => seen,
            None => Seen::of(fd).ok()?,
        };
        Self::known(log, fd, &seen)
    }

    fn known(log: &'static Log, fd: c_int, seen: &Seen) -> Option<Self> {
        let file = if log.may_have(seen.stat.st_dev, seen.stat.st_ino) {
            log.find(&files::key_of(fd, seen).ok()?).ok()?
        } else {
            None
        };
        let counted = |file| Some((file, log.lock(file).ok()?.unlogged()));
        let folder = match file {
            // First: what is said of all directories is asked after it.
            Some(file) if log.names_covered_in(file) => None,
            Some(file) => Some(counted(file)?),
            None => None,
        };
        let is_covered = folder.is_none() && log.names_covered();
        Some(Self { log, file: folder, is_covered })
    }

    /// All names in it are in the log or on the disk: a sync has nothing to do, and is counted as such.
    pub(crate) fn is_covered(&self) -> bool {
        let counter = if self.is_covered { Counter::SyncsSkipped } else { Counter::SyncsReal };
        self.log.stats().add(counter, 1);
        self.is_covered
    }

    /// A real sync, begun after this was made, has succeeded.
    pub(crate) fn synced(&self) {
        if let Some((file, seen)) = self.file
            && let Ok(guard) = self.log.lock(file)
        {
            guard.synced(seen);
        }
    }
}
