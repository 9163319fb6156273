//! The model of allowed outcomes: the states of ext4 and XFS that a crash after a sequence of steps
//! may leave, if each sync of the program is real.
//!
//! **Names, sizes by truncation, attributes** are journalled when they change, in one order for the
//! whole file system. A crash keeps a prefix of these changes: the model has the [`Tree`] of each
//! prefix. **Contents** are bound to the prefix by the rules of [`history`]. A state is allowed if
//! one prefix explains the whole state and has everything that the syncs promise.
//!
//! **Promises of a sync.** A sync writes the file's data. It commits the journal, which makes *all*
//! earlier changes of *all* files durable, if the inode has changed since the last commit: `fsync`
//! after any change, `fdatasync` only after a change of size or allocation. So `fdatasync` after
//! overwrites, or a sync of a clean file, commits nothing. On ext4 a sync of a directory always
//! commits. `sync` covers everything.
//!
//! Two bounds follow. [`Bounds::here`] assumes that only the steps of the sequence commit the
//! journal, as on a quiet disk. [`Bounds::sure`] holds even if something else commits it: it
//! includes only the changes of the synced inode itself, and the changes before them. A state
//! between the two could occur with a commit in the background at the worst moment.
//!
//! **From outside**: a commit makes all changes durable and the inodes clean. A write-back
//! allocates, so that the next sync finds a changed inode. Retiring the log of `run` may do both.
//!
//! **Killed processes.** The place of the kill decides whether the kernel makes the change of an
//! operation, and all later reads and syncs agree with that. Without Tidegate a crash can leave
//! nothing else. Under `tidegate run` the log may have a change that the kernel has not made, and a
//! crash may leave it made (`Replayed`), since the process had begun it. That ends with the next
//! sync or operation on its file or its names: a state that was seen must not change again.
//!
//! **Other ways, other programs, lost processes.** The kernel makes no difference between programs,
//! nor between calls: a step of another program, or by another [`Way`](crate::sequence::Way), is an
//! ordinary operation or sync. Under `tidegate run` files may leave the log before it, as in
//! `outside retire`. A recovery that refuses a file, by name, because another program has changed
//! it, may leave the file as the disk has it ([`Model::of_others`]). `outside.rs` has the changes
//! from outside that no log can know.
//!
//! **Times** are compared if the model knows the times that files showed after each step
//! ([`Model::with_times`]). A file then has a time that it showed, which a write or `utimensat`
//! gave it. By [`TimeRule::Synced`] it is a time at or after its last `fsync`.
//!
//! [`Kind`] has the differences between the two file systems. Under `tidegate run` the existence of
//! a file that was created and never synced is unordered (`Volume::is_optional`), an `fdatasync`
//! may be made as an `fsync`, and an `fsync` may precede a truncation, or a change that `run` does
//! not see ([`Model::under_run`]).

pub mod crowd;
pub mod history;
mod outside;
pub mod tree;
mod verdict;
mod volume;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;

use self::history::{Allocation, BLOCK_BYTES, History};
use self::outside::{Logged, Skipped};
use self::tree::{Id, Tree};
pub use self::verdict::{Found, Node, State, Time, Verdict};
pub use self::volume::Bounds;
use self::volume::{Certainty, Dirty, Volume};
use crate::contents::{INITIAL_A, INITIAL_B, bytes};
use crate::operation::{FallocateMode, Operation, WriteBy};
use crate::sequence::{Kill, Lost, Other, Outside, Sequence, Step, Sync};

/// The file system of the rules.
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

/// The state after a recovery that completes an operation: its process was killed, the kernel had
/// not made the change, and the log has it.
#[derive(Debug, Clone)]
struct Replayed {
    operation: Operation,
    /// The model of a program whose operation was made.
    model: Model,
}

impl Replayed {
    /// Returns whether a recovery may still make the change after `step`.
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

/// The file system during a sequence.
#[derive(Debug, Clone)]
pub struct Model {
    volume: Volume,
    /// The file of the last operation; "." is its descriptor.
    last: Option<Id>,
    /// The file of the last sync.
    synced: Option<Id>,
    /// Number of steps so far.
    step: u64,
    /// Other states that a crash may leave.
    replayed: Vec<Replayed>,
    /// States without changes that programs outside did not sync.
    skipped: Vec<Skipped>,
    /// The file that the program has mapped.
    mapped: Option<Id>,
    /// The file that the program has a stream of.
    stream: Option<Id>,
    /// Paths of files that programs outside the tree have changed.
    of_others: BTreeSet<String>,
    /// Paths that may have any state.
    refused: BTreeSet<String>,
    /// Processes of the run that were killed.
    lost: BTreeSet<Lost>,
    /// Number of files that [`Step::Crowd`] has made.
    crowd: u32,
    /// The journal has data too, so any write makes a sync commit.
    journals_data: bool,
    /// Times that files showed: at the beginning, and after each step.
    shown: Arc<[Times]>,
    /// The rule for times that a crash may leave.
    time_rule: TimeRule,
}

/// The set-user-ID bit, which a change of the owner clears.
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

/// The times of its last change that a file may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TimeRule {
    /// Each that it showed since the sequence began: recovery makes none up.
    Shown,
    /// Those that it showed at its last `fsync` and since.
    Synced,
}

