//! The read of a request: hits from the slots, runs of misses from below. Also tells which requests
//! wait for nothing below.

use super::super::phases;
use super::super::read::read_blocks;
use super::set::{ReadStep, Set};
use super::write_mode::WriteMode;
use super::{Core, Operation, Phase, Result};
use crate::device::BlockDeviceExt;

impl Core {
    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let mut operation = self.recorder.begin();
        let hit = |operation: &mut phases::Operation<'_>, offset, block: &mut [u8]| {
            self.read_cached(operation, self.lba_of(offset), block)
        };
        let below = |offset, buf: &mut [u8]| self.below.read(offset, buf);
        read_blocks(&mut operation, (offset, buf), self.block_bytes(), hit, below)
    }

    /// Copies `lba` out of the cache. Returns whether it was cached.
    fn read_cached(
        &self,
        operation: &mut phases::Operation<'_>,
        lba: u64,
        block: &mut [u8],
    ) -> Result<bool> {
        let number = self.table.set_of(lba);
        // A write raises its set's flag before it is acknowledged, so this misses no acknowledged
        // data.
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

    /// Reports whether `operation` waits for nothing slower than memory, as far as the cache can
    /// tell now: before it runs, a block may leave, and other requests may take the free slots.
    pub(super) fn waits_for_nothing(&self, operation: &Operation<'_>) -> bool {
        match operation {
            _ if self.is_below_memory => true,
            Operation::Read { offset, buf } => {
                let mut lbas = (self.lba_of(*offset)..).take(buf.len() / self.block_bytes());
                lbas.all(|lba| self.is_cached(lba))
            }
            Operation::Write { data, flags, .. } => {
                let blocks = data.len() / self.block_bytes();
                !flags.fua
                    && self.mode_switch.mode() == WriteMode::Cached
                    && self.free.count() as usize > blocks
            }
            _ => false,
        }
    }

    pub(super) fn is_cached(&self, lba: u64) -> bool {
        let number = self.table.set_of(lba);
        // A write raises its set's flag before it is acknowledged, so this misses no acknowledged
        // data.
        if !self.sets.occupied.get(number) {
            return false;
        }
        let _set = self.sets.lock(number);
        Set::contains(&self.table, lba)
    }
}
