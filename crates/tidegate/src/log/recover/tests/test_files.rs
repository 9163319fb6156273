//! The real file system with other identities, and with faults and crashes on demand.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::log::recover::{FileSystem, Found, LocalFiles};

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    None,
    /// The operation of this number fails, and nothing after it happens.
    CrashAt(u64),
    /// The operation of this number fails.
    FailAt(u64, Errno),
}

pub(super) struct TestFiles {
    trouble: Trouble,
    /// Whether links are refused, as a file system without them would.
    pub(super) without_links: bool,
    /// What the files of the truth are called where they are here.
    pub(super) identities: HashMap<u64, u64>,
    operations: Mutex<u64>,
    /// What was changed, in words.
    pub(super) changes: Mutex<Vec<String>>,
}

impl TestFiles {
    pub(super) fn new(trouble: Trouble) -> Self {
        Self {
            trouble,
            without_links: false,
            identities: HashMap::new(),
            operations: Mutex::new(0),
            changes: Mutex::new(Vec::new()),
        }
    }

    pub(super) fn operations(&self) -> u64 {
        *self.operations.lock()
    }

    /// Counts an operation, which may be the one that goes wrong.
    pub(super) fn step(&self) -> io::Result<()> {
        let mut operations = self.operations.lock();
        let number = *operations;
        *operations += 1;
        match self.trouble {
            Trouble::CrashAt(at) if number >= at => Err(Errno::IO.into()),
            Trouble::FailAt(at, errno) if number == at => Err(errno.into()),
            _ => Ok(()),
        }
    }

    fn change(&self, what: &str, path: Option<&Path>) -> io::Result<()> {
        let path = path.map_or(String::new(), |path| path.display().to_string());
        self.changes.lock().push(format!("{what} {path}"));
        self.step()
    }

    fn translate(&self, mut found: Found) -> Found {
        found.identity = *self.identities.get(&found.identity).unwrap_or(&found.identity);
        found
    }
}

impl FileSystem for TestFiles {
    type File = File;

    fn look(&self, path: &Path) -> io::Result<Option<Found>> {
        self.step()?;
        Ok(LocalFiles.look(path)?.map(|found| self.translate(found)))
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        self.step()?;
        LocalFiles.list(directory)
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        self.step()?;
        LocalFiles.open(path)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        self.change("create", Some(path))?;
        LocalFiles.create(path)
    }

    fn examine(&self, file: &File) -> io::Result<Found> {
        self.step()?;
        LocalFiles.examine(file).map(|found| self.translate(found))
    }

    fn set_size(&self, file: &File, size_bytes: u64) -> io::Result<()> {
        self.change("set size", None)?;
        LocalFiles.set_size(file, size_bytes)
    }

    fn write(&self, file: &File, offset: u64, data: &[u8]) -> io::Result<()> {
        let stepped = self.change("write", None);
        // What fails may have done a part.
        let done = if stepped.is_ok() { data } else { &data[..data.len() / 2] };
        if !matches!(self.trouble, Trouble::CrashAt(at) if self.operations() > at + 1) {
            LocalFiles.write(file, offset, done)?;
        }
        stepped
    }

    fn start_sync(&self, _: &File, _: u64, _: u64) {}

    fn zero(&self, file: &File, offset: u64, len: u64) -> io::Result<()> {
        self.change("zero", None)?;
        LocalFiles.zero(file, offset, len)
    }

    fn set_owner(&self, file: &File, mode: u32, uid: u32, gid: u32) -> io::Result<()> {
        self.change("set owner", None)?;
        LocalFiles.set_owner(file, mode, uid, gid)
    }

    fn sync(&self, _: &File) -> io::Result<()> {
        // Only counted: no power is cut here, and the disk is slow.
        self.step()
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        if self.without_links {
            return Err(Errno::PERM.into());
        }
        self.change("link", Some(to))?;
        LocalFiles.link(from, to)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change("rename", Some(to))?;
        LocalFiles.rename(from, to)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        self.change("unlink", Some(path))?;
        LocalFiles.unlink(path)
    }

    fn make_directory(&self, path: &Path, uid: u32, gid: u32) -> io::Result<()> {
        self.change("mkdir", Some(path))?;
        LocalFiles.make_directory(path, uid, gid)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        LocalFiles.look(path)?.ok_or(io::ErrorKind::NotFound)?;
        self.step()
    }
}
