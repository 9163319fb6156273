//! Random histories, made on real files, and what a crash leaves of them.
//!
//! A history runs in one folder, the truth; records go to a journal. The crashed folder is made after it: a prefix of all
//! operations on names, since file systems keep their order, and of each file's bytes any part of what was
//! not retired. What the log does not have of a file is on the disk, as a real sync would have left it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::journal::Journal;
use crate::log::recover::plan::TEMP_PREFIX;
use crate::log::recover::{FileSystem, LocalFiles, identity_of};

const PATHS: [&str; 7] = ["a", "b", "c", "d/a", "d/b", "e/a", "e/b"];
const FOLDERS: [&str; 2] = ["d", "e"];
/// Files that are there at the start, by the paths that they have.
const OLD_FILES: [usize; 3] = [0, 3, 5];

/// One step: numbers that are taken modulo what there is to choose from.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) kind: u8,
    pub(super) which: u8,
    pub(super) other: u8,
    pub(super) offset: u16,
    pub(super) len: u8,
    /// The operation fails, and a void record comes then or later.
    pub(super) fails: bool,
}

/// What a crash leaves.
#[derive(Debug, Clone)]
pub(super) struct Leftovers {
    /// Of the operations on names that may be lost, how many are not: modulo.
    pub(super) names: u16,
    /// Bit by bit, taken in a circle: whether a change of bytes reached the disk.
    pub(super) data: u64,
}

#[derive(Debug, Clone)]
enum NameChange {
    Create { file: usize, path: usize },
    Link { from: usize, to: usize },
    Rename { from: usize, to: usize },
    Unlink { path: usize },
}

#[derive(Debug, Clone)]
enum DataChange {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    SetSize(u64),
}

#[derive(Debug, Default)]
struct Known {
    /// The log has it.
    defined: bool,
    born: bool,
    changes: Vec<DataChange>,
    /// So many changes are on the disk for sure.
    durable: usize,
}

pub(super) struct History {
    truth: TempDir,
    crashed: TempDir,
    pub(super) journal: Journal,
    /// By path.
    names: BTreeMap<usize, usize>,
    files: Vec<Known>,
    changes: Vec<NameChange>,
    durable_changes: usize,
    /// Records that are to be voided.
    voids: Vec<(u64, u64)>,
    fill: u8,
}

fn id(file: usize) -> u64 {
    file as u64 + 1
}

/// What a file is called in the journal before recovery makes it again.
fn identity(file: usize) -> u64 {
    1000 + file as u64
}

impl History {
    /// Runs `steps`.
    pub(super) fn run(steps: &[Step]) -> Self {
        let folder = || tempfile::tempdir().expect("a temporary folder can be made");
        let mut this = Self {
            truth: folder(),
            crashed: folder(),
            journal: Journal::default(),
            names: BTreeMap::new(),
            files: Vec::new(),
            changes: Vec::new(),
            durable_changes: 0,
            voids: Vec::new(),
            fill: 0,
        };
        for folder in FOLDERS {
            fs::create_dir(this.truth.path().join(folder)).expect("a folder can be made");
            fs::create_dir(this.crashed.path().join(folder)).expect("a folder can be made");
        }
        for path in OLD_FILES {
            let file = this.create(path);
            this.files[file].born = false;
            this.change_data(file, DataChange::Write(0, vec![0xEE; 150]));
            this.files[file].durable = 1;
        }
        this.durable_changes = this.changes.len();
        for step in steps {
            this.step(step);
        }
        for (file, position) in std::mem::take(&mut this.voids) {
            this.journal.void(file, position);
        }
        this
    }

    /// The path as the log has it: in the crashed folder.
    fn logged(&self, path: usize) -> String {
        self.crashed.path().join(PATHS[path]).to_str().expect("temporary paths are text").into()
    }

    fn true_path(&self, path: usize) -> PathBuf {
        self.truth.path().join(PATHS[path])
    }

    fn step(&mut self, step: &Step) {
        if step.len.is_multiple_of(3)
            && let Some((file, position)) = self.voids.pop()
        {
            self.journal.void(file, position);
        }
        let to = usize::from(step.other) % PATHS.len();
        let names: Vec<_> = self.names.iter().map(|(path, file)| (*path, *file)).collect();
        let picked = names.get(usize::from(step.which) % names.len().max(1)).copied();
        match (step.kind % 16, picked) {
            (0 | 1, _) | (_, None) if !self.names.contains_key(&to) => {
                self.create(to);
            }
            (_, None) => {}
            (2..=5, Some((path, file))) => self.write(step, path, file),
            (6, Some((path, file))) => self.set_size(step, path, file),
            (7, Some((path, file))) => self.zero(step, path, file),
            (8..=10, Some((path, file))) => self.rename(step, path, file, to),
            (11, Some((path, file))) => self.link(step, path, file, to),
            (12 | 13, Some((path, file))) => self.unlink(step, path, file),
            (14, Some((path, file))) => self.retire(step, path, file),
            (_, Some((path, file))) => self.define(path, file),
        }
    }

