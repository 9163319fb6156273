//! The comparison of a found state with the states that the model allows.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::Model;
use super::tree::{Attributes, Id, Tree};
use crate::contents::writer;

/// A time of a file, in nanoseconds.
pub type Time = i128;

/// How long a step may take between the creation of a file and its first write, in nanoseconds.
const STEP_NS_MAX: Time = 10_000_000_000;

/// The object at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A directory.
    Directory,
    /// A symbolic link and its target.
    Symlink(String),
    /// A regular file and its bytes.
    File(Vec<u8>),
}

/// A path as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The object there.
    pub node: Node,
    /// Number of names.
    pub links: u64,
    /// Its attributes.
    pub attributes: Attributes,
    /// Time of the last change of its contents.
    pub modified: Time,
}

impl Found {
    /// Returns whether this is a file without bytes.
    fn is_empty(&self) -> bool {
        matches!(&self.node, Node::File(bytes) if bytes.is_empty())
    }
}

/// All paths as they were found.
pub type State = BTreeMap<String, Found>;

/// Whether a state is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The state is allowed.
    Allowed,
    /// The state is allowed only if something beside the sequence committed the journal in between;
    /// the objection without that.
    Misordered(String),
    /// The state is forbidden, with the reason.
    Forbidden(String),
}

impl Verdict {
    /// Returns whether the state is allowed.
    pub fn is_allowed(&self) -> bool {
        *self == Self::Allowed
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allowed => write!(out, "allowed"),
            Self::Misordered(why) => write!(out, "misordered: {why}"),
            Self::Forbidden(why) => write!(out, "forbidden: {why}"),
        }
    }
}

impl Model {
    /// Judges the state that a crash after the last step left. `is_unordered` allows files that
    /// were never synced to be missing.
    pub fn judge(&self, state: &State, is_unordered: bool) -> Verdict {
        let own = self.judge_own(state, is_unordered);
        let mut replayed = self.replayed.iter().map(|made| made.model.judge(state, is_unordered));
        let mut skipped = self.skipped.iter().map(|other| other.judge(state, is_unordered));
        if own.is_allowed()
            || replayed.any(|verdict| verdict.is_allowed())
            || skipped.any(|verdict| verdict.is_allowed())
        {
            Verdict::Allowed
        } else {
            own
        }
    }

    fn judge_own(&self, state: &State, is_unordered: bool) -> Verdict {
        let objections = |prefix: usize| self.objections(prefix, state, is_unordered);
        let bounds = self.volume.bounds;
        let mut prefixes = (bounds.sure..self.volume.trees.len()).rev();
        match prefixes.find(|prefix| objections(*prefix).is_empty()) {
            Some(prefix) if prefix >= bounds.here => Verdict::Allowed,
            Some(_) => Verdict::Misordered(objections(bounds.here).join("; ")),
            _ => {
                // Each prefix is one possible history of the state, with the objections to it.
                let allowed: Vec<_> =
                    (bounds.sure..self.volume.trees.len()).map(objections).collect();
                let least = allowed.iter().map(Vec::len).min().unwrap_or_default();
                let nearest = allowed.iter().filter(|against| against.len() == least);
                let nearest: Vec<String> = nearest.map(|against| against.join("; ")).collect();
                Verdict::Forbidden(nearest.join(" / "))
            }
        }
    }

    /// Compares `state` with a reader's view, without a crash.
    pub fn judge_present(&self, state: &State) -> Vec<String> {
        let contents = |id: Id, bytes: &[u8]| {
            let wanted = self.file(id).map_or(&[][..], |history| history.contents());
            let at = bytes.iter().zip(wanted).take_while(|(found, wanted)| found == wanted).count();
            let (found, wanted_bytes) = (bytes.len(), wanted.len());
            (bytes != wanted).then(|| {
                format!("{found} bytes, {wanted_bytes} expected, which differ at offset {at}")
            })
        };
        let last = self.volume.trees.len() - 1;
        self.compare(last, state, false, contents)
    }

    fn objections(&self, prefix: usize, state: &State, is_unordered: bool) -> Vec<String> {
        let contents = |id: Id, bytes: &[u8]| {
            let mut possible = self.file(id)?.possible(prefix);
            if let Some(logged) = self.logged_of(id) {
                logged.add_to(&mut possible);
            }
            possible.objection(bytes, writer)
        };
        self.compare(prefix, state, is_unordered, contents)
    }

    fn compare(
        &self,
        prefix: usize,
        state: &State,
        is_unordered: bool,
        contents: impl Fn(Id, &[u8]) -> Option<String>,
    ) -> Vec<String> {
        let tree = &self.volume.trees[prefix];
        let paths = tree.paths();
        let mut objections = Vec::new();
        for (path, id) in paths.iter().filter(|(path, _)| !self.refused.contains(*path)) {
            match state.get(path) {
                Some(found) => {
                    let links = paths.values().filter(|other| *other == id).count() as u64;
                    objections.extend(
                        self.differences(tree, *id, found, links, &contents)
                            .into_iter()
                            .map(|difference| format!("{path}: {difference}")),
                    );
                }
                None if is_unordered && self.volume.is_optional(*id, prefix) => {}
                None => objections.push(format!("{path}: missing")),
            }
        }
        let is_known = |path: &String| paths.contains_key(path) || self.refused.contains(path);
        let unknown = state.keys().filter(|path| !is_known(path));
        objections.extend(unknown.map(|path| format!("{path}: not expected to exist")));
        objections
    }

    fn differences(
        &self,
        tree: &Tree,
        id: Id,
        found: &Found,
        links: u64,
        contents: &impl Fn(Id, &[u8]) -> Option<String>,
    ) -> Vec<String> {
        let target = self.volume.inodes.get(&id).and_then(|inode| inode.target.as_ref());
        let mut differences = Vec::new();
        match &found.node {
            Node::Directory if tree.is_directory(id) => {}
            Node::Symlink(found) if target == Some(found) => {}
            Node::File(bytes) if self.file(id).is_some() => {
                differences.extend(contents(id, bytes));
                if found.links != links {
                    differences.push(format!("{} names, {links} expected", found.links));
                }
            }
            other => differences.push(format!("of another kind: {}", kind_of(other))),
        }
        let wanted = tree.attributes(id);
        if let Some(wanted) = wanted.filter(|wanted| **wanted != found.attributes) {
            differences.push(format!("{}; expected: {wanted}", found.attributes));
        }
        let times = self.volume.inodes.get(&id).map(|inode| &inode.times);
        if let Some(times) = times.filter(|times| !times.is_empty())
            && !times.contains(&found.modified)
            && !(found.is_empty() && is_of_creation(times, found.modified))
        {
            differences.push(format!("modified at {}, allowed: {times:?}", found.modified));
        }
        differences
    }
}

/// Returns whether a file may have `modified` from its creation. The kernel may commit the file
/// before its first write in the same step, and no step shows that time.
fn is_of_creation(times: &BTreeSet<Time>, modified: Time) -> bool {
    times.first().is_some_and(|first| (*first - STEP_NS_MAX..*first).contains(&modified))
}

fn kind_of(node: &Node) -> String {
    match node {
        Node::Directory => "a directory".into(),
        Node::Symlink(target) => format!("a symbolic link to {target}"),
        Node::File(bytes) => format!("a file of {} bytes", bytes.len()),
    }
}
