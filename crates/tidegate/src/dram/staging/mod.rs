//! Staging caches: what the Caiti paper compares I/O transit caching against. A block stays in DRAM
//! until its slot is needed, a watermark is passed, the device below is idle, or a flush asks for
//! it.
//!
//! Why reads and writes stay in order (`set` keeps the rules for one block):
//!
//! - **Every version of a block passes through its slot**, FUA writes too: they are written to the
//!   slot, which is then written back. So versions reach the device below one after another, and a
//!   copy in the cache is never older than what is below.
//! - **Zeroes and discards** go below by themselves, with their range closed meanwhile: writes to
//!   it wait, what is cached of it is written back and forgotten first.
//! - **A slot is given up only after its write-back has returned**, so a reader that finds no copy
//!   finds at least that version below.
//!
//! Map: `replacement` what a policy decides, `pmbd`, `pmbd70`, `lru`, `coactive` the policies,
//! `set` the state machine that they complete (`table`, `list`, `bloom` its parts): all of them
//! without clock, threads, locks or I/O. `core` and `runtime` give them all of that: `request`
//! reads and writes, `drain` flushes, FUA, zeroes and discards, `background` the work of the
//! threads. Lock order: set, then slot or the queue of calls; no lock is held over a call to the
//! device below.

mod background;
mod bloom;
mod calls;
mod coactive;
mod core;
mod drain;
mod lru;
mod pmbd;
mod pmbd70;
mod replacement;
mod request;
mod runtime;
mod set;
#[cfg(all(test, not(loom)))]
mod set_tests;
mod table;
#[cfg(all(test, not(loom)))]
mod tests;

use std::sync::Arc;

use super::{DramTier, Policy, TierSummary};
use crate::device::{BlockDevice, DeviceError, DeviceErrorKind, Result};
use runtime::Staging;

/// Opens a staging cache of at most `bytes` bytes over `below`.
///
/// # Errors
/// As for [`super::open`]; or `policy` is no staging policy.
pub(super) fn open(
    policy: Policy,
    bytes: u64,
    below: Arc<dyn BlockDevice>,
) -> Result<Arc<dyn DramTier>> {
    match policy {
        Policy::Pmbd => Ok(Arc::new(Staging::<pmbd::Pmbd>::open(policy, bytes, below)?)),
        Policy::Pmbd70 => Ok(Arc::new(Staging::<pmbd70::Pmbd70>::open(policy, bytes, below)?)),
        Policy::Lru => Ok(Arc::new(Staging::<lru::Lru>::open(policy, bytes, below)?)),
        Policy::Coactive => {
            Ok(Arc::new(Staging::<coactive::Coactive>::open(policy, bytes, below)?))
        }
        other => Err(no_staging(other)),
    }
}

/// What [`open`] would make.
///
/// # Errors
/// As for [`open`].
pub(super) fn describe(
    policy: Policy,
    bytes: u64,
    below: Arc<dyn BlockDevice>,
) -> Result<TierSummary> {
    match policy {
        Policy::Pmbd => Staging::<pmbd::Pmbd>::describe(policy, bytes, below),
        Policy::Pmbd70 => Staging::<pmbd70::Pmbd70>::describe(policy, bytes, below),
        Policy::Lru => Staging::<lru::Lru>::describe(policy, bytes, below),
        Policy::Coactive => Staging::<coactive::Coactive>::describe(policy, bytes, below),
        other => Err(no_staging(other)),
    }
}

fn no_staging(policy: Policy) -> DeviceError {
    let context = format!(
        "DRAM policy {policy} is no staging policy; expected pmbd, pmbd70, lru or coactive"
    );
    DeviceError::new(DeviceErrorKind::Unsupported, context)
}
