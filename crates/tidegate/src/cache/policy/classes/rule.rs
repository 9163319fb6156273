//! The conditions of a class, as text such as `io_direction:write&request_size:le:64K`.
//!
//! Conditions are joined from left to right, as in Open CAS: `a|b&c` is `(a|b)&c`. A rule may end
//! in `&done`.

use std::fmt;

use super::Problem;
use crate::cache::policy::Request;
use crate::size::parse_bytes;

/// The conditions of a class's requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Each condition with its join to the conditions before. A rule without any matches no
    /// request.
    pub conditions: Vec<(Join, Condition)>,
    /// A request that matches is not offered to classes with higher ids.
    pub is_final: bool,
}

/// The join of a condition to the conditions before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Join {
    /// The condition must hold too; also the join of the first condition of a rule.
    And,
    /// The condition may hold instead.
    Or,
}

/// A condition on a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// A condition on a number of the request.
    Number(Field, Compare, u64),
    /// `io_direction`: `read` or `write`.
    Direction {
        /// The request is a write.
        is_write: bool,
    },
}

/// A number of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "snake_case")]
pub enum Field {
    /// `request_size`: length in bytes.
    RequestSize,
    /// `lba`: first byte in sectors of 512 bytes.
    Lba,
    /// `offset`: first byte.
    Offset,
    /// `queue`: the queue of the request.
    Queue,
}

/// A comparison with a number, which stands on the right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum Compare {
    /// Equal.
    Eq,
    /// Not equal.
    Ne,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
}

impl Compare {
    fn holds(self, left: u64, right: u64) -> bool {
        match self {
            Self::Eq => left == right,
            Self::Ne => left != right,
            Self::Lt => left < right,
            Self::Le => left <= right,
            Self::Gt => left > right,
            Self::Ge => left >= right,
        }
    }
}

impl Rule {
    /// The rule of class 0.
    pub const UNCLASSIFIED: Self = Self { conditions: Vec::new(), is_final: false };

    /// Returns whether `request` belongs to the class.
    pub fn matches(&self, request: &Request) -> bool {
        let join = |before, (join, condition): &(Join, Condition)| match join {
            Join::And => before && condition.holds(request),
            Join::Or => before || condition.holds(request),
        };
        !self.conditions.is_empty() && self.conditions.iter().fold(true, join)
    }

    /// Parses the rule in `text`.
    pub(super) fn parse(text: &str) -> Result<Self, Problem> {
        let (text, is_final) = match text.strip_suffix("&done") {
            Some(before) => (before, true),
            None => (text, false),
        };
        let mut conditions = Vec::new();
        let (mut join, mut rest) = (Join::And, text);
        loop {
            let end = rest.find(['&', '|']).unwrap_or(rest.len());
            conditions.push((join, Condition::parse(rest[..end].trim())?));
            join = match rest[end..].chars().next() {
                None => return Ok(Self { conditions, is_final }),
                Some('&') => Join::And,
                Some(_) => Join::Or,
            };
            rest = &rest[end + 1..];
        }
    }
}

impl Condition {
    fn holds(self, request: &Request) -> bool {
        match self {
            Self::Number(field, compare, number) => compare.holds(field.of(request), number),
            Self::Direction { is_write } => request.is_write == is_write,
        }
    }

    fn parse(text: &str) -> Result<Self, Problem> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        match name {
            "io_direction" => match rest {
                "read" => Ok(Self::Direction { is_write: false }),
                "write" => Ok(Self::Direction { is_write: true }),
                _ => Err(Problem::value("the condition", text, "io_direction:read or :write")),
            },
            _ => match name.parse() {
                Ok(field) => number(text, rest).map(|(by, it)| Self::Number(field, by, it)),
                Err(_) => Err(Problem::Condition { found: text.to_owned(), reason: reason(name) }),
            },
        }
    }
}

impl Field {
    fn of(self, request: &Request) -> u64 {
        match self {
            Self::RequestSize => request.len_bytes,
            Self::Lba => request.offset_bytes / 512,
            Self::Offset => request.offset_bytes,
            Self::Queue => request.queue.into(),
        }
    }
}

