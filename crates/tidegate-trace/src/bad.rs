//! Lines that cannot be understood, and give no events.

/// The maximum length of a line; a longer line is bad. A call with two paths is shorter even if all
/// bytes of the paths are escaped.
pub(super) const MAX_LINE_BYTES: usize = 64 << 10;

/// Maximum number of bad lines that are kept with their reason.
const KEPT: usize = 10;

/// The bad lines of a trace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BadLines {
    /// Number of lines that are not empty, good lines included.
    pub lines: u64,
    /// Number of bad lines.
    pub count: u64,
    /// Number, from 1, and error of the first ten bad lines.
    pub first: Vec<(u64, String)>,
}

impl BadLines {
    /// Returns the share of bad lines, in percent.
    #[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
    #[must_use]
    pub fn pct(&self) -> f64 {
        self.count as f64 * 100.0 / self.lines.max(1) as f64
    }

    /// Counts line `number`, which is bad because of `why`.
    pub(super) fn push(&mut self, number: u64, why: Bad) {
        self.count += 1;
        if self.first.len() < KEPT {
            self.first.push((number, why.to_string()));
        }
    }
}

/// The result of parsing a part of a line.
pub(super) type Result<T, E = Bad> = std::result::Result<T, E>;

/// Why a line is bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Bad {
    #[error("not a line of this format")]
    Shape,
    #[error("the {0} is not a number that it can be")]
    Number(&'static str),
    #[error("the operation is not one of this format")]
    Operation,
    #[error("the request ends behind the last offset that a file can have")]
    Range,
    #[error("a request of more than 2 GiB, which is more than one can be")]
    Length,
    #[error("descriptor {0}: the trace does not show what it is")]
    Descriptor(i64),
    #[error("descriptor {0}: the trace does not show its position")]
    Position(i64),
    #[error("descriptor {0}: an append to a file whose length the trace does not show")]
    Append(i64),
    #[error("more than {MAX_LINE_BYTES} bytes long")]
    Line,
    #[error("more files, descriptors or processes at a time than are kept track of")]
    Tables,
    #[error("the end of a call whose beginning the trace does not show")]
    Resumed,
}
