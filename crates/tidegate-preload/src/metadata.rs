//! Changes of names, attributes and sizes: made by the kernel, and counted before and after.
//!
//! Invariants:
//! 1. From before the kernel makes such a change until a sync that began after it has committed the
//!    journal, the change is pending in the log's count.
//! 2. A change of the names or attributes of a logged file is counted for that file, too: its next
//!    sync would make it durable, whatever else is pending, and so is real. A file whose story
//!    begins while the call is in the middle is found after it.
//! 3. A process that is killed in the middle of one has said so in its lane: the supervisor counts
//!    it.
//!
//! All file systems that the log knows are counted: to find out which one a path is on would cost
//! more than a real sync that was not needed, now and then.
//!
//! Entry points: [`counted`]; [`counted_of`] for changes of named files.

use std::ffi::{c_char, c_int};

use tidegate::log::{FileRef, Log, PlainCall};

use crate::descriptors::{self, Kind};
use crate::process::Holding;
use crate::readable::text;
use crate::{plain, process, raw};

/// Runs a call that changes names, attributes or sizes.
pub(crate) fn counted<R>(call: impl FnOnce() -> R) -> R {
    let Some(log) = process::log() else { return call() };
    let in_flight = plain::in_lane(log, PlainCall::Metadata);
    log.note_change_everywhere();
    let result = call();
    log.note_change_everywhere();
    drop(in_flight);
    result
}

/// What a call names a file by.
#[derive(Clone, Copy)]
pub(crate) enum Named {
    Descriptor(c_int),
    /// A path in a directory, with the flags of `fstatat`.
    Path(c_int, *const c_char, c_int),
}

impl Named {
    /// The file of a path in the working directory.
    pub(crate) fn path(path: *const c_char) -> Self {
        Self::Path(libc::AT_FDCWD, path, 0)
    }

    /// The entry of a path, which may be a symbolic link.
    pub(crate) fn entry(directory: c_int, path: *const c_char) -> Self {
        Self::Path(directory, path, libc::AT_SYMLINK_NOFOLLOW)
    }

    /// What `directory`, `path` and flags of a call mean: without a path, the descriptor.
    pub(crate) fn at(directory: c_int, path: *const c_char, flags: c_int) -> Self {
        if text(path).is_none_or(std::ffi::CStr::is_empty) {
            return Self::Descriptor(directory);
        }
        Self::Path(directory, path, flags & libc::AT_SYMLINK_NOFOLLOW)
    }

    /// The file's entry, if its changes are logged.
    fn logged(self, log: &Log) -> Option<FileRef> {
        let (device, inode) = self.numbers()?;
        let _holding = Holding::new().filter(|_| log.may_have(device, inode))?;
        log.logged_with(device, inode)
    }

    fn numbers(self) -> Option<(u64, u64)> {
        let stat = match self {
            Self::Descriptor(fd) => {
                let known = descriptors::get(fd);
                if known.kind == Kind::File {
                    return Some((known.device, known.inode));
                }
                raw::fstat(fd)
            }
            Self::Path(directory, path, flags) => raw::fstatat(directory, text(path)?, flags),
        };
        stat.ok().map(|stat| (stat.st_dev, stat.st_ino))
    }
}

/// Runs a call that changes names or attributes of the files that it names so.
pub(crate) fn counted_of<R, const N: usize>(names: [Named; N], call: impl FnOnce() -> R) -> R {
    let Some(log) = process::log().filter(|log| log.has_stories()) else { return counted(call) };
    let errno = raw::errno();
    let before = names.map(|name| name.logged(log));
    before.into_iter().flatten().for_each(|file| log.note_own_change(file));
    raw::set_errno(errno);
    let result = counted(call);
    for (name, before) in names.into_iter().zip(before) {
        if let Some(file) = before.or_else(|| name.logged(log)) {
            log.note_own_change(file);
        }
    }
    result
}
