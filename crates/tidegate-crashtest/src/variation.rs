//! Makes variants of sequences: other ways of making their calls, and steps of other programs and
//! losses between their steps.

use std::fmt;

use anyhow::{Result, bail};

use crate::model::{Kind, Model};
use crate::operation::{Operation, WriteBy};
use crate::random::Random;
use crate::sequence::{Lost, Other, Sequence, Step, Sync, Way};

/// Files of a crowd: more than a log of 128K has space for, as covered files.
const CROWD: u32 = 120;
/// The most variations of one sample.
const VARIATIONS_MAX: u64 = 3;

/// A kind of variation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extra {
    /// One step makes its calls in this way, or all do.
    Way(Way),
    /// These processes are killed between two steps.
    Lost(Lost),
    /// This program changes a file between two steps, and perhaps syncs it.
    Other(Other),
    /// The program writes into a copy of the file system between two steps.
    Clone,
    /// The program writes and syncs many small files between two steps.
    Crowd,
    /// The program gives a file a capability, an access control list or a set-user-ID bit, and
    /// syncs it, between two steps.
    Attributes,
    /// A file can only be appended to after some step.
    AppendOnly,
    /// The program makes a new file that shares the blocks of another, between two steps.
    Reflink,
    /// A program, which runs during recovery, is overwritten and synced between two steps.
    Patch,
}

impl Extra {
    /// Returns every kind.
    pub fn all() -> Vec<Self> {
        let ways = Way::ALL.map(|(way, _)| Self::Way(way)).into_iter();
        let lost = Lost::ALL.map(|(lost, _)| Self::Lost(lost)).into_iter();
        let others = Other::ALL.map(|(other, _)| Self::Other(other)).into_iter();
        ways.chain(lost)
            .chain(others)
            .chain([
                Self::Clone,
                Self::Crowd,
                Self::Attributes,
                Self::AppendOnly,
                Self::Reflink,
                Self::Patch,
            ])
            .collect()
    }

    /// Returns the kinds of a name: the kind itself, all kinds whose names begin with the name and
    /// "-", or every kind for "all".
    ///
    /// # Errors
    /// The name is unknown.
    pub fn named(name: &str) -> Result<Vec<Self>> {
        let begins = |extra: &Self| extra.to_string().starts_with(&format!("{name}-"));
        let is_it = |extra: &Self| name == "all" || extra.to_string() == name || begins(extra);
        let found: Vec<Self> = Self::all().into_iter().filter(is_it).collect();
        if found.is_empty() {
            let names: Vec<String> = Self::all().iter().map(ToString::to_string).collect();
            bail!("{name:?} is not known: all, way, kill, {} are", names.join(", "));
        }
        Ok(found)
    }
}

impl fmt::Display for Extra {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Way(way) => write!(out, "way-{way}"),
            Self::Lost(lost) => write!(out, "kill-{lost}"),
            Self::Other(other) => write!(out, "{other}"),
            Self::Clone => write!(out, "clone"),
            Self::Crowd => write!(out, "crowd"),
            Self::Attributes => write!(out, "attributes"),
            Self::AppendOnly => write!(out, "append-only"),
            Self::Reflink => write!(out, "reflink"),
            Self::Patch => write!(out, "patch"),
        }
    }
}

/// Returns `sequence` with one variation of a kind, for each possible variation.
pub fn varied(sequence: &Sequence, extra: Extra) -> Vec<Sequence> {
    let variants = match extra {
        Extra::Way(way) => in_way(sequence, way),
        _ => with_steps_between(sequence, extra),
    };
    let is_possible = |variant: &Sequence| Model::behind(Kind::Ext4, variant).is_ok();
    variants.into_iter().filter(is_possible).collect()
}

