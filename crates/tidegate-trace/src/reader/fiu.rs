//! Calls on files by inode number, in the traces of FIU:
//! `seq ts_ns READ|WRITE inode inode_size offset size HIT|MISS|APPEND` and
//! `seq ts_ns OPEN|CLOSE|FSYNC|FDATASYNC inode inode_size`.

use super::calls::{Call, Row, Stream};
use crate::bad::{Bad, Result};
use crate::fields::{number, range, split};
use crate::out::Way;

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>> {
    let ([seq, time, op, inode, inode_size], request) = match split::<8>(line, b' ') {
        Ok([head @ .., offset, size, found]) => (head, Some((offset, size, found))),
        Err(_) => (split::<5>(line, b' ')?, None),
    };
    number(seq, "sequence number")?;
    number(inode, "inode")?;
    number(inode_size, "size of the inode")?;
    let range = match request {
        None => None,
        Some((offset, size, b"HIT" | b"MISS" | b"APPEND")) => {
            Some(range(number(offset, "offset")?, number(size, "length")?)?)
        }
        Some(_) => return Err(Bad::Shape),
    };
    let call = match (op, range) {
        (b"READ", Some(range)) => Call::Access(Way::Read, inode, range),
        (b"WRITE", Some(range)) => Call::Access(Way::Write, inode, range),
        (b"OPEN" | b"CLOSE", None) => Call::Nothing,
        (b"FSYNC" | b"FDATASYNC", None) => Call::Sync(inode),
        _ => return Err(Bad::Operation),
    };
    Ok(Row { time_us: number(time, "time")? / 1000, stream: Stream::Number(0), call })
}
