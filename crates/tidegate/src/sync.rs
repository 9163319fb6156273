//! The atomics of lock-free code, or loom's in its place: `cargo test -p tidegate --features loom loom_`
//! checks that code under every interleaving and every reordering that the memory model allows.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
