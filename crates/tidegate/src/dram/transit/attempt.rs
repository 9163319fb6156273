//! Which requests wait for nothing below, and which are for the device below alone.

use super::set::Set;
use super::write_mode::WriteMode;
use super::{Core, Operation};
use crate::device::OwnedOperation;

impl Core {
    /// Whether `operation` waits for nothing slower than memory, as far as the cache can tell now:
    /// a block may leave, and a free slot be taken, before it runs.
    pub(super) fn waits_for_nothing(&self, operation: &Operation<'_>) -> bool {
        match operation {
            _ if self.is_below_memory => true,
            Operation::Read { offset, buf } => {
                self.lbas_of(*offset, buf.len()).all(|lba| self.is_cached(lba))
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

    /// Whether `operation` is a read of blocks none of which is cached.
    pub(super) fn is_read_below(&self, operation: &OwnedOperation) -> bool {
        match operation {
            OwnedOperation::Read { offset, buffer } => {
                let len = buffer.data().len();
                self.geometry.check(*offset, len as u64).is_ok()
                    && !self.lbas_of(*offset, len).any(|lba| self.is_cached(lba))
            }
            _ => false,
        }
    }

    fn lbas_of(&self, offset: u64, len: usize) -> impl Iterator<Item = u64> {
        (self.lba_of(offset)..).take(len / self.block_bytes())
    }

    fn is_cached(&self, lba: u64) -> bool {
        let number = self.table.set_of(lba);
        // A write raises its set's flag before it is acknowledged, so nothing acknowledged is
        // missed.
        if !self.sets.occupied.get(number) {
            return false;
        }
        let _set = self.sets.lock(number);
        Set::contains(&self.table, lba)
    }
}
