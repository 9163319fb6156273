//! Requests of block devices, as `MQSim` has them: `arrival_ns device start_sector sectors type`,
//! the type 0 for a write and 1 for a read.

use super::Reader;
use super::block::{Request, is_write};
use crate::bad::Bad;
use crate::fields::{number, sectors, split};
use crate::names::Names;
use crate::out::Out;

#[derive(Default)]
pub(super) struct Mqsim {
    devices: Names,
}

pub(super) fn parse(line: &[u8]) -> Result<Request<'_>, Bad> {
    let [arrival, device, first, count, kind] = split(line, b' ')?;
    number(device, "device")?;
    let is_write = is_write(kind, b"1", b"0")?;
    let range = sectors(number(first, "sector")?, number(count, "number of sectors")?)?;
    Ok(Request { time_us: number(arrival, "time")? / 1000, device, range, is_write })
}

impl Reader for Mqsim {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        parse(line)?.put(&mut self.devices, out)
    }
}
