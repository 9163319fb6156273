//! The volume below the steps: inodes, the changes in its journal, and the commits of syncs.
//!
//! Entry points: [`Volume::change_names`], [`Volume::change_attributes`] and [`Volume::mark_data`]
//! for changes, [`Volume::sync_inode`] and [`Volume::commit_all`] for syncs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Result, ensure};

use super::history::History;
use super::outside::Logged;
use super::tree::{Attributes, Entry, Id, ROOT, Tree};
use super::verdict::Time;
use super::{DIRECTORIES, FILES, Kind};
use crate::contents::bytes;

/// How sure it is that a sync of an inode commits the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) enum Certainty {
    #[default]
    No,
    Perhaps,
    Surely,
}

impl Certainty {
    fn weaken(&mut self) {
        *self = (*self).min(Self::Perhaps);
    }
}

/// The parts of an inode that changed since the last commit.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Dirty {
    /// Size or allocation.
    pub(super) data: Certainty,
    /// Names and attributes.
    pub(super) metadata: Certainty,
    /// Times, by an overwrite.
    pub(super) times: Certainty,
    /// The inode's data has no blocks yet.
    pub(super) unallocated: Certainty,
}

impl Dirty {
    fn clear(&mut self) {
        *self = Self { unallocated: self.unallocated, ..Self::default() };
    }

    fn weaken(&mut self) {
        self.data.weaken();
        self.metadata.weaken();
        self.times.weaken();
    }
}

/// An inode's state beside names and attributes.
#[derive(Debug, Clone, Default)]
pub(super) struct Inode {
    /// The contents of a regular file.
    pub(super) history: Option<History>,
    /// The target of a symbolic link.
    pub(super) target: Option<String>,
    pub(super) dirty: Dirty,
    /// Number of changes up to the last one of this inode.
    pub(super) last_change: usize,
    /// Number of changes up to the last one of its size or allocation.
    pub(super) last_data_change: usize,
    /// The file was cut, so the file system may allocate its data when it is closed.
    pub(super) was_cut: bool,
    /// Numbers of changes up to each change of its names.
    pub(super) name_changes: Vec<usize>,
    /// The sequence has created the inode with a name.
    pub(super) is_new: bool,
    /// A sync has covered its existence.
    pub(super) is_synced: bool,
    /// Times of its last change of contents that a crash may leave; any time if empty.
    pub(super) times: BTreeSet<Time>,
    /// Its bytes and size in a log.
    pub(super) logged: Logged,
}

/// The least prefixes that a crash keeps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bounds {
    /// Whatever else commits the journal.
    pub sure: usize,
    /// If only the sequence's steps commit it.
    pub here: usize,
}

/// Names, inodes and commits.
#[derive(Debug, Clone)]
pub(super) struct Volume {
    pub(super) kind: Kind,
    /// The tree of each prefix of changes; the last is the present.
    pub(super) trees: Vec<Arc<Tree>>,
    pub(super) inodes: BTreeMap<Id, Inode>,
    pub(super) bounds: Bounds,
    /// Programs run under `tidegate run`.
    pub(super) is_under_run: bool,
    /// The step is by a program whose changes the log does not see.
    pub(super) is_outside: bool,
}

impl Volume {
    /// Returns the initial state, all on the disk.
    pub(super) fn new(kind: Kind) -> Self {
        let mut tree = Tree::default();
        let mut inodes = BTreeMap::from([(ROOT, Inode::default())]);
        tree.add(ROOT, 0o755, true);
        let files = FILES.map(|(path, number, size)| (path, Some((number, size))));
        let initial = DIRECTORIES.map(|path| (path, None)).into_iter().chain(files);
        for (id, (path, file)) in (1..).zip(initial) {
            tree.add(id, if file.is_some() { 0o644 } else { 0o755 }, file.is_none());
            let entry = tree.free(path).expect("the initial state is consistent");
            tree.set(&entry, id);
            let history = file.map(|(number, size)| History::new(bytes(number, 0, size)));
            inodes.insert(id, Inode { history, ..Inode::default() });
        }
        Self {
            kind,
            trees: vec![Arc::new(tree)],
            inodes,
            bounds: Bounds::default(),
            is_under_run: false,
            is_outside: false,
        }
    }