impl TimeRule {
    /// Returns the name on the command line.
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
    /// Creates the initial state: `d0/A`, `d1/B`, the empty directory `d3`, all on the disk.
    ///
    /// # Panics
    /// Never: the constants of the initial state are consistent.
    pub fn new(kind: Kind) -> Self {
        Self {
            volume: Volume::new(kind),
            last: None,
            synced: None,
            step: 0,
            replayed: Vec::new(),
            skipped: Vec::new(),
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

    /// Returns the model after all steps of `sequence`.
    ///
    /// # Errors
    /// A step would fail.
    pub fn behind(kind: Kind, sequence: &Sequence) -> Result<Self> {
        Self::new(kind).after(sequence)
    }

    /// Returns this model for a program under `tidegate run`. To cover a file, `run` makes an
    /// `fdatasync`, or the sync of a write with `O_DSYNC`, as an `fsync`. Before a truncation, or a
    /// change that `run` does not see, a file may leave the log by a real sync. Each of these syncs
    /// is a commit that the kernel could have made by itself at that moment. A later sync of a file
    /// or directory whose changes it included then has nothing to commit.
    #[must_use]
    pub fn under_run(mut self) -> Self {
        self.volume.is_under_run = true;
        self
    }

    /// Returns this model for ext4 mounted with `data=journal`.
    #[must_use]
    pub fn with_data_in_journal(self) -> Self {
        Self { journals_data: true, ..self }
    }

    /// Returns this model with the times that files showed: at the beginning, and after each step.
    #[must_use]
    pub fn with_times(self, time_rule: TimeRule, shown: Arc<[Times]>) -> Self {
        let mut this = Self { shown, time_rule, ..self };
        this.note_times(None);
        this
    }

    /// Notes the times that files show after `step`.
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
            // Recovery may restore the state before a change of another program.
            let is_durable =
                is_durable && self.time_rule == TimeRule::Synced && !self.volume.is_outside;
            let times = &mut self.volume.inode(id).times;
            if is_durable {
                times.clear();
            }
            times.insert(time);
        }
    }

    /// Returns the model after more steps.
    ///
    /// # Errors
    /// A step would fail.
    pub fn after(mut self, sequence: &Sequence) -> Result<Self> {
        sequence.steps.iter().try_for_each(|step| self.apply(step))?;
        Ok(self)
    }

    /// Returns the names and attributes that a program sees now.
    pub fn tree(&self) -> &Tree {
        self.volume.tree()
    }

    /// Returns the contents of a regular file.
    pub fn file(&self, id: Id) -> Option<&History> {
        self.volume.file(id)
    }

    /// Returns the file of the last operation, if its descriptor is open.
    pub fn last(&self) -> Option<Id> {
        self.last
    }

