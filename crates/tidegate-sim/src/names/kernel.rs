//! A kernel's names: directories, a page cache, and a journal that commits in order.
//!
//! Each change of names or attributes is one change of the journal; [`Kernel::trees`] has the tree
//! of each prefix of them. A crash keeps the prefix that was committed. The content of a file is
//! one number, its *version*; 0 is an empty file. A first write-back allocates, which the disk
//! shows from the next commit on; later ones overwrite in place.

use std::collections::BTreeMap;

use crate::random::Random;

/// Directories. Programs of the tree change names in all but the last one.
pub(super) const DIRECTORIES: usize = 3;
/// Names in each directory.
pub(super) const NAMES: usize = 2;
/// Files of the initial state: number n is the first name of directory n.
pub(super) const INITIAL_FILES: usize = 2;

/// A directory and a name in it, as one number.
pub(super) type Slot = usize;
/// An inode number with its generation: no two files of a history have the same.
pub(super) type Inode = usize;

/// The directory of a slot.
pub(super) fn directory_of(slot: Slot) -> usize {
    slot / NAMES
}

/// Names and attributes after some number of changes.
#[derive(Debug, Clone, Default)]
pub(super) struct Tree {
    /// What is at each slot.
    pub(super) names: BTreeMap<Slot, Inode>,
    /// The names that recovery gives files while it works, by the inode that the log knows.
    pub(super) reserved: BTreeMap<Inode, Inode>,
    /// Permission bits.
    pub(super) modes: BTreeMap<Inode, usize>,
    /// When the entries of each directory changed last, as its `ctime` has it.
    pub(super) changed_at: [usize; DIRECTORIES],
    /// How many changes there were that concern no regular file.
    pub(super) others: usize,
}

impl Tree {
    /// The slots of an inode.
    pub(super) fn slots_of(&self, inode: Inode) -> impl Iterator<Item = Slot> {
        self.names.iter().filter(move |(_, other)| **other == inode).map(|(slot, _)| *slot)
    }

    /// How many names an inode has.
    pub(super) fn links(&self, inode: Inode) -> usize {
        let reserved = self.reserved.values().filter(|other| **other == inode).count();
        self.slots_of(inode).count() + reserved
    }
}

/// What has to be committed of an inode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Uncommitted {
    #[default]
    Nothing,
    /// What `fsync` commits only.
    Metadata,
    /// What `fdatasync` commits, too.
    Data,
}

/// A regular file.
#[derive(Debug, Clone, Default)]
struct File {
    version: usize,
    is_dirty: bool,
    /// What its block on the disk holds; none before the first write-back.
    block: Option<usize>,
    /// A commit has made the block visible.
    is_allocated: bool,
    uncommitted: Uncommitted,
}

impl File {
    fn change(&mut self, what: Uncommitted) {
        self.uncommitted = self.uncommitted.max(what);
    }
}

/// A file that was renamed over another one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Replacing {
    pub(super) inode: Inode,
    pub(super) change: usize,
    pub(super) version: usize,
}

/// The kernel with its page cache, and the disk under it.
#[derive(Debug, Clone)]
pub(super) struct Kernel {
    /// The tree of each prefix of changes; the last one is the present.
    pub(super) trees: Vec<Tree>,
    /// Number of changes that the disk has.
    pub(super) committed: usize,
    files: BTreeMap<Inode, File>,
    next_inode: Inode,
    clock: usize,
    /// As ext4: a rename over a file allocates, and the sync of a directory always commits.
    is_ext4: bool,
    pub(super) replacing: Vec<Replacing>,
    /// Which file of the log an inode was made for by recovery.
    originals: BTreeMap<Inode, Inode>,
}

