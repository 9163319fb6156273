//! Readers: a file for each format, which knows its lines and nothing else does.
//!
//! A reader's `parse` makes fields of a line and keeps nothing; its `line` makes events of them.
//! The format of a file is found out by trying every `parse` on its first lines.

mod alibaba;
mod block;
mod cloudphysics;
mod csv;
mod dbench;
mod fiu;
mod mobigen;
mod mobileblock;
mod mqsim;
mod msr;
mod strace;

use super::bad::Bad;
use super::format::Format;
use super::out::Out;

/// How many lines tell the format.
const HEAD_LINES: usize = 50;

/// A reader of one trace, with what it keeps from line to line.
pub(super) trait Reader: Send {
    /// Puts the events of `line` into `out`. A bad line gives none.
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad>;
}

/// A reader of `format`.
pub(super) fn reader(format: Format) -> Box<dyn Reader> {
    match format {
        Format::Mobigen => Box::new(mobigen::Mobigen::new()),
        Format::Csv => Box::new(csv::Csv::new()),
        Format::Dbench => Box::new(dbench::Dbench::new()),
        Format::Mqsim => Box::new(mqsim::Mqsim::default()),
        Format::Cloudphysics => Box::new(cloudphysics::Cloudphysics),
        Format::Mobileblock => Box::new(mobileblock::Mobileblock::default()),
        Format::Fiu => Box::new(fiu::Fiu::default()),
        Format::Msr => Box::new(msr::Msr::default()),
        Format::Alibaba => Box::new(alibaba::Alibaba::default()),
        Format::Strace => Box::new(strace::Strace::new()),
    }
}

/// True where `line` has the form of `format`.
fn has_form(format: Format, line: &[u8]) -> bool {
    match format {
        Format::Mobigen => mobigen::parse(line).is_ok(),
        Format::Csv => csv::parse(line).is_ok(),
        Format::Dbench => dbench::parse(line).is_ok(),
        Format::Mqsim => mqsim::parse(line).is_ok(),
        Format::Cloudphysics => cloudphysics::parse(line).is_ok(),
        Format::Mobileblock => mobileblock::parse(line).is_ok(),
        Format::Fiu => fiu::parse(line).is_ok(),
        Format::Msr => msr::parse(line).is_ok(),
        Format::Alibaba => alibaba::parse(line).is_ok(),
        Format::Strace => strace::parse(line).is_ok(),
    }
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
    let mut scores = Format::ALL.map(|format| (score(format), format));
    scores.sort_unstable_by_key(|(score, _)| std::cmp::Reverse(*score));
    let [(best, format), (second, _), ..] = scores;
    (best * 2 > lines.len() && best > second).then_some(format)
}
