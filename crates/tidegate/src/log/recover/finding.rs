//! Oddities in the records, or in the files that recovery applied them to.

/// Findings kept; the rest are only counted.
const KEPT_MAX: usize = 1000;

/// An oddity that recovery reports.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Finding {
    /// A record's kind or payload is invalid in a log of files. The record was ignored.
    #[error("the record at {position} cannot be understood; ignored")]
    Payload {
        /// Position of the record.
        position: u64,
    },
    /// A record covers bytes that no file can have. The record was ignored.
    #[error("the record at {position} covers bytes that no file has; ignored")]
    Range {
        /// Position of the record.
        position: u64,
    },
    /// A record gives an id to another file. The record was ignored.
    #[error("the record at {position} makes file {file} another one; ignored")]
    Redefined {
        /// Position of the record.
        position: u64,
        /// Id of the file.
        file: u64,
    },
    /// Recovery skipped a failure, as the user asked.
    #[error("{what}; passed over")]
    Salvaged {
        /// The failure.
        what: String,
    },
}

/// The first 1000 findings, and their number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    kept: Vec<Finding>,
    total: u64,
}

impl Findings {
    /// Adds a finding.
    pub(super) fn add(&mut self, finding: Finding) {
        self.total += 1;
        if self.kept.len() < KEPT_MAX {
            self.kept.push(finding);
        }
    }

    /// Returns the first 1000 findings.
    pub fn kept(&self) -> &[Finding] {
        &self.kept
    }

    /// Returns the number of all findings.
    pub fn total(&self) -> u64 {
        self.total
    }
}
