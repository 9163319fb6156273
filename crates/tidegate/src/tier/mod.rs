//! What tiers share: the parts that are the same whatever a tier caches and wherever it keeps it.
//!
//! - [`background`]: work in steps, run by threads or by a simulator's scheduler;
//! - `clock`: the clock of costs and rests;
//! - `ledger`: write-backs that failed, until a flush reports them;
//! - `set_locks`: sets behind locks, and waiting for a set to change;
//! - `version_locks`: versions for readers without a lock, and the locks of their writers.

pub mod background;
pub(crate) mod clock;
pub(crate) mod ledger;
pub(crate) mod set_locks;
pub(crate) mod version_locks;
