//! A kernel's files: names and attributes, a page cache, a disk, and a journal that commits in
//! order.
//!
//! As in ext4, bytes reach the disk page by page, at any time. A page that the disk already has is
//! overwritten in place. Any other page gets a new block, which the disk shows, together with the
//! size that the page brings, only from the next commit on. Changes of names, attributes and sizes
//! go to the journal at once. A new size also writes back the pages that the old and the new size
//! end in, as with `data=ordered`. A sync writes the file's pages and commits; an `fdatasync`
//! commits only if the file needs it. A crash keeps the committed changes, and bytes that were
//! overwritten in place.
//!
//! A page whose block is shared with another file, as on XFS, gets a new block instead of being
//! overwritten in place. The pages of a file whose data is journaled wait for the commit, too. A
//! read may put the inode into the journal, for its access time.
//!
//! - `mod.rs`: bytes, sizes, the journal, syncs;
//! - `tree.rs`: names and attributes;
//! - `mounted.rs`: the files as recovery opens them.

mod mounted;
mod tree;

use std::collections::{BTreeMap, BTreeSet};

use tidegate::log::recover::Ranges;

pub(crate) use self::mounted::Mounted;
use self::tree::Replacing;
pub(crate) use self::tree::{DIRECTORIES, NAMES, Slot, Tree, directory_of};
use crate::random::Random;

/// Flag of an inode whose data goes through the journal, as `FS_IOC_GETFLAGS` reports it.
const FS_JOURNAL_DATA_FL: u32 = 0x4000;
/// Bytes of a page.
pub(crate) const PAGE_BYTES: usize = 64;

type Page = [u8; PAGE_BYTES];
/// An inode number with its generation: unique to a file within a history.
pub(crate) type Inode = usize;

/// A change of a file that the journal has and the disk does not show yet.
#[derive(Debug, Clone)]
enum Change {
    SetSize {
        file: Inode,
        size: usize,
    },
    /// The least size, and the content of the new block, if the page gets one.
    Allocate {
        file: Inode,
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

/// Changes of an inode that a sync has to commit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Uncommitted {
    #[default]
    Nothing,
    /// Changes that `fsync` commits and `fdatasync` does not.
    Metadata,
    /// Changes that `fdatasync` commits, too.
    Data,
}

/// A regular file.
#[derive(Debug, Clone, Default)]
struct File {
    /// The content that programs see.
    bytes: Vec<u8>,
    /// Pages that are to be written back.
    dirty: BTreeSet<usize>,
    /// Pages whose blocks are shared with another file, until a new block is committed.
    shared: BTreeSet<usize>,
    /// The flags of the inode.
    flags: u32,
    uncommitted: Uncommitted,
    disk: OnDisk,
}

impl File {
    fn change(&mut self, kind: Uncommitted) {
        self.uncommitted = self.uncommitted.max(kind);
    }

    /// Returns whether a page that is written back is in the journal until the next commit.
    fn is_journaled(&self, page: usize) -> bool {
        let is_in_place = self.disk.pages.contains_key(&page) && !self.shared.contains(&page);
        !is_in_place || self.flags & FS_JOURNAL_DATA_FL != 0
    }

    fn cached_page(&self, page: usize) -> Page {
        let bytes = self.bytes.chunks(PAGE_BYTES).nth(page).unwrap_or_default();
        let mut content = [0; PAGE_BYTES];
        content[..bytes.len()].copy_from_slice(bytes);
        content
    }

    /// Writes a page in place, if it is dirty.
    fn write_last_page(&mut self, page: usize) {
        let content = self.cached_page(page);
        if let Some(on_disk) = self.disk.pages.get_mut(&page)
            && self.dirty.contains(&page)
        {
            *on_disk = content;
        }
    }