    fn create(&mut self, path: usize) -> usize {
        let file = self.files.len();
        File::create_new(self.true_path(path)).expect("nothing is there");
        self.files.push(Known { born: true, ..Known::default() });
        self.names.insert(path, file);
        self.changes.push(NameChange::Create { file, path });
        file
    }

    fn define(&mut self, path: usize, file: usize) {
        let born = self.files[file].born && !self.files[file].defined;
        self.files[file].defined = true;
        self.journal.define(id(file), identity(file), born, &self.logged(path));
    }

    fn make_live(&mut self, path: usize, file: usize) {
        if !self.files[file].defined {
            self.define(path, file);
        }
    }

    /// Appends a void record soon, if the step is one that fails.
    fn failed(&mut self, step: &Step, file: usize, position: u64) -> bool {
        if step.fails {
            self.voids.push((id(file), position));
        }
        step.fails
    }

    fn change_data(&mut self, file: usize, change: DataChange) {
        let path = *self.names.iter().find(|(_, it)| **it == file).expect("it has a name").0;
        change.apply(&self.true_path(path));
        self.files[file].changes.push(change);
    }

    fn data_of(&mut self, step: &Step) -> (u64, Vec<u8>) {
        self.fill = self.fill.wrapping_add(1);
        let offset = u64::from(step.offset % 400);
        (offset, vec![self.fill; usize::from(step.len) % 120])
    }

    fn write(&mut self, step: &Step, path: usize, file: usize) {
        self.make_live(path, file);
        let (offset, data) = self.data_of(step);
        let position = self.journal.write(id(file), offset, &data);
        if !self.failed(step, file, position) {
            self.change_data(file, DataChange::Write(offset, data));
        }
    }

    fn set_size(&mut self, step: &Step, path: usize, file: usize) {
        self.make_live(path, file);
        let size = u64::from(step.offset % 500);
        let position = self.journal.set_size(id(file), size);
        if !self.failed(step, file, position) {
            self.change_data(file, DataChange::SetSize(size));
        }
    }

    fn zero(&mut self, step: &Step, path: usize, file: usize) {
        self.make_live(path, file);
        let (offset, len) = (u64::from(step.offset % 400), u64::from(step.len) + 1);
        let position = self.journal.zero(id(file), offset, len);
        if !self.failed(step, file, position) {
            self.change_data(file, DataChange::Zero(offset, len));
        }
    }

    fn rename(&mut self, step: &Step, path: usize, file: usize, to: usize) {
        self.make_live(path, file);
        let replaced = self.names.get(&to).copied();
        let replaced_identity = replaced.map_or(0, identity);
        let (from_logged, to_logged) = (self.logged(path), self.logged(to));
        let position = self.journal.rename(id(file), &from_logged, &to_logged, replaced_identity);
        if self.failed(step, file, position) {
            return;
        }
        fs::rename(self.true_path(path), self.true_path(to)).expect("a file can be renamed");
        if replaced != Some(file) {
            self.names.remove(&path);
            self.names.insert(to, file);
        }
        self.changes.push(NameChange::Rename { from: path, to });
    }

    fn link(&mut self, step: &Step, path: usize, file: usize, to: usize) {
        if self.names.contains_key(&to) {
            return;
        }
        self.make_live(path, file);
        let position = self.journal.link(id(file), &self.logged(to));
        if self.failed(step, file, position) {
            return;
        }
        fs::hard_link(self.true_path(path), self.true_path(to)).expect("a file can be linked");
        self.names.insert(to, file);
        self.changes.push(NameChange::Link { from: path, to });
    }

    fn unlink(&mut self, step: &Step, path: usize, file: usize) {
        let logged = self.logged(path);
        if self.files[file].defined {
            let position = self.journal.unlink(id(file), &logged);
            if self.failed(step, file, position) {
                return;
            }
        } else {
            self.journal.unlink_unknown(identity(file), &logged);
        }
        fs::remove_file(self.true_path(path)).expect("a file can be removed");
        self.names.remove(&path);
        self.changes.push(NameChange::Unlink { path });
    }

    /// The file is synced and retired; now and then something is written that the log does not have, and synced.
    fn retire(&mut self, step: &Step, path: usize, file: usize) {
        self.make_live(path, file);
        let position = self.journal.retire(id(file));
        if self.failed(step, file, position) {
            return;
        }
        if step.other.is_multiple_of(2) {
            let (offset, data) = self.data_of(step);
            self.change_data(file, DataChange::Write(offset, data));
        }
        self.files[file].durable = self.files[file].changes.len();
        self.durable_changes = self.changes.len();
    }

