//! Requests of block devices, as `MQSim` has them: `arrival_ns device start_sector sectors type`,
//! the type 0 for a write and 1 for a read.

use super::Reader;
use crate::trace::bad::Bad;
use crate::trace::fields::{number, sectors, split};
use crate::trace::names::Names;
use crate::trace::out::Out;

#[derive(Default)]
pub(super) struct Mqsim {
    devices: Names,
}

/// A line.
pub(super) struct Row<'a> {
    time_us: u64,
    device: &'a [u8],
    range: (u64, u64),
    is_write: bool,
}

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>, Bad> {
    let [arrival, device, first, count, kind] = split(line, b' ')?;
    number(device, "device")?;
    let is_write = match kind {
        b"0" => true,
        b"1" => false,
        _ => return Err(Bad::Operation),
    };
    let range = sectors(number(first, "sector")?, number(count, "number of sectors")?)?;
    Ok(Row { time_us: number(arrival, "time")? / 1000, device, range, is_write })
}

impl Reader for Mqsim {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        let Row { time_us, device, range: (offset, len), is_write } = parse(line)?;
        let file = self.devices.id(device)?;
        out.at(time_us, file.0);
        if is_write { out.write(file, offset, len) } else { out.read(file, offset, len) }
    }
}
