//! Reads and writes, block by block.

use super::super::phases::{Operation, Phase};
use super::super::read::read_blocks;
use super::cache::{SetGuard, StagingCache};
use super::drain::Batch;
use super::replacement::Replacement;
use super::set::{ReadStep, Victim, WriteStep};
use crate::device::{self, BlockDeviceExt, Result, WriteFlags};
use crate::sync::Ordering;

impl<R: Replacement> StagingCache<R> {
    pub(super) fn write(&self, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        let mut operation = self.recorder.begin();
        let first = self.lba_of(offset);
        for (lba, block) in (first..).zip(data.chunks_exact(self.block_bytes())) {
            self.write_block(&mut operation, lba, block)?;
        }
        if flags.fua {
            operation.enter(Phase::Flush);
            return self.make_durable(first..self.lba_of(offset + data.len() as u64));
        }
        Ok(())
    }

    /// Reports whether `operation` waits for nothing slower than memory, as far as the sets can
    /// tell now: another request may take a slot before it runs.
    pub(super) fn waits_for_nothing(&self, operation: &device::Operation<'_>) -> bool {
        let lbas = |offset, len: usize| (self.lba_of(offset)..).take(len / self.block_bytes());
        match operation {
            _ if self.below.is_memory => true,
            device::Operation::Read { offset, buf } => {
                lbas(*offset, buf.len()).all(|lba| self.is_cached(lba))
            }
            device::Operation::Write { offset, data, flags } => {
                !flags.fua
                    && lbas(*offset, data.len())
                        .all(|lba| self.lock(self.set_of(lba)).set().has_slot_for(lba))
            }
            _ => false,
        }
    }

    fn write_block(&self, operation: &mut Operation<'_>, lba: u64, block: &[u8]) -> Result<()> {
        operation.enter(Phase::Metadata);
        let number = self.set_of(lba);
        let mut set = self.lock(number);
        let slot = self.slot_for(operation, &mut set, lba)?;
        let buffer = set.slot(slot);
        drop(set);
        operation.enter(Phase::CacheWrite);
        self.slots.copy_in(buffer, block);
        operation.enter(Phase::Metadata);
        let mut set = self.lock(number);
        set.set().filled(slot);
        set.notify();
        Ok(())
    }

    /// Waits for a slot for `lba` and returns it.
    fn slot_for(
        &self,
        operation: &mut Operation<'_>,
        set: &mut SetGuard<'_, R>,
        lba: u64,
    ) -> Result<u32> {
        let mut is_stalled = false;
        loop {
            // Read under the lock of the set, so that a set's epochs never decrease.
            let epoch = self.epoch.load(Ordering::SeqCst);
            let step = set.set().write(lba, epoch);
            if let WriteStep::Fill(slot) = step {
                return Ok(slot);
            }
            if !std::mem::replace(&mut is_stalled, true) {
                operation.enter(Phase::StalledWrite);
            }
            if step == WriteStep::Wait {
                set.wait();
            } else {
                self.reclaim(set)?;
            }
        }
    }

    /// Writes back as many blocks as the policy says, or waits while another thread does.
    ///
    /// # Errors
    /// Fails if all remaining candidates have failed before, and the one tried now fails again.
    fn reclaim(&self, set: &mut SetGuard<'_, R>) -> Result<()> {
        let quota = set.set().begin_reclaim();
        if quota == 0 {
            set.wait();
            return Ok(());
        }
        let mut batch = Batch::of_thread();
        let (mut tried, mut result) = (0, Ok(()));
        while tried < quota && result.is_ok() {
            let victim = set.set().take_victim(&mut batch.run);
            tried += u32::try_from(batch.run.len()).unwrap_or(u32::MAX);
            match victim {
                Victim::None => break,
                // The ledger has the failure, and other blocks are left.
                Victim::Of(slot) => drop(self.write_back(set, &mut batch, Some(slot))),
                Victim::Retry(slot) => result = self.write_back(set, &mut batch, Some(slot)),
            }
        }
        set.set().end_reclaim();
        set.notify();
        result
    }

    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let mut operation = self.recorder.begin();
        let hit = |operation: &mut Operation<'_>, offset, block: &mut [u8]| {
            self.read_hit(operation, offset, block)
        };
        let below = |offset, buf: &mut [u8]| self.below.request(|below| below.read(offset, buf));
        read_blocks(&mut operation, (offset, buf), self.block_bytes(), hit, below)
    }

    /// Copies one block out of the cache. Returns whether it was cached.
    fn read_hit(
        &self,
        operation: &mut Operation<'_>,
        offset: u64,
        block: &mut [u8],
    ) -> Result<bool> {
        operation.enter(Phase::Metadata);
        let lba = self.lba_of(offset);
        let mut set = self.lock(self.set_of(lba));
        loop {
            match set.set().read(lba) {
                ReadStep::Miss => return Ok(false),
                ReadStep::Wait => set.wait(),
                ReadStep::Hit(slot) => {
                    // No thread holds the slot for writing, so this does not wait under the lock of
                    // the set.
                    let slot = self.slots.lock(set.slot(slot));
                    drop(set);
                    operation.enter(Phase::ReadHit);
                    block.copy_from_slice(&slot);
                    return Ok(true);
                }
            }
        }
    }
}
