//! The promises of a sequence's syncs that hold for any order of the file system: for file systems
//! that no [`model`](crate::model) describes.
//!
//! 1. After `sync` everything is as the kernel showed it.
//! 2. A synced regular file has its bytes, under the names that it had, and after an `fsync` its
//!    mode and its extended attribute. A write by a descriptor with `O_SYNC` or `O_DSYNC` has its
//!    own bytes.
//! 3. A synced directory has its entries, and no others.
//!
//! A later step revokes the promises for the parts that it changes, and only these:
//!
//! - Bytes that it changes or cuts off may be the old or the new ones; the file's other bytes are
//!   still promised. The file's size is promised until a step changes the contents.
//! - An attribute that it changes may be the old or the new one.
//! - A file that gets or loses a name may be anywhere.
//! - A name that it changes may exist or not. Nothing is promised about a directory that it moves.
//!
//! Plain btrfs has shown two exceptions:
//!
//! - The sync of a file or directory does not commit an earlier rename of a directory above it: the
//!   synced file may be below the old name. Only `sync` surely commits the rename.
//! - The sync of a directory may restore a name that was removed, if a file had it at a sync of its
//!   own since the last `sync`. Replaying the log tree adds the names of each synced inode.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use anyhow::{Context, Result};

use crate::contents::writer;
use crate::model::history::{History, index};
use crate::model::tree::{Attributes, Id, ROOT, Tree};
use crate::model::{Found, Kind, Model, Node, State, Verdict};
use crate::operation::{Operation, WriteBy};
use crate::sequence::{Sequence, Step, Sync};

/// The promises about a regular file.
#[derive(Debug, Clone, Default)]
struct File {
    /// The promised bytes.
    bytes: Vec<Option<u8>>,
    /// The length of `bytes` is the exact size of the file.
    has_exact_size: bool,
    attributes: Option<Attributes>,
    names: BTreeSet<String>,
    /// A name changed since the sync, or a directory above moved before it.
    is_moved: bool,
}

/// The promises about a directory.
#[derive(Debug, Clone)]
struct Directory {
    path: String,
    /// Entries that exist.
    entries: BTreeSet<String>,
    /// Entries that may exist: others do not.
    possible: BTreeSet<String>,
}

/// The promises of the syncs of some steps.
#[derive(Debug, Clone)]
pub struct Promises {
    /// The state that the kernel shows; its rules for crashes are not used.
    model: Model,
    files: BTreeMap<Id, File>,
    directories: BTreeMap<Id, Directory>,
    /// Nothing changed since `sync`.
    is_whole: bool,
    /// Directories that moved since `sync`.
    moved: BTreeSet<Id>,
    /// Names that files had when they were synced, since `sync`.
    logged: BTreeSet<String>,
}

impl Promises {
    /// Returns the promises after the last step of `sequence`.
    ///
    /// # Errors
    /// A step would fail.
    pub fn behind(sequence: &Sequence) -> Result<Self> {
        let mut this = Self {
            // The shown state does not depend on the kind.
            model: Model::new(Kind::Ext4),
            files: BTreeMap::new(),
            directories: BTreeMap::new(),
            is_whole: false,
            moved: BTreeSet::new(),
            logged: BTreeSet::new(),
        };
        sequence.steps.iter().try_for_each(|step| this.take(step))?;
        Ok(this)
    }

    fn take(&mut self, step: &Step) -> Result<()> {
        let before = self.model.tree().clone();
        self.model.apply(step)?;
        self.note_moved(&before);
        match step.innermost() {
            Step::Operation(operation) => {
                self.forget_changed();
                if let Operation::Write { by, path, offset, length } = operation
                    && matches!(by, WriteBy::Sync | WriteBy::DataSync)
                {
                    let id = self.model.tree().existing(path)?;
                    self.promise_written(id, index(*offset)..index(offset + length));
                }
            }
            Step::Killed(..) => self.forget_changed(),
            Step::Sync(Sync::All) => self.promise_all(),
            Step::Sync(Sync::File(path)) => self.promise(self.synced(path)?, true),
            Step::Sync(Sync::Data(path)) => self.promise(self.synced(path)?, false),
            Step::Sync(Sync::Mapping) => {
                let id = self.model.last().context("nothing is mapped")?;
                self.promise(id, false);
            }
            _ => {}
        }
        Ok(())
    }

