//! Changes from outside that no log can know: by another program, or by the program itself once its
//! run is lost. docs/unnoticed.md describes them for users. A crash under `tidegate run` may leave
//! these states and no others.
//!
//! 1. **Order** ([`Skipped`]). A change may be lost, even if the session has synced something
//!    since, if its program did not sync it and nothing outside has committed it. The session's
//!    next sync of that file notices a new size.
//! 2. **Bytes** ([`Logged`]). Recovery may put the session's bytes over those from another program
//!    if the time of their change tells nothing. That is so if no commit has the time, if the
//!    session has written to the file since, or if it had not synced its own writes before.
//! 3. **New files**. A new file that the session has a stream on may have the session's state. A
//!    new file that the log can create again may have the attributes that the session knows.

use std::collections::BTreeSet;

use super::history::{Possible, index};
use super::tree::Id;
use super::{Model, State, Verdict};
use crate::operation::{Operation, WriteBy};
use crate::sequence::{Lost, Outside, Step, Sync};

/// Bytes and size of a file that a session's log may have.
#[derive(Debug, Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about one file")]
pub(super) struct Logged {
    /// The session's last byte at each offset, and whether another program wrote later.
    bytes: Vec<(Option<u8>, bool)>,
    /// The size as the session knows it; `None` before it has written.
    size: Option<u64>,
    /// The session has not synced its last writes.
    is_unsynced: bool,
    /// Recovery does not notice that another program wrote: the session had not synced, or has
    /// written since.
    is_mixed: bool,
    /// The session had not synced the file when another program changed it.
    was_unsynced: bool,
    /// No commit is known that has the times from another program.
    is_uncommitted: bool,
}

impl Logged {
    /// Notes a write.
    pub(super) fn write(&mut self, offset: u64, data: &[u8], is_outside: bool) {
        let (start, end) = (index(offset), index(offset) + data.len());
        self.bytes.resize(self.bytes.len().max(end), (None, false));
        for (byte, value) in self.bytes[start..end].iter_mut().zip(data) {
            *byte = if is_outside { (byte.0, true) } else { (Some(*value), false) };
        }
        self.change(is_outside);
        if !is_outside {
            self.size = Some(self.size.unwrap_or(0).max(end as u64));
        }
    }

    /// Notes a change of the size.
    pub(super) fn resize(&mut self, size: u64, is_outside: bool) {
        let kept = index(size).min(self.bytes.len());
        self.change(is_outside);
        if is_outside {
            self.bytes[kept..].iter_mut().for_each(|byte| byte.1 = true);
        } else {
            self.bytes.truncate(kept);
            self.size = Some(size);
        }
    }

    fn change(&mut self, is_outside: bool) {
        if is_outside {
            self.is_mixed |= self.is_unsynced;
            self.was_unsynced |= self.is_unsynced;
            self.is_uncommitted = true;
        } else {
            self.is_mixed |= self.bytes.iter().any(|(_, is_of_other)| *is_of_other);
            self.is_unsynced = true;
        }
    }

    /// Notes a sync of the file.
    pub(super) fn sync(&mut self, is_outside: bool) {
        self.is_unsynced &= is_outside;
    }

    /// Notes that a commit has the times of the file.
    pub(super) fn commit(&mut self) {
        self.is_uncommitted = false;
    }

    /// Allows the bytes and the size that recovery may restore over those from other programs.
    pub(super) fn add_to(&self, possible: &mut Possible) {
        let is_unnoticed = self.is_mixed || self.is_uncommitted;
        for (offset, (value, is_of_other)) in (0..).zip(&self.bytes) {
            if let Some(value) = value.filter(|_| *is_of_other && is_unnoticed) {
                possible.add(offset, value);
            }
        }
        if self.was_unsynced
            && let Some(size) = self.size
        {
            possible.add_size(size);
        }
    }

    /// Returns this for a file whose times tell nothing.
    fn of_stream(mut self) -> Self {
        (self.is_mixed, self.was_unsynced) = (true, true);
        self
    }
}

/// A file system without a change from outside that is not committed.
#[derive(Debug, Clone)]
pub(super) struct Skipped {
    /// The operation's inodes.
    ids: BTreeSet<Id>,
    /// The number of changes, including this one.
    changes: usize,
    /// The change gives a file another size.
    resizes: bool,
    /// The change is of an attribute of a file that the log can create again.
    is_of_new: bool,
    model: Box<Model>,
}

/// The model before a change from outside.
pub(super) struct Before {
    operation: Operation,
    model: Model,
    sizes: Vec<Option<u64>>,
}

impl Skipped {
    /// Returns the state before `step` if that is a change from outside, which a crash may skip.
    pub(super) fn before(model: &Model, step: &Step) -> Option<Before> {
        let Step::Other(_, inner) = step else { return None };
        let Step::Operation(operation) = inner.innermost() else { return None };
        let sizes = model.sizes_of(operation);
        let skipping = || {
            let mut model = model.clone();
            skip(&mut model, step);
            model
        };
        let operation = operation.clone();
        model.volume.is_under_run.then(|| Before { operation, model: skipping(), sizes })
    }