    /// Reads the file from the disk after a crash. A page that was overwritten in place may have
    /// bytes behind the size that the disk shows: they come back as zeroes, should the file grow
    /// over them.
    fn reload(&mut self) {
        let mut disk = std::mem::take(&mut self.disk);
        disk.zero_from(disk.size);
        let mut bytes = vec![0; disk.size];
        for (page, content) in &disk.pages {
            let start = page * PAGE_BYTES;
            let len = disk.size.saturating_sub(start).min(PAGE_BYTES);
            bytes[start.min(disk.size)..][..len].copy_from_slice(&content[..len]);
        }
        *self = Self { bytes, disk, flags: self.flags, ..Self::default() };
    }
}

/// The kernel, with the files that it caches and the disk under it.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    /// The tree of each prefix of changes; the last one is the present.
    pub(crate) trees: Vec<Tree>,
    /// Number of changes of the tree that the disk has.
    pub(crate) committed: usize,
    files: BTreeMap<Inode, File>,
    journal: Vec<Change>,
    next_inode: Inode,
    clock: usize,
    /// As ext4: a rename over a file allocates, and the sync of a directory always commits.
    is_ext4: bool,
    pub(crate) replacing: Vec<Replacing>,
    /// The file of the log that recovery made an inode for.
    originals: BTreeMap<Inode, Inode>,
}

impl Kernel {
    /// Makes a disk with `files` files of `content`: file n has the first name of directory n.
    pub(crate) fn new(is_ext4: bool, files: usize, content: &[u8]) -> Self {
        let mut this = Self {
            trees: vec![Tree::new(files)],
            committed: 0,
            files: BTreeMap::new(),
            journal: Vec::new(),
            next_inode: files,
            clock: 0,
            is_ext4,
            replacing: Vec::new(),
            originals: BTreeMap::new(),
        };
        for inode in 0..files {
            this.write(inode, 0, content);
            this.write_back(inode);
        }
        this.commit();
        this
    }

    fn file(&mut self, inode: Inode) -> &mut File {
        self.files.entry(inode).or_default()
    }

    /// Returns the content of a file as programs see it.
    pub(crate) fn bytes(&self, inode: Inode) -> &[u8] {
        self.files.get(&inode).map_or(&[], |file| &file.bytes)
    }

    /// Returns the first byte of a file, or 0 if the file is empty. Where all bytes of a file are
    /// equal, the first one identifies its content.
    pub(crate) fn version(&self, inode: Inode) -> u8 {
        self.bytes(inode).first().copied().unwrap_or(0)
    }

