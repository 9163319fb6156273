//! The block translation table (BTT): atomic blocks on persistent memory, in the Linux kernel's
//! format.
//!
//! Every write goes to a free block, a flog entry commits it, and the map then points at the new
//! block (copy on write; the Caiti paper, section 2.2). Invariants:
//!
//! 1. Each internal block is owned exactly once: by one map entry, or as the free block of one
//!    lane.
//! 2. A flog entry becomes valid only after the data it points to is durable.
//! 3. A map entry changes only after the flog entry that describes the change is durable, so that a
//!    write that a reader has seen survives a crash.
//! 4. A lane overwrites its newest flog entry only after the map entry of that write is durable.
//! 5. A writer makes the map entry it replaces durable before its own flog entry becomes valid, so
//!    that the entries of several lanes for one lba never depend on the order of their replay.
//! 6. A block is reused only after every reader that may have found it through the map either has
//!    finished or will notice and read again.
//!
//! A pool of libpmemblk holds such a BTT behind a header (`pmemblk.rs`). It is opened in place, and
//! what is written stays readable for libpmemblk. [`convert()`] makes it a BTT of version 1.1.
//!
//! Entry points: [`create`], [`probe`], [`Btt::open`] (recovers), [`check`](check::check) and
//! [`repair()`]. The path of a write: [`Btt`]'s `write` → `Arena::write_blocks`
//! (`write.rs`, where the ordering argument stands beside the stores) → `Lane` and `Flog`.

mod arena;
mod bitmap;
pub mod check;
mod convert;
mod create;
mod device;
mod engine;
mod error;
#[cfg(all(test, not(loom)))]
mod failed_memory_tests;
#[cfg(all(test, not(loom)))]
mod flip_tests;
mod flog;
#[cfg(any(test, feature = "test-support"))]
#[doc(hidden)]
pub mod fuzzing;
mod image;
mod info;
mod lane;
mod layout;
#[cfg(all(test, loom))]
mod loom_tests;
mod map;
mod pmemblk;
#[cfg(all(test, not(loom)))]
mod pmemblk_tests;
mod recover;
mod repair;
mod survey;
#[cfg(all(test, not(loom)))]
mod tests;
mod unwritten;
mod write;

pub use convert::{convert, is_half_converted};
pub use create::{BttOptions, create, largest_fit_bytes, smallest_bytes};
pub use device::{ArenaSummary, Btt, Summary};
pub use engine::BttEngine;
pub use error::BttError;
pub use info::probe;
pub use layout::{FlogSlots, LBA_SIZES, Version};
pub use repair::repair;