    /// Notes the directories that the last step moved.
    fn note_moved(&mut self, before: &Tree) {
        let tree = self.model.tree();
        let is_moved = |(path, id): &(String, Id)| {
            before.is_directory(*id) && tree.existing(path).ok() != Some(*id)
        };
        self.moved.extend(before.paths().into_iter().filter(is_moved).map(|(_, id)| id));
    }

    /// Returns whether a path leads through a directory that moved.
    fn is_below_moved(&self, path: &str) -> bool {
        let dirs = std::iter::successors(Some(parent_of(path)), |dir| Some(parent_of(dir)));
        let mut ids = dirs
            .take_while(|dir| !dir.is_empty())
            .filter_map(|dir| self.model.tree().existing(dir).ok());
        ids.any(|id| self.moved.contains(&id))
    }

    fn synced(&self, path: &str) -> Result<Id> {
        match self.model.last().filter(|_| path == ".") {
            Some(id) => Ok(id),
            None => self.model.tree().existing(path),
        }
    }

    fn promise_all(&mut self) {
        self.moved.clear();
        let ids: BTreeSet<Id> = self.model.tree().paths().into_values().collect();
        ids.into_iter().chain([ROOT]).for_each(|id| self.promise(id, true));
        self.logged.clear();
        self.is_whole = true;
    }

    fn promise(&mut self, id: Id, with_attributes: bool) {
        if self.model.tree().is_directory(id) {
            self.promise_entries(id);
        } else if let Some(history) = self.model.file(id) {
            let bytes = history.contents().iter().copied().map(Some).collect();
            let attributes = self.model.tree().attributes(id).cloned();
            let file = self.name_file(id);
            (file.bytes, file.has_exact_size) = (bytes, true);
            if with_attributes {
                file.attributes = attributes;
            }
        }
    }

    /// Promises the present names of a file, and returns it.
    fn name_file(&mut self, id: Id) -> &mut File {
        let names = names_of(self.model.tree(), id);
        let is_moved = names.iter().any(|name| self.is_below_moved(name));
        self.logged.extend(names.iter().cloned());
        let file = self.files.entry(id).or_default();
        (file.names, file.is_moved) = (names, is_moved);
        file
    }

    /// Promises the bytes of a synchronous write.
    fn promise_written(&mut self, id: Id, range: Range<usize>) {
        let contents = self.model.file(id).map(History::contents);
        let written = contents.and_then(|contents| contents.get(range.clone()));
        let written = written.unwrap_or_default().to_vec();
        let file = self.name_file(id);
        file.bytes.resize(file.bytes.len().max(range.end), None);
        for (promised, byte) in file.bytes[range].iter_mut().zip(written) {
            *promised = Some(byte);
        }
    }

    fn promise_entries(&mut self, id: Id) {
        let tree = self.model.tree();
        let Some(path) = path_of(tree, id) else { return };
        if self.moved.contains(&id) || self.is_below_moved(&path) {
            return;
        }
        let entries = entries_of(tree, &path);
        let possible = entries.union(&self.logged).cloned().collect();
        self.directories.insert(id, Directory { path, entries, possible });
    }

    /// Revokes promises about everything that the last step changed.
    fn forget_changed(&mut self) {
        self.is_whole = false;
        let model = &self.model;
        self.files.retain(|id, file| file.keep_unchanged(*id, model));
        self.directories.retain(|id, directory| directory.keep_unchanged(*id, model.tree()));
    }

