//! Calls of an Android app, from Mobibench's `MobiGen`: `thread microseconds op arguments`.
//!
//! The file has the lines of one thread behind those of another, but all threads share the
//! descriptors: the lines come here sorted by time. Where the opening of a descriptor is not shown,
//! `MobiGen` put one of `/data/data` in, by the order of its own lines. Where the order of time
//! shows the real one, that counts.
//!
//! The last argument of `open` is the descriptor, that of the others the result. That of `read`,
//! `write`, `pread` and `pwrite` is how many bytes; a negative one is a failure.

use super::Reader;
use crate::bad::Bad;
use crate::descriptors::{Descriptors, Open, Way};
use crate::fields::{cut, cut_last, number, range, signed, stream};
use crate::files::Files;
use crate::out::Out;
use crate::storage::is_storage;

/// The path of what was opened by calls that are not shown.
const STAND_IN: &[u8] = b"/data/data";

pub(super) struct Mobigen {
    descriptors: Descriptors,
}

/// A line.
pub(super) struct Row<'a> {
    time_us: u64,
    thread: u32,
    call: Call<'a>,
}

enum Call<'a> {
    Open {
        path: &'a [u8],
        flags: &'a [u8],
        descriptor: i64,
    },
    Close(i64),
    Transfer {
        way: Way,
        descriptor: i64,
        offset: Option<u64>,
        len: u64,
    },
    Sync(i64),
    Unlink(&'a [u8]),
    /// A failed call, or one that looks up something.
    Nothing,
}

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>, Bad> {
    let (thread, rest) = cut(line, b' ')?;
    let (time, rest) = cut(rest, b' ')?;
    let (op, rest) = cut(rest, b' ')?;
    let (arguments, result) = cut_last(rest, b' ')?;
    let result = signed(result, "result")?;
    let call = call(op, arguments, result)?;
    let failed = result < 0;
    let call = if failed { Call::Nothing } else { call };
    Ok(Row { time_us: number(time, "time")?, thread: stream(thread)?, call })
}

fn call<'a>(op: &[u8], arguments: &'a [u8], result: i64) -> Result<Call<'a>, Bad> {
    Ok(match op {
        b"open" => {
            let (path, flags) = cut_last(arguments, b' ')?;
            Call::Open { path: unquoted(path), flags, descriptor: result }
        }
        b"close" => Call::Close(signed(arguments, "descriptor")?),
        b"read" | b"write" => transfer(way(op), signed(arguments, "descriptor")?, None, result)?,
        b"pread" | b"pwrite" => {
            let (descriptor, offset) = cut(arguments, b' ')?;
            let offset = number(offset, "offset")?;
            transfer(way(op), signed(descriptor, "descriptor")?, Some(offset), result)?
        }
        b"fsync" | b"fdatasync" => Call::Sync(signed(arguments, "descriptor")?),
        b"unlink" => Call::Unlink(unquoted(arguments)),
        b"access" | b"stat64" | b"lstat64" | b"fstat64" => Call::Nothing,
        _ => return Err(Bad::Operation),
    })
}

fn way(op: &[u8]) -> Way {
    if op.ends_with(b"read") { Way::Read } else { Way::Write }
}

fn transfer<'a>(
    way: Way,
    descriptor: i64,
    offset: Option<u64>,
    result: i64,
) -> Result<Call<'a>, Bad> {
    let (_, len) = range(offset.unwrap_or(0), u64::try_from(result).unwrap_or(0))?;
    Ok(Call::Transfer { way, descriptor, offset, len })
}

/// `path` without its quotes; some paths have none, or only one.
fn unquoted(path: &[u8]) -> &[u8] {
    let path = path.strip_prefix(b"\"").unwrap_or(path);
    path.strip_suffix(b"\"").unwrap_or(path)
}

impl Mobigen {
    pub(super) fn new() -> Self {
        Self { descriptors: Descriptors::new(Files::new(b'/')) }
    }

    fn open(&mut self, path: &[u8], flags: &[u8], number: i64, out: &mut Out) -> Result<(), Bad> {
        if path == STAND_IN && self.descriptors.get((0, number)).is_ok() {
            return Ok(());
        }
        if !is_storage(path) {
            return self.descriptors.open((0, number), Open::default(), false, out);
        }
        let files = &mut self.descriptors.files;
        let file = files.named(path)?;
        let has = |flag: &[u8]| flags.split(|&byte| byte == b'|').any(|part| part == flag);
        if has(b"O_TRUNC") {
            files.resize(file, 0, out)?;
        } else if has(b"O_CREAT") && has(b"O_EXCL") {
            files.set_len(file, 0);
        }
        let sync = has(b"O_SYNC") || has(b"O_DSYNC");
        let open = Open { append: has(b"O_APPEND"), sync, ..Open::at_start(file) };
        self.descriptors.open((0, number), open, false, out)
    }
}

impl Reader for Mobigen {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        let row = parse(line)?;
        out.at(row.time_us, row.thread);
        match row.call {
            Call::Open { path, flags, descriptor } => self.open(path, flags, descriptor, out)?,
            Call::Close(descriptor) => self.descriptors.close((0, descriptor), out),
            Call::Transfer { way, descriptor, offset, len } => {
                self.descriptors.transfer((0, descriptor), way, offset, len, out)?;
            }
            Call::Sync(descriptor) => self.descriptors.sync((0, descriptor), out)?,
            Call::Unlink(path) => self.descriptors.files.unlink(path, out),
            Call::Nothing => {}
        }
        Ok(())
    }
}
