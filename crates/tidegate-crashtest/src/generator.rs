//! Makes sequences: all short ones, and samples of longer ones.
//!
//! The method is that of ACE (Mohan et al., OSDI 2018): few files in two directories, few offsets,
//! a choice of syncs after each operation. The model tells which files exist, so each operation is
//! possible at its position. Symmetric sequences are left out: the first operation is about `d0/A`,
//! and a free name is the one in the same directory or the one in the other.

use std::collections::BTreeMap;

use crate::model::history::BLOCK_BYTES;
use crate::model::tree::ROOT_PATH;
use crate::model::{Kind, Model};
use crate::operation::{CopyBy, FallocateMode, Operation, WriteBy};
use crate::random::Random;
use crate::sequence::{Kill, Outside, Sequence, Step, Sync};

/// The files of a file operation: its subject, another file, and free names.
struct Subject<'a> {
    path: &'a str,
    size: u64,
    other: Option<&'a str>,
    free: &'a [String],
}

/// Returns all operations that are possible after `model`. `is_first` leaves out symmetric ones.
fn operations(model: &Model, is_first: bool) -> Vec<Operation> {
    let tree = model.tree();
    let paths = tree.paths();
    let sizes: BTreeMap<&String, u64> =
        paths.iter().filter_map(|(path, id)| Some((path, model.file(*id)?.size()))).collect();
    let directories = ["d0", "d1", "d2"].into_iter().filter(|dir| tree.existing(dir).is_ok());
    let names = directories.flat_map(|dir| ["A", "B"].map(|name| format!("{dir}/{name}")));
    let free: Vec<String> = names.filter(|path| !paths.contains_key(path)).collect();
    let mut operations = Vec::new();
    for (path, size) in sizes.iter().take(if is_first { 1 } else { sizes.len() }) {
        let other = sizes.keys().rfind(|other| other != &path).map(|path| path.as_str());
        let subject = Subject { path, size: *size, other, free: &nearest(&free, path) };
        subject.add_writes(&mut operations);
        subject.add_sizes(&mut operations);
        subject.add_ranges(&mut operations);
        subject.add_copies(&mut operations);
        subject.add_names(&mut operations);
    }
    add_creations(free.first(), &mut operations);
    add_directories(model, &mut operations);
    operations.retain(|operation| model.clone().apply(&Step::Operation(operation.clone())).is_ok());
    operations
}

/// Returns a free name in the directory of `path` and one in another.
fn nearest(free: &[String], path: &str) -> Vec<String> {
    let dir = parent(path);
    let mut nearest: Vec<String> =
        free.iter().find(|name| parent(name) == dir).cloned().into_iter().collect();
    nearest.extend(free.iter().find(|name| parent(name) != dir).cloned());
    nearest
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or(ROOT_PATH, |(dir, _)| dir)
}

