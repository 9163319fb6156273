//! The states that a kernel with real syncs could have left.
//!
//! A crash keeps a prefix of the changes of names and attributes, at least as long as the prefix
//! that the twin has committed. One prefix has to explain all the files found. A file has at least
//! its synced content; if the prefix ends before the file's first write-back could be committed,
//! the file is empty. A file that was only created, and never synced, may be missing.

use std::collections::{BTreeMap, BTreeSet};

use crate::files::{Inode, Kernel, Slot, Tree};

/// The history's promises and changes of files, beside the twin.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// The version that the last acknowledged sync has promised.
    pub(super) synced: BTreeMap<Inode, u8>,
    /// Files whose existence some sync has promised.
    pub(super) existing: BTreeSet<Inode>,
    /// Number of changes when the file was first written.
    pub(super) written_at: BTreeMap<Inode, usize>,
    /// Numbers of the changes of the file's names, its creation among them.
    pub(super) named_at: BTreeMap<Inode, Vec<usize>>,
}

/// Compares the files after recovery with those that the twin could have left.
pub(super) fn judge(twin: &Kernel, facts: &Facts, found: &Kernel) -> Result<(), String> {
    let judge = Judge { twin, facts, found, tree: found.present() };
    if !judge.tree.reserved.is_empty() {
        return Err("recovery left names of its own".to_owned());
    }
    let mut objections = Vec::new();
    for prefix in (twin.committed..twin.trees.len()).rev() {
        match judge.objection(prefix) {
            None => return Ok(()),
            Some(objection) => objections.push(format!("not {prefix}, for {objection}")),
        }
    }
    Err(objections.join("; "))
}

struct Judge<'a> {
    twin: &'a Kernel,
    facts: &'a Facts,
    found: &'a Kernel,
    tree: &'a Tree,
}

impl Judge<'_> {
    /// Explains why a prefix does not match the files found; `None` if it matches.
    fn objection(&self, prefix: usize) -> Option<String> {
        let tree = &self.twin.trees[prefix];
        if tree.others != self.tree.others {
            return Some(format!("{} other changes, not {}", self.tree.others, tree.others));
        }
        let slots: BTreeSet<Slot> =
            tree.names.keys().chain(self.tree.names.keys()).copied().collect();
        slots.into_iter().find_map(|slot| self.objection_at(prefix, slot))
    }

    fn objection_at(&self, prefix: usize, slot: Slot) -> Option<String> {
        let tree = &self.twin.trees[prefix];
        let expected = tree.names.get(&slot).copied();
        let inode = self.tree.names.get(&slot).copied();
        let found = inode.map(|inode| self.found.original(inode));
        let Some((inode, expected)) = inode.zip(expected).filter(|_| found == expected) else {
            let is_missing = found.is_none()
                && expected.is_some_and(|expected| self.is_optional(prefix, expected));
            return (found != expected && !is_missing)
                .then(|| format!("name {slot} is of {found:?}, not of {expected:?}"));
        };
        if tree.modes[&expected] != self.tree.modes[&inode] {
            return Some(format!("file {expected} has mode {}", self.tree.modes[&inode]));
        }
        if tree.extended.get(&expected) != self.tree.extended.get(&inode) {
            return Some(format!("file {expected} has other extended flags"));
        }
        self.objection_to_content(prefix, expected, self.found.version(inode))
    }

    fn objection_to_content(&self, prefix: usize, inode: Inode, found: u8) -> Option<String> {
        let replaced = self.twin.replacing.iter();
        let replaced = replaced.filter(|it| it.inode == inode && it.change <= prefix);
        let least = replaced.map(|it| it.version).max().unwrap_or(0);
        let least = least.max(self.facts.synced.get(&inode).copied().unwrap_or(0));
        let written_at = self.facts.written_at.get(&inode).copied().unwrap_or(0);
        let is_early = found > 0 && prefix < written_at;
        (found < least || found > self.twin.version(inode) || is_early).then(|| {
            format!(
                "file {inode} has version {found}, expected at least {least}, first at {written_at}"
            )
        })
    }

    fn is_optional(&self, prefix: usize, inode: Inode) -> bool {
        let named_at = self.facts.named_at.get(&inode);
        let named = named_at.map_or(0, |at| at.iter().filter(|at| **at <= prefix).count());
        named == 1 && !self.facts.existing.contains(&inode)
    }
}
