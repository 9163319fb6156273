//! What the formats of block devices have in common: a line is a request.

use crate::bad::Bad;
use crate::event::FileId;
use crate::names::Names;
use crate::out::Out;

/// A line.
pub(super) struct Request<'a> {
    pub(super) time_us: u64,
    pub(super) device: &'a [u8],
    /// Offset and length in bytes.
    pub(super) range: (u64, u64),
    pub(super) is_write: bool,
}

impl Request<'_> {
    /// The event of a request of which no more is known than its device.
    pub(super) fn put(&self, devices: &mut Names, out: &mut Out) -> Result<(), Bad> {
        let device = devices.id(self.device)?;
        self.put_of(device.0, device, out)
    }

    /// The event of a request of `stream`.
    pub(super) fn put_of(&self, stream: u32, device: FileId, out: &mut Out) -> Result<(), Bad> {
        let (offset, len) = self.range;
        out.at(self.time_us, stream);
        if self.is_write { out.write(device, offset, len) } else { out.read(device, offset, len) }
    }
}

/// Whether `kind` is the format's word for a write; it has one for a read, and no others.
pub(super) fn is_write(kind: &[u8], read: &[u8], write: &[u8]) -> Result<bool, Bad> {
    if kind == write || kind == read { Ok(kind == write) } else { Err(Bad::Operation) }
}
