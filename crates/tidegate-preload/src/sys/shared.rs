//! Values that threads share without waiting for each other.
//!
//! Invariant: one thread at a time uses a value. A thread that finds the value in use does without:
//! the user may be the thread that a signal handler has interrupted, or a thread that a fork has
//! not copied.
#![allow(unsafe_code)] // the value behind a flag

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// A value that one thread at a time can use; empty at first.
pub(crate) struct Shared<T> {
    is_busy: AtomicBool,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: only the thread that has set the flag uses the value.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) const fn new() -> Self {
        Self { is_busy: AtomicBool::new(false), value: UnsafeCell::new(None) }
    }

    /// Runs `use_it` with the value. Returns `None` if another thread uses it.
    pub(crate) fn with<R>(&self, use_it: impl FnOnce(&mut Option<T>) -> R) -> Option<R> {
        if self.is_busy.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: this thread has set the flag, so no other thread uses the value.
        let result = use_it(unsafe { &mut *self.value.get() });
        self.is_busy.store(false, Ordering::Release);
        Some(result)
    }
}