    /// Returns the names and attributes that a program sees now.
    pub(super) fn tree(&self) -> &Tree {
        &self.trees[self.trees.len() - 1]
    }

    /// Returns the contents of a regular file.
    pub(super) fn file(&self, id: Id) -> Option<&History> {
        self.inodes.get(&id)?.history.as_ref()
    }

    pub(super) fn changes(&self) -> usize {
        self.trees.len() - 1
    }

    pub(super) fn inode(&mut self, id: Id) -> &mut Inode {
        self.inodes.entry(id).or_default()
    }

    /// Adds a journalled change that `edit` makes.
    pub(super) fn change(&mut self, edit: impl FnOnce(&mut Tree)) {
        let mut tree = self.tree().clone();
        edit(&mut tree);
        self.trees.push(Arc::new(tree));
    }

    fn mark_metadata(&mut self, id: Id) {
        let changes = self.changes();
        let inode = self.inode(id);
        inode.dirty.metadata = Certainty::Surely;
        inode.last_change = changes;
    }

    pub(super) fn mark_data(&mut self, id: Id) {
        self.mark_metadata(id);
        let inode = self.inode(id);
        inode.dirty.data = Certainty::Surely;
        inode.last_data_change = inode.last_change;
    }

    /// Adds a change of names that concerns inodes and their directories.
    pub(super) fn change_names(
        &mut self,
        ids: &[Id],
        entries: &[&Entry],
        edit: impl FnOnce(&mut Tree),
    ) {
        self.change(edit);
        let changes = self.changes();
        for id in ids {
            self.mark_metadata(*id);
            self.inode(*id).name_changes.push(changes);
        }
        for entry in entries {
            self.mark_metadata(entry.parent);
        }
    }

    /// Creates an inode at a free path.
    pub(super) fn create(&mut self, path: &str, mode: u32, is_directory: bool) -> Result<Id> {
        let entry = self.tree().free(path)?;
        let id = self.inodes.len();
        self.inode(id).is_new = true;
        self.change_names(&[id], &[&entry], |tree| {
            tree.add(id, mode, is_directory);
            tree.set(&entry, id);
        });
        self.mark_data(id);
        Ok(id)
    }

    pub(super) fn create_file(&mut self, path: &str) -> Result<Id> {
        let id = self.create(path, 0o644, false)?;
        self.inode(id).history = Some(History::default());
        Ok(id)
    }

    pub(super) fn regular(&self, path: &str) -> Result<Id> {
        let id = self.tree().existing(path)?;
        ensure!(self.file(id).is_some(), "{path} is no regular file");
        Ok(id)
    }

    pub(super) fn history(&mut self, id: Id) -> &mut History {
        self.inode(id).history.get_or_insert_default()
    }

    pub(super) fn attributes(&self, id: Id) -> Attributes {
        self.tree().attributes(id).cloned().unwrap_or_default()
    }

    /// Clears the attributes that the kernel clears when bytes or owner change.
    pub(super) fn take_privileges(&mut self, id: Id) {
        if self.attributes(id).has_capability {
            self.change_attributes(id, |attributes| attributes.has_capability = false);
        }
    }

    pub(super) fn change_attributes(&mut self, id: Id, edit: impl FnOnce(&mut Attributes)) {
        self.change(|tree| tree.attributes_mut(id).map_or((), edit));
        self.mark_metadata(id);
    }

    /// Gives blocks to data that has none.
    pub(super) fn allocated(&mut self, id: Id) {
        let dirty = &mut self.inode(id).dirty;
        let was = std::mem::take(&mut dirty.unallocated);
        dirty.data = dirty.data.max(was);
        dirty.metadata = dirty.metadata.max(was);
    }