impl Kernel {
    /// A disk with the initial files.
    pub(super) fn new(is_ext4: bool) -> Self {
        let mut tree = Tree::default();
        let mut files = BTreeMap::new();
        for inode in 0..INITIAL_FILES {
            tree.names.insert(inode * NAMES, inode);
            tree.modes.insert(inode, 0);
            let file = File { version: 1, block: Some(1), is_allocated: true, ..File::default() };
            files.insert(inode, file);
        }
        let (trees, replacing) = (vec![tree], Vec::new());
        let next_inode = INITIAL_FILES;
        let originals = BTreeMap::new();
        Self { trees, committed: 0, files, next_inode, clock: 0, is_ext4, replacing, originals }
    }

    /// The file that programs knew by another inode number, or by this one.
    pub(super) fn original(&self, inode: Inode) -> Inode {
        self.originals.get(&inode).copied().unwrap_or(inode)
    }

    /// What programs see.
    pub(super) fn present(&self) -> &Tree {
        &self.trees[self.changes()]
    }

    /// Number of changes so far.
    pub(super) fn changes(&self) -> usize {
        self.trees.len() - 1
    }

    /// What a reader of the file sees.
    pub(super) fn version(&self, inode: Inode) -> usize {
        self.files.get(&inode).map_or(0, |file| file.version)
    }

    fn file(&mut self, inode: Inode) -> &mut File {
        self.files.entry(inode).or_default()
    }

    /// Adds a change of the journal, of these inodes and of the directories of these slots.
    fn change(&mut self, inodes: &[Inode], slots: &[Slot], edit: impl FnOnce(&mut Tree)) {
        self.clock += 1;
        let mut tree = self.present().clone();
        edit(&mut tree);
        for slot in slots {
            tree.changed_at[directory_of(*slot)] = self.clock;
        }
        self.trees.push(tree);
        // XFS commits for an `fdatasync` whatever is more than times.
        let what = if self.is_ext4 { Uncommitted::Metadata } else { Uncommitted::Data };
        for inode in inodes {
            self.file(*inode).change(what);
        }
    }

    pub(super) fn create(&mut self, slot: Slot) -> Inode {
        let inode = self.new_inode();
        self.change(&[inode], &[slot], |tree| {
            tree.names.insert(slot, inode);
            tree.modes.insert(inode, 0);
        });
        inode
    }

    fn new_inode(&mut self) -> Inode {
        let inode = self.next_inode;
        self.next_inode += 1;
        self.files.insert(inode, File { uncommitted: Uncommitted::Data, ..File::default() });
        inode
    }

    pub(super) fn write(&mut self, inode: Inode, version: usize) {
        let file = self.file(inode);
        file.version = version;
        file.is_dirty = true;
        file.change(Uncommitted::Metadata);
    }

    pub(super) fn set_mode(&mut self, inode: Inode, mode: usize) {
        self.change(&[inode], &[], |tree| {
            tree.modes.insert(inode, mode);
        });
    }

    pub(super) fn link(&mut self, inode: Inode, slot: Slot) {
        self.change(&[inode], &[slot], |tree| {
            tree.names.insert(slot, inode);
        });
    }

    pub(super) fn unlink(&mut self, slot: Slot) {
        let inode = self.present().names.get(&slot).copied();
        let inodes: Vec<Inode> = inode.into_iter().collect();
        self.change(&inodes, &[slot], |tree| {
            tree.names.remove(&slot);
        });
    }

    /// Renames, also over another file.
    pub(super) fn rename(&mut self, inode: Inode, from: Slot, to: Slot) {
        let replaced = self.present().names.get(&to).copied();
        if self.is_ext4 && replaced.is_some() {
            self.write_back(inode);
        }
        let inodes: Vec<Inode> = [Some(inode), replaced].into_iter().flatten().collect();
        self.change(&inodes, &[from, to], |tree| {
            tree.names.remove(&from);
            tree.names.insert(to, inode);
        });
        if self.is_ext4 && replaced.is_some() {
            let (change, version) = (self.changes(), self.version(inode));
            self.replacing.push(Replacing { inode, change, version });
        }
    }

