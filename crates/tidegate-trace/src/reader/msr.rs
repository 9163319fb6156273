//! Block requests of servers of Microsoft Research, Cambridge:
//! `filetime,host,disk,Read|Write,offset,size,response`, times in units of 100 ns.

use super::Reader;
use super::block::{Request, is_write};
use crate::bad::Bad;
use crate::fields::{number, range, split};
use crate::names::Names;
use crate::out::Out;

#[derive(Default)]
pub(super) struct Msr {
    disks: Names,
}

pub(super) fn parse(line: &[u8]) -> Result<Request<'_>, Bad> {
    let [time, host, disk, kind, offset, size, response] = split(line, b',')?;
    number(disk, "disk")?;
    number(response, "response time")?;
    let is_write = is_write(kind, b"Read", b"Write")?;
    let range = range(number(offset, "offset")?, number(size, "length")?)?;
    // Host and number, with the comma between them.
    let start = time.len() + 1;
    let device = &line[start..=start + host.len() + disk.len()];
    Ok(Request { time_us: number(time, "time")? / 10, device, range, is_write })
}

impl Reader for Msr {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        parse(line)?.put(&mut self.disks, out)
    }
}
