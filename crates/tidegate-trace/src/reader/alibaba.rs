//! Block requests of virtual disks of Alibaba Cloud: `device_id,opcode,offset,length,timestamp_us`.

use super::calls::{Row, way};
use crate::bad::Result;
use crate::fields::{number, range, split};

const HEADER: &[u8] = b"device_id,opcode,offset,length,timestamp";

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>> {
    if line == HEADER || line.strip_suffix(b"_us") == Some(HEADER) {
        return Ok(Row::HEADER);
    }
    let [device, kind, offset, len, time] = split(line, b',')?;
    number(device, "device")?;
    let way = way(kind, b"R", b"W")?;
    let range = range(number(offset, "offset")?, number(len, "length")?)?;
    Ok(Row::request(number(time, "time")?, device, way, range))
}
