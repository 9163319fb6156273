//! A file system that a crash tears: one directory, a page cache, and a disk that has what was synced.
//!
//! Both lie in the region, behind the pool. What is written is stored through the CPU's cache: everybody sees it at once, and until
//! a sync writes it back a crash may keep any part, as a kernel that has begun to write its pages. Names change all at once, as with
//! a journal: a new snapshot of the directory is made first, then the word that says which one counts is stored, and written
//! back by a sync of the directory.
//!
//! Invariants:
//! 1. An inode is used again only when no snapshot that a crash can bring back has it, and then has a new identity.
//! 2. Bytes behind the end of a file are zero.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidegate::log::recover::{FileSystem, Found, FoundKind};
use tidegate::pmem::Region;

/// Most bytes of a file.
pub(crate) const FILE_BYTES: u64 = 1024;
const INODES: u64 = 20;
const LINE_BYTES: u64 = 64;
const SNAPSHOTS: u64 = 16;
const SNAPSHOT_BYTES: u64 = 16 + ENTRIES as u64 * ENTRY_BYTES as u64;
const ENTRIES: usize = 16;
/// Identity, inode, length of the path, the path.
const ENTRY_BYTES: usize = 96;
const PATH_AT: usize = 24;
const SIZES_AT: u64 = LINE_BYTES + SNAPSHOTS * SNAPSHOT_BYTES;
const DATA_AT: u64 = SIZES_AT + INODES * LINE_BYTES;

/// The files, in a region from some offset on.
pub(crate) struct ModelFiles {
    region: Arc<Region>,
    base: u64,
}

/// An open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ModelFile {
    pub(crate) inode: u64,
    pub(crate) identity: u64,
}

/// The directory at one moment.
#[derive(Debug, Default)]
struct Snapshot {
    last_identity: u64,
    names: BTreeMap<PathBuf, ModelFile>,
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::other(error)
}

fn word_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl Snapshot {
    fn decode(bytes: &[u8]) -> Self {
        let entries = bytes[16..].chunks_exact(ENTRY_BYTES).take(to_usize(word_at(bytes, 8)));
        let names = entries.map(|entry| {
            let path = &entry[PATH_AT..PATH_AT + to_usize(word_at(entry, 16))];
            let file = ModelFile { identity: word_at(entry, 0), inode: word_at(entry, 8) };
            (PathBuf::from(std::ffi::OsStr::from_bytes(path)), file)
        });
        Self { last_identity: word_at(bytes, 0), names: names.collect() }
    }

    fn encode(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(to_usize(SNAPSHOT_BYTES));
        bytes.extend(self.last_identity.to_le_bytes());
        bytes.extend((self.names.len() as u64).to_le_bytes());
        for (path, file) in &self.names {
            let path = path.as_os_str().as_bytes();
            let end = bytes.len() + ENTRY_BYTES;
            if path.len() > ENTRY_BYTES - PATH_AT || end > to_usize(SNAPSHOT_BYTES) {
                return Err(failed("the directory is full"));
            }
            for word in [file.identity, file.inode, path.len() as u64] {
                bytes.extend(word.to_le_bytes());
            }
            bytes.extend(path);
            bytes.resize(end, 0);
        }
        bytes.resize(to_usize(SNAPSHOT_BYTES), 0);
        Ok(bytes)
    }
}

impl ModelFiles {
    /// Bytes that the files need in the region.
    pub(crate) const BYTES: u64 = DATA_AT + INODES * FILE_BYTES;

    /// The files at `base`, as a crash left them: what the directory says now is what the journal says.
    pub(crate) fn mount(region: &Arc<Region>, base: u64) -> io::Result<Self> {
        let files = Self { region: Arc::clone(region), base };
        files.commit()?;
        Ok(files)
    }

    /// The bytes of the file from `offset` on, zero behind its end.
    pub(crate) fn read(&self, file: ModelFile, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.region.read(self.data_at(file) + offset, buf).map_err(failed)
    }

    /// Size of the file in bytes.
    pub(crate) fn size(&self, file: ModelFile) -> io::Result<u64> {
        self.region.load_u64(self.size_at(file)).map_err(failed)
    }

    fn size_at(&self, file: ModelFile) -> u64 {
        self.base + SIZES_AT + file.inode * LINE_BYTES
    }

    fn data_at(&self, file: ModelFile) -> u64 {
        self.base + DATA_AT + file.inode * FILE_BYTES
    }

    fn snapshot(&self) -> io::Result<Snapshot> {
        let version = self.region.load_u64(self.base).map_err(failed)?;
        let mut bytes = vec![0; to_usize(SNAPSHOT_BYTES)];
        let at = self.base + LINE_BYTES + version % SNAPSHOTS * SNAPSHOT_BYTES;
        self.region.read(at, &mut bytes).map_err(failed)?;
        Ok(Snapshot::decode(&bytes))
    }

