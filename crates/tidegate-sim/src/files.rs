//! A kernel's files: a page cache, a disk, and a journal that commits in order.
//!
//! As ext4 does it: bytes reach the disk page by page, at any time. A page that the disk has is
//! overwritten in place; for another one a block is allocated, which the disk shows, with the size
//! that it brings, only from the next commit on. Names and changes of the size go to the journal at
//! once, and pages that the old or the new size ends in are written with them, as `data=ordered`
//! has it. A sync writes the file's pages and commits, an `fdatasync` commits only if the file
//! needs it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tidegate::log::recover::{Access, Failure, FilePlan, FileState, FileSystem, Ranges};

use crate::random::Random;

/// Bytes of a page.
pub(crate) const PAGE_BYTES: usize = 64;

type Page = [u8; PAGE_BYTES];

/// A change that the journal has and the disk does not show yet.
#[derive(Debug, Clone)]
enum Change {
    Names(u64),
    SetSize {
        file: usize,
        size: usize,
    },
    /// Size at least, and the content of a new block, if there is one.
    Allocate {
        file: usize,
        page: usize,
        content: Option<Page>,
        size: usize,
    },
}

/// A file on the disk.
#[derive(Debug, Clone, Default)]
struct OnDisk {
    size: usize,
    pages: BTreeMap<usize, Page>,
}

impl OnDisk {
    /// Zeroes the rest of the page that `end` is in.
    fn zero_from(&mut self, end: usize) {
        if let Some(last) = self.pages.get_mut(&(end / PAGE_BYTES)) {
            last[end % PAGE_BYTES..].fill(0);
        }
    }
}

/// A file in the page cache.
#[derive(Debug, Clone, Default)]
struct Cached {
    bytes: Vec<u8>,
    dirty: BTreeSet<usize>,
    /// The inode was changed since the last commit.
    is_changed: bool,
}

/// The kernel, with the files that it caches and the disk under it.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    cache: Vec<Cached>,
    disk: Vec<OnDisk>,
    journal: Vec<Change>,
    names: u64,
    names_on_disk: u64,
}

impl Kernel {
    /// A disk with so many empty files.
    pub(crate) fn new(files: usize) -> Self {
        let (cache, disk) = (vec![Cached::default(); files], vec![OnDisk::default(); files]);
        Self { cache, disk, journal: Vec::new(), names: 0, names_on_disk: 0 }
    }

    /// What programs see of a file.
    pub(crate) fn bytes(&self, file: usize) -> &[u8] {
        &self.cache[file].bytes
    }

    /// The version of all names that programs see.
    pub(crate) fn names(&self) -> u64 {
        self.names
    }

    /// The version of all names that a crash leaves.
    pub(crate) fn names_on_disk(&self) -> u64 {
        self.names_on_disk
    }

    /// Changes some name.
    pub(crate) fn rename(&mut self) {
        self.names += 1;
        self.journal.push(Change::Names(self.names));
    }

