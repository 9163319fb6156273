//! Writes back, for evictors, flushes and writes that need a slot; and drains: it writes back
//! blocks written before a moment, without waiting for later writes.

use std::sync::atomic::Ordering;

use super::super::still_dirty;
use super::set::FlushStep;
use super::sets::SetGuard;
use super::{Core, Phase, Policy, Result, WriteFlags};
use crate::device::{BlockDeviceExt, DeviceError};
use crate::tier::clock::now_ns;

/// Blocks that a flush writes back before it checks the set again.
const BATCH_BLOCKS: usize = 64;
/// Most dirty slots that a flush writes back without the help of evictors.
const FLUSH_ALONE_SLOTS: u32 = 64;

/// Memory of write-backs, kept between runs.
#[derive(Default)]
pub(super) struct Scratch {
    /// The slots under write-back, by ascending lba.
    run: Vec<u32>,
    /// The slots that failed.
    failed: Vec<(u32, DeviceError)>,
    /// The data of a run of several slots.
    data: Vec<u8>,
}

/// The result of [`Core::evict_queued`].
#[derive(Default)]
pub(super) struct Evicted {
    /// Write-backs that failed.
    pub(super) failures: u64,
    /// The last failure.
    pub(super) error: Option<DeviceError>,
}

impl Core {
    /// Makes every write acknowledged before the call durable.
    ///
    /// The call ends an epoch. A write acknowledged earlier read the epoch's number before the end,
    /// so its slot has that number or a lower one; writes that begin later have a higher one. A
    /// slot that is written again keeps the epoch of its oldest write until it is written back.
    /// While the flush is in its set, it is not written again at all: a newer version gets another
    /// slot. So the work of a flush never grows.
    pub(super) fn flush(&self) -> Result<()> {
        let mut operation = self.recorder.begin();
        operation.enter(Phase::Flush);
        // The flush counts as a writer, so that evictors leave it a CPU.
        let _busy = self.busy.enter();
        let upto = self.end_epoch();
        if self.used_slots() > FLUSH_ALONE_SLOTS {
            self.waker.wake_all();
        }
        let drained = self.drain_sets(0..self.sets.count(), upto);
        let flushed = self.below.flush();
        self.ledger.report().and(drained).and(flushed)
    }

    /// Writes back the cached blocks in `len` bytes at `offset`, whole sets at a time.
    ///
    /// # Errors
    /// Fails if some blocks of the range could not be written back.
    pub(super) fn drain_range(&self, offset: u64, len: u64) -> Result<()> {
        let lbas = self.lba_of(offset)..self.lba_of(offset + len);
        let upto = self.end_epoch();
        if lbas.end - lbas.start > self.sets.count() as u64 {
            return self.drain_sets(0..self.sets.count(), upto);
        }
        let is_cached = |lba: &u64| self.is_cached(*lba);
        let cached = || lbas.clone().filter(is_cached).map(|lba| self.table.set_of(lba));
        // A set may hold other blocks that fail, which do not concern this range.
        self.drain_sets(cached(), upto).or_else(|error| match cached().next() {
            Some(_) => Err(error),
            None => Ok(()),
        })
    }

    /// Drains each set that holds any block, even after a failure.
    ///
    /// # Errors
    /// Fails with the first failure.
    pub(super) fn drain_sets(&self, numbers: impl Iterator<Item = usize>, upto: u64) -> Result<()> {
        let mut scratch = Scratch::default();
        numbers
            .filter(|&number| self.sets.occupied.get(number))
            .map(|number| self.drain_set(number, upto, &mut scratch))
            .fold(Ok(()), Result::and)
    }

