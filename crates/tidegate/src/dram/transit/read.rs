//! The read of a request: hits from the slots, runs of misses from below.

use super::super::phases::Operation;
use super::set::{ReadStep, Set};
use super::{Core, Phase, Result};

impl Core {
    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.geometry.check(offset, buf.len() as u64)?;
        let mut operation = self.recorder.begin();
        let (first, block_bytes) = (self.lba_of(offset), self.block_bytes());
        // Where the present run of misses starts.
        let mut missed = 0;
        for index in 0..buf.len() / block_bytes {
            let at = index * block_bytes;
            let block = &mut buf[at..at + block_bytes];
            if self.read_cached(&mut operation, first + index as u64, block)? {
                self.read_below(&mut operation, offset, &mut buf[..at], missed)?;
                missed = at + block_bytes;
            }
        }
        self.read_below(&mut operation, offset, buf, missed)
    }

    /// Copies `lba` out of the cache. False where it is not there.
    fn read_cached(
        &self,
        operation: &mut Operation<'_>,
        lba: u64,
        block: &mut [u8],
    ) -> Result<bool> {
        let number = self.table.set_of(lba);
        // A write raises its set's flag before it is acknowledged, so nothing acknowledged is
        // missed.
        if !self.sets.occupied.get(number) {
            return Ok(false);
        }
        operation.enter(Phase::Metadata);
        let mut set = self.sets.lock(number);
        loop {
            match Set::read(&self.table, lba) {
                ReadStep::Miss => return Ok(false),
                ReadStep::Wait => set.wait(),
                ReadStep::Hit(slot) => {
                    // Locked before the set is unlocked: a write that reuses the slot waits for
                    // this copy.
                    let slot = self.slots.lock(slot);
                    drop(set);
                    operation.enter(Phase::ReadHit);
                    block.copy_from_slice(&slot);
                    return Ok(true);
                }
            }
        }
    }

    /// Reads the bytes of `buf` from `start` on from below.
    fn read_below(
        &self,
        operation: &mut Operation<'_>,
        offset: u64,
        buf: &mut [u8],
        start: usize,
    ) -> Result<()> {
        if start == buf.len() {
            return Ok(());
        }
        operation.enter(Phase::ReadMiss);
        self.below.read(offset + start as u64, &mut buf[start..])
    }
}
