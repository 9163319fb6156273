//! Calls on files by inode number, as the traces of FIU have them:
//! `seq ts_ns READ|WRITE inode inode_size offset size HIT|MISS|APPEND` and
//! `seq ts_ns OPEN|CLOSE|FSYNC|FDATASYNC inode inode_size`.

use super::Reader;
use crate::bad::Bad;
use crate::event::Op;
use crate::fields::{number, range, split};
use crate::names::Names;
use crate::out::Out;

#[derive(Default)]
pub(super) struct Fiu {
    inodes: Names,
}

/// A line.
pub(super) struct Row<'a> {
    time_us: u64,
    inode: &'a [u8],
    call: Call,
}

#[derive(Clone, Copy)]
enum Call {
    Read(u64, u64),
    Write(u64, u64),
    Sync,
    Nothing,
}

pub(super) fn parse(line: &[u8]) -> Result<Row<'_>, Bad> {
    let ([seq, time, op, inode, inode_size], request) = match split::<8>(line, b' ') {
        Ok([head @ .., offset, size, found]) => (head, Some((offset, size, found))),
        Err(_) => (split::<5>(line, b' ')?, None),
    };
    number(seq, "sequence number")?;
    number(inode, "inode")?;
    number(inode_size, "size of the inode")?;
    let call = match request {
        None => plain(op)?,
        Some((offset, size, b"HIT" | b"MISS" | b"APPEND")) => {
            let (offset, len) = range(number(offset, "offset")?, number(size, "length")?)?;
            match op {
                b"READ" => Call::Read(offset, len),
                b"WRITE" => Call::Write(offset, len),
                _ => return Err(Bad::Operation),
            }
        }
        Some(_) => return Err(Bad::Shape),
    };
    Ok(Row { time_us: number(time, "time")? / 1000, inode, call })
}

fn plain(op: &[u8]) -> Result<Call, Bad> {
    match op {
        b"OPEN" | b"CLOSE" => Ok(Call::Nothing),
        b"FSYNC" | b"FDATASYNC" => Ok(Call::Sync),
        _ => Err(Bad::Operation),
    }
}

impl Reader for Fiu {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<(), Bad> {
        let row = parse(line)?;
        out.at(row.time_us, 0);
        if matches!(row.call, Call::Nothing) {
            return Ok(());
        }
        let file = self.inodes.id(row.inode)?;
        match row.call {
            Call::Read(offset, len) => out.read(file, offset, len),
            Call::Write(offset, len) => out.write(file, offset, len),
            Call::Sync => {
                out.push(Op::Sync { file });
                Ok(())
            }
            Call::Nothing => Ok(()),
        }
    }
}
