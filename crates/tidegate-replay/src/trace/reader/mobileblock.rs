//! Block requests of a phone, as `MobileBlockIOTraces` has them:
//! `process,device,R|W,sector,sectors,seconds`.
//!
//! A request that a process hands to the kernel often has a second line, of the worker that hands
//! it to the device. Both are events: the trace does not say which belong together.

use super::Reader;
use crate::trace::bad::Bad;
use crate::trace::fields::{cut_last, number, seconds_us, sectors};
use crate::trace::names::Names;
use crate::trace::out::Out;

/// Parts the time of installation from that of use.
const MARK: &[u8] = b"preconditioning_ended";

#[derive(Default)]
pub(super) struct Mobileblock {
    devices: Names,
    processes: Names,
}

pub(super) enum Row<'a> {
    Header,
    Request { time_us: u64, process: &'a [u8], device: &'a [u8], range: (u64, u64), is_write: bool },
}

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>, Bad> {
    if line.ends_with(b",device,rw_flag,sector,size,timestamp") || unquoted(line) == MARK {
        return Ok(Row::Header);
    }
    let (rest, time) = cut_last(line, b',')?;
    let (rest, count) = cut_last(rest, b',')?;
    let (rest, first) = cut_last(rest, b',')?;
    let (rest, kind) = cut_last(rest, b',')?;
    let (process, device) = cut_last(rest, b',')?;
    number(device, "device")?;
    let is_write = match kind {
        b"R" => false,
        b"W" => true,
        _ => return Err(Bad::Operation),
    };
    let range = sectors(number(first, "sector")?, number(count, "number of sectors")?)?;
    Ok(Row::Request { time_us: seconds_us(time)?, process, device, range, is_write })
}

fn unquoted(line: &[u8]) -> &[u8] {
    let line = line.strip_prefix(b"\"").unwrap_or(line);
    line.strip_suffix(b"\"").unwrap_or(line)
}

impl Reader for Mobileblock {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        let Row::Request { time_us, process, device, range, is_write } = parse(line)? else {
            return Ok(());
        };
        let (offset, len) = range;
        let file = self.devices.id(device)?;
        out.at(time_us, self.processes.id(process)?.0);
        if is_write { out.write(file, offset, len) } else { out.read(file, offset, len) }
    }
}
