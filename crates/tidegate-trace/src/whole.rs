//! A trace: its lines, its reader, and its bad lines.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::bad::BadLines;
use super::event::Event;
use super::format::Format;
use super::input::Progress;
use super::out::Out;
use super::reader::{Reader, detect, reader};
use super::source::Source;
use crate::error::Error;

/// The events of one trace, in the order of its lines.
///
/// The last item may be an error: the file cannot be read further, or more than half of its lines
/// were bad.
pub struct Trace {
    path: PathBuf,
    format: Format,
    source: Source,
    reader: Box<dyn Reader>,
    out: Out,
    line: u64,
    bad: BadLines,
    progress: Progress,
    ended: bool,
}

/// Opens the trace at `path`, plain or compressed by zstd, gzip or xz. The first lines determine
/// the format if `format` is `None`. If `path` does not exist but `path.PID` files do, reads them
/// as the output of `strace -ff`.
///
/// # Errors
/// [`Error::Io`] if the trace cannot be read, [`Error::Format`] if its format cannot be detected.
pub fn open(path: &Path, format: Option<Format>) -> Result<Trace, Error> {
    let mut progress = Progress::default();
    let source = Source::open(path, &mut progress).map_err(io_error(path))?;
    Trace::new(path, source, progress, format)
}

/// Reads a trace from `bytes`, as [`open`] reads a file. Messages name the trace `path`.
///
/// # Errors
/// [`Error::Io`] if the trace cannot be read, [`Error::Format`] if its format cannot be detected.
pub fn read(
    path: &Path,
    bytes: impl Read + Send + 'static,
    format: Option<Format>,
) -> Result<Trace, Error> {
    let progress = Progress::default();
    let source = Source::read(bytes, &progress).map_err(io_error(path))?;
    Trace::new(path, source, progress, format)
}

fn io_error(path: &Path) -> impl Fn(io::Error) -> Error + '_ {
    |source| Error::Io { path: path.to_owned(), source }
}

impl Trace {
    fn new(
        path: &Path,
        mut source: Source,
        progress: Progress,
        format: Option<Format>,
    ) -> Result<Self, Error> {
        let format = match format {
            Some(format) => format,
            None => detect(source.head().map_err(io_error(path))?).ok_or_else(|| unknown(path))?,
        };
        if format == Format::Mobigen {
            source = source.by_time().map_err(io_error(path))?;
        }
        Ok(Self {
            path: path.to_owned(),
            format,
            source,
            reader: reader(format),
            out: Out::default(),
            line: 0,
            bad: BadLines::default(),
            progress,
            ended: false,
        })
    }

    /// Returns the format.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns the path of the trace's file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the bad lines so far.
    #[must_use]
    pub fn bad_lines(&self) -> &BadLines {
        &self.bad
    }

    /// Returns the number of bytes that were read and the total of the files, both as compressed.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        (self.progress.read_bytes(), self.progress.total_bytes)
    }

    /// Reads one more line; returns `false` at the end.
    fn read_line(&mut self) -> io::Result<bool> {
        let Some(line) = self.source.next()? else { return Ok(false) };
        self.line += 1;
        let result = match line {
            Ok(text) if text.trim_ascii().is_empty() => return Ok(true),
            Ok(text) => self.reader.line(text, &mut self.out),
            Err(why) => Err(why),
        };
        self.bad.lines += 1;
        if let Err(why) = result {
            self.bad.push(self.source.line_number().unwrap_or(self.line), why);
        }
        Ok(true)
    }

    /// Returns an error if more than half of the lines were bad.
    fn verdict(&self) -> Option<Error> {
        let (number, why) = self.bad.first.first()?;
        (self.bad.count * 2 > self.bad.lines).then(|| Error::Bad {
            path: self.path.clone(),
            what: format!(
                "{} of {} lines are bad as lines of format {}, the first one line {number} ({why}); \
                 give the right one with --format: {}",
                self.bad.count,
                self.bad.lines,
                self.format.name(),
                Format::names(),
            ),
        })
    }
}

fn unknown(path: &Path) -> Error {
    let path = path.display();
    let names = Format::names();
    Error::Format(format!(
        "{path}: the first lines have the form of no format, or of more than one; give it with \
         --format: {names}"
    ))
}

impl Iterator for Trace {
    type Item = Result<Event, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(event) = self.out.pop() {
                return Some(Ok(event));
            }
            if self.ended {
                return None;
            }
            match self.read_line() {
                Ok(true) => {}
                Ok(false) => {
                    self.ended = true;
                    return self.verdict().map(Err);
                }
                Err(error) => {
                    self.ended = true;
                    return Some(Err(io_error(&self.path)(error)));
                }
            }
        }
    }
}
