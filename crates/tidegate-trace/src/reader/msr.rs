//! Block requests of servers of Microsoft Research, Cambridge:
//! `filetime,host,disk,Read|Write,offset,size,response`, times in units of 100 ns.

use super::calls::{Row, way};
use crate::bad::Result;
use crate::fields::{number, range, split};

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>> {
    let [time, host, disk, kind, offset, size, response] = split(line, b',')?;
    number(disk, "disk")?;
    number(response, "response time")?;
    let way = way(kind, b"Read", b"Write")?;
    let range = range(number(offset, "offset")?, number(size, "length")?)?;
    // Host and disk number, with the comma between them.
    let start = time.len() + 1;
    let device = &line[start..=start + host.len() + disk.len()];
    Ok(Row::request(number(time, "time")? / 10, device, way, range))
}
