//! Requests of block devices, in `MQSim`'s format: `arrival_ns device start_sector sectors type`.
//! The type is 0 for a write and 1 for a read.

use super::calls::{Row, way};
use crate::bad::Result;
use crate::fields::{number, sectors, split};

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>> {
    let [arrival, device, first, count, kind] = split(line, b' ')?;
    number(device, "device")?;
    let way = way(kind, b"1", b"0")?;
    let range = sectors(number(first, "sector")?, number(count, "number of sectors")?)?;
    Ok(Row::request(number(arrival, "time")? / 1000, device, way, range))
}