    /// Judges the state that a crash after the last step left.
    pub fn judge(&self, state: &State) -> Verdict {
        let mut broken: Vec<String> = Vec::new();
        if self.is_whole {
            broken.extend(self.model.judge_present(state));
        }
        broken.extend(self.files.values().filter_map(|file| file.objection(state)));
        broken.extend(self.directories.values().flat_map(|directory| directory.objections(state)));
        if broken.is_empty() { Verdict::Allowed } else { Verdict::Forbidden(broken.join("; ")) }
    }

    /// Compares `state` with a reader's view, without a crash.
    pub fn judge_present(&self, state: &State) -> Vec<String> {
        self.model.judge_present(state)
    }
}

impl File {
    /// Revokes promises about everything that a step changed. Returns whether a promise is left.
    fn keep_unchanged(&mut self, id: Id, model: &Model) -> bool {
        let names = names_of(model.tree(), id);
        let Some(history) = model.file(id).filter(|_| !names.is_empty()) else { return false };
        self.is_moved |= names != self.names;
        let contents = history.contents();
        let is_cut = contents.len() < self.bytes.len();
        let mut is_changed = self.has_exact_size && contents.len() != self.bytes.len();
        self.bytes.truncate(contents.len());
        for (promised, byte) in self.bytes.iter_mut().zip(contents) {
            if promised.is_some_and(|promised| promised != *byte) {
                *promised = None;
                is_changed = true;
            }
        }
        self.has_exact_size &= !is_changed && !is_cut;
        self.attributes.take_if(|promised| model.tree().attributes(id) != Some(promised));
        true
    }

    /// Returns the violation of the promises, if any.
    fn objection(&self, state: &State) -> Option<String> {
        if self.is_moved {
            let is_it = |found: &Found| self.differences(found).is_empty();
            return (!state.values().any(is_it))
                .then(|| format!("no file is what was synced as {}", list(&self.names)));
        }
        let against = |name: &String| match state.get(name) {
            None => Some(format!("{name}: missing, it was synced")),
            Some(found) => {
                let differences = self.differences(found);
                (!differences.is_empty()).then(|| format!("{name}: {}", differences.join(", ")))
            }
        };
        let objections: Vec<String> = self.names.iter().filter_map(against).collect();
        (!objections.is_empty()).then(|| objections.join("; "))
    }

    fn differences(&self, found: &Found) -> Vec<String> {
        let Node::File(bytes) = &found.node else { return vec!["no regular file".into()] };
        let mut differences: Vec<String> = self.difference_of_bytes(bytes).into_iter().collect();
        if let Some(promised) = &self.attributes
            && *promised != found.attributes
        {
            differences.push(format!("{}; synced were {promised}", found.attributes));
        }
        differences
    }

    fn difference_of_bytes(&self, bytes: &[u8]) -> Option<String> {
        let end = self.bytes.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let is_short = bytes.len() < end;
        if is_short || (self.has_exact_size && bytes.len() != self.bytes.len()) {
            let bound = if self.has_exact_size { "" } else { "at least " };
            let wanted = if self.has_exact_size { self.bytes.len() } else { end };
            return Some(format!("{} bytes long, {bound}{wanted} were synced", bytes.len()));
        }
        let mut pairs = (0_u64..).zip(self.bytes.iter().zip(bytes));
        let differs = |(_, (promised, byte)): &(u64, (&Option<u8>, &u8))| {
            promised.is_some_and(|promised| promised != **byte)
        };
        let (at, (promised, byte)) = pairs.find(differs)?;
        let promised = promised.map(|promised| writer(promised, at)).unwrap_or_default();
        Some(format!("found {} at {at}, synced were {promised}", writer(*byte, at)))
    }
}

impl Directory {
    /// Revokes promises about everything that a step changed. Returns whether a promise is left.
    fn keep_unchanged(&mut self, id: Id, tree: &Tree) -> bool {
        if path_of(tree, id).as_ref() != Some(&self.path) {
            return false;
        }
        let entries = entries_of(tree, &self.path);
        self.entries.retain(|name| entries.contains(name));
        self.possible.extend(entries);
        true
    }

