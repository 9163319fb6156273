//! Block requests of a phone, as `MobileBlockIOTraces` has them:
//! `process,device,R|W,sector,sectors,seconds`.
//!
//! A request that a process hands to the kernel often has a second line, of the worker that hands
//! it to the device. Both are events: the trace does not say which belong together.

use super::Reader;
use super::block::{Request, is_write};
use crate::bad::Bad;
use crate::fields::{cut_last, number, seconds_us, sectors};
use crate::names::Names;
use crate::out::Out;

/// Parts the time of installation from that of use.
const MARK: &[u8] = b"preconditioning_ended";

#[derive(Default)]
pub(super) struct Mobileblock {
    devices: Names,
    processes: Names,
}

/// A process and its request; none for a line that is no request.
pub(super) fn parse(line: &[u8]) -> Result<Option<(&[u8], Request<'_>)>, Bad> {
    if line.ends_with(b",device,rw_flag,sector,size,timestamp") || unquoted(line) == MARK {
        return Ok(None);
    }
    let (rest, time) = cut_last(line, b',')?;
    let (rest, count) = cut_last(rest, b',')?;
    let (rest, first) = cut_last(rest, b',')?;
    let (rest, kind) = cut_last(rest, b',')?;
    let (process, device) = cut_last(rest, b',')?;
    number(device, "device")?;
    let is_write = is_write(kind, b"R", b"W")?;
    let range = sectors(number(first, "sector")?, number(count, "number of sectors")?)?;
    let request = Request { time_us: seconds_us(time)?, device, range, is_write };
    Ok(Some((process, request)))
}

fn unquoted(line: &[u8]) -> &[u8] {
    let line = line.strip_prefix(b"\"").unwrap_or(line);
    line.strip_suffix(b"\"").unwrap_or(line)
}

impl Reader for Mobileblock {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        let Some((process, request)) = parse(line)? else { return Ok(()) };
        let device = self.devices.id(request.device)?;
        request.put_of(self.processes.id(process)?.0, device, out)
    }
}
