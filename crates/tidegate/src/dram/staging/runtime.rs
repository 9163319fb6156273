//! The device of every staging policy: it runs requests on the core, and owns the workers.

use std::sync::Arc;

use super::super::slots::Slots;
use super::super::tier::{collect, is_read_below, state_of};
use super::super::{DramTier, Make, Phases, Policy, TierSummary, no_thread};
use super::background::Stager;
use super::cache::StagingCache;
use super::replacement::Replacement;
use crate::device::{
    AsyncRequest, Attempt, BlockDevice, Context, Geometry, Operation, Result, start_on_pool,
};
use crate::stats::Collector;
use crate::tier::background::Workers;
use crate::tier::{State, Tier};

/// A staging cache over a device, by policy `R`.
pub(super) struct Staging<R: Replacement> {
    pub(super) core: Arc<StagingCache<R>>,
    workers: Workers,
}

impl<R: Replacement> Make for Staging<R> {
    /// Opens the cache; `policy` is the name of `R`.
    fn open(policy: Policy, bytes: u64, below: Arc<dyn BlockDevice>) -> Result<Self> {
        let slots = Slots::new(bytes, below.geometry().block_bytes)?;
        let core = Arc::new(StagingCache::new(policy, slots, below));
        let works = (0..core.workers()).map(|_| Stager::new(Arc::clone(&core)));
        let workers =
            Workers::start("stager", Arc::clone(core.calls.waker()), works).map_err(no_thread)?;
        Ok(Self { core, workers })
    }

    fn describe(policy: Policy, bytes: u64, below: Arc<dyn BlockDevice>) -> Result<TierSummary> {
        let slots = Slots::reserve(bytes, below.geometry().block_bytes)?;
        let core = StagingCache::<R>::new(policy, slots, below);
        Ok(core.summary(core.workers()))
    }
}

impl<R: Replacement> BlockDevice for Staging<R> {
    /// Returns the geometry of the device below, with a volatile cache.
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.core.geometry }
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let core = &self.core;
        core.geometry.check_operation(operation)?;
        match *operation {
            Operation::Read { offset, ref mut buf } => core.read(offset, buf),
            Operation::Write { offset, data, flags } => core.write(offset, data, flags),
            Operation::Flush => core.flush(),
            Operation::Discard { .. } => core.change_below(operation),
            Operation::WriteZeroes { flags, .. } => {
                core.change_below(operation)?;
                if flags.fua { core.ledger.report() } else { Ok(()) }
            }
            Operation::Status { offset, len, .. } => {
                core.drain_range(offset, len)?;
                core.below.request(|below| below.run(operation))
            }
        }
    }

    fn attempt(&self, operation: &mut Operation<'_>, _context: Context) -> Attempt {
        if self.core.waits_for_nothing(operation) {
            Attempt::Done(self.run(operation))
        } else {
            Attempt::WouldBlock
        }
    }

    /// Starts a read of uncached blocks directly on the device below, other requests on the pool.
    fn start(self: Arc<Self>, request: AsyncRequest) {
        let core = &self.core;
        if is_read_below(request.owned(), &core.geometry, |lba| core.is_cached(lba)) {
            core.start_below(request);
        } else {
            start_on_pool(self, request);
        }
    }
}

impl<R: Replacement> Tier for Staging<R> {
    fn state(&self) -> State {
        state_of(self)
    }

    fn drain(&self) -> Result<()> {
        self.workers.stop();
        self.core.flush()
    }

    fn metrics(&self, collector: &mut Collector) {
        collect(self, collector);
    }
}

impl<R: Replacement> DramTier for Staging<R> {
    fn summary(&self) -> TierSummary {
        self.core.summary(self.workers.count())
    }

    fn phases(&self) -> Phases {
        self.core.recorder.snapshot()
    }
}

impl<R: Replacement> Drop for Staging<R> {
    fn drop(&mut self) {
        // A caller that needs the errors calls `drain` before.
        let _ = self.drain();
    }
}
