//! What was odd about the records, or about the files that they were applied to.

/// Findings kept; the rest are only counted.
const KEPT_MAX: usize = 1000;

/// Something that recovery noticed and that is worth a line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Finding {
    /// A record's kind or payload makes no sense in a log of files; it was ignored.
    #[error("the record at {position} cannot be understood; ignored")]
    Payload {
        /// The record.
        position: u64,
    },
    /// A record covers bytes that no file can have; it was ignored.
    #[error("the record at {position} covers bytes that no file has; ignored")]
    Range {
        /// The record.
        position: u64,
    },
    /// A record says that an id is another file than it was; it was ignored.
    #[error("the record at {position} makes file {file} another one; ignored")]
    Redefined {
        /// The record.
        position: u64,
        /// Id of the file.
        file: u64,
    },
    /// Recovery could not do something, and was told to go on without it.
    #[error("{what}; passed over")]
    Salvaged {
        /// What, and why not.
        what: String,
    },
}

/// Findings, the first 1000 of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    kept: Vec<Finding>,
    total: u64,
}

impl Findings {
    /// Adds one.
    pub(super) fn add(&mut self, finding: Finding) {
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
