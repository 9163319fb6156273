//! Where the bytes of extents come from: the pool.

use std::io;

use crate::log::LogPool;

/// The data that a plan's extents point to.
pub trait LogData: Sync {
    /// Copies `buf.len()` bytes from `position` of the log on.
    ///
    /// # Errors
    /// The memory failed there.
    fn read(&self, position: u64, buf: &mut [u8]) -> io::Result<()>;
}

impl LogData for LogPool {
    fn read(&self, position: u64, buf: &mut [u8]) -> io::Result<()> {
        self.region().read(self.region_offset(position), buf).map_err(io::Error::other)
    }
}