    /// Returns the states among `all` that a crash after the next step may leave. `whole` has taken
    /// the step, and its least prefix was `committed` before. A commit includes all earlier
    /// changes.
    pub(super) fn behind(
        all: Vec<Self>,
        step: &Step,
        whole: &Model,
        committed: usize,
    ) -> Vec<Self> {
        let is_there = |state: &Self| state.is_there_behind(step, whole, committed);
        let surely_there = all.iter().rposition(is_there).map_or(0, |last| last + 1);
        let may_be_lost = |(at, state): &(usize, Self)| *at >= surely_there || state.is_of_new;
        let left = all.into_iter().enumerate().filter(may_be_lost).map(|(_, state)| state);
        left.filter(|state| !is_there(state))
            .filter_map(|mut state| state.take(step).then_some(state))
            .collect()
    }

    /// Returns whether the change surely survives after a step that `whole` has taken.
    fn is_there_behind(&self, step: &Step, whole: &Model, committed: usize) -> bool {
        let is_own = || whole.synced.is_some_and(|id| self.ids.contains(&id));
        match step.innermost() {
            Step::Outside(Outside::Retire) => true,
            _ if self.is_of_new => false,
            Step::Sync(Sync::All) | Step::Outside(Outside::Commit) => true,
            Step::Sync(_) if whole.volume.is_outside => {
                is_own()
                    || whole.volume.bounds.here > committed
                        && whole.volume.bounds.here >= self.changes
            }
            Step::Sync(Sync::File(_) | Sync::Data(_)) => self.resizes && is_own(),
            _ => false,
        }
    }

    /// Takes a step. Later changes of other programs are lost as well: they come later in the
    /// journal. Returns false if the step names a missing inode.
    fn take(&mut self, step: &Step) -> bool {
        match step {
            Step::Other(_, inner)
                if !self.is_of_new && matches!(inner.innermost(), Step::Operation(_)) =>
            {
                skip(&mut self.model, step);
                true
            }
            step => self.model.apply(step).is_ok(),
        }
    }

    pub(super) fn refusing(self, refused: &BTreeSet<String>) -> Self {
        Self { model: Box::new(self.model.refusing(refused.clone())), ..self }
    }

    pub(super) fn judge(&self, state: &State, is_unordered: bool) -> Verdict {
        self.model.judge(state, is_unordered)
    }
}

/// Skips a change from outside that is lost.
fn skip(model: &mut Model, step: &Step) {
    model.step += 1;
    model.note_of_others(step);
    model.note_times(None);
}

impl Before {
    /// Returns the states that a crash after the change may leave; `whole` has taken it.
    pub(super) fn behind(self, whole: &Model) -> Skipped {
        let Self { operation, mut model, sizes } = self;
        model.last = whole.last;
        let named = |model: &Model| -> Vec<Id> {
            let paths = operation.paths().into_iter();
            paths.filter_map(|path| model.tree().existing(path).ok()).collect()
        };
        let ids: BTreeSet<Id> = named(&model).into_iter().chain(named(whole)).collect();
        let names_a_file = matches!(
            operation,
            Operation::Unlink { .. } | Operation::Rename { .. } | Operation::New { .. }
        );
        let resizes = !names_a_file && sizes != whole.sizes_of(&operation);
        let is_new = |id: &Id| whole.volume.inodes.get(id).is_some_and(|inode| inode.is_new);
        let is_of_new = matches!(operation, Operation::Chmod { .. }) && ids.iter().any(is_new);
        let changes = whole.volume.changes();
        Skipped { ids, changes, resizes, is_of_new, model: Box::new(model) }
    }
}

impl Model {
    /// Returns whether the log does not see the changes of `step`.
    pub(super) fn is_of_outside(&self, step: &Step) -> bool {
        matches!(step, Step::Other(..) | Step::Outside(_)) || self.lost.contains(&Lost::Run)
    }

    /// Returns the sizes of the files at the paths of an operation.
    fn sizes_of(&self, operation: &Operation) -> Vec<Option<u64>> {
        let size = |path| Some(self.file(self.tree().existing(path).ok()?)?.size());
        operation.paths().into_iter().map(size).collect()
    }

    /// Notes the files that the program has mapped, and those with a stream.
    pub(super) fn note_used(&mut self, operation: &Operation) {
        let id = operation.paths().first().and_then(|path| self.tree().existing(path).ok());
        let is_stream = match operation {
            Operation::Stdio { .. } => true,
            Operation::Write { by, .. } => {
                self.mapped = id.filter(|_| *by == WriteBy::Mapping);
                *by == WriteBy::Stream
            }
            _ => false,
        };
        self.stream = id.filter(|_| is_stream);
    }

    /// Returns the bytes of the log that recovery may put over those from other programs.
    pub(super) fn logged_of(&self, id: Id) -> Option<Logged> {
        let inode = self.volume.inodes.get(&id).filter(|_| self.volume.is_under_run)?;
        let is_of_stream = inode.is_new && self.stream == Some(id);
        let logged = inode.logged.clone();
        Some(if is_of_stream { logged.of_stream() } else { logged })
    }
}
