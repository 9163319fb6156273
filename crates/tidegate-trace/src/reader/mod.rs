//! Readers: a file for each format, which knows its lines and nothing else does.
//!
//! The `parse` of a format makes fields of a line and keeps nothing; `calls` makes events of them.
//! Only `strace` has a reader of its own. The format of a file is found out by trying every `parse`
//! on its first lines.

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

/// How many lines tell the format.
const HEAD_LINES: usize = 50;

/// A reader of one trace, with what it keeps from line to line.
pub(super) trait Reader: Send {
    /// Puts the events of `line` into `out`. A bad line gives none.
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<()>;
}

/// What understands the lines of `format`; none for strace, whose calls may take several lines.
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

/// A reader of `format`.
pub(super) fn reader(format: Format) -> Box<dyn Reader> {
    let separator = if format == Format::Dbench { b'\\' } else { b'/' };
    match parser(format) {
        Some(parse) => Box::new(Calls::new(parse, separator)),
        None => Box::new(strace::Strace::new()),
    }
}

/// True where `line` has the form of `format`.
fn has_form(format: Format, line: &[u8]) -> bool {
    parser(format).map_or_else(|| strace::parse(line).is_ok(), |parse| parse(line).is_ok())
}

/// The format whose form more than half of the first lines of `head` have, more than of any other.
/// `None` where there is none, or more than one.
pub(super) fn detect(head: &[u8]) -> Option<Format> {
    let mut lines: Vec<&[u8]> = head.split_inclusive(|&byte| byte == b'\n').collect();
    // The last one may go on behind the head.
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