/// Returns `sequence` with one to three variations that `random` picks of some kinds.
pub fn vary(sequence: Sequence, extras: &[Extra], random: &mut Random) -> Sequence {
    let count = 1 + random.number() % VARIATIONS_MAX;
    (0..count).fold(sequence, |sequence, _| {
        let variants = random.pick(extras).map(|extra| varied(&sequence, *extra));
        random.pick(&variants.unwrap_or_default()).cloned().unwrap_or(sequence)
    })
}

/// Returns variants with each step alone in a way, and with all steps in that way.
fn in_way(sequence: &Sequence, way: Way) -> Vec<Sequence> {
    let changed = |is_wanted: &dyn Fn(usize) -> bool| {
        let mut variant = sequence.clone();
        for (at, step) in variant.steps.iter_mut().enumerate() {
            if is_wanted(at) && step.has_ways() {
                *step = Step::By(way, Box::new(step.clone()));
            }
        }
        variant
    };
    let steps = &sequence.steps;
    let mut variants: Vec<Sequence> = (0..steps.len())
        .filter(|at| steps[*at].has_ways())
        .map(|at| changed(&|this| this == at))
        .collect();
    if variants.len() > 1 {
        variants.push(changed(&|_| true));
    }
    variants
}

/// Returns variants with steps of a kind before each step, and after the last.
fn with_steps_between(sequence: &Sequence, extra: Extra) -> Vec<Sequence> {
    let mut variants = Vec::new();
    let mut model = Model::new(Kind::Ext4);
    for at in 0..=sequence.steps.len() {
        if sequence.steps.get(at) != Some(&Step::Prepare) {
            variants.extend(steps_of(&model, extra).into_iter().map(|added| {
                let mut variant = sequence.clone();
                variant.steps.splice(at..at, added);
                variant
            }));
        }
        if sequence.steps.get(at).is_some_and(|step| model.apply(step).is_err()) {
            break;
        }
    }
    variants
}

/// Returns the steps that may follow the steps of `model`.
fn steps_of(model: &Model, extra: Extra) -> Vec<Vec<Step>> {
    match extra {
        Extra::Lost(lost) => vec![vec![Step::Lost(lost)]],
        Extra::Crowd => vec![vec![Step::Crowd(CROWD)]],
        Extra::Clone => in_clone(),
        Extra::Other(other) => of_other(model, other),
        Extra::Attributes => attributes(model),
        Extra::AppendOnly => append_only(model),
        Extra::Reflink => reflinks(model),
        Extra::Patch => vec![vec![Step::Patch]],
        Extra::Way(_) => Vec::new(),
    }
}

fn in_clone() -> Vec<Vec<Step>> {
    let path = || "d0/A".to_owned();
    let write = Operation::Write { by: WriteBy::Call, path: path(), offset: 1000, length: 3000 };
    let changes = [write, Operation::Append { path: path(), length: 3000 }];
    let steps = |change| [Step::Operation(change), Step::Sync(Sync::Data(path()))];
    let in_clone = |step| Step::Clone(Box::new(step));
    changes.map(|change| steps(change).map(in_clone).to_vec()).to_vec()
}

/// Returns the existing files.
fn files(model: &Model) -> Vec<String> {
    let paths = model.tree().paths().into_iter();
    paths.filter(|(_, id)| model.file(*id).is_some()).map(|(path, _)| path).collect()
}

/// Returns a free path.
fn free(model: &Model) -> Option<&'static str> {
    ["d0/B", "d1/A"].into_iter().find(|path| model.tree().free(path).is_ok())
}

/// Returns steps that make a new file share the blocks of another, with and without a sync.
fn reflinks(model: &Model) -> Vec<Vec<Step>> {
    let Some(to) = free(model) else { return Vec::new() };
    let of_file = |from: String| {
        let reflink = Step::Operation(Operation::Reflink { from, to: to.into() });
        let sync = Step::Sync(Sync::File(to.into()));
        [vec![reflink.clone()], vec![reflink, sync]]
    };
    files(model).into_iter().flat_map(of_file).collect()
}

