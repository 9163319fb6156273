//! The source of the bytes of extents: the pool.

use std::io;

use crate::log::LogPool;

/// The data that a plan's extents refer to.
pub trait LogData: Sync {
    /// Copies `buf.len()` bytes from `position` of the log.
    ///
    /// # Errors
    /// The memory failed.
    fn read(&self, position: u64, buf: &mut [u8]) -> io::Result<()>;
}

impl LogData for LogPool {
    fn read(&self, position: u64, buf: &mut [u8]) -> io::Result<()> {
        self.region().read(self.region_offset(position), buf).map_err(io::Error::other)
    }
}