    /// Returns the violations of the promises.
    fn objections(&self, state: &State) -> Vec<String> {
        let found: BTreeSet<String> =
            state.keys().filter(|path| parent_of(path) == self.path).cloned().collect();
        let missing = self.entries.difference(&found);
        let missing = missing.map(|name| format!("{name}: missing, its directory was synced"));
        let odd = found.difference(&self.possible);
        let odd = odd.map(|name| format!("{name}: was not there when its directory was synced"));
        let own = (!self.path.is_empty() && !state.contains_key(&self.path))
            .then(|| format!("{}: missing, it was synced", self.path));
        if own.is_some() { own.into_iter().collect() } else { missing.chain(odd).collect() }
    }
}

/// Returns all paths of an inode.
fn names_of(tree: &Tree, id: Id) -> BTreeSet<String> {
    tree.paths().into_iter().filter(|(_, other)| *other == id).map(|(path, _)| path).collect()
}

/// Returns the path of a directory, "" for the root.
fn path_of(tree: &Tree, id: Id) -> Option<String> {
    if id == ROOT { Some(String::new()) } else { names_of(tree, id).pop_first() }
}

fn parent_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(dir, _)| dir)
}

/// Returns the paths of a directory's entries.
fn entries_of(tree: &Tree, dir: &str) -> BTreeSet<String> {
    tree.paths().into_keys().filter(|path| parent_of(path) == dir).collect()
}