    pub(crate) fn write(&mut self, inode: Inode, offset: usize, data: &[u8]) {
        let file = self.file(inode);
        let (old, end) = (file.bytes.len(), offset + data.len());
        if end > old {
            file.bytes.resize(end, 0);
        }
        file.bytes[offset..end].copy_from_slice(data);
        // The bytes between the old end and the write stay a hole.
        file.dirty.extend(offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES));
        file.change(Uncommitted::Metadata);
    }

    pub(crate) fn set_size(&mut self, inode: Inode, size: usize) {
        let file = self.file(inode);
        file.bytes.resize(size, 0);
        file.dirty.split_off(&size.div_ceil(PAGE_BYTES));
        file.shared.split_off(&size.div_ceil(PAGE_BYTES));
        file.change(Uncommitted::Metadata);
        self.journal.push(Change::SetSize { file: inode, size });
    }

    /// Turns on journaling of the file's data.
    pub(crate) fn journal_data(&mut self, inode: Inode) {
        self.file(inode).flags |= FS_JOURNAL_DATA_FL;
    }

    /// Returns the flags of an inode.
    pub(crate) fn flags(&self, inode: Inode) -> u32 {
        self.files.get(&inode).map_or(0, |file| file.flags)
    }

    /// Makes another file that shares this file's blocks; writes this file back before.
    pub(crate) fn share(&mut self, inode: Inode) {
        self.write_back(inode);
        let file = self.file(inode);
        file.shared.extend(0..file.bytes.len().div_ceil(PAGE_BYTES));
        file.change(Uncommitted::Metadata);
    }

    /// Returns whether the file shares some of its blocks with another file.
    pub(crate) fn is_shared(&self, inode: Inode) -> bool {
        self.files.get(&inode).is_some_and(|file| !file.shared.is_empty())
    }

    /// Reads the file, which sets its time of access.
    pub(crate) fn read(&mut self, inode: Inode) {
        self.file(inode).change(Uncommitted::Metadata);
    }

    /// Returns whether the journal has a change of the file's size.
    fn is_resized(&self, inode: Inode) -> bool {
        let resizes =
            |change: &Change| matches!(change, Change::SetSize { file, .. } if *file == inode);
        self.journal.iter().any(resizes)
    }

    /// Writes a page back, if it is dirty and no new size of the file waits for its commit. A page
    /// that is overwritten in place would come with the old size, which ext4 allows and no moment
    /// explains.
    pub(crate) fn write_back_page(&mut self, inode: Inode, page: usize) {
        let is_resized = self.is_resized(inode);
        let file = self.file(inode);
        if is_resized || !file.dirty.remove(&page) {
            return;
        }
        let size = file.bytes.len().min((page + 1) * PAGE_BYTES);
        let content = file.cached_page(page);
        let is_journaled = file.is_journaled(page);
        if !is_journaled {
            file.disk.pages.insert(page, content);
        }
        if is_journaled || size > file.disk.size {
            file.change(Uncommitted::Data);
        }
        let content = is_journaled.then_some(content);
        self.journal.push(Change::Allocate { file: inode, page, content, size });
    }

    /// Writes all dirty pages of a file back.
    pub(crate) fn write_back(&mut self, inode: Inode) {
        for page in self.file(inode).dirty.clone() {
            self.write_back_page(inode, page);
        }
    }

    /// Returns whether the file has bytes without a block on the disk: they get one when they are
    /// written back.
    pub(crate) fn is_delayed(&self, inode: Inode) -> bool {
        let is_new =
            |file: &File| file.dirty.iter().any(|page| !file.disk.pages.contains_key(page));
        self.files.get(&inode).is_some_and(is_new)
    }

    /// Writes random pages back, and may commit.
    pub(crate) fn write_back_some(&mut self, random: &mut Random) {
        let pages = |(inode, file): (&Inode, &File)| {
            let inode = *inode;
            file.dirty.clone().into_iter().map(move |page| (inode, page))
        };
        let dirty: Vec<(Inode, usize)> = self.files.iter().flat_map(pages).collect();
        for (inode, page) in dirty {
            if random.one_in(2) {
                self.write_back_page(inode, page);
            }
        }
        if random.one_in(2) {
            self.commit();
        }
    }

    /// Commits the journal.
    pub(crate) fn commit(&mut self) {
        self.committed = self.changes();
        let mut ends = Vec::new();
        for change in std::mem::take(&mut self.journal) {
            match change {
                Change::SetSize { file, size } => {
                    let disk = &mut self.file(file).disk;
                    disk.zero_from(size.min(disk.size));
                    ends.extend([disk.size, size].map(|end| (file, end / PAGE_BYTES)));
                    disk.size = size;
                    disk.pages.split_off(&size.div_ceil(PAGE_BYTES));
                }
                Change::Allocate { file, page, content, size } => {
                    let file = self.file(file);
                    file.disk.size = file.disk.size.max(size);
                    if let Some(content) = content {
                        file.shared.remove(&page);
                        file.disk.pages.insert(page, content);
                    }
                }
            }
        }
        for (inode, page) in ends {
            self.file(inode).write_last_page(page);
        }
        self.files.values_mut().for_each(|file| file.uncommitted = Uncommitted::Nothing);
    }

    /// Makes an `fsync`, or `fdatasync`; returns whether it committed the journal.
    pub(crate) fn sync(&mut self, inode: Inode, data_only: bool) -> bool {
        let resized = self.is_resized(inode);
        if resized {
            self.commit();
        }
        self.write_back(inode);
        let least = if data_only { Uncommitted::Data } else { Uncommitted::Metadata };
        let commits = self.file(inode).uncommitted >= least;
        if commits {
            self.commit();
        }
        commits || resized
    }

    /// Makes an `fsync` of a directory; returns whether it committed the journal.
    pub(crate) fn sync_directory(&mut self, directory: usize) -> bool {
        let on_disk = self.trees[self.committed].changed_at[directory];
        let commits = self.is_ext4 || self.present().changed_at[directory] != on_disk;
        if commits {
            self.commit();
        }
        commits
    }

    /// Returns the bytes of the file that the disk has allocated and written.
    pub(crate) fn written(&self, inode: Inode) -> Ranges {
        let range = |page: &usize| {
            let start = page * PAGE_BYTES;
            start as u64..(start + PAGE_BYTES) as u64
        };
        self.files
            .get(&inode)
            .into_iter()
            .flat_map(|file| file.disk.pages.keys())
            .map(range)
            .collect()
    }

    /// Reverts to the state on the disk, as a power cut does. Inodes without a name are gone.
    pub(crate) fn crash(&mut self) {
        self.trees.truncate(self.committed + 1);
        self.journal.clear();
        let tree = &self.trees[self.committed];
        self.files.retain(|inode, _| tree.links(*inode) > 0);
        self.files.values_mut().for_each(File::reload);
    }
}
