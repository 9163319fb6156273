//! Block requests of a phone, in `MobileBlockIOTraces`:
//! `process,device,R|W,sector,sectors,seconds`.
//!
//! A request that a process submits to the kernel often has a second line, of the worker that
//! submits it to the device. Both are events: the trace does not show which lines belong together.

use super::calls::{Row, Stream, way};
use crate::bad::Result;
use crate::fields::{cut_last, number, seconds_us, sectors, unquoted};

/// Separates the time of installation from the time of use.
const MARK: &[u8] = b"preconditioning_ended";

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>> {
    if line.ends_with(b",device,rw_flag,sector,size,timestamp") || unquoted(line) == MARK {
        return Ok(Row::HEADER);
    }
    let (rest, time) = cut_last(line, b',')?;
    let (rest, count) = cut_last(rest, b',')?;
    let (rest, first) = cut_last(rest, b',')?;
    let (rest, kind) = cut_last(rest, b',')?;
    let (process, device) = cut_last(rest, b',')?;
    number(device, "device")?;
    let way = way(kind, b"R", b"W")?;
    let range = sectors(number(first, "sector")?, number(count, "number of sectors")?)?;
    let row = Row::request(seconds_us(time)?, device, way, range);
    Ok(Row { stream: Stream::Process(process), ..row })
}