    /// Makes the crashed folder; what its files are called in the journal, by what they are.
    pub(super) fn crash(&self, leftovers: &Leftovers) -> HashMap<u64, u64> {
        empty(self.crashed.path());
        let optional = self.changes.len() - self.durable_changes + 1;
        let kept = self.durable_changes + usize::from(leftovers.names) % optional;
        let mut identities = HashMap::new();
        let mut opened = BTreeMap::new();
        for change in &self.changes[..kept] {
            if let Some((file, handle)) = change.apply(self.crashed.path()) {
                let real = identity_of(&handle).expect("the file system has handles");
                identities.insert(real, identity(file));
                opened.insert(file, handle);
            }
        }
        let mut bits = leftovers.data;
        for (file, handle) in opened {
            for (number, change) in self.files[file].changes.iter().enumerate() {
                bits = bits.rotate_right(1);
                let unlogged = !self.files[file].defined;
                if number < self.files[file].durable || unlogged || bits & 1 != 0 {
                    change.apply_to(&handle);
                }
            }
        }
        identities
    }

    /// What is wrong in the crashed folder, after recovery; none, if all is as in the truth.
    pub(super) fn difference(&self, identities: &HashMap<u64, u64>) -> Option<String> {
        let mut inodes = HashMap::new();
        for (path, name) in PATHS.iter().enumerate() {
            let (expected, found) = (self.true_path(path), self.crashed.path().join(name));
            let wanted = self.names.get(&path).filter(|file| self.files[**file].defined);
            let Some(file) = wanted else {
                if let Some(stranger) = self.logged_file_at(&found, identities) {
                    return Some(format!("{name}: file {stranger} should not be here"));
                }
                continue;
            };
            let Ok(bytes) = fs::read(&found) else { return Some(format!("{name}: missing")) };
            if bytes != fs::read(&expected).expect("the truth is there") {
                return Some(format!("{name}: wrong bytes in file {file}"));
            }
            let inode = fs::metadata(&found).expect("it is there").ino();
            if *inodes.entry(file).or_insert(inode) != inode {
                return Some(format!("{name}: no link to its other names"));
            }
        }
        self.surplus()
    }

    /// The file of the log at a path.
    fn logged_file_at(&self, path: &Path, identities: &HashMap<u64, u64>) -> Option<usize> {
        let found = LocalFiles.look(path).expect("the crashed folder is readable")?;
        let Some(identity) = identities.get(&found.identity) else { return Some(usize::MAX) };
        let file = usize::try_from(identity - 1000).expect("small");
        self.files[file].defined.then_some(file)
    }

    fn surplus(&self) -> Option<String> {
        let known: BTreeSet<_> = PATHS.iter().map(|name| self.crashed.path().join(name)).collect();
        let mut folders = vec![self.crashed.path().to_path_buf()];
        folders.extend(FOLDERS.map(|folder| self.crashed.path().join(folder)));
        for folder in &folders {
            for entry in fs::read_dir(folder).ok()? {
                let path = entry.expect("a folder can be read").path();
                if !known.contains(&path) && !folders.contains(&path) {
                    let kind = if is_temp(&path) { "left over" } else { "unexpected" };
                    return Some(format!("{}: {kind}", path.display()));
                }
            }
        }
        None
    }
}

fn is_temp(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TEMP_PREFIX))
}

/// Leaves only the folders.
fn empty(folder: &Path) {
    for entry in fs::read_dir(folder).expect("a folder can be read") {
        let path = entry.expect("a folder can be read").path();
        if path.is_dir() {
            fs::remove_dir_all(path).expect("a folder can be removed");
        } else {
            fs::remove_file(path).expect("a file can be removed");
        }
    }
    for name in FOLDERS {
        fs::create_dir(folder.join(name)).expect("a folder can be made");
    }
}

impl NameChange {
    /// Does it; a file that was made.
    fn apply(&self, folder: &Path) -> Option<(usize, File)> {
        let at = |path: &usize| folder.join(PATHS[*path]);
        match self {
            Self::Create { file, path } => {
                return Some((*file, File::create_new(at(path)).expect("nothing is there")));
            }
            Self::Link { from, to } => fs::hard_link(at(from), at(to)),
            Self::Rename { from, to } => fs::rename(at(from), at(to)),
            Self::Unlink { path } => fs::remove_file(at(path)),
        }
        .expect("what the truth could do can be done again");
        None
    }
}

impl DataChange {
    fn apply(&self, path: &Path) {
        self.apply_to(&File::options().write(true).open(path).expect("it is there"));
    }

    fn apply_to(&self, file: &File) {
        match self {
            Self::Write(offset, data) => file.write_all_at(data, *offset),
            Self::Zero(offset, len) => LocalFiles.zero(file, *offset, *len),
            Self::SetSize(size) => file.set_len(*size),
        }
        .expect("a small file can be written");
    }
}