/// Parses the comparison and the number of `condition`, which follow its name as `text`.
fn number(condition: &str, text: &str) -> Result<(Compare, u64), Problem> {
    let parsed = text.split_once(':').and_then(|(by, number)| {
        let by = by.parse().ok()?;
        let number = if number == "0" { Some(0) } else { parse_bytes(number).ok() };
        number.map(|number| (by, number))
    });
    let expected =
        "NAME:OP:NUMBER with OP eq, ne, lt, le, gt or ge and a number such as 4096 or 4K";
    parsed.ok_or_else(|| Problem::value("the condition", condition, expected))
}

/// Returns the reason why there is no condition called `name`.
fn reason(name: &str) -> &'static str {
    match name {
        "metadata" | "direct" | "file_size" | "file_offset" | "directory" | "extension"
        | "file_name_prefix" | "process_name" | "pid" | "wlth" | "io_class" => {
            "a block export does not see files or processes"
        }
        "core_id" => "there is one backing",
        "done" => "it stands at the end of a rule, after `&`",
        "unclassified" => "it is the rule of class 0 alone, with nothing beside it",
        _ => "there is no such condition",
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.conditions.is_empty() {
            return f.write_str("unclassified");
        }
        for (number, (join, condition)) in self.conditions.iter().enumerate() {
            match join {
                _ if number == 0 => {}
                Join::And => f.write_str("&")?,
                Join::Or => f.write_str("|")?,
            }
            condition.fmt(f)?;
        }
        f.write_str(if self.is_final { "&done" } else { "" })
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(field, by, number) => write!(f, "{field}:{by}:{number}"),
            Self::Direction { is_write: true } => f.write_str("io_direction:write"),
            Self::Direction { is_write: false } => f.write_str("io_direction:read"),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn matches(rule: &str, queue: u16, offset_bytes: u64, len_bytes: u64, is_write: bool) -> bool {
        let request = Request { queue, offset_bytes, len_bytes, is_write };
        Rule::parse(rule).unwrap().matches(&request)
    }

    #[test]
    fn each_condition_looks_at_its_part_of_a_request() {
        assert!(matches("request_size:eq:4K", 0, 1, 4096, true));
        assert!(!matches("request_size:ne:4K", 0, 1, 4096, true));
        assert!(matches("lba:ge:2", 0, 1024, 1, true));
        assert!(!matches("lba:ge:2", 0, 1023, 1, true));
        assert!(matches("offset:lt:1024&offset:gt:1022", 0, 1023, 1, true));
        assert!(matches("queue:le:3", 3, 0, 1, true));
        assert!(!matches("queue:eq:0", 3, 0, 1, true));
        assert!(matches("io_direction:read", 0, 0, 1, false));
        assert!(!matches("io_direction:write", 0, 0, 1, false));
    }

    #[test]
    fn conditions_are_joined_from_left_to_right() {
        let rule = "io_direction:read|request_size:lt:8K&queue:eq:1";
        assert!(!matches(rule, 0, 0, 1, false), "the queue has to be 1 in any case");
        assert!(matches(rule, 1, 0, 1 << 20, false));
        assert!(!matches(rule, 1, 0, 1 << 20, true));
        assert!(matches("queue:eq:1&io_direction:read|request_size:lt:8K", 0, 0, 1, true));
    }

    #[test]
    fn what_cannot_be_matched_says_why() {
        let error = |rule| Rule::parse(rule).unwrap_err().to_string();
        assert_eq!(
            error("file_size:lt:4K"),
            "the condition `file_size:lt:4K` is not known: a block export does not see files or processes; use request_size, io_direction, lba, offset or queue"
        );
        assert_eq!(
            error("lba:above:3"),
            "the condition is `lba:above:3`; expected NAME:OP:NUMBER with OP eq, ne, lt, le, gt or ge and a number such as 4096 or 4K"
        );
        assert!(error("io_direction:up").contains("expected io_direction:read or :write"));
        assert!(error("done&lba:eq:1").contains("stands at the end"));
        for rule in ["", "&", "lba", "lba:eq", "lba:eq:", "lba:eq:1&", "lba:eq:1|done", "done"] {
            assert!(Rule::parse(rule).is_err(), "{rule}");
        }
    }
}
