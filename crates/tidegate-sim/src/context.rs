//! Which simulated thread, and which of its operations, the calling OS thread is running.
//!
//! The core calls an [`Observer`](tidegate::pmem::Observer) without naming the caller; these
//! thread-locals do.

use std::cell::Cell;

thread_local! {
    static THREAD: Cell<Option<usize>> = const { Cell::new(None) };
    static OPERATION: Cell<u64> = const { Cell::new(0) };
    static ORDINAL: Cell<usize> = const { Cell::new(0) };
    static LBA: Cell<Option<u64>> = const { Cell::new(None) };
    static RESIZING: Cell<bool> = const { Cell::new(false) };
    static PURGING: Cell<bool> = const { Cell::new(false) };
}

/// Thread number used for events of threads that are not simulated (setup and recovery).
pub(crate) const OUTSIDE: usize = 7;

/// Marks the calling OS thread as simulated thread `thread`, for good.
pub(crate) fn enter(thread: usize) {
    THREAD.set(Some(thread));
}

/// Returns the simulated thread that the caller is, if any.
pub(crate) fn simulated() -> Option<usize> {
    THREAD.get()
}

/// Returns the simulated thread, or [`OUTSIDE`].
pub(crate) fn thread() -> usize {
    THREAD.get().unwrap_or(OUTSIDE)
}

/// Starts the caller's next operation, on block `lba`. Engines see the caller as thread number
/// `ordinal`.
pub(crate) fn next_operation(ordinal: usize, lba: Option<u64>) {
    OPERATION.set(OPERATION.get() + 1);
    ORDINAL.set(ordinal);
    LBA.set(lba);
}

/// Returns the block of the caller's operation.
pub(crate) fn lba() -> Option<u64> {
    LBA.get()
}

/// Sets whether the caller is changing the size of a pool.
pub(crate) fn set_resizing(is_resizing: bool) {
    RESIZING.set(is_resizing);
}

/// Reports whether the caller is changing the size of a pool.
pub(crate) fn is_resizing() -> bool {
    RESIZING.get()
}

/// Sets whether the caller is purging a cache.
pub(crate) fn set_purging(is_purging: bool) {
    PURGING.set(is_purging);
}

/// Reports whether the caller is purging a cache.
pub(crate) fn is_purging() -> bool {
    PURGING.get()
}

/// Returns the thread number that engines see: they choose lanes by it.
pub(crate) fn ordinal() -> usize {
    ORDINAL.get()
}

/// Returns a number that differs between any two operations of one thread.
pub(crate) fn operation() -> u64 {
    OPERATION.get()
}
