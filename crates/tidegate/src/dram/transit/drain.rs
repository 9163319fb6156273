//! Writing back, for evictors, flushes and writes that need a slot; and draining: blocks written
//! before a moment are written back, and later writes are not waited for.

use std::sync::atomic::Ordering;

use super::super::still_dirty;
use super::set::FlushStep;
use super::sets::SetGuard;
use super::{Core, Phase, Policy, Result, WriteFlags};
use crate::device::{BlockDeviceExt, DeviceError};
use crate::tier::clock::now_ns;

/// Blocks that a flush writes back before it looks at the set again.
const BATCH_BLOCKS: usize = 64;
/// Most dirty slots that a flush writes back without the help of evictors.
const FLUSH_ALONE_SLOTS: u32 = 64;

/// Memory of write-backs, kept between runs.
#[derive(Default)]
pub(super) struct Scratch {
    /// The slots that are being written back, by ascending lba.
    run: Vec<u32>,
    /// Those that failed.
    failed: Vec<(u32, DeviceError)>,
    /// Their data, where they are several.
    data: Vec<u8>,
}

/// What [`Core::evict_queued`] did.
#[derive(Default)]
pub(super) struct Evicted {
    /// Write-backs that failed.
    pub(super) failures: u64,
    /// The last of them.
    pub(super) error: Option<DeviceError>,
}

impl Core {
    /// Everything acknowledged before the call is durable when it returns.
    ///
    /// The call ends an epoch. A write acknowledged earlier read the epoch's number before it
    /// ended, so its slot has that number or a lower one; no write that begins later has. A slot
    /// that is written again keeps the epoch of its oldest write until it is written back, and
    /// while the flush is in its set it is not written again at all: the newer version goes beside
    /// it. So the work of a flush never grows.
    pub(super) fn flush(&self) -> Result<()> {
        let mut operation = self.recorder.begin();
        operation.enter(Phase::Flush);
        // It works as a writer does: evictors leave it a CPU.
        let _busy = self.busy.enter();
        let upto = self.end_epoch();
        if self.used_slots() > FLUSH_ALONE_SLOTS {
            self.waker.wake_all();
        }
        let drained = self.drain_sets(0..self.sets.count(), upto);
        let flushed = self.below.flush();
        self.ledger.report().and(drained).and(flushed)
    }

    /// Writes back the cached blocks of `len` bytes at `offset`, whole sets at a time.
    ///
    /// # Errors
    /// Some of them could not be written back.
    pub(super) fn drain_range(&self, offset: u64, len: u64) -> Result<()> {
        let lbas = self.lba_of(offset)..self.lba_of(offset + len);
        let upto = self.end_epoch();
        if lbas.end - lbas.start > self.sets.count() as u64 {
            return self.drain_sets(0..self.sets.count(), upto);
        }
        let is_cached = |lba: &u64| self.is_cached(*lba);
        let cached = || lbas.clone().filter(is_cached).map(|lba| self.table.set_of(lba));
        // A set may hold other blocks that fail; those are no concern of this range.
        self.drain_sets(cached(), upto).or_else(|error| match cached().next() {
            Some(_) => Err(error),
            None => Ok(()),
        })
    }

    /// Drains each of the sets that hold anything, also after a failure.
    ///
    /// # Errors
    /// The first failure.
    pub(super) fn drain_sets(&self, numbers: impl Iterator<Item = usize>, upto: u64) -> Result<()> {
        let mut scratch = Scratch::default();
        numbers
            .filter(|&number| self.sets.occupied.get(number))
            .map(|number| self.drain_set(number, upto, &mut scratch))
            .fold(Ok(()), Result::and)
    }

    /// Ends the present epoch: the number of every write acknowledged so far is at most this.
    pub(super) fn end_epoch(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::SeqCst)
    }

    /// Writes back what set `number` holds of epochs up to `upto`, helping the evictors.
    ///
    /// # Errors
    /// Some of it failed.
    fn drain_set(&self, number: usize, upto: u64, scratch: &mut Scratch) -> Result<()> {
        let mut set = self.sets.lock(number);
        set.set().begin_flush(&self.table, upto);
        // Each slot may fail once. Other writes that succeed queue failed slots again, which must
        // not keep the flush busy for ever.
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

    /// Writes blocks of set `number` back whose epoch is at most `upto`, until none is queued or
    /// `most` were tried.
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

    /// Writes the slots of `run`, whose lbas are neighbours, in one request where there are
    /// several. Where that fails, each is tried alone, so that one bad block fails alone.
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

    /// Tells the state machine what became of `run`, gives free slots back and wakes the threads
    /// that wait for either.
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
