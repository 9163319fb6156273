//! A sequence of operations, syncs and actions from outside, and its text form.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};

use crate::operation::Operation;

/// A sync of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sync {
    /// `fsync` of a path, or of the last operation's descriptor if it is ".".
    File(String),
    /// `fdatasync` of the same.
    Data(String),
    /// `sync`.
    All,
    /// `msync` of the last operation's mapping.
    Mapping,
}

/// What a process outside the tree does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outside {
    /// An fsync of an unrelated file: the journal commits.
    Commit,
    /// `sync_file_range` of a file: its dirty pages go to the disk without a commit.
    WriteBack(String),
    /// `tidegate flush`: `run` syncs what it has in its log, and empties it. Without Tidegate
    /// nothing is done.
    Retire,
}

/// Where a child is killed in an operation. One of its system calls makes the change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kill {
    /// At the entry of that call: the change is not made.
    Before,
    /// At so many entries and exits of its system calls, counted from 1, but at the latest where
    /// [`Before`](Self::Before) kills.
    At(u32),
    /// Behind so many instructions, but at the latest where [`Before`](Self::Before) kills.
    In(u32),
    /// So many entries and exits of its system calls behind the exit of that call, but at the
    /// latest at the end of the operation.
    Behind(u32),
    /// So many instructions behind the exit of that call, but at the latest at the end of the
    /// operation.
    Past(u32),
}

impl Kill {
    /// Whether the kernel has made the change.
    pub fn is_behind_change(self) -> bool {
        matches!(self, Self::Behind(_) | Self::Past(_))
    }

    /// Splits the words behind "killed".
    fn of_words<'w, 't>(words: &'w [&'t str]) -> Result<(Self, &'w [&'t str])> {
        Ok(match words {
            ["before", rest @ ..] => (Self::Before, rest),
            ["at", count, rest @ ..] => (Self::At(count.parse()?), rest),
            ["in", count, rest @ ..] => (Self::In(count.parse()?), rest),
            ["behind", count, rest @ ..] => (Self::Behind(count.parse()?), rest),
            ["past", count, rest @ ..] => (Self::Past(count.parse()?), rest),
            rest => (Self::Behind(0), rest),
        })
    }
}

impl fmt::Display for Kill {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Before => write!(out, "killed before"),
            Self::At(count) => write!(out, "killed at {count}"),
            Self::In(count) => write!(out, "killed in {count}"),
            Self::Behind(0) => write!(out, "killed"),
            Self::Behind(count) => write!(out, "killed behind {count}"),
            Self::Past(count) => write!(out, "killed past {count}"),
        }
    }
}

/// One line of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The program changes something.
    Operation(Operation),
    /// A child of the program does, and is killed in the middle.
    Killed(Kill, Operation),
    /// The program syncs.
    Sync(Sync),
    /// Another program acts.
    Outside(Outside),
    /// The program makes a file that is no part of the test, and syncs it: from here on `run` may
    /// have new files in its log. The first step, if it is one.
    Prepare,
    /// The program closes all files that it holds open: later steps open them anew.
    Release,
}

impl fmt::Display for Step {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operation(operation) => operation.fmt(out),
            Self::Killed(kill, operation) => write!(out, "{kill} {operation}"),
            Self::Prepare => write!(out, "prepare"),
            Self::Release => write!(out, "release"),
            Self::Sync(Sync::File(path)) => write!(out, "fsync {path}"),
            Self::Sync(Sync::Data(path)) => write!(out, "fdatasync {path}"),
            Self::Sync(Sync::All) => write!(out, "sync"),
            Self::Sync(Sync::Mapping) => write!(out, "msync"),
            Self::Outside(Outside::Commit) => write!(out, "outside commit"),
            Self::Outside(Outside::Retire) => write!(out, "outside retire"),
            Self::Outside(Outside::WriteBack(path)) => write!(out, "outside writeback {path}"),
        }
    }
}

impl FromStr for Step {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> Result<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        Ok(match words.as_slice() {
            ["fsync", path] => Self::Sync(Sync::File((*path).to_owned())),
            ["fdatasync", path] => Self::Sync(Sync::Data((*path).to_owned())),
            ["sync"] => Self::Sync(Sync::All),
            ["msync"] => Self::Sync(Sync::Mapping),
            ["prepare"] => Self::Prepare,
            ["release"] => Self::Release,
            ["outside", "commit"] => Self::Outside(Outside::Commit),
            ["outside", "retire"] => Self::Outside(Outside::Retire),
            ["outside", "writeback", path] => Self::Outside(Outside::WriteBack((*path).to_owned())),
            ["killed", rest @ ..] => {
                let (kill, operation) = Kill::of_words(rest)?;
                Self::Killed(kill, Operation::parse(&operation.join(" "))?)
            }
            _ => Self::Operation(Operation::parse(line)?),
        })
    }
}

/// A sequence. Step 1 is the first; a step's number identifies the bytes that it writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// Whether files stay open from one operation to the next.
    pub hold: bool,
    /// The steps in order.
    pub steps: Vec<Step>,
}

impl Sequence {
    /// How many of the steps are operations.
    pub fn operation_count(&self) -> usize {
        self.steps
            .iter()
            .filter(|step| matches!(step, Step::Operation(_) | Step::Killed(..)))
            .count()
    }

    /// The whole sequence in one line, steps separated by "; ".
    pub fn one_line(&self) -> String {
        self.to_string().trim_end().replace('\n', "; ")
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.hold {
            writeln!(out, "hold")?;
        }
        self.steps.iter().try_for_each(|step| writeln!(out, "{step}"))
    }
}

impl FromStr for Sequence {
    type Err = anyhow::Error;

    /// Lines or parts between "; "; empty ones and those that begin with "#" are comments.
    fn from_str(text: &str) -> Result<Self> {
        let lines = text.split(['\n', ';']).map(str::trim);
        let lines: Vec<&str> =
            lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
        let hold = lines.first() == Some(&"hold");
        let steps = lines.iter().skip(usize::from(hold));
        let steps: Result<Vec<Step>> =
            steps.map(|line| line.parse().with_context(|| format!("the step {line:?}"))).collect();
        Ok(Self { hold, steps: steps? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_survives_its_text_form() {
        let text = "hold\nprepare\nutime d0/A\ncreate d0/B\nnew d1/A 10\nfork write d0/B 0 100\nkilled write d0/B 0 9\nrelease\n\
                    killed before append d0/B 9\nkilled at 4 chmod d0/B 600\nkilled behind 2 unlink d0/B\nkilled in 90 append d0/A 1\nkilled past 7 chmod d0/A 600\nfallocate d0/A punch 1 2\nfsync .\n\
                    outside writeback d0/A\ntmpfile d1/A 10 fsync\nuring-rename d0/A d1/B\nsync\n\
                    chmod d0/B 640\nsplice d0/A d0/B\nstatic write d0/A 5 6\noutside commit\noutside retire\n";
        let sequence: Sequence = text.parse().unwrap();
        assert_eq!(sequence.to_string(), text);
        assert_eq!(sequence.one_line().parse::<Sequence>().unwrap(), sequence);
    }

    #[test]
    fn unknown_lines_are_errors() {
        for line in
            ["", "write d0/A 1", "fallocate d0/A up 1 2", "fsync", "remove d0/A", "killed at fsync"]
        {
            assert!(line.parse::<Step>().is_err(), "{line:?}");
        }
    }
}
