//! The files of [`Step::Crowd`]: each is synced, so all of it is there whatever happens behind.

use std::collections::{BTreeMap, BTreeSet};

use crate::contents::{bytes, writer};
use crate::model::{Node, State};
use crate::sequence::{Sequence, Step};

/// Bytes of each file.
const BYTES: u64 = 3000;
/// How their names begin.
const PREFIX: &str = "crowd.";

/// The names of so many files.
pub fn names(count: u32) -> impl Iterator<Item = String> {
    (0..count).map(|index| format!("{PREFIX}{index}"))
}

/// Takes the files out of `state`, and tells what they miss behind `sequence`; those that were
/// `refused` by a recovery may be as they are.
pub fn objections(
    sequence: &Sequence,
    state: &mut State,
    refused: &BTreeSet<String>,
) -> Vec<String> {
    let mut numbers = BTreeMap::new();
    for (number, step) in (1..).zip(&sequence.steps) {
        if let Step::Crowd(count) = step {
            numbers.extend(names(*count).map(|name| (name, number)));
        }
    }
    numbers.retain(|name, _| !refused.contains(name));
    let objection = |(name, number): (&String, &u64)| {
        let what = match state.get(name).map(|found| &found.node) {
            None => "missing".into(),
            Some(Node::File(found)) => difference(found, &bytes(*number, 0, BYTES))?,
            Some(_) => "no regular file".into(),
        };
        Some(format!("{name}: {what}, synced in step {number}"))
    };
    let all: Vec<String> = numbers.iter().filter_map(objection).collect();
    state.retain(|path, _| !path.starts_with(PREFIX));
    match all.len() {
        0 | 1 => all,
        count => vec![format!("{} (and {} files more)", all[0], count - 1)],
    }
}

fn difference(found: &[u8], wanted: &[u8]) -> Option<String> {
    if found.len() != wanted.len() {
        return Some(format!("{} bytes long, {}", found.len(), wanted.len()));
    }
    let at = found.iter().zip(wanted).position(|(found, wanted)| found != wanted)?;
    Some(format!("{} at {at}", writer(found[at], at as u64)))
}