    pub(super) fn children(&self, id: Id) -> Vec<Id> {
        let paths = self.tree().paths();
        let of_this = |path: &String| self.tree().entry(path).is_ok_and(|entry| entry.parent == id);
        paths.into_iter().filter(|(path, _)| of_this(path)).map(|(_, id)| id).collect()
    }

    pub(super) fn sync_inode(&mut self, id: Id, data_only: bool) {
        self.inode(id).history.iter_mut().for_each(History::sync);
        let is_outside = self.is_outside;
        let inode = self.inode(id);
        let grew = inode.dirty.data.max(inode.dirty.unallocated) != Certainty::No;
        inode.logged.sync(is_outside);
        if is_outside && (!data_only || grew) {
            inode.logged.commit();
        }
        self.commit_for(id, data_only);
        self.inode(id).dirty.unallocated = Certainty::No;
    }

    /// Makes the commit of a sync of an inode, if it makes one.
    pub(super) fn commit_for(&mut self, id: Id, data_only: bool) {
        let (changes, kind) = (self.changes(), self.kind);
        let inode = self.inode(id);
        inode.is_synced = true;
        let dirty = inode.dirty;
        let own = if data_only { inode.last_data_change } else { inode.last_change };
        let certainty = match data_only {
            false => dirty.metadata.max(dirty.times),
            true if kind == Kind::Xfs => dirty.metadata.min(Certainty::Perhaps),
            true => Certainty::No,
        };
        if kind == Kind::Ext4 && self.tree().is_directory(id) {
            self.commit_changes();
            return;
        }
        self.bounds.sure = self.bounds.sure.max(own);
        self.bounds.here = self.bounds.here.max(own);
        match certainty.max(dirty.data).max(dirty.unallocated) {
            Certainty::No => {}
            Certainty::Perhaps => self.perhaps_commit(),
            Certainty::Surely => {
                self.bounds.here = changes;
                self.clean();
            }
        }
        if data_only && self.is_under_run {
            self.perhaps_commit();
        }
    }

    pub(super) fn perhaps_commit(&mut self) {
        self.inodes.values_mut().for_each(|inode| inode.dirty.weaken());
    }

    pub(super) fn commit_changes(&mut self) {
        self.bounds = Bounds { sure: self.changes(), here: self.changes() };
        self.clean();
    }

    pub(super) fn commit_all(&mut self) {
        self.commit_changes();
        self.inodes.values_mut().for_each(|inode| inode.is_synced = true);
    }

    /// Notes a commit of the journal: inodes are clean, except for data without blocks.
    fn clean(&mut self) {
        for inode in self.inodes.values_mut() {
            inode.dirty.clear();
            if inode.was_cut {
                inode.dirty.unallocated.weaken();
            }
            if self.is_outside {
                inode.logged.commit();
            }
        }
    }

    /// Notes that `run` may have synced any file in its log, or the whole file system, to retire
    /// the log or to have files leave it. The kernel could have written back and committed at that
    /// moment by itself.
    pub(super) fn retire(&mut self) {
        if self.is_under_run {
            self.inodes.values_mut().for_each(|inode| inode.dirty.unallocated.weaken());
            self.perhaps_commit();
        }
    }

    /// Returns whether a file may be missing although its creation is in the prefix: it was created
    /// and never synced, and the prefix has no other change of its names. Plain file systems do not
    /// lose it; `tidegate run` does not order it.
    pub(super) fn is_optional(&self, id: Id, prefix: usize) -> bool {
        self.inodes.get(&id).is_some_and(|inode| {
            let name_changes = inode.name_changes.iter().filter(|change| **change <= prefix);
            let is_unnamed = name_changes.count() == 1;
            inode.is_new && inode.history.is_some() && !inode.is_synced && is_unnamed
        })
    }
}
