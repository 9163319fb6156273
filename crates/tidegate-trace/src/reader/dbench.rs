//! Operations of a client of a file server, in dbench's `client.txt`: an operation, its arguments,
//! and its status. An operation with another status than OK has no effect.
//!
//! `ReadX` and `WriteX` have handle, offset, requested length, and transferred length. Newer files
//! begin each line with seconds; without seconds all events have the time 0.

use super::calls::{Call, Row, Stream};
use crate::bad::{Bad, Result};
use crate::descriptors::{Makes, Opening};
use crate::fields::{cut, number, range, seconds_us};
use crate::out::Way;

const OK: &[u8] = b"NT_STATUS_OK";
const MOST_FIELDS: usize = 8;
/// Opens a directory.
const FOLDER: u64 = 1;
const DELETE_ON_CLOSE: u64 = 0x1000;

/// Operations that change no data of files and give no events.
const OTHERS: [&[u8]; 12] = [
    b"FIND_FIRST",
    b"FIND_NEXT",
    b"LockX",
    b"Mkdir",
    b"QUERY_FILE_INFORMATION",
    b"QUERY_FS_INFORMATION",
    b"QUERY_PATH_INFORMATION",
    b"QUERY_SECURITY_DESCRIPTOR",
    b"Rmdir",
    b"SET_FILE_INFORMATION",
    b"Sleep",
    b"UnlockX",
];

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>> {
    let (time_us, line) = match line.first() {
        Some(b'0'..=b'9') => {
            let (seconds, rest) = cut(line, b' ')?;
            (seconds_us(seconds)?, rest)
        }
        _ => (0, line),
    };
    let (op, rest) = cut(line, b' ')?;
    let mut fields = [&[][..]; MOST_FIELDS];
    let count = words(rest, &mut fields)?;
    let [arguments @ .., status] = &fields[..count] else { return Err(Bad::Shape) };
    if !status.starts_with(b"NT_STATUS_") {
        return Err(Bad::Shape);
    }
    let call = call(op, arguments)?;
    let call = if *status == OK { call } else { Call::Nothing };
    Ok(Row { time_us, stream: Stream::Number(0), call })
}

fn call<'a>(op: &[u8], arguments: &[&'a [u8]]) -> Result<Call<'a>> {
    Ok(match (op, arguments) {
        (b"NTCreateX", [path, options, disposition, handle_text]) => {
            let options = hex(options, "options")?;
            if options & DELETE_ON_CLOSE != 0 {
                return Err(Bad::Operation);
            }
            let makes = match hex(disposition, "disposition")? {
                _ if options & FOLDER != 0 => Makes::Folder,
                // Supersede, overwrite, overwrite or create.
                0 | 4 | 5 => Makes::Empty,
                // Create: a file that the trace has shown was removed without a line.
                2 => Makes::Anew,
                _ => Makes::Nothing,
            };
            let opening = Opening { makes, ..Opening::default() };
            Call::Open { path, opening, descriptor: handle(handle_text)?, is_assumed: false }
        }
        (b"Close", [it]) => Call::Close(handle(it)?),
        (b"ReadX", [it, offset, _, len]) => transfer(Way::Read, it, offset, len)?,
        (b"WriteX", [it, offset, _, len]) => transfer(Way::Write, it, offset, len)?,
        (b"Flush", [it]) => Call::SyncDescriptor(handle(it)?),
        (b"Rename", [from, to]) => Call::Rename(from, to),
        // A pattern: the trace does not show which files match.
        (b"Unlink", [path, _]) if path.iter().any(|byte| b"*?".contains(byte)) => {
            return Err(Bad::Operation);
        }
        (b"Unlink", [path, _]) => Call::Unlink(path),
        (b"Deltree", [path]) => Call::RemoveTree(path),
        (op, _) if OTHERS.contains(&op) => Call::Nothing,
        _ => return Err(Bad::Operation),
    })
}

fn transfer<'a>(way: Way, it: &[u8], offset: &[u8], len: &[u8]) -> Result<Call<'a>> {
    let (offset, len) = range(number(offset, "offset")?, number(len, "length")?)?;
    Ok(Call::Transfer { way, descriptor: handle(it)?, offset: Some(offset), len })
}

fn handle(text: &[u8]) -> Result<i64> {
    i64::try_from(number(text, "handle")?).map_err(|_| Bad::Number("handle"))
}

fn hex(text: &[u8], what: &'static str) -> Result<u64> {
    let digits = text.strip_prefix(b"0x").and_then(|digits| std::str::from_utf8(digits).ok());
    digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()).ok_or(Bad::Number(what))
}

/// Splits `text` into unquoted words, and stores them in `fields`; returns their number.
fn words<'a>(mut text: &'a [u8], fields: &mut [&'a [u8]]) -> Result<usize> {
    let mut count = 0;
    loop {
        text = text.trim_ascii_start();
        if text.is_empty() {
            return Ok(count);
        }
        let field = fields.get_mut(count).ok_or(Bad::Shape)?;
        (*field, text) = match text.strip_prefix(b"\"") {
            Some(quoted) => cut(quoted, b'"')?,
            None => text.split_at(text.iter().position(|&it| it == b' ').unwrap_or(text.len())),
        };
        count += 1;
    }
}
