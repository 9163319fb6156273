//! Writing back: for evictors, flushes and writes that need a slot.

use super::sets::SetGuard;
use super::{Core, Phase, Policy, Result, WriteFlags};
use crate::device::DeviceError;
use crate::tier::clock::now_ns;

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
