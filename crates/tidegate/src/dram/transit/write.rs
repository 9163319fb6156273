//! The write of a request: cache or bypass, block by block.

use std::sync::atomic::Ordering;

use super::super::phases::Operation;
use super::closing::Closed;
use super::drain::Scratch;
use super::in_flight::Entered;
use super::set::WriteStep;
use super::sets::SetGuard;
use super::write_mode::WriteMode;
use super::{Core, Phase, Policy, Result, WriteFlags};
use crate::device::{BlockDeviceExt, DeviceError};
use crate::tier::clock::now_ns;

/// Most blocks that are closed at once for zeroes, discards and FUA writes.
const PIECE_BLOCKS: u64 = 4096;

/// The destination of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placed {
    Cached,
    Bypass,
}

impl Core {
    pub(super) fn write(&self, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        let first = self.lba_of(offset);
        if let Some(entered) = self.enter_bypass(first, data.len() / self.block_bytes()) {
            return self.write_below(entered, offset, data, flags);
        }
        if flags.fua {
            return self.write_through(offset, data, flags);
        }
        let _busy = self.busy.enter();
        let mut operation = self.recorder.begin();
        // Neighbouring blocks that bypass the cache together; closed meanwhile.
        let mut bypassing = Closed::none_from(self, first);
        for (lba, block) in (first..).zip(data.chunks_exact(self.block_bytes())) {
            if self.place(&mut operation, lba, block)? == Placed::Cached {
                continue;
            }
            // The block is closed. It joins `bypassing`, which opens it, before anything can fail.
            let begins_anew = bypassing.lbas().end != lba;
            let done = begins_anew
                .then(|| std::mem::replace(&mut bypassing, Closed::none_from(self, lba)));
            bypassing.extend();
            if let Some(done) = done {
                self.bypass(&mut operation, offset, data, &done)?;
            }
        }
        self.bypass(&mut operation, offset, data, &bypassing)
    }

    /// Writes uncached blocks below, in the bypassing mode.
    fn write_below(
        &self,
        entered: Entered<'_>,
        offset: u64,
        data: &[u8],
        flags: WriteFlags,
    ) -> Result<()> {
        let operation = self.recorder.begin_single(Phase::Bypass);
        let measured_from_ns = self.draw().then(now_ns);
        self.below.write(offset, data, flags)?;
        drop((operation, entered));
        self.sample_bypass(measured_from_ns, (data.len() / self.block_bytes()).max(1) as u64);
        if flags.fua { self.ledger.report() } else { Ok(()) }
    }

    /// Runs a FUA write: drains its range, then writes below. Reports failures of earlier
    /// write-backs of any block.
    fn write_through(&self, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        self.bypass_range(offset, data.len() as u64, |at, len| {
            let mut operation = self.recorder.begin();
            operation.enter(Phase::Bypass);
            let start = usize::try_from(at - offset).expect("inside the data");
            let len = usize::try_from(len).expect("inside the data");
            self.below.write(at, &data[start..start + len], flags)
        })?;
        self.ledger.report()
    }

    /// Runs `below` on `len` bytes at `offset`, in pieces that are first closed and drained.
    ///
    /// # Errors
    /// Fails if a cached block cannot be written back, or `below` fails.
    pub(super) fn bypass_range(
        &self,
        offset: u64,
        len: u64,
        mut below: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let piece_bytes = PIECE_BLOCKS * self.block_bytes() as u64;
        let mut done = 0;
        while done < len {
            let (at, piece) = (offset + done, (len - done).min(piece_bytes));
            let _closed = Closed::close(self, self.lba_of(at)..self.lba_of(at + piece));
            self.drain_range(at, piece)?;
            below(at, piece)?;
            done += piece;
        }
        Ok(())
    }

    /// Puts one block into the cache, unless it should go below. In that case it is closed.
    fn place(&self, operation: &mut Operation<'_>, lba: u64, data: &[u8]) -> Result<Placed> {
        operation.enter(Phase::Metadata);
        let measured_from_ns = self.draw().then(now_ns);
        let number = self.table.set_of(lba);
        let Some(slot) = self.pending_slot(operation, number, lba, measured_from_ns)? else {
            return Ok(Placed::Bypass);
        };
        self.fill(operation, number, slot, data);
        if let Some(from_ns) = measured_from_ns {
            let now_ns = now_ns();
            self.costs.sample_cached(now_ns.saturating_sub(from_ns), now_ns);
            self.adapt_mode();
        }
        self.waker.wake();
        Ok(Placed::Cached)
    }

