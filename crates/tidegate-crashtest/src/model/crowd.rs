//! Files that are no part of the test: the files of [`Step::Crowd`], and the program of
//! [`Step::Patch`]. Each of their changes is synced, so it survives whatever follows.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::history::index;
use super::{Node, State};
use crate::contents::{bytes, writer};
use crate::sequence::{Lost, Outside, Sequence, Step, Sync};

/// Bytes of each file of a crowd.
const BYTES: u64 = 3000;
/// The program's path.
pub const PROGRAM: &str = "program";
/// Bytes of the program.
pub const PROGRAM_BYTES: u64 = 16_384;
/// The range that [`Step::Patch`] overwrites, after the code that is executed.
const PATCH: Range<u64> = 16_000..16_100;
/// Prefix of the names of a crowd.
const PREFIX: &str = "crowd.";

/// Returns the names of `count` files.
pub fn names(count: u32) -> impl Iterator<Item = String> {
    (0..count).map(|index| format!("{PREFIX}{index}"))
}

/// Numbers of the steps that wrote a file of a crowd.
struct Written {
    /// The last step.
    number: u64,
    /// The session's last step, if the log may have it and no known commit has later bytes from
    /// outside.
    logged: Option<u64>,
}

/// Returns each file with the steps that wrote it.
fn written(sequence: &Sequence) -> BTreeMap<String, Written> {
    let mut written: BTreeMap<String, Written> = BTreeMap::new();
    let mut is_lost = false;
    for (number, step) in (1..).zip(&sequence.steps) {
        match step {
            Step::Lost(Lost::Run) => is_lost = true,
            Step::Outside(Outside::Commit) => {
                for file in written.values_mut() {
                    file.logged = None;
                }
            }
            step if *step.innermost() == Step::Sync(Sync::All) => {
                for file in written.values_mut() {
                    file.logged = None;
                }
            }
            Step::Crowd(count) => {
                // An `fdatasync` of overwritten bytes commits no time. New files are committed.
                let logged = |name: &String| match written.get(name) {
                    Some(file) if is_lost => file.logged,
                    _ => Some(number).filter(|_| !is_lost),
                };
                let files: Vec<(String, Written)> = names(*count)
                    .map(|name| {
                        let logged = logged(&name);
                        (name, Written { number, logged })
                    })
                    .collect();
                written.extend(files);
            }
            _ => {}
        }
    }
    written
}

/// Removes the files from `state`, and returns objections to them after `sequence`. Files that a
/// recovery `refused` may have any content. With `has_log` a file may have the session's last
/// bytes, if nothing tells that it was written without the log.
pub fn objections(
    sequence: &Sequence,
    state: &mut State,
    refused: &BTreeSet<String>,
    has_log: bool,
) -> Vec<String> {
    let mut numbers = written(sequence);
    numbers.retain(|name, _| !refused.contains(name));
    let objection = |(name, file): (&String, &Written)| {
        let number = file.number;
        let what = match state.get(name).map(|found| &found.node) {
            None => "missing".into(),
            Some(Node::File(found)) => {
                let logged = file.logged.filter(|_| has_log);
                let is_logged = |logged| difference(found, &bytes(logged, 0, BYTES)).is_none();
                difference(found, &bytes(number, 0, BYTES))
                    .filter(|_| !logged.is_some_and(is_logged))?
            }
            Some(_) => "no regular file".into(),
        };
        Some(format!("{name}: {what}, synced in step {number}"))
    };
    let mut all: Vec<String> = numbers.iter().filter_map(objection).collect();
    if !refused.contains(PROGRAM) {
        all.extend(objection_to_program(sequence, state));
    }
    state.retain(|path, _| !path.starts_with(PREFIX) && path != PROGRAM);
    match all.len() {
        0 | 1 => all,
        count => vec![format!("{} (and {} files more)", all[0], count - 1)],
    }
}

fn objection_to_program(sequence: &Sequence, state: &State) -> Option<String> {
    let numbered = (1..).zip(&sequence.steps);
    let patches = numbered.filter(|(_, step)| **step == Step::Patch);
    let number = patches.map(|(number, _)| number).last()?;
    let wanted = bytes(number, PATCH.start, PATCH.end - PATCH.start);
    let is_there = match state.get(PROGRAM).map(|found| &found.node) {
        Some(Node::File(found)) => found.get(index(PATCH.start)..index(PATCH.end)) == Some(&wanted),
        _ => false,
    };
    (!is_there).then(|| format!("{PROGRAM}: without what was synced in step {number}"))
}

fn difference(found: &[u8], wanted: &[u8]) -> Option<String> {
    if found.len() != wanted.len() {
        return Some(format!("{} bytes long, {}", found.len(), wanted.len()));
    }
    let at = found.iter().zip(wanted).position(|(found, wanted)| found != wanted)?;
    Some(format!("{} at {at}", writer(found[at], at as u64)))
}
