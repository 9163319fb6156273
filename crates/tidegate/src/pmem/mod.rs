//! Persistent memory: mappings, stores, write-backs, fences, and their guarantees.
//!
//! [`Region`] owns a mapping. Everything above it speaks in byte offsets into a region, never in
//! pointers or references, so this is the only module of the core that needs `unsafe`.
//!
//! Invariants:
//! 1. All bytes that a thread stored and wrote back, or streamed, are durable when its next
//!    [`Region::fence`] has returned `Ok`, in every [`Domain`] that keeps anything.
//! 2. An access that touched failed memory returns [`PmemError::Poisoned`]; the process lives on.
//! 3. One pool file is open for writing at most once on a machine ([`PmemError::Busy`]).
//! 4. No reference into a region exists: all access is through atomics or opaque copies.
//!
//! Map: `region` (the operations) · `mapping` (how a path becomes memory) · `domain` (when stores
//! are durable) · `cpu` (write-back and copies by instruction set) · `writeback` (the msync domain)
//! · `media` and `delay` (slower memory, modeled) · `poison` (memory errors) · `counters`
//! (per-thread counting) · `crc32c` (arithmetic) · `observer` (the crash simulator's seam) ·
//! `shared` (volatile memory of several processes) · `buffers` (ordinary memory behind locks, for
//! caches above).

#![allow(unsafe_code)] // Mapped memory is reached through raw pointers; nothing above this module needs to.

mod buffers;
mod counters;
mod cpu;
mod crc32c;
mod delay;
mod domain;
mod error;
mod fault;
mod mapping;
mod media;
mod observer;
mod poison;
mod read_once;
mod region;
mod shared;
mod writeback;

pub use buffers::{Buffers, ReadBuffer, WriteBuffer, copy_streaming};
pub use counters::Counters;
pub(crate) use crc32c::is_of_one_bit;
pub use domain::Domain;
pub use error::{ParseError, PmemError};
pub use fault::FaultWatch;
pub use mapping::Kind;
pub use media::MediaModel;
pub use observer::Observer;
pub use read_once::ReadOnce;
pub use region::{Region, RegionOptions};
pub use shared::{LOCK_BYTES, LockFailure, Locked, SharedMemory};

/// Bytes in the unit of write-back: a cache line.
pub const LINE_BYTES: u64 = 64;

#[cfg(all(test, not(loom)))]
pub(crate) mod flips;
#[cfg(test)]
mod tests;
