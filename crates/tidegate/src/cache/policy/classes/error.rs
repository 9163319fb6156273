//! Errors in a table of IO classes.

/// A table of IO classes that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("IO classes, line {line}: {problem}")]
pub struct ClassError {
    /// Number of the line, from 1.
    pub line: usize,
    /// The problem of the line.
    pub problem: Problem,
}

/// The problem of a line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The first line names other columns.
    #[error(
        "the header is `{found}`; expected `{expected}`, of which the last two may be left out"
    )]
    Header {
        /// The line.
        found: String,
        /// All columns.
        expected: &'static str,
    },
    /// The line has another number of columns than the header.
    #[error("there are {found} columns; expected {expected}, as in the header")]
    Columns {
        /// Columns of the line.
        found: usize,
        /// Columns of the header.
        expected: usize,
    },
    /// The id was used before.
    #[error(
        "class {id} was defined in line {first_line}; choose another id or remove one of the two"
    )]
    Twice {
        /// The id.
        id: u8,
        /// Number of the line that used it first.
        first_line: usize,
    },
    /// A value is out of range.
    #[error("{what} is `{found}`; expected {expected}")]
    Value {
        /// Name of the value.
        what: &'static str,
        /// The value.
        found: String,
        /// Values that are allowed.
        expected: String,
    },
    /// There is no such condition.
    #[error(
        "the condition `{found}` is not known: {reason}; use request_size, io_direction, lba, offset or queue"
    )]
    Condition {
        /// The condition.
        found: String,
        /// Reason why it is not known.
        reason: &'static str,
    },
    /// The classes cannot all have their minimum.
    #[error("the minimums up to here are {total_pct} % of the cache; expected at most 100 %")]
    Minimums {
        /// Sum of the minimums.
        total_pct: u32,
    },
}

impl Problem {
    /// Returns the problem that `what` is `found`, and not `expected`.
    pub(super) fn value(what: &'static str, found: &str, expected: impl Into<String>) -> Self {
        Self::Value { what, found: found.to_owned(), expected: expected.into() }
    }
}
