//! The project's own format: `ts_us,tid,op,file,offset,len`, a line an operation that took place.
//!
//! `truncate` has the new length as its offset, `rename` the new name as its length. `unlink`,
//! `fsync`, `fdatasync`, `sync` and `syncfs` have no use for both. `sync_file_range` makes nothing
//! durable, and `fallocate` changes no data: neither is an event.

use super::Reader;
use crate::bad::Bad;
use crate::event::Op;
use crate::fields::{cut, cut_last, file_length, number, range, stream};
use crate::files::Files;
use crate::out::Out;

const HEADER: &[u8] = b"ts_us,tid,op,file,offset,len";

pub(super) struct Csv {
    files: Files,
}

/// A line.
pub(super) struct Row<'a> {
    time_us: u64,
    tid: u32,
    file: &'a [u8],
    call: Call<'a>,
}

enum Call<'a> {
    Header,
    Read(u64, u64),
    Write(u64, u64),
    Sync,
    SyncAll,
    Truncate(u64),
    Rename(&'a [u8]),
    Unlink,
    Hint,
}

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>, Bad> {
    if line == HEADER {
        return Ok(Row { time_us: 0, tid: 0, file: b"", call: Call::Header });
    }
    let (time, rest) = cut(line, b',')?;
    let (tid, rest) = cut(rest, b',')?;
    let (op, rest) = cut(rest, b',')?;
    let (file, call) = call(op, rest)?;
    Ok(Row { time_us: number(time, "time")?, tid: stream(tid)?, file, call })
}

/// The name of the file in `rest`, which may hold commas, and what is done to it.
fn call<'a>(op: &[u8], rest: &'a [u8]) -> Result<(&'a [u8], Call<'a>), Bad> {
    let (first, last) = cut_last(rest, b',')?;
    let (file, offset) = cut_last(first, b',')?;
    let numbers = || Ok((number(offset, "offset")?, number(last, "length")?));
    let ranged = || numbers().and_then(|(offset, len)| range(offset, len));
    let call = match op {
        b"read" => ranged().map(|(offset, len)| Call::Read(offset, len))?,
        b"write" => ranged().map(|(offset, len)| Call::Write(offset, len))?,
        b"fsync" | b"fdatasync" => Call::Sync,
        b"sync" | b"syncfs" => Call::SyncAll,
        b"sync_file_range" | b"fallocate" => Call::Hint,
        b"truncate" => Call::Truncate(file_length(numbers()?.0)?),
        b"unlink" => Call::Unlink,
        // With more commas, where the first name ends cannot be told.
        b"rename" if !file.contains(&b',') && !last.is_empty() => Call::Rename(last),
        b"rename" => return Err(Bad::Shape),
        _ => return Err(Bad::Operation),
    };
    if file.is_empty() && !matches!(call, Call::SyncAll) {
        return Err(Bad::Shape);
    }
    Ok((file, call))
}

impl Csv {
    pub(super) fn new() -> Self {
        Self { files: Files::new(b'/') }
    }
}

impl Reader for Csv {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        let row = parse(line)?;
        out.at(row.time_us, row.tid);
        match row.call {
            Call::Header | Call::Hint => Ok(()),
            Call::Read(offset, len) => out.read(self.files.named(row.file)?, offset, len),
            Call::Write(offset, len) => out.write(self.files.named(row.file)?, offset, len),
            Call::Sync => {
                out.push(Op::Sync { file: self.files.named(row.file)? });
                Ok(())
            }
            Call::SyncAll => {
                out.push(Op::SyncAll);
                Ok(())
            }
            Call::Truncate(len) => {
                let file = self.files.named(row.file)?;
                self.files.resize(file, len, out)
            }
            Call::Rename(to) => self.files.rename(row.file, to, out),
            Call::Unlink => {
                self.files.unlink(row.file, out);
                Ok(())
            }
        }
    }
}
