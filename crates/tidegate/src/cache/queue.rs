//! The requests of one queue, which IO classes tell apart.

use std::sync::Arc;

use super::CacheDevice;
use crate::device::{BlockDevice, Extent, Geometry, Result, WriteFlags, ZeroFlags};

/// The device for requests that came by one queue.
pub(super) struct Queue {
    pub(super) device: Arc<CacheDevice>,
    pub(super) queue: u32,
}

impl BlockDevice for Queue {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.device.core.read(self.queue, offset, buf)
    }

    fn write(&self, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        self.device.core.write(self.queue, offset, data, flags.fua)
    }

    fn flush(&self) -> Result<()> {
        self.device.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.device.core.discard(self.queue, offset, len)
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.device.core.write_zeroes(self.queue, offset, len, flags)
    }

    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        self.device.status(offset, len, most)
    }
}
