//! Sorts the lines of a file by time.

use std::io;

use super::bad::Bad;
use super::fields::{cut, number};
use super::lines::Line;

/// Maximum size of all lines, which are kept in memory. A larger trace is refused.
const MAX_BYTES: usize = 256 << 20;

/// The lines of a file, sorted by the time in their second field; the sort is stable.
#[derive(Debug, Default)]
pub(super) struct ByTime {
    text: Vec<u8>,
    lines: Vec<Kept>,
    read: usize,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    time: u64,
    number: u64,
    start: usize,
    len: usize,
    is_whole: bool,
}

impl ByTime {
    /// Adds a line. A line without a time gets the time of the line above.
    pub(super) fn push(&mut self, line: Line<'_>) -> io::Result<()> {
        let (text, is_whole) = (line.unwrap_or_default(), line.is_ok());
        let kept_bytes = self.text.len() + self.lines.len() * size_of::<Kept>();
        if kept_bytes + text.len() > MAX_BYTES {
            return Err(io::Error::other(
                "a trace of this format is sorted in memory, and has more than 256 MiB; split it",
            ));
        }
        let above = self.lines.last().map_or(0, |line| line.time);
        let number = self.lines.len() as u64 + 1;
        let (start, len) = (self.text.len(), text.len());
        let time = time(text).unwrap_or(above);
        self.lines.push(Kept { time, number, start, len, is_whole });
        self.text.extend_from_slice(text);
        Ok(())
    }

    pub(super) fn sort(&mut self) {
        self.lines.sort_by_key(|line| line.time);
    }

    pub(super) fn next(&mut self) -> Option<Line<'_>> {
        let line = self.lines.get(self.read)?;
        self.read += 1;
        let text = &self.text[line.start..line.start + line.len];
        Some(if line.is_whole { Ok(text) } else { Err(Bad::Line) })
    }

    /// Returns the number in the file of the line that was read last.
    pub(super) fn number(&self) -> u64 {
        let last = self.read.checked_sub(1).and_then(|last| self.lines.get(last));
        last.map_or(0, |line| line.number)
    }
}

fn time(line: &[u8]) -> Option<u64> {
    let (_, rest) = cut(line, b' ').ok()?;
    let (time, _) = cut(rest, b' ').ok()?;
    number(time, "time").ok()
}
