//! The atomics of lock-free code, or loom's in its place: `cargo nextest run -p tidegate-loom`
//! checks that code under every interleaving and every reordering that the memory model allows.

pub(crate) mod lock;
pub mod machine;
pub(crate) mod shard;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// A store that comes before all later loads of its thread, in the one order in which all threads
/// see such stores and sequentially consistent loads.
#[inline]
pub(crate) fn store_before_loads(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::SeqCst);
    // Loom takes a sequentially consistent store for a releasing one; of fences it knows the order.
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
