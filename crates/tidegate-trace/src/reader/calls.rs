//! The calls of all formats but strace's, and their events.

use super::Reader;
use crate::bad::{Bad, Result};
use crate::descriptors::{Descriptors, Open, Opening};
use crate::event::Op;
use crate::names::Names;
use crate::out::{Out, Way};

/// Parses the fields of a line, without state.
pub(super) type Parse = fn(&[u8]) -> Result<Row<'_>>;

/// A parsed line.
pub(super) struct Row<'a> {
    pub(super) time_us: u64,
    pub(super) stream: Stream<'a>,
    pub(super) call: Call<'a>,
}

impl<'a> Row<'a> {
    /// A line without a call.
    pub(super) const HEADER: Self =
        Self { time_us: 0, stream: Stream::Number(0), call: Call::Nothing };

    /// Returns a request of a block device; `range` is in bytes.
    pub(super) fn request(time_us: u64, device: &'a [u8], way: Way, range: (u64, u64)) -> Self {
        Self { time_us, stream: Stream::Device(device), call: Call::Access(way, device, range) }
    }
}

/// Returns the direction that `kind` stands for, given the format's words for read and write.
pub(super) fn way(kind: &[u8], read: &[u8], write: &[u8]) -> Result<Way> {
    match kind {
        _ if kind == read => Ok(Way::Read),
        _ if kind == write => Ok(Way::Write),
        _ => Err(Bad::Operation),
    }
}

/// The stream of a call.
pub(super) enum Stream<'a> {
    /// A thread or a process.
    Number(u32),
    /// A process that the trace identifies by name.
    Process(&'a [u8]),
    /// A device, if the trace shows no process.
    Device(&'a [u8]),
}

/// A call on a file or a device by its name, or on a descriptor by its number.
pub(super) enum Call<'a> {
    /// The call failed, or reads and changes no data.
    Nothing,
    /// Offset and length in bytes.
    Access(Way, &'a [u8], (u64, u64)),
    Sync(&'a [u8]),
    SyncAll,
    Resize(&'a [u8], u64),
    Rename(&'a [u8], &'a [u8]),
    Unlink(&'a [u8]),
    RemoveTree(&'a [u8]),
    Open {
        path: &'a [u8],
        opening: Opening,
        descriptor: i64,
        /// The opening is assumed: it has no effect if the trace shows the real opening.
        is_assumed: bool,
    },
    /// Opens a descriptor that is not storage.
    OpenOther(i64),
    Close(i64),
    Transfer {
        way: Way,
        descriptor: i64,
        offset: Option<u64>,
        len: u64,
    },
    SyncDescriptor(i64),
}

/// Reads lines that `parse` understands. All processes share the descriptors.
pub(super) struct Calls {
    parse: Parse,
    descriptors: Descriptors,
    processes: Names,
}

impl Calls {
    /// Returns a reader of lines; `separator` separates the names of directories in a path.
    pub(super) fn new(parse: Parse, separator: u8) -> Self {
        Self { parse, descriptors: Descriptors::new(separator), processes: Names::default() }
    }
}

impl Reader for Calls {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<()> {
        let Row { time_us, stream, call } = (self.parse)(line)?;
        let descriptors = &mut self.descriptors;
        let stream = match stream {
            Stream::Number(number) => number,
            Stream::Process(name) => self.processes.id(name)?.0,
            Stream::Device(name) => descriptors.files.named(name)?.0,
        };
        out.at(time_us, stream);
        match call {
            Call::Nothing => {}
            Call::Access(way, name, (offset, len)) => {
                out.transfer(way, descriptors.files.named(name)?, offset, len)?;
            }
            Call::Sync(name) => out.push(Op::Sync { file: descriptors.files.named(name)? }),
            Call::SyncAll => out.push(Op::SyncAll),
            Call::Resize(name, len) => {
                let file = descriptors.files.named(name)?;
                descriptors.files.resize(file, len, out)?;
            }
            Call::Rename(from, to) => descriptors.files.rename(from, to, out)?,
            Call::Unlink(name) => descriptors.files.unlink(name, out),
            Call::RemoveTree(name) => descriptors.files.remove_tree(name, out),
            Call::Open { descriptor, is_assumed: true, .. }
                if descriptors.get((0, descriptor)).is_ok() => {}
            Call::Open { path, opening, descriptor, .. } => {
                let open = descriptors.open_named(path, opening, out)?;
                descriptors.open((0, descriptor), open, false, out)?;
            }
            Call::OpenOther(descriptor) => {
                descriptors.open((0, descriptor), Open::default(), false, out)?;
            }
            Call::Close(descriptor) => descriptors.close((0, descriptor), out),
            Call::Transfer { way, descriptor, offset, len } => {
                descriptors.transfer((0, descriptor), way, offset, len, out)?;
            }
            Call::SyncDescriptor(descriptor) => descriptors.sync((0, descriptor), out)?,
        }
        Ok(())
    }
}
