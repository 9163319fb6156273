//! A sequence of operations, syncs and actions from outside, and its text form.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};

use crate::operation::Operation;

/// A sync of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sync {
    /// `fsync` of a path, or of the last operation's descriptor if it is ".".
    File(String),
    /// `fdatasync` of a path, or of the last operation's descriptor if it is ".".
    Data(String),
    /// `sync`.
    All,
    /// `msync` of the last operation's mapping.
    Mapping,
}

/// An action of a process outside the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outside {
    /// An fsync of an unrelated file: the journal commits.
    Commit,
    /// `sync_file_range` of a file: its dirty pages go to the disk without a commit.
    WriteBack(String),
    /// `tidegate flush`: syncs the files in the log, and empties it. No effect without Tidegate.
    Retire,
}

/// The way of a step's calls to the kernel, other than by the public names of the C library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// `dlsym` on the C library's own handle.
    Libc,
    /// `dlvsym` on that handle.
    Version,
    /// An object that is loaded with `RTLD_DEEPBIND`.
    Deep,
    /// An object that `dlmopen` loads, with a C library of its own.
    Space,
    /// `syscall` with the number of the call.
    Number,
    /// `syscall` with the newest number that the kernel has for the call: `openat2`, `pwritev2`,
    /// `renameat2`, `fchmodat2`, `setxattrat`.
    New,
    /// A system call instruction of a loaded object.
    Own,
}

impl fmt::Display for Way {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(name_in(&Self::ALL, *self))
    }
}

impl Way {
    /// Every way, with its name in the text form.
    pub const ALL: [(Self, &str); 7] = [
        (Self::Libc, "libc"),
        (Self::Version, "version"),
        (Self::Deep, "deep"),
        (Self::Space, "space"),
        (Self::Number, "number"),
        (Self::New, "new"),
        (Self::Own, "own"),
    ];
}

/// A program outside the tree of the first one, which acts on the same files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Other {
    /// A program without Tidegate.
    Outside,
    /// A program under a `tidegate run` of its own, with a pool of its own.
    Second,
}

impl fmt::Display for Other {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(name_in(&Self::ALL, *self))
    }
}

impl Other {
    /// Every program, with its name in the text form.
    pub const ALL: [(Self, &str); 2] = [(Self::Outside, "outside"), (Self::Second, "second")];
}

/// Processes that are killed with -9 between two steps. Without Tidegate there is only the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lost {
    /// The launcher.
    Launcher,
    /// The supervisor.
    Supervisor,
    /// Both, the launcher first.
    Both,
    /// All of the run. The program starts again and continues, without Tidegate.
    Run,
}

impl fmt::Display for Lost {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(name_in(&Self::ALL, *self))
    }
}

impl Lost {
    /// Every loss, with its name in the text form.
    pub const ALL: [(Self, &str); 4] = [
        (Self::Launcher, "launcher"),
        (Self::Supervisor, "supervisor"),
        (Self::Both, "both"),
        (Self::Run, "run"),
    ];
}

/// Where a child is killed in an operation. One of the operation's system calls makes the change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kill {
    /// At the entry of that call: the change is not made.
    Before,
    /// At this entry or exit of its system calls, counted from 1, but at the latest at the place of
    /// [`Before`](Self::Before).
    At(u32),
    /// After this number of instructions, but at the latest at the place of
    /// [`Before`](Self::Before).
    In(u32),
    /// This number of entries and exits of system calls after the exit of that call, at the latest
    /// at the operation's end.
    Behind(u32),
    /// This number of instructions after the exit of that call, at the latest at the operation's
    /// end.
    Past(u32),
}

impl Kill {
    /// Returns whether the kernel has made the change.
    pub fn is_behind_change(self) -> bool {
        matches!(self, Self::Behind(_) | Self::Past(_))
    }