    pub(crate) fn write(&mut self, file: usize, offset: usize, data: &[u8]) {
        let cached = &mut self.cache[file];
        let (old, end) = (cached.bytes.len(), offset + data.len());
        if end > old {
            cached.bytes.resize(end, 0);
        }
        cached.bytes[offset..end].copy_from_slice(data);
        // What lies between the old end and the write stays a hole.
        cached.dirty.extend(offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES));
        cached.is_changed = true;
    }

    pub(crate) fn set_size(&mut self, file: usize, size: usize) {
        let cached = &mut self.cache[file];
        cached.bytes.resize(size, 0);
        cached.dirty.split_off(&size.div_ceil(PAGE_BYTES));
        cached.is_changed = true;
        self.journal.push(Change::SetSize { file, size });
    }

    /// The journal has a change of the file's size.
    fn is_resized(&self, file: usize) -> bool {
        let resizes =
            |change: &Change| matches!(change, Change::SetSize { file: its, .. } if *its == file);
        self.journal.iter().any(resizes)
    }

    /// Writes a page back, if it is dirty. Not before a new size of the file is committed: a page
    /// that is overwritten in place would come with the old size, which ext4 allows and no moment
    /// explains.
    pub(crate) fn write_back(&mut self, file: usize, page: usize) {
        if self.is_resized(file) || !self.cache[file].dirty.remove(&page) {
            return;
        }
        let size = self.cache[file].bytes.len().min((page + 1) * PAGE_BYTES);
        let content = self.cached_page(file, page);
        let is_new = !self.disk[file].pages.contains_key(&page);
        if !is_new {
            self.disk[file].pages.insert(page, content);
        }
        let content = is_new.then_some(content);
        self.journal.push(Change::Allocate { file, page, content, size });
    }

    /// Writes pages back and commits, as chance has it.
    pub(crate) fn write_back_some(&mut self, random: &mut Random) {
        for file in 0..self.cache.len() {
            for page in self.cache[file].dirty.clone() {
                if random.one_in(2) {
                    self.write_back(file, page);
                }
            }
        }
        if random.one_in(2) {
            self.commit();
        }
    }

    /// Writes a page in place, if it is dirty.
    fn write_last_page(&mut self, file: usize, page: usize) {
        let is_dirty = self.cache[file].dirty.contains(&page);
        let content = self.cached_page(file, page);
        if let Some(on_disk) = self.disk[file].pages.get_mut(&page).filter(|_| is_dirty) {
            *on_disk = content;
        }
    }

    fn cached_page(&self, file: usize, page: usize) -> Page {
        let bytes = self.cache[file].bytes.chunks(PAGE_BYTES).nth(page).unwrap_or_default();
        let mut content = [0; PAGE_BYTES];
        content[..bytes.len()].copy_from_slice(bytes);
        content
    }

    pub(crate) fn commit(&mut self) {
        let mut ends = Vec::new();
        for change in std::mem::take(&mut self.journal) {
            match change {
                Change::Names(names) => self.names_on_disk = names,
                Change::SetSize { file, size } => {
                    let disk = &mut self.disk[file];
                    disk.zero_from(size.min(disk.size));
                    ends.extend([disk.size, size].map(|end| (file, end / PAGE_BYTES)));
                    disk.size = size;
                    disk.pages.split_off(&size.div_ceil(PAGE_BYTES));
                }
                Change::Allocate { file, page, content, size } => {
                    let disk = &mut self.disk[file];
                    disk.size = disk.size.max(size);
                    if let Some(content) = content {
                        disk.pages.insert(page, content);
                    }
                }
            }
        }
        for (file, page) in ends {
            self.write_last_page(file, page);
        }
        self.cache.iter_mut().for_each(|cached| cached.is_changed = false);
    }

    /// `fsync`, or `fdatasync`; whether it committed the journal.
    pub(crate) fn sync(&mut self, file: usize, data_only: bool) -> bool {
        let resized = self.is_resized(file);
        if resized {
            self.commit();
        }
        for page in self.cache[file].dirty.clone() {
            self.write_back(file, page);
        }
        let disk = &self.disk[file];
        let needs_commit = |change: &Change| match change {
            Change::Names(_) | Change::SetSize { .. } => false,
            Change::Allocate { file: its, content, size, .. } => {
                *its == file && (content.is_some() || *size > disk.size)
            }
        };
        let commits =
            self.journal.iter().any(needs_commit) || !data_only && self.cache[file].is_changed;
        if commits {
            self.commit();
        }
        commits || resized
    }

    /// The bytes of the file that the disk has allocated and written.
    pub(crate) fn written(&self, file: usize) -> Ranges {
        let range = |page: &usize| {
            let start = page * PAGE_BYTES;
            start as u64..(start + PAGE_BYTES) as u64
        };
        self.disk[file].pages.keys().map(range).collect()
    }

    /// What the power cut leaves. A page that was overwritten in place may have bytes behind the
    /// size that the disk shows: they come back as zeroes, should the file grow over them.
    pub(crate) fn crash(&mut self) {
        self.journal.clear();
        self.names = self.names_on_disk;
        for (cached, disk) in self.cache.iter_mut().zip(&mut self.disk) {
            disk.zero_from(disk.size);
            let mut bytes = vec![0; disk.size];
            for (page, content) in &disk.pages {
                let start = page * PAGE_BYTES;
                let len = disk.size.saturating_sub(start).min(PAGE_BYTES);
                bytes[start.min(disk.size)..][..len].copy_from_slice(&content[..len]);
            }
            *cached = Cached { bytes, ..Cached::default() };
        }
    }
}

/// The files of a kernel as recovery sees them, until it is interrupted.
pub(crate) struct Mounted {
    kernel: Mutex<Kernel>,
    /// Calls that still succeed.
    calls_left: Mutex<usize>,
}

impl Mounted {
    pub(crate) fn new(kernel: Kernel, calls_left: usize) -> Self {
        Self { kernel: Mutex::new(kernel), calls_left: Mutex::new(calls_left) }
    }

    pub(crate) fn into_kernel(self) -> Kernel {
        self.kernel.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self) -> io::Result<MutexGuard<'_, Kernel>> {
        let mut left = self.calls_left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.checked_sub(1).ok_or(io::ErrorKind::Interrupted)?;
        Ok(self.kernel.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl FileSystem for Mounted {
    type File = usize;

    fn open(&self, file: &FilePlan, _: Access) -> Result<Option<usize>, Failure> {
        Ok(Some(to_usize(file.identity - 1)))
    }

    fn state(&self, file: &usize) -> io::Result<FileState> {
        let size_bytes = self.call()?.bytes(*file).len() as u64;
        Ok(FileState { size_bytes, block_bytes: PAGE_BYTES as u64, changed_ns: 0, modified_ns: 0 })
    }

    fn written(&self, file: &usize, _size_bytes: u64) -> io::Result<Ranges> {
        Ok(self.call()?.written(*file))
    }

    fn set_size(&self, file: &usize, size_bytes: u64) -> io::Result<()> {
        self.call()?.set_size(*file, to_usize(size_bytes));
        Ok(())
    }

    fn write(&self, file: &usize, offset: u64, data: &[u8]) -> io::Result<()> {
        self.call()?.write(*file, to_usize(offset), data);
        Ok(())
    }

    fn zero(&self, file: &usize, offset: u64, len: u64) -> io::Result<()> {
        self.call()?.write(*file, to_usize(offset), &vec![0; to_usize(len)]);
        Ok(())
    }

    fn start_sync(&self, _file: &usize, _offset: u64, _len: u64) {}

    fn sync(&self, file: &usize) -> io::Result<()> {
        self.call()?.sync(*file, false);
        Ok(())
    }
}
