//! Calls of an Android app, from Mobibench's `MobiGen`: `thread microseconds op arguments`.
//!
//! The file lists the lines of one thread after the lines of another, but all threads share the
//! descriptors. So the lines are sorted by time first. If the opening of a descriptor is not shown,
//! `MobiGen` inserted an opening of `/data/data`, by the order of its own lines. If the time order
//! shows the real opening, the real one counts.
//!
//! The last argument is the result: for `open` the descriptor, for `read`, `write`, `pread` and
//! `pwrite` the number of bytes. A negative result is a failure.

use super::calls::{Call, Row, Stream};
use crate::bad::{Bad, Result};
use crate::descriptors::Opening;
use crate::fields::{cut, cut_last, number, range, signed, stream, unquoted};
use crate::out::Way;
use crate::storage::is_storage;

/// The path of descriptors whose opening is not shown.
const STAND_IN: &[u8] = b"/data/data";

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>> {
    let (thread, rest) = cut(line, b' ')?;
    let (time, rest) = cut(rest, b' ')?;
    let (op, rest) = cut(rest, b' ')?;
    let (arguments, result) = cut_last(rest, b' ')?;
    let result = signed(result, "result")?;
    let call = call(op, arguments, result)?;
    let call = if result < 0 { Call::Nothing } else { call };
    Ok(Row { time_us: number(time, "time")?, stream: Stream::Number(stream(thread)?), call })
}

fn call<'a>(op: &[u8], arguments: &'a [u8], result: i64) -> Result<Call<'a>> {
    Ok(match op {
        b"open" => {
            let (path, flags) = cut_last(arguments, b' ')?;
            let (path, opening) = (unquoted(path), Opening::of_flags(flags));
            let is_assumed = path == STAND_IN;
            if is_storage(path) {
                Call::Open { path, opening, descriptor: result, is_assumed }
            } else {
                Call::OpenOther(result)
            }
        }
        b"close" => Call::Close(signed(arguments, "descriptor")?),
        b"read" | b"write" => transfer(op, arguments, None, result)?,
        b"pread" | b"pwrite" => {
            let (descriptor, offset) = cut(arguments, b' ')?;
            transfer(op, descriptor, Some(number(offset, "offset")?), result)?
        }
        b"fsync" | b"fdatasync" => Call::SyncDescriptor(signed(arguments, "descriptor")?),
        b"unlink" => Call::Unlink(unquoted(arguments)),
        b"access" | b"stat64" | b"lstat64" | b"fstat64" => Call::Nothing,
        _ => return Err(Bad::Operation),
    })
}

fn transfer<'a>(
    op: &[u8],
    descriptor: &[u8],
    offset: Option<u64>,
    result: i64,
) -> Result<Call<'a>> {
    let way = if op.ends_with(b"read") { Way::Read } else { Way::Write };
    let descriptor = signed(descriptor, "descriptor")?;
    let (_, len) = range(offset.unwrap_or(0), u64::try_from(result).unwrap_or(0))?;
    Ok(Call::Transfer { way, descriptor, offset, len })
}