    /// Parses the words after "killed". Returns the rest.
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

/// The most files that a [`Step::Crowd`] has.
pub const CROWD_MAX: u32 = 250;

/// One line of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The program executes an operation.
    Operation(Operation),
    /// A child of the program executes an operation, and is killed in the middle.
    Killed(Kill, Operation),
    /// The program syncs.
    Sync(Sync),
    /// Another program acts.
    Outside(Outside),
    /// The program makes a file that is no part of the test, and syncs it: from now on `run` may
    /// have new files in its log. Always the first step.
    Prepare,
    /// The program closes all its files: later steps open them again.
    Release,
    /// An operation or a sync of the program, whose calls reach the kernel in another way.
    By(Way, Box<Step>),
    /// An operation or a sync of another program, with the same paths.
    Other(Other, Box<Step>),
    /// A write or a sync of the program in a copy of the file system, with the same identity.
    Clone(Box<Step>),
    /// Processes of the run are killed.
    Lost(Lost),
    /// The program writes and syncs this number of small files that are no part of the test, each
    /// by itself: `crowd.0`, `crowd.1`, ... They stay open if the sequence holds files.
    Crowd(u32),
    /// The program overwrites a part of a program file, and syncs it. That file is no part of the
    /// test, and runs during recovery.
    Patch,
}

impl Step {
    /// Returns the operation or sync in this step, unless that is in a copy of the file system.
    pub fn innermost(&self) -> &Self {
        match self {
            Self::By(_, step) | Self::Other(_, step) => step.innermost(),
            step => step,
        }
    }

    /// Returns the name under which a campaign counts the step: the operation, its program and its
    /// way. Returns `None` for steps that are not counted.
    pub fn name(&self) -> Option<String> {
        Some(match self {
            Self::Operation(operation) | Self::Killed(_, operation) => operation.name(),
            Self::By(way, step) => format!("{}@{way}", step.name()?),
            Self::Other(other, step) => {
                format!("{other} {}", step.name()?)
            }
            Self::Clone(step) => format!("clone {}", step.name()?),
            Self::Lost(_) | Self::Crowd(_) | Self::Patch => self.to_string(),
            _ => return None,
        })
    }

    /// Returns whether all calls of the step can be made in any [`Way`].
    pub fn has_ways(&self) -> bool {
        match self {
            Self::Operation(operation) => operation.has_ways(),
            Self::Sync(_) => true,
            _ => false,
        }
    }

    /// Returns whether another program can take the step: it needs no descriptor of an earlier
    /// step.
    pub fn can_be_of_others(&self) -> bool {
        match self {
            Self::Operation(operation) => operation.can_be_of_others(),
            Self::Sync(Sync::File(path) | Sync::Data(path)) => path != ".",
            Self::By(_, step) => step.can_be_of_others(),
            _ => false,
        }
    }

    /// Returns whether the step is an operation that moves or removes files.
    pub fn changes_names(&self) -> bool {
        matches!(self, Self::Operation(Operation::Rename { .. } | Operation::Unlink { .. }))
    }

    /// Returns whether the step is possible in a copy of the file system: it changes no names.
    pub fn can_be_in_clone(&self) -> bool {
        let writes = |operation: &Operation| {
            matches!(operation, Operation::Write { .. } | Operation::Append { .. })
        };
        match self {
            Self::Operation(operation) => operation.can_be_of_others() && writes(operation),
            Self::By(_, step) => step.can_be_in_clone(),
            step => step.can_be_of_others(),
        }
    }
}

/// Returns `step` with `way` after its first word.
fn with_way(way: Way, step: &Step) -> String {
    let (text, name) = (step.to_string(), way);
    match text.split_once(' ') {
        Some((first, rest)) => format!("{first}@{name} {rest}"),
        None => format!("{text}@{name}"),
    }
}

