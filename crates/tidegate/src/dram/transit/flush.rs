//! Draining: blocks written before a moment are written back; later writes are not waited for.

use std::sync::atomic::Ordering;

use super::super::still_dirty;
use super::evict::Scratch;
use super::set::FlushStep;
use super::{Core, Phase, Result};

/// Blocks that a flush writes back before it looks at the set again.
const BATCH_BLOCKS: usize = 64;
/// Most dirty slots that a flush writes back without the help of evictors.
const FLUSH_ALONE_SLOTS: u32 = 64;

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
}
