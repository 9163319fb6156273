//! A name as the program gives it, and what stands under it.
#![allow(unsafe_code)] // system calls

use std::ffi::{CStr, c_int};

use tidegate::log::{FileKey, FileRef, Log};

use crate::file_systems;
use crate::files::{self, Seen};
use crate::known_folder;
use crate::path::{self, Opened, PathBuffer};
use crate::raw::{self, Errno, words};
use crate::subject::{Place, Subject};

/// An entry of a directory, as the arguments of a call name it.
#[derive(Clone, Copy)]
pub(crate) struct Name<'a> {
    pub(crate) directory: c_int,
    pub(crate) path: &'a CStr,
}

impl Name<'_> {
    /// The entry's path from the root.
    pub(super) fn absolute(&self, out: &mut PathBuffer) -> Result<(), Errno> {
        path::absolute(self.directory, self.path, out)
    }

    /// Looks at the entry; `flags` may be `O_NOFOLLOW`, without which a symbolic link is followed.
    pub(crate) fn look(&self, flags: c_int) -> Result<Target, Errno> {
        Target::of(Opened::path(self.directory, self.path, flags)?)
    }

    /// Looks at the entry itself, under the lock of names: what is found may know its path.
    pub(super) fn look_at_entry(&self, log: &Log) -> Result<Target, Errno> {
        if known_folder::knows(log, self.path).is_some()
            && let Ok(opened) = Opened::without_links(self.path)
        {
            let mut path = PathBuffer::new();
            path.push(self.path.to_bytes())?;
            return Ok(Target { path: Some(path), ..Target::of(opened)? });
        }
        self.look(libc::O_NOFOLLOW)
    }
}

/// What a name stands for. It stays the same thing while this lives, whatever happens to the name.
pub(crate) struct Target {
    opened: Opened,
    seen: Seen,
    /// From the root, if that is known.
    path: Option<PathBuffer>,
}

impl Target {
    pub(super) fn of(opened: Opened) -> Result<Self, Errno> {
        let seen = Seen::of(opened.number())?;
        Ok(Self { opened, seen, path: None })
    }

    pub(crate) fn stat(&self) -> &libc::stat {
        &self.seen.stat
    }

    /// What the kernel says by now.
    pub(crate) fn stat_now(&self) -> Result<libc::stat, Errno> {
        raw::fstat(self.opened.number())
    }

    /// Whether some process absorbs the file.
    pub(crate) fn is_absorbed(&self, log: &Log) -> bool {
        self.find(log).is_some_and(|file| log.absorber_of(file) != 0)
    }

    pub(crate) fn is_file(&self) -> bool {
        self.stat().st_mode & libc::S_IFMT == libc::S_IFREG
    }

    pub(super) fn is_directory(&self) -> bool {
        self.stat().st_mode & libc::S_IFMT == libc::S_IFDIR
    }

    /// The same file, by whatever name.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let numbers = |target: &Self| (target.stat().st_dev, target.stat().st_ino);
        numbers(self) == numbers(other)
    }

    /// Whether the file has no name by now.
    fn is_nameless_now(&self) -> bool {
        self.stat_now().is_ok_and(|stat| stat.st_nlink == 0)
    }

    /// What tells the file from all others.
    pub(super) fn key(&self) -> Result<FileKey, Errno> {
        files::key_of(self.opened.number(), &self.seen)
    }

    /// The name's path from the root.
    pub(super) fn path(&self, out: &mut PathBuffer) -> Result<(), Errno> {
        if let Some(path) = &self.path {
            out.clear();
            return out.push(path.as_bytes());
        }
        path::of_descriptor(self.opened.number(), out)
    }

    /// The file's entry in the log's table, if it has one.
    pub(crate) fn find(&self, log: &Log) -> Option<FileRef> {
        if self.is_file() && log.may_have(self.stat().st_dev, self.stat().st_ino) {
            return log.find(&self.key().ok()?).ok()?;
        }
        None
    }

    /// Locks the file, if the log knows it.
    pub(crate) fn known<'l>(&self, log: &'l Log) -> Option<Subject<'l>> {
        Subject::of(log, self.opened.number(), || self.find(log))
    }

    /// Locks the file, if the log has records of it.
    pub(super) fn live<'l>(&self, log: &'l Log) -> Option<Subject<'l>> {
        self.known(log).filter(Subject::is_live)
    }

    /// Locks the file for a record of its names; the log will know it, if it is one to be recorded.
    pub(crate) fn recorded<'l>(&self, log: &'l Log) -> Option<Subject<'l>> {
        if self.is_recordable() { self.entered(log) } else { self.live(log) }
    }

    /// A file whose names outlive a power cut.
    pub(super) fn is_recordable(&self) -> bool {
        self.is_file()
            && file_systems::of(self.opened.number(), self.seen.mount)
                .is_ok_and(|found| found.is_for_log)
    }

    /// Before a name of the file is lost: recovery may not know the names that stay, so it must not have to bring data there.
    pub(super) fn settle_for_further_names(&self, subject: &Subject<'_>) {
        if self.stat().st_nlink > 1 && subject.guard.has_live_changes() {
            subject.settle(self);
        }
    }

    /// After a name of the file was lost.
    pub(super) fn lost_a_name(&self, subject: &Subject<'_>) {
        if self.is_nameless_now() {
            subject.guard.mark_nameless();
        } else {
            subject.guard.forget_definition();
        }
    }

    /// Locks the file; the log will know it.
    pub(crate) fn entered<'l>(&self, log: &'l Log) -> Option<Subject<'l>> {
        let key = self.key().ok()?;
        Subject::of(log, self.opened.number(), || log.entry_for(&key).ok())
    }

    fn directory(&self) -> Result<Opened, Errno> {
        let (mut path, mut directory) = (PathBuffer::new(), PathBuffer::new());
        self.path(&mut path)?;
        let (parent, _) = path::split(path.as_bytes()).ok_or(libc::EINVAL)?;
        directory.push(parent)?;
        Opened::open(libc::AT_FDCWD, directory.as_c_str(), libc::O_DIRECTORY)
    }
}

impl Place for Target {
    fn identify(&self, path: &mut PathBuffer) -> Result<(Seen, FileKey), Errno> {
        self.path(path)?;
        Ok((self.seen, self.key()?))
    }

    /// All of the file system, since the file itself must not be opened: closing it again would take the program's record
    /// locks away.
    fn make_durable(&self) -> bool {
        let Ok(directory) = self.directory() else {
            // All file systems, then: it cannot fail.
            raw::sync();
            return true;
        };
        // SAFETY: no pointers.
        let synced = unsafe { raw::call(libc::SYS_syncfs, words![directory.number()]) };
        // Of one that turned read-only after an error the kernel may say that there is nothing to sync.
        synced == 0 && !files::is_read_only(directory.number())
    }
}
