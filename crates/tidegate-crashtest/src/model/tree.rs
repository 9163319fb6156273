//! Names and attributes: the state of all directories after a number of journalled changes.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result, bail, ensure};

/// Identifies an inode of the model.
pub type Id = usize;
/// The root directory.
pub const ROOT: Id = 0;
/// Path of the root directory.
pub const ROOT_PATH: &str = "./";

/// The attributes that `stat`, `getxattr` and `lsattr` show, without contents and times.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits.
    pub mode: u32,
    /// The extended attribute `user.crashtest`.
    pub xattr: Option<String>,
    /// The file has a capability (`setcap`).
    pub has_capability: bool,
    /// The file has an access control list (`setfacl`).
    pub has_acl: bool,
    /// Bytes can only be appended (`chattr +a`).
    pub is_append_only: bool,
}

impl Attributes {
    /// Returns the attributes of a file that has only a mode.
    pub fn of_mode(mode: u32) -> Self {
        Self { mode, ..Self::default() }
    }
}

impl fmt::Display for Attributes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, xattr, has_capability, has_acl, is_append_only } = self;
        write!(out, "mode {mode:o}, attribute {xattr:?}")?;
        let others = [
            (has_capability, "capability"),
            (has_acl, "access control list"),
            (is_append_only, "append only"),
        ];
        let mut others = others.iter().filter(|(has, _)| **has);
        others.try_for_each(|(_, name)| write!(out, ", {name}"))
    }
}

/// All directories and attributes.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    directories: BTreeMap<Id, BTreeMap<String, Id>>,
    attributes: BTreeMap<Id, Attributes>,
}

/// A path's last component and its directory.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The directory.
    pub parent: Id,
    /// The name in it.
    pub name: String,
    /// The inode of that name, if any.
    pub id: Option<Id>,
}

impl Tree {
    /// Adds an inode without a name.
    pub fn add(&mut self, id: Id, mode: u32, is_directory: bool) {
        self.attributes.insert(id, Attributes::of_mode(mode));
        if is_directory {
            self.directories.insert(id, BTreeMap::new());
        }
    }

    /// Returns the attributes of an inode.
    pub fn attributes(&self, id: Id) -> Option<&Attributes> {
        self.attributes.get(&id)
    }

    /// Returns the attributes of an inode, to change them.
    pub fn attributes_mut(&mut self, id: Id) -> Option<&mut Attributes> {
        self.attributes.get_mut(&id)
    }

    /// Returns whether an inode is a directory.
    pub fn is_directory(&self, id: Id) -> bool {
        self.directories.contains_key(&id)
    }

    /// Returns whether a directory has no entries.
    pub fn is_empty(&self, id: Id) -> bool {
        self.directories.get(&id).is_some_and(BTreeMap::is_empty)
    }

    /// Resolves all but the last component of `path`.
    ///
    /// # Errors
    /// A directory on the way does not exist.
    pub fn entry(&self, path: &str) -> Result<Entry> {
        let (dirs, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut parent = ROOT;
        for dir in dirs.split('/').filter(|dir| !dir.is_empty()) {
            let found = self.directories.get(&parent).and_then(|entries| entries.get(dir));
            parent = *found.with_context(|| format!("{path}: no directory {dir}"))?;
        }
        let entries = self.directories.get(&parent);
        let entries = entries.with_context(|| format!("{path}: its parent is no directory"))?;
        Ok(Entry { parent, name: name.to_owned(), id: entries.get(name).copied() })
    }

    /// Returns the inode at `path`.
    ///
    /// # Errors
    /// The path does not exist.
    pub fn existing(&self, path: &str) -> Result<Id> {
        if path == ROOT_PATH {
            return Ok(ROOT);
        }
        self.entry(path)?.id.with_context(|| format!("{path} does not exist"))
    }

    /// Returns the directory and name of `path`, which must not exist.
    ///
    /// # Errors
    /// The path exists, or its directory does not.
    pub fn free(&self, path: &str) -> Result<Entry> {
        let entry = self.entry(path)?;
        ensure!(entry.id.is_none(), "{path} exists");
        Ok(entry)
    }

    /// Sets or replaces a name.
    pub fn set(&mut self, entry: &Entry, id: Id) {
        if let Some(entries) = self.directories.get_mut(&entry.parent) {
            entries.insert(entry.name.clone(), id);
        }
    }

    /// Removes a name.
    pub fn remove(&mut self, entry: &Entry) {
        if let Some(entries) = self.directories.get_mut(&entry.parent) {
            entries.remove(&entry.name);
        }
    }

    /// Checks that `to` may be replaced by `from` in a rename.
    ///
    /// # Errors
    /// The two are of different kinds, one inode, or a directory would be moved below itself or
    /// over a full one.
    pub fn check_rename(&self, from: &str, to: &str) -> Result<()> {
        let source = self.existing(from)?;
        let target = self.entry(to)?.id;
        if to.starts_with(&format!("{from}/")) || target == Some(source) {
            bail!("{from} cannot be renamed to {to}");
        }
        if let Some(target) = target {
            ensure!(
                self.is_directory(source) == self.is_directory(target),
                "{to} is of another kind"
            );
            ensure!(!self.is_directory(target) || self.is_empty(target), "{to} is not empty");
        }
        Ok(())
    }

    /// Returns every path below the root, with its inode.
    pub fn paths(&self) -> BTreeMap<String, Id> {
        let mut paths = BTreeMap::new();
        self.collect(ROOT, "", &mut paths);
        paths
    }

    fn collect(&self, dir: Id, prefix: &str, paths: &mut BTreeMap<String, Id>) {
        for (name, id) in self.directories.get(&dir).into_iter().flatten() {
            let path = format!("{prefix}{name}");
            self.collect(*id, &format!("{path}/"), paths);
            paths.insert(path, *id);
        }
    }
}
