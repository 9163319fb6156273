//! Splits an input into lines of any length, in bounded memory.

use std::io::{self, ErrorKind, Read};
use std::ops::Range;

use super::bad::{Bad, MAX_LINE_BYTES, Result};

const FIRST_BUFFER_BYTES: usize = 16 << 10;

/// A line without its end, or an error if it is too long.
pub(super) type Line<'a> = Result<&'a [u8]>;

/// The lines of `input`. The buffer grows up to [`MAX_LINE_BYTES`].
pub(super) struct Lines<R> {
    input: R,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    ended: bool,
}

impl<R: Read> Lines<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, buffer: vec![0; FIRST_BUFFER_BYTES], start: 0, end: 0, ended: false }
    }

    /// Returns the next line, or `None` at the end of the input. The last line needs no line feed.
    /// A carriage return before the line feed is dropped.
    pub(super) fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        let found = self.find()?;
        Ok(found.map(|found| found.map(|place| self.text(place))))
    }

    /// Returns the first bytes of the input, a full initial buffer, without consuming them.
    pub(super) fn head(&mut self) -> io::Result<&[u8]> {
        while !self.ended && self.end < FIRST_BUFFER_BYTES {
            self.fill()?;
        }
        Ok(&self.buffer[self.start..self.end])
    }

    /// Returns the buffered bytes of the next line, or `None` at the end of the input.
    pub(super) fn peek(&mut self) -> io::Result<Option<&[u8]>> {
        while !self.ended && memchr::memchr(b'\n', &self.buffer[self.start..self.end]).is_none() {
            if self.end - self.start == self.buffer.len() {
                break;
            }
            self.fill()?;
        }
        Ok(Some(&self.buffer[self.start..self.end]).filter(|bytes| !bytes.is_empty()))
    }

    fn text(&self, place: Range<usize>) -> &[u8] {
        let line = &self.buffer[place];
        line.strip_suffix(b"\r").unwrap_or(line)
    }

    /// Finds the next line, and returns its range in the buffer.
    fn find(&mut self) -> io::Result<Option<Result<Range<usize>>>> {
        let mut seen = 0;
        loop {
            let unseen = &self.buffer[self.start + seen..self.end];
            if let Some(at) = memchr::memchr(b'\n', unseen) {
                let (start, end) = (self.start, self.start + seen + at);
                self.start = end + 1;
                return Ok(Some(Ok(start..end)));
            }
            seen = self.end - self.start;
            if self.ended {
                let start = std::mem::replace(&mut self.start, self.end);
                return Ok((seen > 0).then_some(Ok(start..self.end)));
            }
            if seen == MAX_LINE_BYTES {
                self.skip_line()?;
                return Ok(Some(Err(Bad::Line)));
            }
            self.fill()?;
        }
    }

    /// Skips the rest of the line that fills the buffer.
    fn skip_line(&mut self) -> io::Result<()> {
        loop {
            (self.start, self.end) = (0, 0);
            self.fill()?;
            if let Some(at) = memchr::memchr(b'\n', &self.buffer[..self.end]) {
                self.start = at + 1;
                return Ok(());
            }
            if self.ended {
                self.start = self.end;
                return Ok(());
            }
        }
    }

    /// Reads more bytes into the buffer.
    fn fill(&mut self) -> io::Result<()> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.buffer.len() {
            self.buffer.resize((self.buffer.len() * 2).min(MAX_LINE_BYTES), 0);
        }
        let read = loop {
            match self.input.read(&mut self.buffer[self.end..]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => break result?,
            }
        };
        self.end += read;
        self.ended = read == 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines of `text` as strings, read a few bytes at a time.
    fn lines(text: &[u8]) -> Vec<Option<String>> {
        struct Few<'a>(&'a [u8]);
        impl Read for Few<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let few = buffer.len().min(4093);
                self.0.read(&mut buffer[..few])
            }
        }
        let mut lines = Lines::new(Few(text));
        let mut found = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            found.push(match line {
                Ok(text) => Some(String::from_utf8(text.to_vec()).unwrap()),
                Err(_) => None,
            });
        }
        found
    }

    #[test]
    fn ends_of_lines_are_no_part_of_them() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(lines(b"a\n\nb\r\nc"), [some("a"), some(""), some("b"), some("c")]);
        assert_eq!(lines(b""), []);
        assert_eq!(lines(b"a\n"), [some("a")]);
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped_and_told() {
        let long = "x".repeat(MAX_LINE_BYTES - 1);
        let longer = "y".repeat(5 * MAX_LINE_BYTES);
        let text = format!("{long}\n{longer}\nz\n{longer}");
        assert_eq!(lines(text.as_bytes()), [Some(long), None, Some("z".to_owned()), None]);
    }

    #[test]
    fn the_head_is_read_again_as_lines() {
        let text = "a line\n".repeat(10_000);
        let mut lines = Lines::new(text.as_bytes());
        assert_eq!(lines.head().unwrap().len(), FIRST_BUFFER_BYTES);
        let mut count = 0;
        while lines.next().unwrap().is_some() {
            count += 1;
        }
        assert_eq!(count, 10_000);
    }
}
