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
//! without clock, threads, locks or I/O. `cache` and `runtime` give them all of that: `request`
//! reads and writes, `drain` flushes, FUA, zeroes and discards, `background` the work of the
//! threads. Lock order: set, then slot or the queue of calls; no lock is held over a call to the
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

/// Makes the caches of a staging policy.
///
/// # Errors
/// `policy` is none.
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
