//! The read of a request, block by block: hits from the cache, runs of misses from below.

use super::Result;
use super::phases::{Operation, Phase};

/// Reads `buf`, which begins at `offset`. `hit` copies a cached block out of the cache and returns
/// whether it was cached; `below` reads from the device below.
pub(super) fn read_blocks(
    operation: &mut Operation<'_>,
    (offset, buf): (u64, &mut [u8]),
    block_bytes: usize,
    hit: impl Fn(&mut Operation<'_>, u64, &mut [u8]) -> Result<bool>,
    below: impl Fn(u64, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let read_missed = |operation: &mut Operation<'_>, start: usize, missed: &mut [u8]| {
        if missed.is_empty() {
            return Ok(());
        }
        operation.enter(Phase::ReadMiss);
        below(offset + start as u64, missed)
    };
    // Start of the current run of misses.
    let mut missed = 0;
    for at in (0..buf.len()).step_by(block_bytes) {
        let end = at + block_bytes;
        if hit(operation, offset + at as u64, &mut buf[at..end])? {
            read_missed(operation, missed, &mut buf[missed..at])?;
            missed = end;
        }
    }
    read_missed(operation, missed, &mut buf[missed..])
}
