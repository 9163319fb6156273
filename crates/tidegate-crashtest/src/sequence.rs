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

/// One line of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The program changes something.
    Operation(Operation),
    /// A child of the program does, and is killed when the kernel has made the change, before the
    /// call returns.
    Killed(Operation),
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
            Self::Killed(operation) => write!(out, "killed {operation}"),
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
            ["killed", ..] => Self::Killed(Operation::parse(&words[1..].join(" "))?),
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
            .filter(|step| matches!(step, Step::Operation(_) | Step::Killed(_)))
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
        let text = "hold\nprepare\nutime d0/A\ncreate d0/B\nnew d1/A 10\nfork write d0/B 0 100\nkilled write d0/B 0 9\nrelease\nfallocate d0/A punch 1 2\nfsync .\n\
                    outside writeback d0/A\ntmpfile d1/A 10 fsync\nuring-rename d0/A d1/B\nsync\n\
                    chmod d0/B 640\nsplice d0/A d0/B\nstatic write d0/A 5 6\noutside commit\noutside retire\n";
        let sequence: Sequence = text.parse().unwrap();
        assert_eq!(sequence.to_string(), text);
        assert_eq!(sequence.one_line().parse::<Sequence>().unwrap(), sequence);
    }

    #[test]
    fn unknown_lines_are_errors() {
        for line in ["", "write d0/A 1", "fallocate d0/A up 1 2", "fsync", "remove d0/A"] {
            assert!(line.parse::<Step>().is_err(), "{line:?}");
        }
    }
}
