//! Block requests of servers of Microsoft Research, Cambridge:
//! `filetime,host,disk,Read|Write,offset,size,response`, times in units of 100 ns.

use super::Reader;
use crate::trace::bad::Bad;
use crate::trace::fields::{number, range, split};
use crate::trace::names::Names;
use crate::trace::out::Out;

#[derive(Default)]
pub(super) struct Msr {
    disks: Names,
}

/// A line.
pub(super) struct Row<'a> {
    time_us: u64,
    /// Host and number, with the comma between them.
    disk: &'a [u8],
    range: (u64, u64),
    is_write: bool,
}

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>, Bad> {
    let [time, host, disk, kind, offset, size, response] = split(line, b',')?;
    number(disk, "disk")?;
    number(response, "response time")?;
    let is_write = match kind {
        b"Read" => false,
        b"Write" => true,
        _ => return Err(Bad::Operation),
    };
    let range = range(number(offset, "offset")?, number(size, "length")?)?;
    let start = time.len() + 1;
    let disk = &line[start..=start + host.len() + disk.len()];
    Ok(Row { time_us: number(time, "time")? / 10, disk, range, is_write })
}

impl Reader for Msr {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        let Row { time_us, disk, range: (offset, len), is_write } = parse(line)?;
        let file = self.disks.id(disk)?;
        out.at(time_us, file.0);
        if is_write { out.write(file, offset, len) } else { out.read(file, offset, len) }
    }
}
