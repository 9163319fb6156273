//! Block requests of virtual disks of Alibaba Cloud: `device_id,opcode,offset,length,timestamp_us`.

use super::Reader;
use crate::trace::bad::Bad;
use crate::trace::fields::{number, range, split};
use crate::trace::names::Names;
use crate::trace::out::Out;

const HEADER: &[u8] = b"device_id,opcode,offset,length,timestamp";

#[derive(Default)]
pub(super) struct Alibaba {
    devices: Names,
}

pub(super) enum Row<'a> {
    Header,
    Request { time_us: u64, device: &'a [u8], range: (u64, u64), is_write: bool },
}

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>, Bad> {
    if line == HEADER || line.strip_suffix(b"_us") == Some(HEADER) {
        return Ok(Row::Header);
    }
    let [device, kind, offset, len, time] = split(line, b',')?;
    number(device, "device")?;
    let is_write = match kind {
        b"R" => false,
        b"W" => true,
        _ => return Err(Bad::Operation),
    };
    let range = range(number(offset, "offset")?, number(len, "length")?)?;
    Ok(Row::Request { time_us: number(time, "time")?, device, range, is_write })
}

impl Reader for Alibaba {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        let Row::Request { time_us, device, range: (offset, len), is_write } = parse(line)? else {
            return Ok(());
        };
        let file = self.devices.id(device)?;
        out.at(time_us, file.0);
        if is_write { out.write(file, offset, len) } else { out.read(file, offset, len) }
    }
}
