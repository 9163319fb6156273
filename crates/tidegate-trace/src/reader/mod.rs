//! Readers: one file for each format, which alone knows the format's lines.
//!
//! The `parse` of a format parses the fields of a line without state; `calls` turns the fields into
//! events. Only `strace` has a reader of its own. The format of a file is detected by running every
//! `parse` on its first lines.

mod alibaba;
mod calls;
mod cloudphysics;
mod csv;
mod dbench;
mod fiu;
mod mobigen;
mod mobileblock;
mod mqsim;
mod msr;
mod strace;

use super::bad::Result;
use super::format::Format;
use super::out::Out;
use calls::{Calls, Parse};

/// Maximum number of lines that detect the format.
const HEAD_LINES: usize = 50;

/// A reader of one trace, with state between lines.
pub(super) trait Reader: Send {
    /// Appends the events of `line` to `out`. A bad line gives no event.
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<()>;
}

/// Returns the parser of `format`, or `None` for strace, whose calls may span several lines.
fn parser(format: Format) -> Option<Parse> {
    Some(match format {
        Format::Mobigen => mobigen::parse,
        Format::Csv => csv::parse,
        Format::Dbench => dbench::parse,
        Format::Mqsim => mqsim::parse,
        Format::Cloudphysics => cloudphysics::parse,
        Format::Mobileblock => mobileblock::parse,
        Format::Fiu => fiu::parse,
        Format::Msr => msr::parse,
        Format::Alibaba => alibaba::parse,
        Format::Strace => return None,
    })
}

/// Returns a reader of `format`.
pub(super) fn reader(format: Format) -> Box<dyn Reader> {
    let separator = if format == Format::Dbench { b'\\' } else { b'/' };
    match parser(format) {
        Some(parse) => Box::new(Calls::new(parse, separator)),
        None => Box::new(strace::Strace::new()),
    }
}

/// Returns whether `line` has the form of `format`.
fn has_form(format: Format, line: &[u8]) -> bool {
    parser(format).map_or_else(|| strace::parse(line).is_ok(), |parse| parse(line).is_ok())
}

/// Returns the format that fits the most of the first lines of `head`. Returns `None` if no format
/// fits more than half of the lines, or if several formats fit equally many.
pub(super) fn detect(head: &[u8]) -> Option<Format> {
    let mut lines: Vec<&[u8]> = head.split_inclusive(|&byte| byte == b'\n').collect();
    // The last line may be cut off.
    if lines.len() > 1 && !head.ends_with(b"\n") {
        lines.pop();
    }
    let trimmed = lines.into_iter().map(<[u8]>::trim_ascii).filter(|line| !line.is_empty());
    let lines: Vec<&[u8]> = trimmed.take(HEAD_LINES).collect();
    let score = |format: Format| lines.iter().filter(|line| has_form(format, line)).count();
    let mut scores: Vec<_> = Format::ALL.iter().map(|it| (score(*it), *it)).collect();
    scores.sort_unstable_by_key(|(score, _)| std::cmp::Reverse(*score));
    let &[(best, format), (second, _), ..] = scores.as_slice() else { return None };
    (best * 2 > lines.len() && best > second).then_some(format)
}
