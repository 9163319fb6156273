//! Which requests wait for nothing below, and which blocks are cached.

use super::set::Set;
use super::write_mode::WriteMode;
use super::{Core, Operation};

impl Core {
    /// Whether `operation` waits for nothing slower than memory, as far as the cache can tell now:
    /// a block may leave, and a free slot be taken, before it runs.
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
        // A write raises its set's flag before it is acknowledged, so nothing acknowledged is
        // missed.
        if !self.sets.occupied.get(number) {
            return false;
        }
        let _set = self.sets.lock(number);
        Set::contains(&self.table, lba)
    }
}
