//! The model of allowed outcomes: in which states ext4 and XFS may be after a crash behind a
//! sequence of steps, if each sync of the program is real.
//!
//! **Names, sizes by truncation, attributes** are journalled when they change, in one order for the
//! whole file system. A crash keeps a prefix of these changes: the model has the [`Tree`] of each
//! prefix. **Contents** are bound to the prefix by the rules of [`history`]. A state is allowed if
//! one prefix explains all of it, and the prefix has what the syncs promise.
//!
//! **What a sync promises.** It writes the file's data. It commits the journal, which makes *all*
//! earlier changes of *all* files durable, if the inode changed since the last commit: `fsync` for
//! any change, `fdatasync` for one of size or allocation only. So `fdatasync` after overwrites, or
//! a sync of a clean file, commits nothing. On ext4 a sync of a directory always commits. `sync`
//! covers everything.
//!
//! Two bounds follow. [`Bounds::here`] assumes that nothing commits the journal but the steps of
//! the sequence: that is so where the sequence runs on a quiet disk. [`Bounds::sure`] holds
//! whatever else commits it: only the changes of the synced inode itself, and those before them. A
//! state between the two could occur with a commit in the background at the worst moment.
//!
//! **From outside**: a commit makes all changes durable and the inodes clean; a write-back
//! allocates, so that the next sync finds an inode that changed; `run`, told to retire its log, may
//! do both.
//!
//! **Killed processes.** The kernel makes the change of an operation or does not, by where in it
//! its process was killed: all that reads, and each sync that returns, has the one or the other.
//! Without Tidegate a crash can leave nothing else. Under `tidegate run` a change that the kernel
//! has not made may be in the log, and a crash may leave it made (`Replayed`): the process had
//! begun it. That ends with the next sync or operation that is about its file or its names, for
//! what that has found must not change again.
//!
//! **Other ways, other programs, lost processes.** The kernel makes no difference between
//! programs, nor between calls: a step of another program, or one by another
//! [`Way`](crate::sequence::Way), is an operation or a sync as any. Under `tidegate run` it may
//! have files leave the log before, as `outside retire`. A recovery that refuses a file that
//! another program has changed, by its name, may leave it as the disk has it
//! ([`Model::of_others`]). `outside.rs` has the changes from outside that no log can know.
//!
//! **Times** are compared if the model is given those that files showed behind each step
//! ([`Model::with_times`]). A file has one that it showed: none that no write and no `utimensat`
//! gave it. By [`TimeRule::Synced`] it has one of at or behind its last `fsync`.
//!
//! What the two file systems differ in stands in [`Kind`]. Under `tidegate run` the existence of a
//! file that was created and never synced is unordered ([`Model::is_optional`]), an `fdatasync` may
//! be made as an `fsync`, and a truncation, or a change that `run` does not see, may be preceded by
//! one ([`Model::under_run`]).

pub mod crowd;
pub mod history;
mod outside;
pub mod tree;
mod verdict;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;

use self::history::{Allocation, BLOCK_BYTES, History};
use self::outside::{Logged, Skipped};
use self::tree::{Entry, Id, ROOT, Tree};
pub use self::verdict::{Found, Node, State, Time, Verdict};
use crate::contents::{INITIAL_A, INITIAL_B, bytes};
use crate::operation::{FallocateMode, Operation, WriteBy};
use crate::sequence::{Kill, Lost, Other, Outside, Sequence, Step, Sync};

/// The file system whose rules hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Allocates the blocks of a file that replaces another (`auto_da_alloc`); an extension inside
    /// a mapped block is journalled with the write; `fdatasync` ignores names and attributes; any
    /// sync of a directory commits.
    Ext4,
    /// Journals an extension at write-back; `fdatasync` forces the log for names and attributes
    /// too.
    Xfs,
}