    /// Takes one more step.
    ///
    /// # Errors
    /// The step would fail; the model is of no use afterwards.
    pub fn apply(&mut self, step: &Step) -> Result<()> {
        let mut replayed = std::mem::take(&mut self.replayed);
        replayed.retain_mut(|made| made.is_possible_behind(step) && made.model.apply(step).is_ok());
        let skipped = std::mem::take(&mut self.skipped);
        let (before, committed) = (Skipped::before(self, step), self.volume.bounds.here);
        self.volume.is_outside = self.is_of_outside(step);
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
                // The first program follows its files to other names, and closes its open files.
                self.last.take_if(|_| step.innermost().changes_names());
                Ok(())
            }
            Step::Clone(_) => {
                self.leave_log();
                self.last = None;
                Ok(())
            }
            Step::Lost(lost) => {
                self.volume.retire();
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
                self.volume.perhaps_commit();
                Ok(())
            }
            step => self.take_called(step),
        }
    }

    /// Notes that files may leave the log, if it has any.
    fn leave_log(&mut self) {
        if self.volume.inodes.values().any(|inode| inode.is_synced) || self.crowd > 0 {
            self.volume.retire();
        }
    }

    /// Notes all names of files that another program changes, or the program without its run.
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

    /// Returns the paths of files that programs outside the tree have changed; recovery may refuse
    /// them.
    pub fn of_others(&self) -> &BTreeSet<String> {
        &self.of_others
    }

    /// Returns this model for a recovery that left the files at `refused` unchanged.
    #[must_use]
    pub fn refusing(self, refused: BTreeSet<String>) -> Self {
        let of = |made: Replayed| Replayed { model: made.model.refusing(refused.clone()), ..made };
        let replayed = self.replayed.into_iter().map(of).collect();
        let skipped = self.skipped.into_iter().map(|state| state.refusing(&refused)).collect();
        Self { replayed, skipped, refused, ..self }
    }

    /// Adds the files of a crowd. New files are synced, which commits pending changes; existing
    /// ones are overwritten and synced, which may commit.
    fn add_crowd(&mut self, count: u32) {
        self.last = None;
        if self.lost.contains(&Lost::Run) {
            self.of_others.extend(crowd::names(count));
        }
        if count > self.crowd {
            self.volume.commit_changes();
            self.crowd = count;
        } else {
            self.volume.perhaps_commit();
        }
    }

    /// Takes an operation, a sync or an action of another program, in whichever way it is called.
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
                self.volume.commit_all();
                Ok(())
            }
            Step::Outside(Outside::WriteBack(path)) => self.write_back(path),
            Step::Outside(Outside::Retire) => {
                ensure!(self.lost.is_empty(), "nobody may supervise the run");
                self.volume.retire();
                self.volume.inodes.values_mut().for_each(|inode| inode.logged = Logged::default());
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
        } else if self.volume.is_under_run {
            // A recovery may give the file a time that it has not shown.
            made.shown = Arc::default();
            made.volume.inodes.values_mut().for_each(|inode| inode.times.clear());
            self.replayed.push(Replayed { operation: operation.clone(), model: made });
        }
        Ok(())
    }

    fn operate(&mut self, operation: &Operation) -> Result<()> {
        self.check_append_only(operation)?;
        if operation.is_unseen() && self.volume.inodes.values().any(|inode| inode.is_synced) {
            self.volume.retire();
        }
        match operation {
            Operation::Create { path } => self.last = Some(self.volume.create_file(path)?),
            Operation::New { path, length } => {
                let id = self.volume.create_file(path)?;
                self.append(id, *length);
            }
            Operation::Write { by, path, offset, length } => {
                self.write_by(*by, path, *offset, *length)?;
            }
            Operation::Append { path, length } => {
                let id = self.volume.regular(path)?;
                self.append(id, *length);
            }
            Operation::Stdio { path, length } => {
                let exists = self.tree().entry(path)?.id.is_some();
                let id = if exists {
                    self.volume.regular(path)?
                } else {
                    self.volume.create_file(path)?
                };
                self.append(id, *length);
            }
            Operation::Truncate { path, size } => {
                let id = self.volume.regular(path)?;
                self.truncate(id, *size);
                self.last = Some(id);
            }
            Operation::TruncateOpen { path, length } => {
                let id = self.volume.regular(path)?;
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

    /// Refuses an operation other than an append to a file that is append-only.
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

    fn operate_on_names(&mut self, operation: &Operation) -> Result<()> {
        match operation {
            Operation::Link { from, to } => {
                let (id, entry) = (self.volume.regular(from)?, self.tree().free(to)?);
                self.volume.change_names(&[id], &[&entry], |tree| tree.set(&entry, id));
            }
            Operation::Symlink { target, path } => {
                let id = self.volume.create(path, 0o777, false)?;
                self.volume.inode(id).target = Some(target.clone());
            }
            Operation::Unlink { path } => {
                let (id, entry) = (self.tree().existing(path)?, self.tree().entry(path)?);
                ensure!(!self.tree().is_directory(id), "{path} is a directory");
                self.volume.change_names(&[id], &[&entry], |tree| tree.remove(&entry));
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
                self.volume.change_names(&[a, b], &[&here, &there], |tree| {
                    tree.set(&here, b);
                    tree.set(&there, a);
                });
            }
            Operation::Mkdir { path } => {
                self.volume.create(path, 0o755, true)?;
            }
            Operation::Rmdir { path } => {
                let (id, entry) = (self.tree().existing(path)?, self.tree().entry(path)?);
                ensure!(self.tree().is_empty(id), "{path} is no empty directory");
                self.volume.change_names(&[id], &[&entry], |tree| tree.remove(&entry));
            }
            _ => self.operate_on_attributes(operation)?,
        }
        Ok(())
    }

    fn operate_on_attributes(&mut self, operation: &Operation) -> Result<()> {
        match operation {
            Operation::SetXattr { path } => {
                let (id, value) = (self.volume.regular(path)?, self.step.to_string());
                self.volume.change_attributes(id, |attributes| attributes.xattr = Some(value));
            }
            Operation::Utime { path } => {
                let id = self.volume.regular(path)?;
                self.volume.change_attributes(id, |_| ());
            }
            Operation::Chown { path } => {
                let id = self.volume.regular(path)?;
                self.volume.take_privileges(id);
                self.volume.change_attributes(id, |attributes| attributes.mode &= !SET_USER);
            }
            Operation::SetCapability { path } => {
                let id = self.volume.regular(path)?;
                // A file that has the value already stays unchanged, and nothing is pending.
                ensure!(!self.volume.attributes(id).has_capability, "{path} has a capability");
                self.volume.change_attributes(id, |attributes| attributes.has_capability = true);
            }
            Operation::SetAcl { path } => {
                let id = self.volume.regular(path)?;
                ensure!(!self.volume.attributes(id).has_acl, "{path} has an access control list");
                self.volume.change_attributes(id, |attributes| {
                    attributes.has_acl = true;
                    attributes.mode = attributes.mode & !0o777 | 0o644;
                });
            }
            Operation::AppendOnly { path } => {
                let id = self.volume.regular(path)?;
                self.volume.change_attributes(id, |attributes| attributes.is_append_only = true);
            }
            Operation::Chmod { path, mode } => {
                let id = self.volume.regular(path)?;
                self.volume.change_attributes(id, |attributes| attributes.mode = *mode);
            }
            _ => bail!("{operation} is about neither names nor attributes"),
        }
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        self.tree().check_rename(from, to)?;
        let (id, source) = (self.tree().existing(from)?, self.tree().entry(from)?);
        let target = self.tree().entry(to)?;
        let ids: Vec<Id> = [Some(id), target.id].into_iter().flatten().collect();
        self.volume.change_names(&ids, &[&source, &target], |tree| {
            tree.remove(&source);
            tree.set(&target, id);
        });
        let changes = self.volume.changes();
        if self.volume.kind == Kind::Ext4 && target.id.is_some() && self.file(id).is_some() {
            self.volume.history(id).allocate(changes);
            self.volume.allocated(id);
        }
        Ok(())
    }

    fn write_by(&mut self, by: WriteBy, path: &str, offset: u64, length: u64) -> Result<()> {
        let id = self.volume.regular(path)?;
        let is_mapped = by == WriteBy::Mapping;
        let size = self.volume.history(id).size();
        ensure!(!is_mapped || offset + length <= size, "a mapping does not extend {path}");
        // A write with O_SYNC or O_DSYNC writes back only its own bytes. Data of earlier writes
        // without blocks gets blocks only where it shares one with them.
        let is_synced = matches!(by, WriteBy::Sync | WriteBy::DataSync);
        let dirty = &mut self.volume.inode(id).dirty;
        let before = if is_synced { std::mem::take(&mut dirty.unallocated) } else { Certainty::No };
        let earlier = before.min(Certainty::Perhaps);
        if !is_mapped {
            self.volume.take_privileges(id);
        }
        self.write(id, offset, length);
        if by == WriteBy::Direct {
            self.volume.allocated(id);
        }
        if is_synced {
            self.volume.history(id).sync_last();
            let is_outside = self.volume.is_outside;
            self.volume.inode(id).logged.sync(is_outside);
            let dirty = &mut self.volume.inode(id).dirty;
            dirty.unallocated = dirty.unallocated.max(earlier);
            self.volume.commit_for(id, by == WriteBy::DataSync);
            self.volume.inode(id).dirty.unallocated = earlier;
        }
        self.last = (!matches!(by, WriteBy::Fork | WriteBy::Static)).then_some(id);
        Ok(())
    }

    fn write(&mut self, id: Id, offset: u64, length: u64) {
        let data = bytes(self.step, offset, length);
        self.write_data(id, offset, &data);
    }

    fn append(&mut self, id: Id, length: u64) {
        let end = self.volume.history(id).size();
        self.volume.take_privileges(id);
        self.write(id, end, length);
        self.last = Some(id);
    }

    fn write_data(&mut self, id: Id, offset: u64, data: &[u8]) {
        let (changes, kind, is_outside) =
            (self.volume.changes(), self.volume.kind, self.volume.is_outside);
        self.volume.inode(id).logged.write(offset, data, is_outside);
        let allocation = self.volume.history(id).write(offset, data, changes);
        let journals_data = self.journals_data;
        let inode = self.volume.inode(id);
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
        if self.volume.is_under_run && self.volume.inode(id).is_synced {
            self.volume.perhaps_commit();
        }
        self.volume.take_privileges(id);
        self.volume.change(|_| {});
        let changes = self.volume.changes();
        let was = self.volume.history(id).size();
        self.volume.history(id).resize(size, changes);
        self.volume.mark_data(id);
        let is_outside = self.volume.is_outside;
        let inode = self.volume.inode(id);
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
        let id = self.volume.regular(path)?;
        self.volume.take_privileges(id);
        let (kind, range) = (self.volume.kind, offset..offset + length);
        // A punch that frees no block writes zeroes: on XFS an `fdatasync` after it commits
        // nothing.
        let is_overwrite = kind == Kind::Xfs
            && mode == FallocateMode::Punch
            && !self.volume.history(id).has_whole_block(&range);
        if !is_overwrite {
            self.volume.change(|_| {});
        }
        // Such a file has left the log.
        self.volume.inode(id).logged = Logged::default();
        let changes = self.volume.changes();
        let history = self.volume.history(id);
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
            let dirty = &mut self.volume.inode(id).dirty;
            dirty.times = Certainty::Surely;
            // A block at the end of the file may have been freed.
            dirty.data = dirty.data.max(Certainty::Perhaps);
        } else {
            self.volume.mark_data(id);
        }
        // Both file systems write a file's dirty pages before they move its blocks, and may before
        // they clear some.
        if matches!(mode, FallocateMode::Collapse | FallocateMode::Insert) {
            self.volume.allocated(id);
        } else if !matches!(mode, FallocateMode::Keep | FallocateMode::Default) {
            self.volume.inode(id).was_cut = true;
        }
        self.last = Some(id);
        Ok(())
    }

    fn copy(&mut self, from: &str, to: &str) -> Result<()> {
        let source = self.volume.regular(from)?;
        let data = self.volume.history(source).contents().to_vec();
        let exists = self.tree().entry(to)?.id.is_some();
        let id = if exists { self.volume.regular(to)? } else { self.volume.create_file(to)? };
        ensure!(id != source, "{from} and {to} are one file");
        ensure!(!data.is_empty(), "{from} is empty");
        self.volume.take_privileges(id);
        self.write_data(id, 0, &data);
        self.last = Some(id);
        // XFS shares blocks instead of copying bytes: it writes the source and allocates at once.
        if self.volume.kind == Kind::Xfs {
            self.volume.inode(id).was_cut = true;
            self.volume.inode(source).was_cut = true;
        }
        Ok(())
    }

    /// Shares the source's blocks with a new file, after writing the source's dirty pages.
    fn reflink(&mut self, from: &str, to: &str) -> Result<()> {
        let source = self.volume.regular(from)?;
        let data = self.volume.history(source).contents().to_vec();
        ensure!(!data.is_empty(), "{from} is empty");
        let id = self.volume.create_file(to)?;
        self.volume.allocated(source);
        self.volume.change(|_| {});
        let changes = self.volume.changes();
        let history = self.volume.history(id);
        history.resize(data.len() as u64, changes);
        history.write(0, &data, changes);
        history.share();
        self.volume.history(source).share();
        self.volume.mark_data(id);
        let dirty = &mut self.volume.inode(source).dirty;
        dirty.metadata = dirty.metadata.max(Certainty::Perhaps);
        self.last = Some(id);
        Ok(())
    }

    fn tmpfile(&mut self, path: &str, length: u64, synced: bool) -> Result<()> {
        let entry = self.tree().free(path)?;
        let id = self.volume.inodes.len();
        self.volume.inode(id).history = Some(History::default());
        self.volume.change(|tree| tree.add(id, 0o644, false));
        self.volume.mark_data(id);
        self.write(id, 0, length);
        if synced {
            self.volume.sync_inode(id, false);
        }
        self.volume.change_names(&[id], &[&entry], |tree| tree.set(&entry, id));
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
                self.volume.sync_inode(id, true);
            }
            Sync::All => {
                self.volume.commit_all();
                let is_outside = self.volume.is_outside;
                for inode in self.volume.inodes.values_mut() {
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
        ensure!(self.volume.inode(id).target.is_none(), "{path} is a symbolic link");
        self.synced = Some(id);
        self.volume.sync_inode(id, data_only);
        for child in self.volume.children(id) {
            self.volume.inode(child).is_synced = true;
        }
        Ok(())
    }

    fn write_back(&mut self, path: &str) -> Result<()> {
        let id = self.volume.regular(path)?;
        self.volume.allocated(id);
        Ok(())
    }
}
