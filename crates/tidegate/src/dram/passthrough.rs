//! The policy `none`: every request goes straight to the device below.

use std::sync::Arc;

use super::tier::{collect, state_of};
use super::{DramTier, Make, Phases, Policy, TierSummary};
use crate::device::{
    AsyncRequest, Attempt, BlockDevice, BlockDeviceExt, Context, Geometry, Operation, Result,
};
use crate::stats::Collector;
use crate::tier::{State, Tier};

/// A tier without a cache, so that `none` is a policy like the others.
pub(super) struct Passthrough {
    below: Arc<dyn BlockDevice>,
}

impl Make for Passthrough {
    fn open(_policy: Policy, _bytes: u64, below: Arc<dyn BlockDevice>) -> Result<Self> {
        Ok(Self { below })
    }

    fn describe(_policy: Policy, _bytes: u64, below: Arc<dyn BlockDevice>) -> Result<TierSummary> {
        Ok(Self { below }.summary())
    }
}

impl BlockDevice for Passthrough {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.below.run(operation)
    }

    fn attempt(&self, operation: &mut Operation<'_>, context: Context) -> Attempt {
        self.below.attempt(operation, context)
    }

    fn start(self: Arc<Self>, request: AsyncRequest) {
        Arc::clone(&self.below).start(request);
    }
}

impl Tier for Passthrough {
    fn state(&self) -> State {
        state_of(self)
    }

    fn drain(&self) -> Result<()> {
        self.below.flush()
    }

    /// Does nothing: a flush would commit data that the tier below has not committed.
    fn destage(&self) -> Result<u64> {
        Ok(0)
    }

    fn metrics(&self, collector: &mut Collector) {
        collect(self, collector);
    }
}

impl DramTier for Passthrough {
    fn summary(&self) -> TierSummary {
        TierSummary {
            policy: Policy::None,
            capacity_bytes: 0,
            block_bytes: self.below.geometry().block_bytes,
            slots: 0,
            sets: 0,
            metadata_bytes_per_slot: 0.0,
            dirty_slots: 0,
            failed_slots: 0,
            threads: 0,
        }
    }

    fn phases(&self) -> Phases {
        Phases::default()
    }
}
