//! Writes back, for flushes, FUA, zeroes, discards, queries of the allocation state and full sets.

use std::cell::Cell;
use std::ops::Range;

use super::super::phases::Phase;
use super::super::still_dirty;
use super::cache::{SetGuard, StagingCache};
use super::replacement::Replacement;
use super::set::FlushStep;
use crate::device::{BlockDeviceExt, DeviceError, Operation, Result, WriteFlags};
use crate::sync::Ordering;

/// Slots to write back together, and their copy for the device below.
#[derive(Default)]
pub(super) struct Batch {
    /// Slots of one set, by ascending lba without a gap.
    pub(super) run: Vec<u32>,
    data: Vec<u8>,
}

thread_local! {
    static MEMORY: Cell<(Vec<u32>, Vec<u8>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

impl Batch {
    /// Makes a batch with the memory of the calling thread's last one.
    pub(super) fn of_thread() -> Self {
        let (run, data) = MEMORY.take();
        Self { run, data }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        MEMORY.set((std::mem::take(&mut self.run), std::mem::take(&mut self.data)));
    }
}

impl<R: Replacement> StagingCache<R> {
    /// Writes the batch back for a request, and then frees slot `free` of the batch, if given.
    ///
    /// # Errors
    /// Fails with the first failure; the ledger gets all failures.
    pub(super) fn write_back(
        &self,
        set: &mut SetGuard<'_, R>,
        batch: &mut Batch,
        free: Option<u32>,
    ) -> Result<()> {
        self.write_back_by(set, batch, free, |offset, data| {
            self.below.request(|below| below.write(offset, data, WriteFlags::default()))
        })
    }

    /// Writes the batch back in the background.
    ///
    /// # Errors
    /// Fails as [`write_back`](Self::write_back) does.
    pub(super) fn write_back_in_background(
        &self,
        set: &mut SetGuard<'_, R>,
        batch: &mut Batch,
    ) -> Result<()> {
        self.write_back_by(set, batch, None, |offset, data| {
            self.below.background(|below| below.write(offset, data, WriteFlags::default()))
        })
    }

    fn write_back_by(
        &self,
        set: &mut SetGuard<'_, R>,
        batch: &mut Batch,
        free: Option<u32>,
        write: impl Fn(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (first_slot, lba) = (set.slot(0), set.set().lba(batch.run[0]));
        let failures = set.unlocked(|| self.write_run(first_slot, lba, batch, write));
        for (index, &slot) in batch.run.iter().enumerate() {
            let failure = failures.iter().find(|(failed, _)| *failed == index);
            if let Some((_, error)) = failure {
                self.ledger.record(Some(lba + index as u64), error);
            }
            set.set().written_back(slot, failure.is_none(), free == Some(slot));
        }
        set.notify();
        failures.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Writes the batch, which begins with `lba`, in one request. If that fails, writes each block
    /// alone, so that only a bad block fails. Returns the index and the error of each failed block.
    fn write_run(
        &self,
        first_slot: u32,
        lba: u64,
        batch: &mut Batch,
        write: impl Fn(u64, &[u8]) -> Result<()>,
    ) -> Vec<(usize, DeviceError)> {
        let block_bytes = self.block_bytes();
        let Batch { run, data } = batch;
        let mut write_part = |part: Range<usize>| {
            let offset = (lba + part.start as u64) * block_bytes as u64;
            if let &[slot] = &run[part.clone()] {
                return write(offset, &self.slots.lock(first_slot + slot));
            }
            data.clear();
            for slot in &run[part] {
                data.extend_from_slice(&self.slots.lock(first_slot + slot));
            }
            write(offset, data)
        };
        match write_part(0..run.len()) {
            Ok(()) => Vec::new(),
            Err(error) if run.len() == 1 => vec![(0, error)],
            Err(_) => (0..run.len())
                .filter_map(|index| Some((index, write_part(index..index + 1).err()?)))
                .collect(),
        }
    }

    /// Makes every write acknowledged before the call durable.
    ///
    /// The call ends an epoch. A write acknowledged earlier read the epoch's number before, so its
    /// slot has that number or a lower one. Slots that become dirty later have a higher one.
    pub(super) fn flush(&self) -> Result<()> {
        let mut operation = self.recorder.begin();
        operation.enter(Phase::Flush);
        let upto = self.epoch.fetch_add(1, Ordering::SeqCst);
        // Every set is drained, even after a failure.
        let drained =
            (0..self.sets()).map(|number| self.drain_set(number, upto)).fold(Ok(()), Result::and);
        let flushed = self.below.request(|below| below.flush());
        self.ledger.report().and(drained).and(flushed)
    }

    /// Writes back the blocks of set `number` of epochs up to `upto`: first retries failed blocks,
    /// then writes the rest.
    fn drain_set(&self, number: usize, upto: u64) -> Result<()> {
        let mut set = self.lock(number);
        let mut batch = Batch::of_thread();
        for lba in set.set().failed_upto(upto) {
            // The check at the end finds blocks that fail again.
            let _ = self.drain_block(&mut set, &mut batch, lba);
        }
        loop {
            match set.set().flush_step(upto, &mut batch.run) {
                FlushStep::Done => break,
                FlushStep::Wait => set.wait(),
                // The check at the end finds blocks that fail again.
                FlushStep::WriteBack => drop(self.write_back(&mut set, &mut batch, None)),
            }
        }
        let failed = set.set().failed_upto(upto);
        failed.first().map_or(Ok(()), |&lba| Err(still_dirty(&self.ledger, lba)))
    }

    /// Waits until the version of `lba` that is cached now, or a later one, is below.
    ///
    /// # Errors
    /// Fails if the write-back fails.
    fn drain_block(&self, set: &mut SetGuard<'_, R>, batch: &mut Batch, lba: u64) -> Result<()> {
        loop {
            match set.set().drain_step(lba, &mut batch.run) {
                FlushStep::Done => return Ok(()),
                FlushStep::Wait => set.wait(),
                FlushStep::WriteBack => break,
            }
        }
        // Neighbours in the batch may have failed although `lba` succeeded.
        let _ = self.write_back(set, batch, None);
        if set.set().has_failed(lba) { Err(still_dirty(&self.ledger, lba)) } else { Ok(()) }
    }

    /// Writes back the cached blocks of `lbas` in set `number`, and gives them up if `forget`.
    fn drain_cached(&self, number: usize, lbas: &Range<u64>, forget: bool) -> Result<()> {
        let mut set = self.lock(number);
        let mut batch = Batch::of_thread();
        let mut result = Ok(());
        for lba in set.set().cached_in(lbas) {
            result = result.and(self.drain_block(&mut set, &mut batch, lba));
            if forget {
                set.set().forget(lba);
            }
        }
        set.notify();
        result
    }

    /// Makes `lbas` durable, at the end of a FUA write.
    ///
    /// # Errors
    /// Fails if that fails, or if a write-back failed since the last report.
    pub(super) fn make_durable(&self, lbas: Range<u64>) -> Result<()> {
        let drain = |lba| self.drain_cached(self.set_of(lba), &(lba..lba + 1), false);
        let drained = lbas.map(drain).fold(Ok(()), Result::and);
        let flushed = self.below.request(|below| below.flush());
        self.ledger.report().and(drained).and(flushed)
    }

    /// Runs `change`, a change of blocks, on the device below, around the cache. Writes to its
    /// blocks wait meanwhile.
    pub(super) fn change_below(&self, change: &mut Operation<'_>) -> Result<()> {
        let (offset, len) = change.range();
        let mut operation = self.recorder.begin();
        operation.enter(Phase::Flush);
        let lbas = self.lba_of(offset)..self.lba_of(offset + len);
        let sets = self.sets_of(&lbas);
        for &number in &sets {
            self.lock(number).set().close(lbas.clone());
        }
        let drain = |&number: &usize| self.drain_cached(number, &lbas, true);
        let drained = sets.iter().map(drain).fold(Ok(()), Result::and);
        operation.enter(Phase::Bypass);
        let changed = drained.and_then(|()| self.below.request(|below| below.run(change)));
        for &number in &sets {
            let mut set = self.lock(number);
            set.set().open(&lbas);
            set.notify();
        }
        changed
    }

    /// Writes back the cached blocks in `len` bytes at `offset`.
    pub(super) fn drain_range(&self, offset: u64, len: u64) -> Result<()> {
        let lbas = self.lba_of(offset)..self.lba_of(offset + len);
        let drain = |number| self.drain_cached(number, &lbas, false);
        self.sets_of(&lbas).into_iter().map(drain).fold(Ok(()), Result::and)
    }

    /// Returns the sets of the blocks `lbas`.
    fn sets_of(&self, lbas: &Range<u64>) -> Vec<usize> {
        if lbas.end - lbas.start >= self.sets() as u64 {
            return (0..self.sets()).collect();
        }
        let mut sets: Vec<_> = lbas.clone().map(|lba| self.set_of(lba)).collect();
        sets.sort_unstable();
        sets.dedup();
        sets
    }
}