/// How sure it is that a sync of an inode commits the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Certainty {
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
struct Dirty {
    /// Size or allocation.
    data: Certainty,
    /// Names and attributes.
    metadata: Certainty,
    /// Times, by an overwrite.
    times: Certainty,
    /// Its data has no blocks yet.
    unallocated: Certainty,
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
struct Inode {
    /// Of a regular file.
    history: Option<History>,
    /// Of a symbolic link.
    target: Option<String>,
    dirty: Dirty,
    /// Number of changes with the last one of this inode.
    last_change: usize,
    /// Number of changes with the last one of its size or allocation.
    last_data_change: usize,
    /// It was cut: the file system may allocate its data when it is closed.
    was_cut: bool,
    /// Numbers of changes with each change of its names.
    name_changes: Vec<usize>,
    /// It was created by the sequence.
    is_new: bool,
    /// Some sync covered its existence.
    is_synced: bool,
    /// Times of its last change of contents that a crash may leave; any if there are none.
    times: BTreeSet<Time>,
    /// Its bytes and size in a log.
    logged: Logged,
}

/// What a recovery makes of an operation that its process was killed in, where the kernel had not
/// made the change, and the log has it.
#[derive(Debug, Clone)]
struct Replayed {
    operation: Operation,
    /// Of a program whose operation was made.
    model: Model,
}

impl Replayed {
    /// Whether the change may still be made by a recovery behind `step`.
    fn is_possible_behind(&self, step: &Step) -> bool {
        let is_other = |path: &str| {
            let is_in = |path: &str, dir: &str| {
                path == dir || path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
            };
            self.operation.paths().iter().all(|own| !is_in(own, path) && !is_in(path, own))
        };
        match step.innermost() {
            Step::Operation(operation) | Step::Killed(_, operation) => {
                operation.paths().into_iter().all(is_other)
            }
            Step::Sync(Sync::File(path) | Sync::Data(path)) => is_other(path),
            Step::Sync(Sync::All) | Step::Outside(Outside::Retire) => false,
            _ => true,
        }
    }
}

/// The least prefixes that a crash keeps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bounds {
    /// Whatever else commits the journal.
    pub sure: usize,
    /// If only the sequence's steps commit it.
    pub here: usize,
}

/// The file system in the course of a sequence.
#[derive(Debug, Clone)]
pub struct Model {
    kind: Kind,
    /// The tree of each prefix of changes; the last is the present.
    trees: Vec<Arc<Tree>>,
    inodes: BTreeMap<Id, Inode>,
    bounds: Bounds,
    /// The file of the last operation, whose descriptor "." is.
    last: Option<Id>,
    /// The file of the last sync.
    synced: Option<Id>,
    /// Number of steps so far.
    step: u64,
    is_under_run: bool,
    /// Other states that a crash may leave.
    replayed: Vec<Replayed>,
    /// States without changes that programs outside did not sync.
    skipped: Vec<Skipped>,
    /// The step is of a program whose changes the log does not see.
    is_outside: bool,
    /// The file that the program has mapped.
    mapped: Option<Id>,
    /// The file that the program has a stream on.
    stream: Option<Id>,
    /// Paths of files that programs outside the tree have changed.
    of_others: BTreeSet<String>,
    /// Paths at which anything may be.
    refused: BTreeSet<String>,
    /// Processes of the run that were killed.
    lost: BTreeSet<Lost>,
    /// Number of files that [`Step::Crowd`] has made.
    crowd: u32,
    /// The journal has data too, so that any write makes a sync commit.
    journals_data: bool,
    /// Times that files showed: at the beginning, and behind each step.
    shown: Arc<[Times]>,
    /// The rule for times that a crash may leave.
    time_rule: TimeRule,
}

/// The bit of a mode that a change of the owner takes away.
const SET_USER: u32 = 0o4000;
/// Initial size of `d0/A` in bytes: two blocks and a half.
pub const A_BYTES: u64 = 10_000;
/// Initial size of `d1/B` in bytes.
pub const B_BYTES: u64 = 6000;
/// Directories of the initial state.
pub const DIRECTORIES: [&str; 3] = ["d0", "d1", "d3"];
/// Files of the initial state, with the number of their bytes and their size.
pub const FILES: [(&str, u64, u64); 2] =
    [("d0/A", INITIAL_A, A_BYTES), ("d1/B", INITIAL_B, B_BYTES)];

/// Which times of its last change a file may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TimeRule {
    /// Each that it showed since the sequence began: recovery makes none up.
    Shown,
    /// Those that it showed at its last `fsync` and since.
    Synced,
}

impl TimeRule {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shown => "shown",
            Self::Synced => "synced",
        }
    }
}

/// Times of files by their paths.
pub type Times = BTreeMap<String, Time>;