impl Subject<'_> {
    fn write(&self, by: WriteBy, offset: u64, length: u64) -> Operation {
        Operation::Write { by, path: self.path.into(), offset, length }
    }

    fn add_writes(&self, operations: &mut Vec<Operation>) {
        let aligned = self.size.next_multiple_of(BLOCK_BYTES);
        operations.extend(WriteBy::ALL.map(|(by, _)| match by {
            WriteBy::Direct => self.write(by, 4096, 4096),
            _ => self.write(by, 1000, 3000),
        }));
        operations.extend([
            self.write(WriteBy::Call, 4096, 4096),
            self.write(WriteBy::Call, self.size + 4000, 1000),
            self.write(WriteBy::Direct, aligned, 4096),
            self.write(WriteBy::Sync, self.size, 3000),
            self.write(WriteBy::DataSync, self.size, 3000),
            self.write(WriteBy::Static, self.size, 3000),
            Operation::Stdio { path: self.path.into(), length: 3000 },
        ]);
        let append = |length| Operation::Append { path: self.path.into(), length };
        operations.extend([append(100), append(3000)]);
    }

    fn add_sizes(&self, operations: &mut Vec<Operation>) {
        let sizes = [0, 5000, self.size + 6000].into_iter().filter(|size| *size != self.size);
        operations.extend(sizes.map(|size| Operation::Truncate { path: self.path.into(), size }));
        operations.extend(
            [10, 6000].map(|length| Operation::TruncateOpen { path: self.path.into(), length }),
        );
    }

    fn add_ranges(&self, operations: &mut Vec<Operation>) {
        let ranges = [
            (FallocateMode::Default, 8192, 8192),
            (FallocateMode::Keep, 8192, 8192),
            (FallocateMode::Punch, 2000, 5000),
            (FallocateMode::Punch, 4096, 4096),
            (FallocateMode::Zero, 2000, 5000),
            (FallocateMode::Collapse, 4096, 4096),
            (FallocateMode::Insert, 4096, 4096),
        ];
        operations.extend(ranges.map(|(mode, offset, length)| Operation::Fallocate {
            path: self.path.into(),
            mode,
            offset,
            length,
        }));
    }

    fn add_copies(&self, operations: &mut Vec<Operation>) {
        let free = self.free.first().map(String::as_str);
        for to in free.into_iter().chain(self.other) {
            operations.extend(CopyBy::ALL.map(|(by, _)| Operation::Copy {
                by,
                from: self.path.into(),
                to: to.into(),
            }));
        }
    }

    fn add_names(&self, operations: &mut Vec<Operation>) {
        let path = || self.path.to_owned();
        for to in self.free {
            operations.push(Operation::Link { from: path(), to: to.clone() });
            operations.push(Operation::Rename { from: path(), to: to.clone(), uring: false });
        }
        if let Some(to) = self.free.first() {
            operations.push(Operation::Rename { from: path(), to: to.clone(), uring: true });
            operations.push(Operation::Symlink { target: "A".into(), path: to.clone() });
        }
        if let Some(to) = self.other.map(str::to_owned) {
            operations.push(Operation::Rename { from: path(), to: to.clone(), uring: false });
            operations.push(Operation::Exchange { from: path(), to });
        }
        operations.push(Operation::Unlink { path: path() });
        operations.push(Operation::SetXattr { path: path() });
        operations.push(Operation::Chmod { path: path(), mode: 0o600 });
        operations.push(Operation::Chown { path: path() });
        operations.push(Operation::Utime { path: path() });
    }
}

fn add_creations(free: Option<&String>, operations: &mut Vec<Operation>) {
    let Some(path) = free else { return };
    operations.push(Operation::Create { path: path.clone() });
    operations.push(Operation::New { path: path.clone(), length: 5000 });
    operations.push(Operation::Stdio { path: path.clone(), length: 3000 });
    for synced in [false, true] {
        operations.push(Operation::Tmpfile { path: path.clone(), length: 5000, synced });
    }
}

fn add_directories(model: &Model, operations: &mut Vec<Operation>) {
    operations.push(Operation::Mkdir { path: "d2".into() });
    operations.extend(["d2", "d3"].map(|path| Operation::Rmdir { path: path.into() }));
    let mut rename = |from: &str, to: &str| {
        operations.push(Operation::Rename { from: from.into(), to: to.into(), uring: false });
    };
    if model.tree().existing("d2").is_ok() {
        rename("d2", "d3");
    } else {
        rename("d0", "d2");
    }
    rename("d0", "d3");
}

/// Returns the syncs that may follow `operation`, which `model` has taken; `None` is no sync.
fn syncs(model: &Model, operation: &Operation) -> Vec<Option<Sync>> {
    let (file, dirs) = concerned(operation);
    let file = if model.last().is_some() { Some(".") } else { file };
    let mut syncs = vec![None];
    for path in file.into_iter().filter(|path| *path == "." || model.tree().existing(path).is_ok())
    {
        syncs.push(Some(Sync::File(path.into())));
        syncs.push(Some(Sync::Data(path.into())));
    }
    syncs.push(Some(Sync::All));
    if matches!(operation, Operation::Write { by: WriteBy::Mapping, .. }) {
        syncs.push(Some(Sync::Mapping));
    }
    for dir in dirs {
        syncs.push(Some(Sync::File(dir.into())));
    }
    let clean = "d1/B";
    if model.tree().existing(clean).is_ok_and(|id| model.file(id).is_some()) {
        syncs.push(Some(Sync::File(clean.into())));
    }
    let works = |sync: &Option<Sync>| {
        sync.as_ref().is_none_or(|sync| model.clone().apply(&Step::Sync(sync.clone())).is_ok())
    };
    syncs.retain(works);
    syncs
}