    /// Ends the current epoch. Returns its number, which no write acknowledged so far exceeds.
    pub(super) fn end_epoch(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::SeqCst)
    }

    /// Writes back the blocks of set `number` of epochs up to `upto`, beside the evictors.
    ///
    /// # Errors
    /// Fails if some blocks failed.
    fn drain_set(&self, number: usize, upto: u64, scratch: &mut Scratch) -> Result<()> {
        let mut set = self.sets.lock(number);
        set.set().begin_flush(&self.table, upto);
        // Each slot may fail once. Successes of other writes queue failed slots again, which must
        // not keep the flush busy forever.
        let mut failures_left = set.set().counts(&self.table).0;
        let stuck = loop {
            match set.set().flush_step(&self.table, upto) {
                FlushStep::Done => break None,
                FlushStep::Failed(lba) => break Some(lba),
                FlushStep::Wait => set.wait(),
                FlushStep::Evict(lba) if failures_left == 0 => break Some(lba),
                FlushStep::Evict(_) => {
                    drop(set);
                    let failures = self.evict_queued(number, upto, BATCH_BLOCKS, scratch).failures;
                    failures_left = failures_left.saturating_sub(failures);
                    set = self.sets.lock(number);
                }
            }
        };
        set.set().end_flush();
        set.notify();
        stuck.map_or(Ok(()), |lba| Err(still_dirty(&self.ledger, lba)))
    }

    /// Writes back blocks of set `number` of epochs up to `upto`, until none is queued or `most`
    /// were tried.
    pub(super) fn evict_queued(
        &self,
        number: usize,
        upto: u64,
        most: usize,
        scratch: &mut Scratch,
    ) -> Evicted {
        let Scratch { run, failed, data } = scratch;
        let (mut evicted, mut blocks) = (Evicted::default(), 0);
        let mut set = self.sets.lock(number);
        while blocks < most && set.set().take_for_eviction(&self.table, upto, run) {
            drop(set);
            self.write_back(run, failed, data);
            set = self.sets.lock(number);
            blocks += run.len();
            evicted.failures += failed.len() as u64;
            self.finish(&mut set, run, failed);
            evicted.error = failed.drain(..).next().map(|(_, error)| error).or(evicted.error);
        }
        evicted
    }

    /// Writes the slots of `run`, whose lbas are neighbours, in one request. If a request for
    /// several slots fails, writes each slot alone, so that only a bad block fails.
    fn write_back(&self, run: &[u32], failed: &mut Vec<(u32, DeviceError)>, data: &mut Vec<u8>) {
        match self.write_run(run, data) {
            Ok(()) => {}
            Err(error) if run.len() == 1 => failed.push((run[0], error)),
            Err(_) => run.iter().for_each(|&slot| self.write_back(&[slot], failed, data)),
        }
    }

    fn write_run(&self, run: &[u32], data: &mut Vec<u8>) -> Result<()> {
        let _operation = self.recorder.begin_single(Phase::Eviction);
        let measured_from_ns = self.draw().then(now_ns);
        let offset = self.table.lba(run[0]) * self.block_bytes() as u64;
        if let &[slot] = run {
            self.below.write(offset, &self.slots.lock(slot), WriteFlags::default())?;
        } else {
            data.clear();
            for &slot in run {
                data.extend_from_slice(&self.slots.lock(slot));
            }
            self.below.write(offset, data, WriteFlags::default())?;
        }
        if let Some(from_ns) = measured_from_ns {
            self.costs.sample_eviction(now_ns().saturating_sub(from_ns) / run.len() as u64);
        }
        Ok(())
    }

    /// Reports the results of `run` to the state machine, frees slots, and wakes the threads that
    /// wait for either.
    fn finish(&self, set: &mut SetGuard<'_>, run: &[u32], failed: &[(u32, DeviceError)]) {
        for &slot in run {
            let error = failed.iter().find(|(number, _)| *number == slot);
            if let Some((_, error)) = error {
                self.ledger.record(Some(self.table.lba(slot)), error);
            }
            if let Some(free) = set.set().evicted(&self.table, slot, error.is_none()) {
                self.free.give(free);
            }
        }
        set.notify();
        if self.policy == Policy::TransitNoBypass {
            self.progress.signal();
        }
    }
}
