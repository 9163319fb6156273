//! SCSI requests of one virtual disk, in libCacheSim's CSV of `CloudPhysics` traces:
//! `version,time,op,size,lbn` with seconds, the SCSI operation in hex, bytes, and a sector.

use super::calls::{Call, Row, Stream};
use crate::bad::{Bad, Result};
use crate::fields::{number, range, sectors, split};
use crate::out::Way;

const HEADER: &[u8] = b"version,time,op,size,lbn";
const DISK: &[u8] = b"disk";

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>> {
    if line == HEADER {
        return Ok(Row::HEADER);
    }
    let [version, time, op, size, lbn] = split(line, b',')?;
    number(version, "version")?;
    let time_us = number(time, "time")?.checked_mul(1_000_000).ok_or(Bad::Number("time"))?;
    let (offset, _) = sectors(number(lbn, "sector")?, 0)?;
    let range = range(offset, number(size, "length")?)?;
    // The commands with 6, 10, 12 and 16 bytes.
    let call = match op {
        b"08" | b"8" | b"28" | b"a8" | b"88" => Call::Access(Way::Read, DISK, range),
        b"0a" | b"a" | b"2a" | b"aa" | b"8a" => Call::Access(Way::Write, DISK, range),
        b"35" | b"91" => Call::Sync(DISK),
        _ => return Err(Bad::Operation),
    };
    Ok(Row { time_us, stream: Stream::Device(DISK), call })
}