/// Returns the path of an operation's file after it, and the directories that it changes.
fn concerned(operation: &Operation) -> (Option<&str>, Vec<&str>) {
    match operation {
        Operation::Create { path }
        | Operation::New { path, .. }
        | Operation::Tmpfile { path, .. }
        | Operation::Stdio { path, .. }
        | Operation::Write { path, .. }
        | Operation::Mkdir { path } => (Some(path), vec![parent(path)]),
        Operation::Link { from, to } => (Some(from), vec![parent(to)]),
        Operation::Copy { to, .. } | Operation::Reflink { to, .. } => (Some(to), vec![parent(to)]),
        Operation::Rename { from, to, .. } | Operation::Exchange { from, to } => {
            let (from, into) = (parent(from), parent(to));
            (Some(to), if from == into { vec![into] } else { vec![into, from] })
        }
        Operation::Symlink { path, .. }
        | Operation::Unlink { path }
        | Operation::Rmdir { path } => (None, vec![parent(path)]),
        Operation::Append { path, .. }
        | Operation::Truncate { path, .. }
        | Operation::TruncateOpen { path, .. }
        | Operation::Fallocate { path, .. }
        | Operation::SetXattr { path }
        | Operation::SetCapability { path }
        | Operation::SetAcl { path }
        | Operation::AppendOnly { path }
        | Operation::Utime { path }
        | Operation::Chown { path }
        | Operation::Chmod { path, .. } => (Some(path), Vec::new()),
    }
}

/// Returns the actions from outside that may follow `operation`.
fn outside_actions(model: &Model, operation: &Operation) -> Vec<Outside> {
    let file = concerned(operation).0;
    let written = file.map(|path| Outside::WriteBack(path.to_owned()));
    let works = |action: &Outside| model.clone().apply(&Step::Outside(action.clone())).is_ok();
    let all = [Some(Outside::Commit), written, Some(Outside::Retire)];
    all.into_iter().flatten().filter(works).collect()
}

/// Returns all sequences of `length` operations, each with at most one sync after it, without
/// actions from outside.
pub fn all(length: usize) -> impl Iterator<Item = Sequence> {
    // The possible operations do not depend on the file system.
    let mut found: Box<dyn Iterator<Item = (Model, Vec<Step>)>> =
        Box::new(std::iter::once((Model::new(Kind::Ext4), Vec::new())));
    for at in 0..length {
        found = Box::new(found.flat_map(move |(model, steps)| extensions(&model, &steps, at == 0)));
    }
    found.zip(0_usize..).map(|((_, steps), number)| Sequence { hold: number % 2 == 1, steps })
}

fn extensions(model: &Model, steps: &[Step], is_first: bool) -> Vec<(Model, Vec<Step>)> {
    let mut extensions = Vec::new();
    for operation in operations(model, is_first) {
        let mut changed = model.clone();
        let step = Step::Operation(operation.clone());
        if changed.apply(&step).is_err() {
            continue;
        }
        for sync in syncs(&changed, &operation) {
            let added = [Some(step.clone()), sync.map(Step::Sync)].into_iter().flatten();
            let steps: Vec<Step> = steps.iter().cloned().chain(added).collect();
            let mut model = changed.clone();
            let last = steps.last().filter(|last| matches!(last, Step::Sync(_)));
            if last.is_none_or(|sync| model.apply(sync).is_ok()) {
                extensions.push((model, steps));
            }
        }
    }
    extensions
}

/// Returns `sequence` itself, and a variant for each action from outside after each of its steps.
pub fn with_outside(sequence: &Sequence) -> Vec<Sequence> {
    let mut variants = vec![sequence.clone()];
    let mut model = Model::new(Kind::Ext4);
    let mut operation = None;
    for (at, step) in sequence.steps.iter().enumerate() {
        if model.apply(step).is_err() {
            break;
        }
        if let Step::Operation(this) = step {
            operation = Some(this);
        }
        for action in operation.map(|this| outside_actions(&model, this)).unwrap_or_default() {
            let mut variant = sequence.clone();
            variant.steps.insert(at + 1, Step::Outside(action));
            variants.extend(Model::behind(Kind::Ext4, &variant).is_ok().then_some(variant));
        }
    }
    variants
}

/// Operations of programs on new files: they deliver, replace and remove files.
const OF_NEW_FILES: [&str; 17] = [
    "new", "create", "stdio", "fwrite", "append", "write", "chmod", "chown", "utime", "setxattr",
    "link", "rename", "unlink", "mkdir", "exchange", "truncate", "dup",
];

