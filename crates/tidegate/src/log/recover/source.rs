//! Where a plan's records and data come from: the pool.

use std::io;

use super::plan::{Plan, Planner};
use crate::log::layout::PATH_BYTES_MAX;
use crate::log::{Header, LogError, LogPool, Scanner};
use crate::pmem::PmemError;

/// The longest payload that has to be read for a plan: two paths and what is before them.
const PLANNED_BYTES_MAX: usize = 2 * PATH_BYTES_MAX + 64;

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

/// The plan of all records in a pool; also how many bytes of the log could not be read.
///
/// # Errors
/// [`LogError::Pmem`].
pub fn plan_pool(pool: &LogPool) -> Result<(Plan, u64), LogError> {
    let mut planner = Planner::new();
    let mut scanner = Scanner::new(pool, pool.tail()?, pool.limit()?);
    let mut payload = Vec::with_capacity(PLANNED_BYTES_MAX);
    let mut failed_bytes = 0;
    for header in &mut scanner {
        payload.clear();
        if Planner::needs_payload(header.kind) && read_payload(pool, &header, &mut payload).is_err()
        {
            // It could be read when the record was found whole.
            failed_bytes += header.record_bytes();
            continue;
        }
        planner.add(&header, &payload);
    }
    Ok((planner.finish(), scanner.unreadable_bytes() + failed_bytes))
}

/// What is too long makes no sense: it stays empty, and is then ignored as such.
fn read_payload(pool: &LogPool, header: &Header, payload: &mut Vec<u8>) -> Result<(), PmemError> {
    let len = usize::try_from(header.payload_bytes).unwrap_or(usize::MAX);
    if len <= PLANNED_BYTES_MAX {
        payload.resize(len, 0);
        pool.read_payload(header, 0, payload)?;
    }
    Ok(())
}
