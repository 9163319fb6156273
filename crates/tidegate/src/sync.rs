//! The atomics of lock-free code. Under loom they are loom's: `cargo nextest run -p tidegate-loom`
//! checks that code under every interleaving and every reordering that the memory model allows.

pub(crate) mod lock;
pub mod machine;
pub(crate) mod shard;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// Stores `value` before all later loads of this thread, in the single order that all threads see
/// of such stores and of sequentially consistent loads.
#[inline]
pub(crate) fn store_before_loads(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::SeqCst);
    // Loom treats a sequentially consistent store as a releasing one, but orders such fences.
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