/// Returns a sequence of `length` operations that `seed` determines. Half of the sequences are
/// about new files and their names.
pub fn sample(length: usize, seed: u64) -> Sequence {
    let mut random = Random::new(seed ^ (length as u64) << 56);
    let mut model = Model::new(Kind::Ext4);
    let mut sequence = Sequence { hold: random.one_in(2), steps: Vec::new() };
    let is_of_new_files = random.one_in(2);
    // After these steps `run` has files in its log.
    let firsts = [
        is_of_new_files.then_some(Step::Prepare),
        (sequence.hold && random.one_in(2)).then(|| Step::Sync(Sync::File("d0/A".into()))),
    ];
    for first in firsts.into_iter().flatten() {
        if model.apply(&first).is_ok() {
            sequence.steps.push(first);
        }
    }
    while sequence.operation_count() < length {
        let Some(operation) = pick_operation(&model, is_of_new_files, &mut random) else { break };
        let is_killed = operation.can_be_killed_in() && random.one_in(6);
        let step = if is_killed {
            Step::Killed(pick_kill(&mut random), operation.clone())
        } else {
            Step::Operation(operation.clone())
        };
        let mut added = vec![step];
        let mut changed = model.clone();
        if changed.apply(&added[0]).is_err() {
            break;
        }
        add_outside(&changed, &operation, &mut random, &mut added);
        let mut choices = syncs(&changed, &operation);
        if is_of_new_files && random.one_in(2) {
            choices.retain(Option::is_some);
        }
        added.extend(random.pick(&choices).cloned().flatten().map(Step::Sync));
        add_outside(&changed, &operation, &mut random, &mut added);
        for step in &added {
            // Each step was tried alone, and a write-back does not make another step fail.
            let _ = model.apply(step);
        }
        sequence.steps.extend(added);
    }
    sequence
}

/// Picks the place of a kill. For a file in the log, an operation has some 25 entries and exits of
/// system calls and 11,000 instructions before its change, and 6 and 3,000 after it.
fn pick_kill(random: &mut Random) -> Kill {
    let mut count = |most: u64| 1 + u32::try_from(random.number() % most).unwrap_or_default();
    let kills = [
        Kill::Before,
        Kill::At(count(25)),
        Kill::In(count(11_000)),
        Kill::Behind(0),
        Kill::Behind(count(6)),
        Kill::Past(count(3000)),
    ];
    random.pick(&kills).copied().unwrap_or(Kill::Before)
}

fn add_outside(model: &Model, operation: &Operation, random: &mut Random, added: &mut Vec<Step>) {
    if random.one_in(4) {
        let actions = outside_actions(model, operation);
        added.extend(random.pick(&actions).cloned().map(Step::Outside));
    }
}

/// Picks an operation by name first, so that each kind is equally frequent. With `of_new_files`,
/// creations are more frequent.
fn pick_operation(model: &Model, of_new_files: bool, random: &mut Random) -> Option<Operation> {
    let mut by_name: BTreeMap<String, Vec<Operation>> = BTreeMap::new();
    for operation in operations(model, false) {
        by_name.entry(operation.name()).or_default().push(operation);
    }
    if of_new_files {
        by_name.retain(|name, _| OF_NEW_FILES.contains(&name.as_str()));
        if random.one_in(4) {
            by_name.retain(|name, _| ["new", "stdio"].contains(&name.as_str()));
        }
    }
    let names: Vec<Vec<Operation>> = by_name.into_values().collect();
    random.pick(&names).and_then(|choices| random.pick(choices)).cloned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn all_of_length_one_have_every_operation_and_are_valid() {
        let all: Vec<Sequence> = all(1).collect();
        let names: BTreeSet<String> = all
            .iter()
            .flat_map(|sequence| &sequence.steps)
            .filter_map(|step| match step {
                Step::Operation(operation) => Some(operation.name()),
                _ => None,
            })
            .collect();
        assert_eq!(names.len(), 38, "{names:?}");
        let variants: Vec<Sequence> = all.iter().flat_map(with_outside).collect();
        let texts: BTreeSet<String> = variants.iter().map(ToString::to_string).collect();
        println!("{} of length 1, {} with actions from outside", all.len(), variants.len());
        assert!(texts.len() > 600);
        for sequence in &variants {
            Model::behind(Kind::Xfs, sequence).unwrap();
        }
    }

    #[test]
    fn samples_are_valid_and_determined_by_their_seed() {
        for seed in 0..300 {
            let sequence = sample(4, seed);
            assert_eq!(sequence, sample(4, seed));
            // A sequence ends early if its next operation is impossible.
            assert!((1..=4).contains(&sequence.operation_count()), "{sequence}");
            Model::behind(Kind::Ext4, &sequence)
                .unwrap_or_else(|error| panic!("{sequence}{error:#}"));
        }
    }
}