fn list(names: &BTreeSet<String>) -> String {
    names.iter().map(String::as_str).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contents::{INITIAL_A, INITIAL_B, bytes};
    use crate::model::{A_BYTES, B_BYTES};

    fn file(bytes: Vec<u8>) -> Found {
        Found {
            node: Node::File(bytes),
            attributes: Attributes::of_mode(0o644),
            links: 1,
            modified: 0,
        }
    }

    fn initial() -> State {
        let directory = Found {
            node: Node::Directory,
            attributes: Attributes::of_mode(0o755),
            ..file(Vec::new())
        };
        let directories = ["d0", "d1", "d3"].map(|path| (path.to_owned(), directory.clone()));
        let files = [
            ("d0/A".to_owned(), file(bytes(INITIAL_A, 0, A_BYTES))),
            ("d1/B".to_owned(), file(bytes(INITIAL_B, 0, B_BYTES))),
        ];
        directories.into_iter().chain(files).collect()
    }

    /// Returns the initial state with another file, or none, at a path.
    fn with(path: &str, found: Option<Found>) -> State {
        let mut state = initial();
        match found {
            Some(found) => state.insert(path.into(), found),
            None => state.remove(path),
        };
        state
    }

    /// Returns `d0/A` with the bytes of steps in ranges.
    fn written(writes: &[(u64, u64, u64)]) -> Found {
        let mut contents = bytes(INITIAL_A, 0, A_BYTES);
        for (number, offset, length) in writes {
            let end = index(offset + length);
            contents.resize(contents.len().max(end), 0);
            contents[index(*offset)..end].copy_from_slice(&bytes(*number, *offset, *length));
        }
        file(contents)
    }

    fn allows(sequence: &str, state: &State) -> bool {
        Promises::behind(&sequence.parse().unwrap()).unwrap().judge(state).is_allowed()
    }

    #[test]
    fn what_was_synced_is_there() {
        for sync in ["fsync .", "fdatasync d0/A", "sync"] {
            let sequence = format!("append d0/A 3000; {sync}");
            assert!(!allows(&sequence, &initial()), "{sequence}");
            let synced = with("d0/A", Some(written(&[(1, 10_000, 3000)])));
            assert!(allows(&sequence, &synced), "{sequence}");
        }
        assert!(allows("append d0/A 3000; fsync d1/B", &initial()));
        assert!(!allows("odsync d0/A 1000 3000", &initial()));
        assert!(allows("odsync d0/A 1000 3000", &with("d0/A", Some(written(&[(1, 1000, 3000)])))));
    }

    #[test]
    fn a_later_step_takes_back_what_it_changes_and_no_more() {
        let sequence = "write d0/A 0 3000; fsync .; write d0/A 2000 3000";
        let old = written(&[(1, 0, 3000)]);
        let new = written(&[(1, 0, 3000), (3, 2000, 3000)]);
        assert!(allows(sequence, &with("d0/A", Some(old))));
        assert!(allows(sequence, &with("d0/A", Some(new))));
        assert!(!allows(sequence, &with("d0/A", Some(written(&[(3, 2000, 3000)])))));
        let cut = "fsync d0/A; truncate d0/A 5000";
        let short = |bytes_kept| file(bytes(INITIAL_A, 0, bytes_kept));
        assert!(allows(cut, &with("d0/A", Some(short(5000)))));
        assert!(!allows(cut, &with("d0/A", Some(short(4999)))));
    }

    #[test]
    fn attributes_are_those_of_the_fsync_until_they_change() {
        let mut changed = written(&[]);
        changed.attributes.mode = 0o600;
        let changed = with("d0/A", Some(changed));
        assert!(!allows("chmod d0/A 600; fsync d0/A", &initial()));
        assert!(allows("chmod d0/A 600; fdatasync d0/A", &initial()));
        assert!(allows("fsync d0/A; chmod d0/A 600", &initial()));
        assert!(allows("fsync d0/A; chmod d0/A 600", &changed));
        assert!(!allows("chmod d0/A 600; fsync d0/A; append d0/A 9", &initial()));
    }

    #[test]
    fn a_synced_file_has_its_name_until_that_changes() {
        let missing = with("d0/A", None);
        let mut moved = missing.clone();
        moved.insert("d0/B".into(), written(&[]));
        assert!(!allows("fsync d0/A", &missing));
        assert!(!allows("fsync d0/A", &moved));
        assert!(allows("fsync d0/A; rename d0/A d0/B", &moved));
        assert!(allows("fsync d0/A; rename d0/A d0/B", &initial()));
        assert!(!allows("fsync d0/A; rename d0/A d0/B", &missing));
        assert!(allows("fsync d0/A; unlink d0/A", &missing));
    }

    #[test]
    fn a_directory_has_the_entries_that_it_had_when_it_was_synced() {
        let made = with("d0/B", Some(file(Vec::new())));
        assert!(!allows("new d0/B 100; fsync d0", &initial()));
        assert!(allows("new d0/B 100; fsync d0", &made));
        assert!(allows("new d0/B 100; fsync d0; unlink d0/B", &initial()));
        assert!(!allows("fsync d0", &made));
        assert!(allows("fsync d0; create d0/B", &made));
        assert!(!allows("unlink d0/A; fsync d0", &initial()));
        assert!(allows("fsync d0/A; unlink d0/A; fsync d0", &initial()));
        assert!(!allows("fsync d0/A; sync; unlink d0/A; fsync d0", &initial()));
    }

    #[test]
    fn what_is_below_a_directory_that_moved_is_there_by_either_name() {
        let sequence = "rename d0 d2; fsync d2/A";
        assert!(allows(sequence, &initial()));
        assert!(!allows(sequence, &with("d0/A", None)));
        assert!(!allows("rename d0 d2; sync; fsync d2/A", &initial()));
    }

    #[test]
    fn behind_sync_all_is_as_it_was_shown() {
        assert!(allows("sync", &initial()));
        assert!(!allows("mkdir d2; sync", &initial()));
        assert!(!allows("symlink A d0/B; sync", &with("d0/B", Some(file(Vec::new())))));
        assert!(!allows("link d0/A d0/B; sync", &with("d0/B", Some(written(&[])))));
    }
}
