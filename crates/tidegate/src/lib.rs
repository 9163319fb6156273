//! Tidegate: a persistent-memory I/O cache for Linux, in user space.
//!
//! The modules are the layers, from the memory upwards:
//!
//! - [`pmem`]: mapped persistent memory, its stores, write-backs and fences;
//! - [`device`]: the [`device::BlockDevice`] trait that every tier and layer shares;
//! - [`durable`]: syncs that report a file system that gave up;
//! - [`btt`]: the block translation table, an atomic block device on persistent memory;
//! - [`pool`]: the content of a region, and the superblock of every engine but the BTT;
//! - [`cache`]: a persistent cache of pages in front of a slower device;
//! - [`log`]: a write log, for files and blocks, shared by processes;
//! - [`raw`]: blocks in place on persistent memory, fast and not atomic;
//! - [`dram`]: the DRAM tier, a volatile write cache over any device;
//! - [`opening`]: opens of a user's path, which never wait;
//! - [`size`]: numbers of bytes as people write them;
//! - [`glob`]: patterns of paths;
//! - [`backing`]: devices behind a pool, by URL;
//! - [`stack`]: the registry of engines, and the stack of tiers that a pool is served as;
//! - [`machine`]: the seam of a model of machines with other CPUs and clocks;
//! - [`stats`]: counters, gauges and latency histograms of every tier;
//! - [`tier`]: the operations of every tier, the parts that tiers share, and how an engine offers
//!   itself.
//!
//! `docs/walks/block.md` walks one write through them.

pub mod backing;
pub mod btt;
pub mod cache;
pub mod device;
pub mod dram;
pub mod durable;
pub mod glob;
pub mod locking;
pub mod log;
pub mod opening;
pub mod pmem;
pub mod pool;
pub mod raw;
pub mod size;
pub mod stack;
pub mod stats;
mod sync;
pub mod tier;

pub use sync::machine;
