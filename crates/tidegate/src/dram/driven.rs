//! A transit tier without own threads, for a simulator that schedules all threads.
//!
//! The tier does not depend on time. A request that has to wait for another thread calls [`Relax`]
//! and looks again. The simulator runs the evictors' work and changes the write mode, which
//! otherwise depends on measured costs.

use std::sync::Arc;

use super::transit::Transit;
use super::{BlockDevice, DramTier, Result};
use crate::tier::background::Work;

pub use crate::tier::set_locks::Relax;

/// A transit tier that a simulator drives. Dropping it loses its data, as a power cut does.
#[derive(Clone)]
pub struct Driven {
    tier: Arc<Transit>,
}

impl Driven {
    /// Opens a tier of at most `bytes` bytes of data over `below`.
    ///
    /// # Errors
    /// Fails as [`open`](super::open) does.
    pub fn open(bytes: u64, below: Arc<dyn BlockDevice>, relax: Relax) -> Result<Self> {
        Ok(Self { tier: Arc::new(Transit::open_driven(bytes, below, relax)?) })
    }

    /// Returns the tier.
    pub fn tier(&self) -> Arc<dyn DramTier> {
        Arc::<Transit>::clone(&self.tier)
    }

    /// Returns the work of an evictor.
    pub fn evictor(&self) -> impl Work + use<> {
        self.tier.unpaced_evictor()
    }

    /// Changes the write mode by one step, towards bypassing the cache or towards using it.
    pub fn step_write_mode(&self, bypass: bool) {
        self.tier.step_write_mode(bypass);
    }
}