    /// Returns a Pending slot for `lba` in set `number`, waiting if necessary. Returns `None` if
    /// the block should go below; its lba is closed then.
    fn pending_slot(
        &self,
        operation: &mut Operation<'_>,
        number: usize,
        lba: u64,
        measured_from_ns: Option<u64>,
    ) -> Result<Option<u32>> {
        let mut set = self.sets.lock(number);
        loop {
            let step = set.set().write(&self.table, lba);
            let slot = match step {
                WriteStep::Copy(slot) => Some(slot),
                WriteStep::Absent if self.bypasses(measured_from_ns) => {
                    set.set().close(lba);
                    return Ok(None);
                }
                WriteStep::Beside if self.mode_switch.mode() != WriteMode::Cached => None,
                WriteStep::Beside | WriteStep::Absent => self.admit(&mut set, lba),
                WriteStep::Wait => None,
            };
            if slot.is_some() {
                return Ok(slot);
            }
            if step == WriteStep::Absent && self.policy != Policy::TransitNoBypass {
                set.set().close(lba);
                self.end_naps();
                return Ok(None);
            }
            operation.enter_once(Phase::StalledWrite);
            if step == WriteStep::Absent {
                drop(set);
                self.wait_for_slot()?;
                set = self.sets.lock(number);
            } else {
                set.wait();
            }
        }
    }

    /// Takes a free slot, if any, for a new version of `lba`.
    fn admit(&self, set: &mut SetGuard<'_>, lba: u64) -> Option<u32> {
        self.free.take().inspect(|&slot| {
            // Read under the set's lock and before the write is acknowledged (see `flush`).
            let epoch = self.epoch.load(Ordering::SeqCst);
            set.set().admit(&self.table, lba, slot, epoch);
        })
    }

    /// Reports whether an uncached block goes below even if slots are free: because of the write
    /// mode, or to measure the cost of a bypass.
    fn bypasses(&self, measured_from_ns: Option<u64>) -> bool {
        self.policy == Policy::Transit
            && (self.mode_switch.mode() != WriteMode::Cached
                || measured_from_ns.is_some() && self.costs.bypass_may_be_better() && self.draw())
    }

    /// Copies a block into `slot`, which is Pending, and queues it for eviction.
    fn fill(&self, operation: &mut Operation<'_>, number: usize, slot: u32, data: &[u8]) {
        operation.enter(Phase::CacheWrite);
        self.slots.copy_in(slot, data);
        operation.enter(Phase::Enqueue);
        let mut set = self.sets.lock(number);
        set.set().written(&self.table, slot);
        set.notify();
        drop(set);
        if self.policy == Policy::TransitNoBypass {
            self.progress.signal();
        }
    }

    /// Writes the blocks of `bypassing`, part of the `data` for `offset`, below.
    fn bypass(
        &self,
        operation: &mut Operation<'_>,
        offset: u64,
        data: &[u8],
        bypassing: &Closed<'_>,
    ) -> Result<()> {
        let lbas = bypassing.lbas();
        if lbas.is_empty() {
            return Ok(());
        }
        operation.enter(Phase::Bypass);
        // With free slots this is a measurement (see `bypasses`).
        let measured_from_ns = (self.free.count() > 0 || self.draw()).then(now_ns);
        let at = lbas.start * self.block_bytes() as u64;
        let start = usize::try_from(at - offset).expect("inside the data");
        let blocks = lbas.end - lbas.start;
        let len = usize::try_from(blocks).expect("inside the data") * self.block_bytes();
        self.below.write(at, &data[start..start + len], WriteFlags::default())?;
        self.sample_bypass(measured_from_ns, blocks);
        Ok(())
    }

    /// Samples the cost by block of a write of `blocks` blocks below, if its begin was timed.
    fn sample_bypass(&self, measured_from_ns: Option<u64>, blocks: u64) {
        if let Some(from_ns) = measured_from_ns {
            let now_ns = now_ns();
            self.costs.sample_bypass(now_ns.saturating_sub(from_ns) / blocks, now_ns);
            self.adapt_mode();
        }
    }

    /// Waits until a slot may be free: evicts a block itself if possible, else waits for running
    /// evictions.
    ///
    /// # Errors
    /// Fails if every block in the cache has failed its write-back, and one tried now fails again.
    fn wait_for_slot(&self) -> Result<()> {
        let mut error: Option<DeviceError> = None;
        loop {
            let seen = self.progress.now();
            if self.free.count() > 0 {
                return Ok(());
            }
            if let Some(number) = self.sets.ready.next_from(0) {
                let evicted = self.evict_queued(number, u64::MAX, 1, &mut Scratch::default());
                error = evicted.error.or(error);
            } else if !self.all_failed() {
                self.progress.wait(seen);
            } else if let Some(error) = error {
                return Err(error);
            } else {
                self.sets
                    .lock(self.sets.occupied.next_from(0).unwrap_or(0))
                    .set()
                    .retry_one(&self.table);
            }
        }
    }

    fn all_failed(&self) -> bool {
        let failed = |number| self.sets.lock(number).set().counts(&self.table).1;
        (0..self.sets.count()).map(failed).sum::<u64>() == u64::from(self.slots.count())
    }

    /// Wakes an evictor that naps: the cache is full.
    fn end_naps(&self) {
        let napping = &self.napping;
        if napping.load(Ordering::Relaxed) == 1 && napping.swap(0, Ordering::Relaxed) == 1 {
            self.waker.wake_resting();
        }
    }
}
