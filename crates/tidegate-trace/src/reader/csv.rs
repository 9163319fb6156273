//! The project's own format: `ts_us,tid,op,file,offset,len`, one line for each completed operation.
//!
//! `truncate` has the new length as its offset, `rename` the new name as its length. `unlink`,
//! `fsync`, `fdatasync`, `sync` and `syncfs` ignore both. `sync_file_range` makes nothing durable,
//! and `fallocate` changes no data: they give no event.

use super::calls::{Call, Row, Stream};
use crate::bad::{Bad, Result};
use crate::fields::{cut, cut_last, file_length, number, range, stream};
use crate::out::Way;

const HEADER: &[u8] = b"ts_us,tid,op,file,offset,len";

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>> {
    if line == HEADER {
        return Ok(Row::HEADER);
    }
    let (time, rest) = cut(line, b',')?;
    let (tid, rest) = cut(rest, b',')?;
    let (op, rest) = cut(rest, b',')?;
    let call = call(op, rest)?;
    Ok(Row { time_us: number(time, "time")?, stream: Stream::Number(stream(tid)?), call })
}

/// Parses the operation `op` on the file whose name begins `rest`; the name may contain commas.
fn call<'a>(op: &[u8], rest: &'a [u8]) -> Result<Call<'a>> {
    let (first, last) = cut_last(rest, b',')?;
    let (file, offset) = cut_last(first, b',')?;
    let numbers = || Ok((number(offset, "offset")?, number(last, "length")?));
    let ranged = || numbers().and_then(|(offset, len)| range(offset, len));
    let call = match op {
        b"read" => Call::Access(Way::Read, file, ranged()?),
        b"write" => Call::Access(Way::Write, file, ranged()?),
        b"fsync" | b"fdatasync" => Call::Sync(file),
        b"sync" | b"syncfs" => Call::SyncAll,
        b"sync_file_range" | b"fallocate" => Call::Nothing,
        b"truncate" => Call::Resize(file, file_length(numbers()?.0)?),
        b"unlink" => Call::Unlink(file),
        // With more commas, the end of the first name is ambiguous.
        b"rename" if !file.contains(&b',') && !last.is_empty() => Call::Rename(file, last),
        b"rename" => return Err(Bad::Shape),
        _ => return Err(Bad::Operation),
    };
    if file.is_empty() && !matches!(call, Call::SyncAll) { Err(Bad::Shape) } else { Ok(call) }
}