impl Model {
    /// The initial state: `d0/A`, `d1/B`, the empty directory `d3`, all on the disk.
    ///
    /// # Panics
    /// Never: the constants of the initial state are consistent.
    pub fn new(kind: Kind) -> Self {
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
            last: None,
            synced: None,
            step: 0,
            is_under_run: false,
            replayed: Vec::new(),
            skipped: Vec::new(),
            is_outside: false,
            mapped: None,
            stream: None,
            of_others: BTreeSet::new(),
            refused: BTreeSet::new(),
            lost: BTreeSet::new(),
            crowd: 0,
            journals_data: false,
            shown: Arc::default(),
            time_rule: TimeRule::Shown,
        }
    }

    /// The model behind all steps of `sequence`.
    ///
    /// # Errors
    /// A step would fail.
    pub fn behind(kind: Kind, sequence: &Sequence) -> Result<Self> {
        Self::new(kind).after(sequence)
    }

    /// This model, of a program under `tidegate run`. To cover a file, an `fdatasync`, or the sync
    /// of a write with `O_DSYNC`, is made as an `fsync`, and before a truncation, or a change that
    /// `run` does not see, a file may leave the log by a real sync. Each is a commit which the
    /// kernel could have made at that moment by itself, and a later sync of a file or directory
    /// that it had changes of has nothing to commit then.
    #[must_use]
    pub fn under_run(self) -> Self {
        Self { is_under_run: true, ..self }
    }

    /// This model, of ext4 that is mounted with `data=journal`.
    #[must_use]
    pub fn with_data_in_journal(self) -> Self {
        Self { journals_data: true, ..self }
    }

    /// This model, of files that showed these times: at the beginning, and behind each step.
    #[must_use]
    pub fn with_times(self, time_rule: TimeRule, shown: Arc<[Times]>) -> Self {
        let mut this = Self { shown, time_rule, ..self };
        this.note_times(None);
        this
    }

    /// Takes note of the times that files show behind `step`.
    fn note_times(&mut self, step: Option<&Step>) {
        let Some(shown) = usize::try_from(self.step).ok().and_then(|at| self.shown.get(at)) else {
            return;
        };
        let shown: Vec<(Id, Time)> = shown
            .iter()
            .filter_map(|(path, time)| Some((self.tree().existing(path).ok()?, *time)))
            .collect();
        for (id, time) in shown {
            let is_durable = match step.map(Step::innermost) {
                Some(Step::Sync(Sync::All)) => true,
                Some(Step::Sync(Sync::File(_))) => self.synced == Some(id),
                _ => false,
            };
            // Recovery may give back what was there before others have changed it.
            let is_durable = is_durable && self.time_rule == TimeRule::Synced && !self.is_outside;
            let times = &mut self.inode(id).times;
            if is_durable {
                times.clear();
            }
            times.insert(time);
        }
    }

    /// The model behind more steps.
    ///
    /// # Errors
    /// A step would fail.
    pub fn after(mut self, sequence: &Sequence) -> Result<Self> {
        sequence.steps.iter().try_for_each(|step| self.apply(step))?;
        Ok(self)
    }

    /// Returns the state that a program sees now.
    pub fn tree(&self) -> &Tree {
        &self.trees[self.trees.len() - 1]
    }

    /// Contents of a regular file.
    pub fn file(&self, id: Id) -> Option<&History> {
        self.inodes.get(&id)?.history.as_ref()
    }

    /// The file of the last operation, if it left a descriptor.
    pub fn last(&self) -> Option<Id> {
        self.last
    }

    /// Takes one more step.
    ///
    /// # Errors
    /// The step would fail; the model is of no use afterwards.
    pub fn apply(&mut self, step: &Step) -> Result<()> {
        let mut replayed = std::mem::take(&mut self.replayed);
        replayed.retain_mut(|it| it.is_possible_behind(step) && it.model.apply(step).is_ok());
        let skipped = std::mem::take(&mut self.skipped);
        let (before, committed) = (Skipped::before(self, step), self.bounds.here);
        self.is_outside = self.is_of_outside(step);
        self.take(step)?;
        self.note_times(Some(step));
        self.replayed.append(&mut replayed);
        self.skipped = Skipped::behind(skipped, step, self, committed);
        self.skipped.extend(before.map(|before| before.behind(self)));
        Ok(())
    }

    fn take(&mut self, step: &Step) -> Result<()> {
        self.step += 1;
        self.note_of_others(step);
        match step {
            Step::By(_, step) => {
                self.leave_log();
                self.take_called(step)
            }
            Step::Other(_, step) => {
                let used = (self.last, self.mapped, self.stream);
                self.leave_log();
                self.take_called(step.innermost())?;
                self.note_of_others(&Step::Other(Other::Outside, step.clone()));
                (self.last, self.mapped, self.stream) = used;
                // The first program follows its files to other names, and closes what it has.
                self.last.take_if(|_| step.innermost().changes_names());
                Ok(())
            }
            Step::Clone(_) => {
                self.leave_log();
                self.last = None;
                Ok(())
            }
            Step::Lost(lost) => {
                self.retire();
                self.lost.insert(*lost);
                if *lost == Lost::Run {
                    (self.last, self.mapped, self.stream) = (None, None, None);
                }
                Ok(())
            }
            Step::Crowd(count) => {
                self.add_crowd(*count);
                Ok(())
            }
            Step::Patch => {
                self.last = None;
                self.of_others.insert(crowd::PROGRAM.into());
                self.perhaps_commit();
                Ok(())
            }
            step => self.take_called(step),
        }
    }

    /// Files may leave the log, if there are some.
    fn leave_log(&mut self) {
        if self.inodes.values().any(|inode| inode.is_synced) || self.crowd > 0 {
            self.retire();
        }
    }

    /// Takes note of the files that another program changes, or the program itself when its run is
    /// lost: by all their names.
    fn note_of_others(&mut self, step: &Step) {
        let is_of_other = matches!(step, Step::Other(..)) || self.lost.contains(&Lost::Run);
        let Step::Operation(operation) = step.innermost() else { return };
        if is_of_other {
            let named: Vec<String> = operation.paths().into_iter().map(str::to_owned).collect();
            let ids: Vec<Id> =
                named.iter().filter_map(|path| self.tree().existing(path).ok()).collect();
            let paths = self.tree().paths().into_iter();
            self.of_others.extend(paths.filter(|(_, id)| ids.contains(id)).map(|(path, _)| path));
            self.of_others.extend(named);
        }
    }

    /// Paths of files that programs outside the tree have changed: a recovery may refuse them.
    pub fn of_others(&self) -> &BTreeSet<String> {
        &self.of_others
    }

    /// This model, of a recovery that left what is at some paths as it was.
    #[must_use]
    pub fn refusing(self, refused: BTreeSet<String>) -> Self {
        let of = |it: Replayed| Replayed { model: it.model.refusing(refused.clone()), ..it };
        let replayed = self.replayed.into_iter().map(of).collect();
        let skipped = self.skipped.into_iter().map(|it| it.refusing(&refused)).collect();
        Self { replayed, skipped, refused, ..self }
    }

    /// New files are synced, which commits what is pending; those that are there are overwritten
    /// and synced, which may.
    fn add_crowd(&mut self, count: u32) {
        self.last = None;
        if self.lost.contains(&Lost::Run) {
            self.of_others.extend(crowd::names(count));
        }
        if count > self.crowd {
            self.commit_changes();
            self.crowd = count;
        } else {
            self.perhaps_commit();
        }
    }

    /// An operation, a sync or an action of another program, however it is called.
    fn take_called(&mut self, step: &Step) -> Result<()> {
        match step {
            Step::Operation(operation) => {
                self.last = None;
                self.mapped = None;
                self.operate(operation)?;
                self.note_used(operation);
                Ok(())
            }
            Step::Sync(sync) => self.sync(sync),
            Step::Outside(Outside::Commit) => {
                self.commit_all();
                Ok(())
            }
            Step::Outside(Outside::WriteBack(path)) => self.write_back(path),
            Step::Outside(Outside::Retire) => {
                ensure!(self.lost.is_empty(), "nobody may supervise the run");
                self.retire();
                self.inodes.values_mut().for_each(|inode| inode.logged = Logged::default());
                Ok(())
            }
            Step::Prepare => {
                ensure!(self.step == 1, "something was done before it was prepared");
                Ok(())
            }
            Step::Killed(kill, operation) => {
                ensure!(operation.can_be_killed_in(), "nothing is killed in {operation}");
                (self.last, self.mapped, self.stream) = (None, None, None);
                self.be_killed(*kill, operation)
            }
            Step::Release => {
                self.last = None;
                Ok(())
            }
            _ => bail!("{step} is about another step"),
        }
    }

    fn be_killed(&mut self, kill: Kill, operation: &Operation) -> Result<()> {
        let mut made = self.clone();
        made.operate(operation)?;
        made.last = None;
        if kill.is_behind_change() {
            *self = made;
        } else if self.is_under_run {
            // A recovery may give it a time that no file has shown.
            made.shown = Arc::default();
            made.inodes.values_mut().for_each(|inode| inode.times.clear());
            self.replayed.push(Replayed { operation: operation.clone(), model: made });
        }
        Ok(())
    }

    fn changes(&self) -> usize {
        self.trees.len() - 1
    }

    fn inode(&mut self, id: Id) -> &mut Inode {
        self.inodes.entry(id).or_default()
    }

    /// Adds a journalled change that `edit` makes.
    fn change(&mut self, edit: impl FnOnce(&mut Tree)) {
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

    fn mark_data(&mut self, id: Id) {
        self.mark_metadata(id);
        let inode = self.inode(id);
        inode.dirty.data = Certainty::Surely;
        inode.last_data_change = inode.last_change;
    }

    /// Adds a change of names that concerns inodes and their directories.
    fn change_names(&mut self, ids: &[Id], entries: &[&Entry], edit: impl FnOnce(&mut Tree)) {
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
    fn create(&mut self, path: &str, mode: u32, is_directory: bool) -> Result<Id> {
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

    fn create_file(&mut self, path: &str) -> Result<Id> {
        let id = self.create(path, 0o644, false)?;
        self.inode(id).history = Some(History::default());
        Ok(id)
    }

    fn regular(&self, path: &str) -> Result<Id> {
        let id = self.tree().existing(path)?;
        ensure!(self.file(id).is_some(), "{path} is no regular file");
        Ok(id)
    }

    fn history(&mut self, id: Id) -> &mut History {
        self.inode(id).history.get_or_insert_default()
    }

    fn operate(&mut self, operation: &Operation) -> Result<()> {
        self.check_append_only(operation)?;
        if operation.is_unseen() && self.inodes.values().any(|inode| inode.is_synced) {
            self.retire();
        }
        match operation {
            Operation::Create { path } => self.last = Some(self.create_file(path)?),
            Operation::New { path, length } => {
                let id = self.create_file(path)?;
                self.append(id, *length);
            }
            Operation::Write { by, path, offset, length } => {
                self.write_by(*by, path, *offset, *length)?;
            }
            Operation::Append { path, length } => {
                let id = self.regular(path)?;
                self.append(id, *length);
            }
            Operation::Stdio { path, length } => {
                let exists = self.tree().entry(path)?.id.is_some();
                let id = if exists { self.regular(path)? } else { self.create_file(path)? };
                self.append(id, *length);
            }
            Operation::Truncate { path, size } => {
                let id = self.regular(path)?;
                self.truncate(id, *size);
                self.last = Some(id);
            }
            Operation::TruncateOpen { path, length } => {
                let id = self.regular(path)?;
                self.truncate(id, 0);
                self.append(id, *length);
            }
            Operation::Fallocate { path, mode, offset, length } => {
                self.fallocate(path, *mode, *offset, *length)?;
            }
            Operation::Copy { from, to, .. } => self.copy(from, to)?,
            Operation::Reflink { from, to } => self.reflink(from, to)?,
            Operation::Tmpfile { path, length, synced } => {
                self.tmpfile(path, *length, *synced)?;
            }
            _ => self.operate_on_names(operation)?,
        }
        Ok(())
    }

    /// Files that can only be appended to take nothing else.
    fn check_append_only(&self, operation: &Operation) -> Result<()> {
        let tree = self.tree();
        let is_append_only = |path: &&str| {
            let attributes = tree.existing(path).ok().and_then(|id| tree.attributes(id));
            attributes.is_some_and(|attributes| attributes.is_append_only)
        };
        let is_append = matches!(operation, Operation::Append { .. });
        match operation.paths().into_iter().find(is_append_only).filter(|_| !is_append) {
            Some(path) => bail!("{path} can only be appended to"),
            None => Ok(()),
        }
    }

    fn attributes(&self, id: Id) -> tree::Attributes {
        self.tree().attributes(id).cloned().unwrap_or_default()
    }

    /// Takes the attributes away that the kernel clears when bytes or owner change.
    fn take_privileges(&mut self, id: Id) {
        if self.attributes(id).has_capability {
            self.change_attributes(id, |attributes| attributes.has_capability = false);
        }
    }

    fn operate_on_names(&mut self, operation: &Operation) -> Result<()> {
        match operation {
            Operation::Link { from, to } => {
                let (id, entry) = (self.regular(from)?, self.tree().free(to)?);
                self.change_names(&[id], &[&entry], |tree| tree.set(&entry, id));
            }
            Operation::Symlink { target, path } => {
                let id = self.create(path, 0o777, false)?;
                self.inode(id).target = Some(target.clone());
            }
            Operation::Unlink { path } => {
                let (id, entry) = (self.tree().existing(path)?, self.tree().entry(path)?);
                ensure!(!self.tree().is_directory(id), "{path} is a directory");
                self.change_names(&[id], &[&entry], |tree| tree.remove(&entry));
            }
            Operation::Rename { from, to, .. } => self.rename(from, to)?,
            Operation::Exchange { from, to } => {
                let (here, there) = (self.tree().entry(from)?, self.tree().entry(to)?);
                let (a, b) = (self.tree().existing(from)?, self.tree().existing(to)?);
                ensure!(a != b, "{from} and {to} are one file");
                ensure!(
                    !self.tree().is_directory(a) && !self.tree().is_directory(b),
                    "a directory"
                );
                self.change_names(&[a, b], &[&here, &there], |tree| {
                    tree.set(&here, b);
                    tree.set(&there, a);
                });
            }
            Operation::Mkdir { path } => {
                self.create(path, 0o755, true)?;
            }
            Operation::Rmdir { path } => {
                let (id, entry) = (self.tree().existing(path)?, self.tree().entry(path)?);
                ensure!(self.tree().is_empty(id), "{path} is no empty directory");
                self.change_names(&[id], &[&entry], |tree| tree.remove(&entry));
            }
            _ => self.operate_on_attributes(operation)?,
        }
        Ok(())
    }

    fn operate_on_attributes(&mut self, operation: &Operation) -> Result<()> {
        match operation {
            Operation::SetXattr { path } => {
                let (id, value) = (self.regular(path)?, self.step.to_string());
                self.change_attributes(id, |attributes| attributes.xattr = Some(value));
            }
            Operation::Utime { path } => {
                let id = self.regular(path)?;
                self.change_attributes(id, |_| ());
            }
            Operation::Chown { path } => {
                let id = self.regular(path)?;
                self.take_privileges(id);
                self.change_attributes(id, |attributes| attributes.mode &= !SET_USER);
            }
            Operation::SetCapability { path } => {
                let id = self.regular(path)?;
                // What has the value already is left as it is, and nothing is pending.
                ensure!(!self.attributes(id).has_capability, "{path} has a capability");
                self.change_attributes(id, |attributes| attributes.has_capability = true);
            }
            Operation::SetAcl { path } => {
                let id = self.regular(path)?;
                ensure!(!self.attributes(id).has_acl, "{path} has an access control list");
                self.change_attributes(id, |attributes| {
                    attributes.has_acl = true;
                    attributes.mode = attributes.mode & !0o777 | 0o644;
                });
            }
            Operation::AppendOnly { path } => {
                let id = self.regular(path)?;
                self.change_attributes(id, |attributes| attributes.is_append_only = true);
            }
            Operation::Chmod { path, mode } => {
                let id = self.regular(path)?;
                self.change_attributes(id, |attributes| attributes.mode = *mode);
            }
            _ => bail!("{operation} is about neither names nor attributes"),
        }
        Ok(())
    }

    fn change_attributes(&mut self, id: Id, edit: impl FnOnce(&mut tree::Attributes)) {
        self.change(|tree| tree.attributes_mut(id).map_or((), edit));
        self.mark_metadata(id);
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        self.tree().check_rename(from, to)?;
        let (id, source) = (self.tree().existing(from)?, self.tree().entry(from)?);
        let target = self.tree().entry(to)?;
        let ids: Vec<Id> = [Some(id), target.id].into_iter().flatten().collect();
        self.change_names(&ids, &[&source, &target], |tree| {
            tree.remove(&source);
            tree.set(&target, id);
        });
        let changes = self.changes();
        if self.kind == Kind::Ext4 && target.id.is_some() && self.file(id).is_some() {
            self.history(id).allocate(changes);
            self.allocated(id);
        }
        Ok(())
    }

    /// Data without blocks gets them.
    fn allocated(&mut self, id: Id) {
        let dirty = &mut self.inode(id).dirty;
        let was = std::mem::take(&mut dirty.unallocated);
        dirty.data = dirty.data.max(was);
        dirty.metadata = dirty.metadata.max(was);
    }

    fn write_by(&mut self, by: WriteBy, path: &str, offset: u64, length: u64) -> Result<()> {
        let id = self.regular(path)?;
        let is_mapped = by == WriteBy::Mapping;
        let size = self.history(id).size();
        ensure!(!is_mapped || offset + length <= size, "a mapping does not extend {path}");
        // Only what a write with O_SYNC or O_DSYNC wrote itself is written back: data of earlier
        // writes that has no blocks gets them only where it shares one.
        let is_synced = matches!(by, WriteBy::Sync | WriteBy::DataSync);
        let dirty = &mut self.inode(id).dirty;
        let before = if is_synced { std::mem::take(&mut dirty.unallocated) } else { Certainty::No };
        let earlier = before.min(Certainty::Perhaps);
        if !is_mapped {
            self.take_privileges(id);
        }
        self.write(id, offset, length);
        if by == WriteBy::Direct {
            self.allocated(id);
        }
        if is_synced {
            self.history(id).sync_last();
            let is_outside = self.is_outside;
            self.inode(id).logged.sync(is_outside);
            let dirty = &mut self.inode(id).dirty;
            dirty.unallocated = dirty.unallocated.max(earlier);
            self.commit_for(id, by == WriteBy::DataSync);
            self.inode(id).dirty.unallocated = earlier;
        }
        self.last = (!matches!(by, WriteBy::Fork | WriteBy::Static)).then_some(id);
        Ok(())
    }

    fn write(&mut self, id: Id, offset: u64, length: u64) {
        let data = bytes(self.step, offset, length);
        self.write_data(id, offset, &data);
    }

    fn append(&mut self, id: Id, length: u64) {
        let end = self.history(id).size();
        self.take_privileges(id);
        self.write(id, end, length);
        self.last = Some(id);
    }

    fn write_data(&mut self, id: Id, offset: u64, data: &[u8]) {
        let (changes, kind, is_outside) = (self.changes(), self.kind, self.is_outside);
        self.inode(id).logged.write(offset, data, is_outside);
        let allocation = self.history(id).write(offset, data, changes);
        let journals_data = self.journals_data;
        let inode = self.inode(id);
        inode.dirty.times = Certainty::Surely;
        match allocation {
            Allocation::None if journals_data => inode.dirty.data = Certainty::Surely,
            Allocation::None => return,
            Allocation::Size if kind == Kind::Ext4 => inode.dirty.data = Certainty::Surely,
            Allocation::Size | Allocation::Blocks => inode.dirty.unallocated = Certainty::Surely,
            Allocation::Perhaps => {
                inode.dirty.unallocated = inode.dirty.unallocated.max(Certainty::Perhaps);
            }
        }
        inode.last_data_change = inode.last_data_change.max(changes);
        inode.last_change = inode.last_change.max(changes);
    }

    fn truncate(&mut self, id: Id, size: u64) {
        if self.is_under_run && self.inode(id).is_synced {
            self.perhaps_commit();
        }
        self.take_privileges(id);
        self.change(|_| {});
        let changes = self.changes();
        let was = self.history(id).size();
        self.history(id).resize(size, changes);
        self.mark_data(id);
        let is_outside = self.is_outside;
        let inode = self.inode(id);
        inode.was_cut |= size < was;
        inode.logged.resize(size, is_outside);
    }

    fn fallocate(
        &mut self,
        path: &str,
        mode: FallocateMode,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        let id = self.regular(path)?;
        self.take_privileges(id);
        let (kind, range) = (self.kind, offset..offset + length);
        // A punch that frees no block only writes zeroes: on XFS an `fdatasync` behind it commits
        // nothing.
        let is_overwrite = kind == Kind::Xfs
            && mode == FallocateMode::Punch
            && !self.history(id).has_whole_block(&range);
        if !is_overwrite {
            self.change(|_| {});
        }
        // Such a file has left the log.
        self.inode(id).logged = Logged::default();
        let changes = self.changes();
        let history = self.history(id);
        let size = history.size();
        let is_whole = offset.is_multiple_of(BLOCK_BYTES) && length.is_multiple_of(BLOCK_BYTES);
        match mode {
            FallocateMode::Default if range.end > size => history.resize(range.end, changes),
            FallocateMode::Default if kind == Kind::Ext4 => history.extend(range.end, changes),
            FallocateMode::Default | FallocateMode::Keep => {}
            FallocateMode::Punch => {
                ensure!(offset < size, "punches only inside of a file");
                history.clear(range, changes);
            }
            FallocateMode::Zero => {
                ensure!(range.end <= size, "zeroes only inside of a file");
                let end = range.end;
                history.clear(range, changes);
                if kind == Kind::Ext4 {
                    history.extend(end, changes);
                }
            }
            FallocateMode::Collapse => {
                ensure!(is_whole && range.end < size, "not inside of {path}");
                history.collapse(range, changes);
            }
            FallocateMode::Insert => {
                ensure!(is_whole && offset < size, "not inside of {path}");
                history.insert(range, changes);
            }
        }
        if is_overwrite {
            let dirty = &mut self.inode(id).dirty;
            dirty.times = Certainty::Surely;
            // A block at the end of the file may have been freed.
            dirty.data = dirty.data.max(Certainty::Perhaps);
        } else {
            self.mark_data(id);
        }
        // Both file systems write a file's dirty pages before they move its blocks, and may before
        // they clear some.
        if matches!(mode, FallocateMode::Collapse | FallocateMode::Insert) {
            self.allocated(id);
        } else if !matches!(mode, FallocateMode::Keep | FallocateMode::Default) {
            self.inode(id).was_cut = true;
        }
        self.last = Some(id);
        Ok(())
    }

    fn copy(&mut self, from: &str, to: &str) -> Result<()> {
        let source = self.regular(from)?;
        let data = self.history(source).contents().to_vec();
        let exists = self.tree().entry(to)?.id.is_some();
        let id = if exists { self.regular(to)? } else { self.create_file(to)? };
        ensure!(id != source, "{from} and {to} are one file");
        ensure!(!data.is_empty(), "{from} is empty");
        self.take_privileges(id);
        self.write_data(id, 0, &data);
        self.last = Some(id);
        // XFS shares blocks instead of copying bytes: then it writes the source first and allocates
        // at once.
        if self.kind == Kind::Xfs {
            self.inode(id).was_cut = true;
            self.inode(source).was_cut = true;
        }
        Ok(())
    }

    /// The file system writes the source's dirty pages, then gives its blocks to a new file.
    fn reflink(&mut self, from: &str, to: &str) -> Result<()> {
        let source = self.regular(from)?;
        let data = self.history(source).contents().to_vec();
        ensure!(!data.is_empty(), "{from} is empty");
        let id = self.create_file(to)?;
        self.allocated(source);
        self.change(|_| {});
        let changes = self.changes();
        let history = self.history(id);
        history.resize(data.len() as u64, changes);
        history.write(0, &data, changes);
        history.share();
        self.history(source).share();
        self.mark_data(id);
        let dirty = &mut self.inode(source).dirty;
        dirty.metadata = dirty.metadata.max(Certainty::Perhaps);
        self.last = Some(id);
        Ok(())
    }

    fn tmpfile(&mut self, path: &str, length: u64, synced: bool) -> Result<()> {
        let entry = self.tree().free(path)?;
        let id = self.inodes.len();
        self.inode(id).history = Some(History::default());
        self.change(|tree| tree.add(id, 0o644, false));
        self.mark_data(id);
        self.write(id, 0, length);
        if synced {
            self.sync_inode(id, false);
        }
        self.change_names(&[id], &[&entry], |tree| tree.set(&entry, id));
        self.last = Some(id);
        Ok(())
    }

    fn sync(&mut self, sync: &Sync) -> Result<()> {
        match sync {
            Sync::File(path) => self.sync_path(path, false)?,
            Sync::Data(path) => self.sync_path(path, true)?,
            Sync::Mapping => {
                let Some(id) = self.mapped.filter(|id| self.last == Some(*id)) else {
                    bail!("nothing is mapped")
                };
                self.sync_inode(id, true);
            }
            Sync::All => {
                self.commit_all();
                let is_outside = self.is_outside;
                for inode in self.inodes.values_mut() {
                    inode.history.iter_mut().for_each(History::sync);
                    inode.dirty = Dirty::default();
                    inode.logged.sync(is_outside);
                    inode.logged.commit();
                }
            }
        }
        Ok(())
    }

    fn sync_path(&mut self, path: &str, data_only: bool) -> Result<()> {
        let last = self.last.filter(|_| path == ".");
        let id = match last {
            Some(id) => id,
            None => self.tree().existing(path)?,
        };
        ensure!(self.inode(id).target.is_none(), "{path} is a symbolic link");
        self.synced = Some(id);
        self.sync_inode(id, data_only);
        for child in self.children(id) {
            self.inode(child).is_synced = true;
        }
        Ok(())
    }

    fn children(&self, id: Id) -> Vec<Id> {
        let paths = self.tree().paths();
        let of_this = |path: &String| self.tree().entry(path).is_ok_and(|entry| entry.parent == id);
        paths.into_iter().filter(|(path, _)| of_this(path)).map(|(_, id)| id).collect()
    }

    fn sync_inode(&mut self, id: Id, data_only: bool) {
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

    /// The commit that a sync of an inode makes, if it makes one.
    fn commit_for(&mut self, id: Id, data_only: bool) {
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

    fn perhaps_commit(&mut self) {
        self.inodes.values_mut().for_each(|inode| inode.dirty.weaken());
    }

    fn commit_changes(&mut self) {
        self.bounds = Bounds { sure: self.changes(), here: self.changes() };
        self.clean();
    }

    fn commit_all(&mut self) {
        self.commit_changes();
        self.inodes.values_mut().for_each(|inode| inode.is_synced = true);
    }

    /// The journal was committed: inodes are clean, but for data that has no blocks.
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

    /// `run` may sync any file that it has in its log, or all of the file system, since it retires
    /// the log or has files leave it: the kernel could have written back and committed at that
    /// moment by itself.
    fn retire(&mut self) {
        if self.is_under_run {
            self.inodes.values_mut().for_each(|inode| inode.dirty.unallocated.weaken());
            self.perhaps_commit();
        }
    }

    fn write_back(&mut self, path: &str) -> Result<()> {
        let id = self.regular(path)?;
        self.allocated(id);
        Ok(())
    }

    /// Whether a file may be missing though its creation is in the prefix: it was created and never
    /// synced, and the prefix has no other change of its names. Plain file systems do not lose it;
    /// `tidegate run` does not order it.
    pub fn is_optional(&self, id: Id, prefix: usize) -> bool {
        self.inodes.get(&id).is_some_and(|inode| {
            let name_changes = inode.name_changes.iter().filter(|change| **change <= prefix);
            let is_unnamed = name_changes.count() == 1;
            inode.is_new && inode.history.is_some() && !inode.is_synced && is_unnamed
        })
    }
}
