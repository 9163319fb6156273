//! SCSI requests of one virtual disk, as libCacheSim's CSV of `CloudPhysics` traces has them:
//! `version,time,op,size,lbn` with seconds, the SCSI operation in hex, bytes, and a sector.

use super::Reader;
use crate::bad::Bad;
use crate::event::{FileId, Op};
use crate::fields::{number, range, sectors, split};
use crate::out::Out;

const HEADER: &[u8] = b"version,time,op,size,lbn";
const DISK: FileId = FileId(0);

pub(super) struct Cloudphysics;

pub(super) enum Row {
    Header,
    Request { time_us: u64, kind: Kind, offset: u64, len: u64 },
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Read,
    Write,
    Sync,
}

pub(super) fn parse(line: &[u8]) -> Result<Row, Bad> {
    if line == HEADER {
        return Ok(Row::Header);
    }
    let [version, time, op, size, lbn] = split(line, b',')?;
    number(version, "version")?;
    let time_us = number(time, "time")?.checked_mul(1_000_000).ok_or(Bad::Number("time"))?;
    let (offset, _) = sectors(number(lbn, "sector")?, 0)?;
    let (offset, len) = range(offset, number(size, "length")?)?;
    Ok(Row::Request { time_us, kind: kind(op)?, offset, len })
}

/// The commands of 6, 10, 12 and 16 bytes.
fn kind(op: &[u8]) -> Result<Kind, Bad> {
    match op {
        b"08" | b"8" | b"28" | b"a8" | b"88" => Ok(Kind::Read),
        b"0a" | b"a" | b"2a" | b"aa" | b"8a" => Ok(Kind::Write),
        b"35" | b"91" => Ok(Kind::Sync),
        _ => Err(Bad::Operation),
    }
}

impl Reader for Cloudphysics {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        let Row::Request { time_us, kind, offset, len } = parse(line)? else { return Ok(()) };
        out.at(time_us, 0);
        match kind {
            Kind::Read => out.read(DISK, offset, len),
            Kind::Write => out.write(DISK, offset, len),
            Kind::Sync => {
                out.push(Op::Sync { file: DISK });
                Ok(())
            }
        }
    }
}
