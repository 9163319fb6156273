//! Staging caches, the counterparts of I/O transit caching in the Caiti paper. A block stays in
//! DRAM until its slot is needed, the cache passes a watermark, the device below is idle, or a
//! flush needs the block.
//!
//! Why reads and writes stay in order (`set` keeps the rules for one block):
//!
//! - **Every version of a block passes through its slot**, also that of a FUA write, which fills
//!   the slot and then writes it back. So versions reach the device below one after another, and a
//!   cached copy is never older than the block below.
//! - **Zeroes and discards** go directly below, with their range closed meanwhile: writes to the
//!   range wait, and its cached blocks are first written back and forgotten.
//! - **A slot is given up only after its write-back has returned**, so a reader that finds no copy
//!   finds at least that version below.
//!
//! Map: `replacement` is the interface of a policy, `pmbd`, `pmbd70`, `lru` and `coactive` are the
//! policies, and `set` is the state machine that they complete (with `table`, `list` and `bloom`):
//! all without clock, threads, locks or I/O. `cache` and `runtime` add those: `request` reads and
//! writes, `drain` handles flushes, FUA, zeroes and discards, `background` is the work of the
//! threads. Lock order: set, then slot or the queue of calls; no lock is held during a call to the
//! device below.

mod background;
mod bloom;
mod cache;
mod calls;
mod coactive;
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

use super::{Maker, Policy};
use crate::device::{DeviceError, DeviceErrorKind, Result};
use runtime::Staging;

/// Returns the maker of a staging policy's caches.
///
/// # Errors
/// Fails if `policy` is not a staging policy.
pub(super) fn maker(policy: Policy) -> Result<Maker> {
    match policy {
        Policy::Pmbd => Ok(Maker::of::<Staging<pmbd::Pmbd>>()),
        Policy::Pmbd70 => Ok(Maker::of::<Staging<pmbd70::Pmbd70>>()),
        Policy::Lru => Ok(Maker::of::<Staging<lru::Lru>>()),
        Policy::Coactive => Ok(Maker::of::<Staging<coactive::Coactive>>()),
        other => {
            let context = format!(
                "DRAM policy {other} is no staging policy; expected pmbd, pmbd70, lru or coactive"
            );
            Err(DeviceError::new(DeviceErrorKind::Unsupported, context))
        }
    }
}
