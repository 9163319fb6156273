//! Block requests of virtual disks of Alibaba Cloud: `device_id,opcode,offset,length,timestamp_us`.

use super::Reader;
use super::block::{Request, is_write};
use crate::bad::Bad;
use crate::fields::{number, range, split};
use crate::names::Names;
use crate::out::Out;

const HEADER: &[u8] = b"device_id,opcode,offset,length,timestamp";

#[derive(Default)]
pub(super) struct Alibaba {
    devices: Names,
}

/// A line; none for the header.
pub(super) fn parse(line: &[u8]) -> Result<Option<Request<'_>>, Bad> {
    if line == HEADER || line.strip_suffix(b"_us") == Some(HEADER) {
        return Ok(None);
    }
    let [device, kind, offset, len, time] = split(line, b',')?;
    number(device, "device")?;
    let is_write = is_write(kind, b"R", b"W")?;
    let range = range(number(offset, "offset")?, number(len, "length")?)?;
    Ok(Some(Request { time_us: number(time, "time")?, device, range, is_write }))
}

impl Reader for Alibaba {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        parse(line)?.map_or(Ok(()), |request| request.put(&mut self.devices, out))
    }
}
