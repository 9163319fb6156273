//! A request that was routed when it was started, and runs on a thread of the pool.

use std::sync::Arc;

use super::CacheDevice;
use super::router::Route;
use crate::device::{BlockDevice, Extent, Geometry, Result, WriteFlags, ZeroFlags};

/// The device for one request; `route` has the request's bytes.
pub(super) struct Routed {
    pub(super) device: Arc<CacheDevice>,
    pub(super) route: Route,
}

impl BlockDevice for Routed {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn read(&self, _offset: u64, buf: &mut [u8]) -> Result<()> {
        self.device.core.read(&self.route, buf)
    }

    fn write(&self, _offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        self.device.core.write(&self.route, data, flags.fua)
    }

    fn flush(&self) -> Result<()> {
        self.device.flush()
    }

    fn discard(&self, _offset: u64, _len: u64) -> Result<()> {
        self.device.core.discard(&self.route)
    }

    fn write_zeroes(&self, _offset: u64, _len: u64, flags: ZeroFlags) -> Result<()> {
        self.device.core.write_zeroes(&self.route, flags)
    }

    fn status(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>> {
        self.device.status(offset, len, most)
    }
}
