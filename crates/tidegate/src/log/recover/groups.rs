//! Groups of names that recovery decides and changes apart from all others.
//!
//! A group has the names that share a file or a directory, directly or through others. So no change
//! of one group changes a ground of another's decisions: the files at its names, their numbers of
//! names, and the ctimes of its directories. The records alone give the groups, so they are the
//! same for the next recovery.

use std::collections::{BTreeMap, BTreeSet};

use super::failure::Failure;
use super::named::NamedPlan;

/// The groups of a plan's names. The number of a group is that of its first name.
#[derive(Debug)]
pub(super) struct Groups {
    of_name: Vec<usize>,
    of_file: BTreeMap<u64, usize>,
}

impl Groups {
    /// Returns the groups of the plan.
    pub(super) fn of(plan: &NamedPlan) -> Self {
        let mut parents: Vec<usize> = (0..plan.places.len()).collect();
        let (mut directories, mut files) = (BTreeMap::new(), BTreeMap::new());
        for (at, place) in plan.places.iter().enumerate() {
            let directory = (place.file_system, place.parent.kind(), place.parent.bytes());
            join(&mut parents, at, *directories.entry(directory).or_insert(at));
            for file in plan.stories.files_at(&at) {
                join(&mut parents, at, *files.entry(*file).or_insert(at));
            }
        }
        let of_name: Vec<usize> = (0..parents.len()).map(|at| root(&mut parents, at)).collect();
        let of_file = files.into_iter().map(|(file, at)| (file, of_name[at])).collect();
        Self { of_name, of_file }
    }

    /// Returns the numbers of all groups.
    pub(super) fn all(&self) -> BTreeSet<usize> {
        self.of_name.iter().copied().collect()
    }

    /// Returns the group of a name.
    pub(super) fn of_name(&self, at: usize) -> usize {
        self.of_name[at]
    }

    /// Returns the group of a file, if the log knows the file at some name.
    pub(super) fn of_file(&self, identity: u64) -> Option<usize> {
        self.of_file.get(&identity).copied()
    }
}

fn root(parents: &mut [usize], mut at: usize) -> usize {
    while parents[at] != at {
        parents[at] = parents[parents[at]];
        at = parents[at];
    }
    at
}

fn join(parents: &mut [usize], one: usize, other: usize) {
    let (one, other) = (root(parents, one), root(parents, other));
    parents[one.max(other)] = one.min(other);
}

/// The groups that cannot be recovered now, and the causes.
#[derive(Debug, Default)]
pub(super) struct Failing {
    groups: BTreeSet<usize>,
    pub(super) failures: Vec<Failure>,
}

impl Failing {
    /// Adds a group and the cause.
    pub(super) fn add(&mut self, group: usize, failure: Failure) {
        self.groups.insert(group);
        self.failures.push(failure);
    }

    /// Adds groups whose causes are reported elsewhere.
    pub(super) fn leave(&mut self, groups: impl Iterator<Item = usize>) {
        self.groups.extend(groups);
    }

    /// Returns whether the group fails.
    pub(super) fn has(&self, group: usize) -> bool {
        self.groups.contains(&group)
    }
}
