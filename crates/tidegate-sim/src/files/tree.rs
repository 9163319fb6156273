//! Names and attributes: each change is one change of the journal, and the tree after each change
//! is kept.

use std::collections::BTreeMap;

use super::{File, Inode, Kernel, Uncommitted};

/// Directories. Programs of the tree change names in all but the last one.
pub(crate) const DIRECTORIES: usize = 3;
/// Names in each directory.
pub(crate) const NAMES: usize = 2;
/// A directory and a name in it, as one number.
pub(crate) type Slot = usize;

/// Returns the directory of a slot.
pub(crate) fn directory_of(slot: Slot) -> usize {
    slot / NAMES
}

/// Names and attributes after some number of changes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tree {
    /// The inode at each slot.
    pub(crate) names: BTreeMap<Slot, Inode>,
    /// The names that recovery gives files while it works, by the inode number in the log.
    pub(crate) reserved: BTreeMap<Inode, Inode>,
    /// Permission bits.
    pub(crate) modes: BTreeMap<Inode, usize>,
    /// Extended flags that are set; no record has them.
    pub(crate) extended: BTreeMap<Inode, u32>,
    /// When the entries of each directory changed last, as its `ctime` has it.
    pub(crate) changed_at: [usize; DIRECTORIES],
    /// Number of changes that concern no regular file.
    pub(crate) others: usize,
}

impl Tree {
    /// Makes the tree of `files` files: file n has the first name of directory n.
    pub(super) fn new(files: usize) -> Self {
        let names = (0..files).map(|inode| (inode * NAMES, inode)).collect();
        let modes = (0..files).map(|inode| (inode, 0)).collect();
        Self { names, modes, ..Self::default() }
    }

    /// Returns the slots of an inode.
    pub(crate) fn slots_of(&self, inode: Inode) -> impl Iterator<Item = Slot> {
        self.names.iter().filter(move |(_, other)| **other == inode).map(|(slot, _)| *slot)
    }

    /// Returns the number of names of an inode.
    pub(crate) fn links(&self, inode: Inode) -> usize {
        let reserved = self.reserved.values().filter(|other| **other == inode).count();
        self.slots_of(inode).count() + reserved
    }
}

/// A file that was renamed over another one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Replacing {
    pub(crate) inode: Inode,
    pub(crate) change: usize,
    pub(crate) version: u8,
}

impl Kernel {
    /// Returns the inode number that programs knew before recovery made the file again.
    pub(crate) fn original(&self, inode: Inode) -> Inode {
        self.originals.get(&inode).copied().unwrap_or(inode)
    }

    /// Returns the tree that programs see.
    pub(crate) fn present(&self) -> &Tree {
        &self.trees[self.changes()]
    }

    /// Returns the number of changes so far.
    pub(crate) fn changes(&self) -> usize {
        self.trees.len() - 1
    }

    /// Adds a change to the journal, of these inodes and of the directories of these slots.
    fn change(&mut self, inodes: &[Inode], slots: &[Slot], edit: impl FnOnce(&mut Tree)) {
        self.clock += 1;
        let mut tree = self.present().clone();
        edit(&mut tree);
        for slot in slots {
            tree.changed_at[directory_of(*slot)] = self.clock;
        }
        self.trees.push(tree);
        // XFS commits every change but that of times for an `fdatasync`.
        let what = if self.is_ext4 { Uncommitted::Metadata } else { Uncommitted::Data };
        for inode in inodes {
            self.file(*inode).change(what);
        }
    }

    pub(crate) fn create(&mut self, slot: Slot) -> Inode {
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

    pub(crate) fn set_mode(&mut self, inode: Inode, mode: usize) {
        self.change(&[inode], &[], |tree| {
            tree.modes.insert(inode, mode);
        });
    }

    pub(crate) fn set_extended(&mut self, inode: Inode, flags: u32) {
        self.change(&[inode], &[], |tree| {
            tree.extended.insert(inode, flags);
        });
    }

    pub(crate) fn link(&mut self, inode: Inode, slot: Slot) {
        self.change(&[inode], &[slot], |tree| {
            tree.names.insert(slot, inode);
        });
    }

    pub(crate) fn unlink(&mut self, slot: Slot) {
        let inode = self.present().names.get(&slot).copied();
        let inodes: Vec<Inode> = inode.into_iter().collect();
        self.change(&inodes, &[slot], |tree| {
            tree.names.remove(&slot);
        });
    }

    /// Renames, also over another file.
    pub(crate) fn rename(&mut self, inode: Inode, from: Slot, to: Slot) {
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

    /// Makes a change that concerns no regular file, such as of a directory's name or mode.
    pub(crate) fn change_other(&mut self) {
        self.change(&[], &[], |tree| tree.others += 1);
    }

    /// Makes a file without a name, with its content on the disk, and gives it a reserved name: a
    /// crash leaves the whole file, or nothing. Returns the inode.
    pub(crate) fn make_reserved(&mut self, original: Inode, mode: usize, version: u8) -> Inode {
        let inode = self.make_empty(original, mode);
        self.write(inode, 0, &[version]);
        self.write_back(inode);
        inode
    }

    /// Makes an empty file with a reserved name, as a careless recovery does before the content.
    pub(crate) fn make_empty(&mut self, original: Inode, mode: usize) -> Inode {
        let inode = self.new_inode();
        self.originals.insert(inode, original);
        self.change(&[inode], &[], |tree| {
            tree.modes.insert(inode, mode);
            tree.reserved.insert(original, inode);
        });
        inode
    }

    /// Gives a file a reserved name beside its own.
    pub(crate) fn reserve(&mut self, inode: Inode) {
        self.change(&[inode], &[], |tree| {
            tree.reserved.insert(inode, inode);
        });
    }

    /// Removes the reserved name.
    pub(crate) fn release(&mut self, original: Inode) {
        self.change(&[], &[], |tree| {
            tree.reserved.remove(&original);
        });
    }
}