fn name_in<T: Copy + PartialEq>(all: &[(T, &'static str)], wanted: T) -> &'static str {
    all.iter().find(|(value, _)| *value == wanted).map_or("", |(_, name)| name)
}

fn named<T: Copy>(all: &[(T, &'static str)], name: &str) -> Result<T> {
    let found = all.iter().find(|(_, known)| *known == name);
    found.map(|(value, _)| *value).with_context(|| format!("{name:?} is not known"))
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
            Self::By(way, step) => write!(out, "{}", with_way(*way, step)),
            Self::Other(other, step) => write!(out, "{other} {step}"),
            Self::Clone(step) => write!(out, "clone {step}"),
            Self::Lost(lost) => write!(out, "kill {lost}"),
            Self::Crowd(count) => write!(out, "crowd {count}"),
            Self::Patch => write!(out, "patch"),
        }
    }
}

impl FromStr for Step {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> Result<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        if let Some((first, way)) = words[0].split_once('@') {
            let step: Self = [&[first], &words[1..]].concat().join(" ").parse()?;
            ensure!(step.has_ways(), "{step:?} is made in one way only");
            return Ok(Self::By(named(&Way::ALL, way)?, Box::new(step)));
        }
        Ok(match words.as_slice() {
            ["fsync", path] => Self::Sync(Sync::File((*path).to_owned())),
            ["fdatasync", path] => Self::Sync(Sync::Data((*path).to_owned())),
            ["sync"] => Self::Sync(Sync::All),
            ["msync"] => Self::Sync(Sync::Mapping),
            ["prepare"] => Self::Prepare,
            ["release"] => Self::Release,
            ["patch"] => Self::Patch,
            ["outside", "commit"] => Self::Outside(Outside::Commit),
            ["outside", "retire"] => Self::Outside(Outside::Retire),
            ["outside", "writeback", path] => Self::Outside(Outside::WriteBack((*path).to_owned())),
            [who @ ("outside" | "second"), rest @ ..] => {
                let step: Self = rest.join(" ").parse()?;
                ensure!(step.can_be_of_others(), "{step:?} is of the program only");
                Self::Other(named(&Other::ALL, who)?, Box::new(step))
            }
            ["clone", rest @ ..] => {
                let step: Self = rest.join(" ").parse()?;
                ensure!(step.can_be_in_clone(), "{step:?} is not made in a copy");
                Self::Clone(Box::new(step))
            }
            ["kill", who] => Self::Lost(named(&Lost::ALL, who)?),
            ["crowd", count] => match count.parse()? {
                count @ 1..=CROWD_MAX => Self::Crowd(count),
                count => bail!("{count} files; 1 to {CROWD_MAX} are possible"),
            },
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
    /// Returns the number of operations.
    pub fn operation_count(&self) -> usize {
        self.steps
            .iter()
            .filter(|step| matches!(step.innermost(), Step::Operation(_) | Step::Killed(..)))
            .count()
    }

    /// Returns whether recovery may refuse files: files that other programs change, or the program
    /// after its run is lost, and files that are in use.
    pub fn has_others(&self) -> bool {
        let changes =
            |step: &Step| matches!(step, Step::Other(..) | Step::Lost(Lost::Run) | Step::Patch);
        self.steps.iter().any(changes)
    }

    /// Returns the whole sequence in one line, steps separated by "; ".
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

    /// Parses lines, or parts between "; ". Empty ones and those that begin with "#" are comments.
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
                    chmod d0/B 640\nsplice d0/A d0/B\nstatic write d0/A 5 6\noutside commit\noutside retire\n\
                    rename@deep d0/A d0/B\nfork@own write d0/B 0 1\nsync@libc\nfsync@number .\noutside append d0/A 9\n\
                    second fsync d0/A\noutside rename@new d0/A d0/B\nclone write@own d0/A 0 9\npatch\nreflink d0/A d1/A\nkill launcher\nkill run\ncrowd 40\n";
        let sequence: Sequence = text.parse().unwrap();
        assert_eq!(sequence.to_string(), text);
        assert_eq!(sequence.one_line().parse::<Sequence>().unwrap(), sequence);
    }

    #[test]
    fn unknown_lines_are_errors() {
        for line in [
            "",
            "write d0/A 1",
            "fallocate d0/A up 1 2",
            "fsync",
            "remove d0/A",
            "killed at fsync",
            "fsync@none .",
            "uring-write@deep d0/A 0 1",
            "outside fsync .",
            "clone rename d0/A d0/B",
            "kill program",
            "crowd 0",
        ] {
            assert!(line.parse::<Step>().is_err(), "{line:?}");
        }
    }
}
