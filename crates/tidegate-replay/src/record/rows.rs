//! Writes rows of a trace in the format `csv` to a file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::error::{Error, Result};

/// The first line of a trace.
const HEADER: &str = "ts_us,tid,op,file,offset,len\n";
const BUFFER_BYTES: usize = 256 << 10;
/// The compression level; a higher level takes CPU time that the program needs.
const LEVEL: i32 = 3;

/// Time and thread of an operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct At {
    /// Microseconds since the first event.
    pub(super) time_us: u64,
    /// The thread's number.
    pub(super) thread: u32,
}

/// A writer of rows. After a failure it drops all rows, and returns the error at the end.
pub(super) struct Rows {
    sink: Sink,
    failure: Option<io::Error>,
}

enum Sink {
    Plain(Box<dyn Write + Send>),
    Compressed(Box<zstd::Encoder<'static, File>>),
}

impl Sink {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(file) => file.write_all(bytes),
            Self::Compressed(encoder) => encoder.write_all(bytes),
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::Plain(mut file) => file.flush(),
            Self::Compressed(encoder) => encoder.finish().map(drop),
        }
    }
}

impl Rows {
    /// Creates a file at `path`, compressed if its name ends in `.zst`.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).map_err(Error::io(path))?;
        let sink = if path.extension().is_some_and(|it| it == "zst") {
            Sink::Compressed(Box::new(zstd::Encoder::new(file, LEVEL).map_err(Error::io(path))?))
        } else {
            Sink::Plain(Box::new(BufWriter::with_capacity(BUFFER_BYTES, file)))
        };
        let mut rows = Self { sink, failure: None };
        rows.write(HEADER.as_bytes());
        Ok(rows)
    }

    /// Writes rows to `writer`.
    #[cfg(test)]
    pub(super) fn to(writer: impl Write + Send + 'static) -> Self {
        Self { sink: Sink::Plain(Box::new(writer)), failure: None }
    }

    /// Writes a row of an operation with two numbers.
    pub(super) fn push(&mut self, at: At, op: &str, name: &[u8], [offset, len]: [u64; 2]) {
        self.push_row(at, op, name, format!(",{offset},{len}").as_bytes());
    }

    /// Writes a row of a rename.
    pub(super) fn push_rename(&mut self, at: At, name: &[u8], new: &[u8]) {
        let mut rest = b",0,".to_vec();
        escape(new, &mut rest);
        self.push_row(at, "rename", name, &rest);
    }

    fn push_row(&mut self, At { time_us, thread }: At, op: &str, name: &[u8], rest: &[u8]) {
        let mut row = format!("{time_us},{thread},{op},").into_bytes();
        escape(name, &mut row);
        row.extend_from_slice(rest);
        row.push(b'\n');
        self.write(&row);
    }

    fn write(&mut self, row: &[u8]) {
        if self.failure.is_none() {
            self.failure = self.sink.write_all(row).err();
        }
    }

    /// Completes the file; returns the first error, if any.
    pub(super) fn finish(self) -> Option<io::Error> {
        self.failure.or(self.sink.finish().err())
    }
}

/// Appends a name to a row. `%` and two hexadecimal digits encode a comma, a percent sign, and each
/// control character.
fn escape(name: &[u8], row: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for &byte in name {
        if matches!(byte, b',' | b'%' | 0..b' ' | 0x7f) {
            let digit = |half: u8| DIGITS[usize::from(half)];
            row.extend_from_slice(&[b'%', digit(byte >> 4), digit(byte & 15)]);
        } else {
            row.push(byte);
        }
    }
}
