//! A transit tier without threads of its own: for a simulator, which decides who runs when.
//!
//! It waits for nothing by itself, and nothing in it depends on time: whoever would have to wait calls
//! [`Relax`] and looks again, and the caller writes back and steers where evictors and costs do so otherwise.

use std::sync::Arc;

use super::transit::Transit;
use super::{BlockDevice, DramTier, Result};

/// Called where the caller cannot go on before another thread did. Returns at any time after.
pub type Relax = Arc<dyn Fn() + Send + Sync>;

/// A transit tier that others drive. Dropping it loses what it holds, as a power cut does.
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

    /// Does what a background thread does in one go. False where there was nothing to do.
    pub fn evict(&self) -> bool {
        self.tier.evict()
    }

    /// Takes a step towards writes that pass the cache by, or back to those that use it: what costs and load decide
    /// otherwise.
    pub fn steer(&self, past_the_cache: bool) {
        self.tier.steer(past_the_cache);
    }
}
