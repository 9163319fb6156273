//! Persistent memory: mappings, stores, write-backs, fences, and what they promise.
//!
//! [`Region`] owns a mapping. Everything above it speaks in byte offsets into a region, never in
//! pointers or references, so this is the only module of the core that needs `unsafe`.

#![allow(unsafe_code)]

mod error;
mod observer;
mod region;

pub use error::PmemError;
pub use observer::Observer;
pub use region::{Domain, Region, RegionOptions};