    /// Makes `change` to the names; callers take turns. No crash brings more snapshots back than there are, since the
    /// journal is committed whenever they have gone around.
    fn change(&self, change: impl FnOnce(&mut Snapshot) -> io::Result<()>) -> io::Result<()> {
        let mut snapshot = self.snapshot()?;
        change(&mut snapshot)?;
        let version = self.region.load_u64(self.base).map_err(failed)? + 1;
        if version.is_multiple_of(SNAPSHOTS / 2) {
            self.commit()?;
        }
        let at = self.base + LINE_BYTES + version % SNAPSHOTS * SNAPSHOT_BYTES;
        let stored = self
            .region
            .write_streaming(at, &snapshot.encode()?)
            .and_then(|()| self.region.fence())
            .and_then(|()| self.region.store_u64(self.base, version));
        stored.map_err(failed)
    }

    /// Makes all names durable.
    fn commit(&self) -> io::Result<()> {
        self.region.persist(self.base, 8).map_err(failed)
    }

    fn found(&self, snapshot: &Snapshot, file: ModelFile) -> io::Result<Found> {
        let links = snapshot.names.values().filter(|other| **other == file).count() as u64;
        let size_bytes = self.size(file)?;
        Ok(Found { identity: file.identity, kind: FoundKind::File, links, size_bytes })
    }

    fn zero_data(&self, file: ModelFile, offset: u64, len: u64) -> io::Result<()> {
        let zeroes = vec![0; to_usize(len)];
        self.region.write(self.data_at(file) + offset, &zeroes).map_err(failed)
    }
}

impl FileSystem for ModelFiles {
    type File = ModelFile;

    fn look(&self, path: &Path) -> io::Result<Option<Found>> {
        if path == Path::new("/") {
            let kind = FoundKind::Directory;
            return Ok(Some(Found { identity: 0, kind, links: 1, size_bytes: 0 }));
        }
        let snapshot = self.snapshot()?;
        snapshot.names.get(path).map(|file| self.found(&snapshot, *file)).transpose()
    }

    fn list(&self, _directory: &Path) -> io::Result<Vec<PathBuf>> {
        Ok(self.snapshot()?.names.into_keys().collect())
    }

    fn open(&self, path: &Path) -> io::Result<ModelFile> {
        let found = self.snapshot()?.names.get(path).copied();
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn create(&self, path: &Path) -> io::Result<ModelFile> {
        self.commit()?;
        let mut snapshot = self.snapshot()?;
        if snapshot.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let used = |inode: &u64| snapshot.names.values().any(|file| file.inode == *inode);
        let inode = (0..INODES).find(|inode| !used(inode)).ok_or_else(|| failed("no inode"))?;
        snapshot.last_identity += 1;
        let file = ModelFile { inode, identity: snapshot.last_identity };
        self.region.store_u64(self.size_at(file), 0).map_err(failed)?;
        self.zero_data(file, 0, FILE_BYTES)?;
        self.sync(&file)?;
        self.change(|now| {
            now.last_identity = file.identity;
            now.names.insert(path.to_path_buf(), file);
            Ok(())
        })?;
        Ok(file)
    }

    fn examine(&self, file: &ModelFile) -> io::Result<Found> {
        self.found(&self.snapshot()?, *file)
    }

    fn set_size(&self, file: &ModelFile, size_bytes: u64) -> io::Result<()> {
        let size = self.size(*file)?;
        if size_bytes > FILE_BYTES {
            return Err(failed("the file is too large"));
        }
        if size_bytes < size {
            self.zero_data(*file, size_bytes, size - size_bytes)?;
        }
        self.region.store_u64(self.size_at(*file), size_bytes).map_err(failed)
    }

    fn write(&self, file: &ModelFile, offset: u64, data: &[u8]) -> io::Result<()> {
        let end = offset + data.len() as u64;
        if end > FILE_BYTES {
            return Err(failed("the file is too large"));
        }
        self.region.write(self.data_at(*file) + offset, data).map_err(failed)?;
        if end > self.size(*file)? {
            self.region.store_u64(self.size_at(*file), end).map_err(failed)?;
        }
        Ok(())
    }

    fn start_sync(&self, _file: &ModelFile, _offset: u64, _len: u64) {}

    fn zero(&self, file: &ModelFile, offset: u64, len: u64) -> io::Result<()> {
        self.zero_data(*file, offset, len.min(FILE_BYTES - offset))
    }

    fn set_owner(&self, _: &ModelFile, _: u32, _: u32, _: u32) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self, file: &ModelFile) -> io::Result<()> {
        let synced = self
            .region
            .write_back(self.data_at(*file), FILE_BYTES)
            .and_then(|()| self.region.persist(self.size_at(*file), 8));
        synced.map_err(failed)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let file = self.open(from)?;
        self.change(|now| match now.names.insert(to.to_path_buf(), file) {
            None => Ok(()),
            Some(_) => Err(io::ErrorKind::AlreadyExists.into()),
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change(|now| {
            let file = now.names.get(from).copied().ok_or(io::ErrorKind::NotFound)?;
            // Of two names of one file both stay, as POSIX has it.
            if now.names.get(to) != Some(&file) {
                now.names.remove(from);
                now.names.insert(to.to_path_buf(), file);
            }
            Ok(())
        })
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        self.change(|now| {
            now.names.remove(path).map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
        })
    }

    fn make_directory(&self, _path: &Path, _uid: u32, _gid: u32) -> io::Result<()> {
        Err(failed("there is one directory"))
    }

    fn sync_directory(&self, _path: &Path) -> io::Result<()> {
        self.commit()
    }
}
