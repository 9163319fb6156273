//! What was odd about the records, or about the files that they were applied to.

use std::fmt;

/// Findings kept; the rest are only counted.
const KEPT_MAX: usize = 1000;

/// Something that recovery noticed and that is worth a line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// A record's payload cannot be understood, or has a path that no file can have; it was ignored.
    Payload {
        /// The record.
        position: u64,
    },
    /// A record covers bytes that no file can have; it was ignored.
    Range {
        /// The record.
        position: u64,
    },
    /// A record is about a file that no record defines; it was ignored.
    Undefined {
        /// The record.
        position: u64,
        /// Id of the file.
        file: u64,
    },
    /// A record says that an id is another file than it was; it was ignored.
    Redefined {
        /// The record.
        position: u64,
        /// Id of the file.
        file: u64,
    },
    /// A file was at a path where the log has another, though no record took that away: something outside Tidegate did.
    Displaced {
        /// The record.
        position: u64,
        /// The path.
        path: String,
    },
    /// A file that something outside Tidegate took the name from is not found; its records were passed over.
    Vanished {
        /// Id of the file.
        file: u64,
        /// The last path known.
        path: String,
    },
    /// A file is not where the log has it, but beside it under a name that the log does not know; its bytes were restored there.
    Elsewhere {
        /// Where the log has it.
        path: String,
        /// Where it is.
        found: String,
    },
    /// A name that the log takes away was left, since it is the last one that is known of the file.
    NameKept {
        /// The path.
        path: String,
    },
    /// The owner or permissions of a file that was made again could not be set.
    Owner {
        /// The path.
        path: String,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Payload { position } => {
                write!(f, "the record at {position} cannot be understood; ignored")
            }
            Self::Range { position } => {
                write!(f, "the record at {position} covers bytes that no file has; ignored")
            }
            Self::Undefined { position, file } => {
                write!(
                    f,
                    "the record at {position} is about file {file}, which is not defined; ignored"
                )
            }
            Self::Redefined { position, file } => {
                write!(f, "the record at {position} makes file {file} another one; ignored")
            }
            Self::Displaced { position, path } => {
                write!(
                    f,
                    "{path}: something outside Tidegate changed it before the record at {position}"
                )
            }
            Self::Vanished { file, path } => {
                write!(
                    f,
                    "{path}: file {file} was moved or removed from outside Tidegate; passed over"
                )
            }
            Self::Elsewhere { path, found } => {
                write!(f, "{path}: the file was found as {found}, and restored there")
            }
            Self::NameKept { path } => {
                write!(f, "{path}: was removed, but no other name of the file is there; kept")
            }
            Self::Owner { path } => {
                write!(f, "{path}: made again, but its owner or permissions could not be set")
            }
        }
    }
}

/// Findings, the first 1000 of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    kept: Vec<Finding>,
    total: u64,
}

impl Findings {
    /// Adds one.
    pub(in crate::log::recover) fn add(&mut self, finding: Finding) {
        self.total += 1;
        if self.kept.len() < KEPT_MAX {
            self.kept.push(finding);
        }
    }

    /// The first 1000.
    pub fn kept(&self) -> &[Finding] {
        &self.kept
    }

    /// How many there were.
    pub fn total(&self) -> u64 {
        self.total
    }
}