/// Returns changes of attributes, each with a sync.
fn attributes(model: &Model) -> Vec<Vec<Step>> {
    let of_file = |path: String| {
        let operations = [
            Operation::SetCapability { path: path.clone() },
            Operation::SetAcl { path: path.clone() },
            Operation::Chmod { path: path.clone(), mode: 0o4755 },
        ];
        operations.map(|it| vec![Step::Operation(it), Step::Sync(Sync::File(path.clone()))])
    };
    files(model).into_iter().flat_map(of_file).collect()
}

/// Returns steps that make a file append-only, append to it, and sync it.
fn append_only(model: &Model) -> Vec<Vec<Step>> {
    let of_file = |path: String| {
        let change = Operation::AppendOnly { path: path.clone() };
        let append = Operation::Append { path: path.clone(), length: 3000 };
        let sync = Step::Sync(Sync::Data(path));
        vec![Step::Operation(change), Step::Operation(append), sync]
    };
    files(model).into_iter().map(of_file).collect()
}

/// Returns changes by another program, each with and without a sync.
fn of_other(model: &Model, other: Other) -> Vec<Vec<Step>> {
    let files = files(model);
    let free = free(model);
    let changes = files.iter().flat_map(|path| changes_of(path, free));
    let of_other = |step| Step::Other(other, Box::new(step));
    let with_sync = changes.flat_map(|(change, synced)| {
        let sync = Step::Sync(Sync::File(synced));
        let change = Step::Operation(change);
        [vec![of_other(change.clone())], vec![of_other(change), of_other(sync)]]
    });
    with_sync.collect()
}

/// Returns changes of a file, each with the path whose sync makes it durable.
fn changes_of(path: &str, free: Option<&str>) -> Vec<(Operation, String)> {
    let own = || path.to_owned();
    let dir = || path.rsplit_once('/').map_or("./", |(dir, _)| dir).to_owned();
    let write = Operation::Write { by: WriteBy::Call, path: own(), offset: 1000, length: 3000 };
    let mut changes = vec![
        (write, own()),
        (Operation::Append { path: own(), length: 3000 }, own()),
        (Operation::Truncate { path: own(), size: 0 }, own()),
        (Operation::TruncateOpen { path: own(), length: 10 }, own()),
        (Operation::Chmod { path: own(), mode: 0o640 }, own()),
        (Operation::Unlink { path: own() }, dir()),
    ];
    if let Some(to) = free.map(str::to_owned) {
        let moved = to.rsplit_once('/').map_or("./", |(dir, _)| dir).to_owned();
        changes.push((Operation::Rename { from: own(), to: to.clone(), uring: false }, moved));
        changes.push((Operation::New { path: to.clone(), length: 5000 }, to));
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generator;

    #[test]
    fn every_kind_has_variants_of_a_sequence() {
        let sequence: Sequence =
            "hold; fsync d0/A; write d0/A 1000 3000; fdatasync .".parse().unwrap();
        for extra in Extra::all() {
            let variants = varied(&sequence, extra);
            assert!(variants.len() >= 2, "{extra}: {}", variants.len());
            assert!(variants.iter().all(|variant| *variant != sequence), "{extra}");
        }
    }

    #[test]
    fn varied_samples_are_valid_and_have_their_text_form() {
        for seed in 0..40 {
            let sample = || vary(generator::sample(3, seed), &Extra::all(), &mut Random::new(seed));
            let sequence = sample();
            assert_eq!(sequence, sample());
            assert_eq!(sequence.one_line().parse::<Sequence>().unwrap(), sequence);
            Model::behind(Kind::Xfs, &sequence).unwrap();
        }
    }

    #[test]
    fn a_name_stands_for_a_kind_or_for_several() {
        assert_eq!(Extra::named("all").unwrap(), Extra::all());
        assert_eq!(Extra::named("way").unwrap().len(), Way::ALL.len());
        assert_eq!(Extra::named("kill-run").unwrap(), [Extra::Lost(Lost::Run)]);
        assert!(Extra::named("kil").is_err());
    }
}
