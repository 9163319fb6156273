//! A transit tier without threads of its own: for a simulator, which decides which thread runs
//! when.
//!
//! Nothing in it depends on time. A request that has to wait for another thread calls [`Relax`] and
//! looks again. The simulator runs the work of evictors and changes the write mode, which measured
//! costs do otherwise.

use std::sync::Arc;

use super::transit::Transit;
use super::{BlockDevice, DramTier, Result};
use crate::tier::background::Work;

pub use crate::tier::set_locks::Relax;

/// A transit tier that a simulator drives. Dropping it loses what it holds, as a power cut does.
#[derive(Clone)]
pub struct Driven {
    tier: Arc<Transit>,
}

impl Driven {
    /// A tier of at most `bytes` bytes of data over `below`.
    ///
    /// # Errors
    /// As for [`open`](super::open).
    pub fn open(bytes: u64, below: Arc<dyn BlockDevice>, relax: Relax) -> Result<Self> {
        Ok(Self { tier: Arc::new(Transit::open_driven(bytes, below, relax)?) })
    }

    /// The tier itself.
    pub fn tier(&self) -> Arc<dyn DramTier> {
        Arc::<Transit>::clone(&self.tier)
    }

    /// The work of an evictor.
    pub fn evictor(&self) -> impl Work + use<> {
        self.tier.unpaced_evictor()
    }

    /// Changes the write mode by one step, towards bypassing the cache or towards using it.
    pub fn step_write_mode(&self, bypass: bool) {
        self.tier.step_write_mode(bypass);
    }
}
