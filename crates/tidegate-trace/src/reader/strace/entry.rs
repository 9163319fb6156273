//! Parses the parts of a line: process, time, and content.

use crate::bad::{Bad, Result};
use crate::fields::{cut, seconds_us, stream};

/// A parsed line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry<'a> {
    /// The process, if the line names it.
    pub(super) pid: Option<u32>,
    pub(super) time_us: u64,
    pub(super) what: What<'a>,
}

/// The content of a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum What<'a> {
    /// A whole call.
    Call(&'a [u8]),
    /// The beginning of a call.
    Unfinished(&'a [u8]),
    /// The rest of a call that an earlier line began.
    Resumed(&'a [u8]),
    /// The exit of a process.
    Exit,
    /// A signal, or a message of strace itself.
    Notice,
}

const UNFINISHED: &[u8] = b"<unfinished ...>";
const RESUMED: &[u8] = b" resumed>";

/// Parses `line`, which has the time in seconds, optionally after the process's number:
/// `[pid 12] 1.000000 read(...`, `12 1.000000 read(...`, `1.000000 read(...`.
pub(super) fn entry(line: &[u8]) -> Result<Entry<'_>> {
    if line.starts_with(b"strace: ") || line.starts_with(b"Process ") {
        return Ok(Entry { pid: None, time_us: 0, what: What::Notice });
    }
    let (pid, rest) = pid(line)?;
    let (time, rest) = cut(rest, b' ')?;
    if !time.contains(&b'.') {
        return Err(Bad::Number("time"));
    }
    Ok(Entry { pid, time_us: seconds_us(time)?, what: what(rest.trim_ascii())? })
}

fn pid(line: &[u8]) -> Result<(Option<u32>, &[u8])> {
    let (first, rest) = match line.strip_prefix(b"[pid ") {
        Some(bracket) => cut(bracket, b']')?,
        None => cut(line, b' ')?,
    };
    if first.contains(&b'.') {
        return Ok((None, line));
    }
    Ok((Some(stream(first.trim_ascii())?), rest.trim_ascii_start()))
}

fn what(text: &[u8]) -> Result<What<'_>> {
    if text.starts_with(b"+++ exited") || text.starts_with(b"+++ killed") {
        return Ok(What::Exit);
    }
    if text.starts_with(b"+++ ") || text.starts_with(b"--- ") {
        return Ok(What::Notice);
    }
    if text.starts_with(b"<... ") {
        let at = memchr::memmem::find(text, RESUMED).ok_or(Bad::Shape)?;
        return Ok(What::Resumed(&text[at + RESUMED.len()..]));
    }
    if let Some(begun) = text.strip_suffix(UNFINISHED) {
        return Ok(What::Unfinished(begun.trim_ascii_end()));
    }
    Ok(What::Call(text))
}