    /// A change that concerns no regular file: a directory made, renamed, given another mode.
    pub(super) fn change_other(&mut self) {
        self.change(&[], &[], |tree| tree.others += 1);
    }

    /// Writes the file's data back, if it is dirty.
    pub(super) fn write_back(&mut self, inode: Inode) {
        let file = self.file(inode);
        if !std::mem::take(&mut file.is_dirty) {
            return;
        }
        file.block = Some(file.version);
        if !file.is_allocated {
            file.change(Uncommitted::Data);
        }
    }

    /// The file has bytes without a block on the disk: they get one when they are written back.
    pub(super) fn is_delayed(&self, inode: Inode) -> bool {
        self.files.get(&inode).is_some_and(|file| file.is_dirty && !file.is_allocated)
    }

    /// Commits the journal.
    pub(super) fn commit(&mut self) {
        self.committed = self.changes();
        for file in self.files.values_mut() {
            file.uncommitted = Uncommitted::Nothing;
            file.is_allocated = file.block.is_some();
        }
    }

    /// `fsync`, or `fdatasync`; whether it committed the journal.
    pub(super) fn sync(&mut self, inode: Inode, data_only: bool) -> bool {
        self.write_back(inode);
        let least = if data_only { Uncommitted::Data } else { Uncommitted::Metadata };
        let commits = self.file(inode).uncommitted >= least;
        if commits {
            self.commit();
        }
        commits
    }

    /// `fsync` of a directory; whether it committed the journal.
    pub(super) fn sync_directory(&mut self, directory: usize) -> bool {
        let on_disk = self.trees[self.committed].changed_at[directory];
        let commits = self.is_ext4 || self.present().changed_at[directory] != on_disk;
        if commits {
            self.commit();
        }
        commits
    }

    /// Files are written back, and the journal is committed, as chance has it.
    pub(super) fn write_back_some(&mut self, random: &mut Random) {
        let dirty = self.files.iter().filter(|(_, file)| file.is_dirty);
        let dirty: Vec<Inode> = dirty.map(|(inode, _)| *inode).collect();
        for inode in dirty {
            if random.one_in(2) {
                self.write_back(inode);
            }
        }
        if random.one_in(4) {
            self.commit();
        }
    }

    /// What a power cut leaves. Inodes without a name are gone.
    pub(super) fn crash(&mut self) {
        self.trees.truncate(self.committed + 1);
        let tree = self.trees[self.committed].clone();
        self.files.retain(|inode, _| tree.links(*inode) > 0);
        for file in self.files.values_mut() {
            let block = file.block.filter(|_| file.is_allocated);
            let (version, is_allocated) = (block.unwrap_or(0), block.is_some());
            *file = File { version, block, is_allocated, ..File::default() };
        }
    }

    /// Makes a file without a name, with its content on the disk, and gives it a reserved name: it
    /// is whole, or not there at all. Returns its inode.
    pub(super) fn make_reserved(&mut self, original: Inode, mode: usize, version: usize) -> Inode {
        let inode = self.make_empty(original, mode);
        self.write(inode, version);
        self.write_back(inode);
        self.file(inode).is_allocated = true;
        inode
    }

    /// As a careless recovery makes a file: the name first, the content later.
    pub(super) fn make_empty(&mut self, original: Inode, mode: usize) -> Inode {
        let inode = self.new_inode();
        self.originals.insert(inode, original);
        self.change(&[inode], &[], |tree| {
            tree.modes.insert(inode, mode);
            tree.reserved.insert(original, inode);
        });
        inode
    }

    /// Gives a file a reserved name beside its own.
    pub(super) fn reserve(&mut self, inode: Inode) {
        self.change(&[inode], &[], |tree| {
            tree.reserved.insert(inode, inode);
        });
    }

    /// Takes the reserved name away.
    pub(super) fn release(&mut self, original: Inode) {
        self.change(&[], &[], |tree| {
            tree.reserved.remove(&original);
        });
    }
}
