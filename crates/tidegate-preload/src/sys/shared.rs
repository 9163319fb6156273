//! Values that threads share without waiting for each other.
//!
//! Invariant: a value is used by one thread at a time. A thread that finds it in use does without
//! it: the user may be the thread that a signal handler has interrupted, or one that a fork has not
//! copied.
#![allow(unsafe_code)] // the value behind a flag

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// A value, or none.
pub(crate) struct Shared<T> {
    is_busy: AtomicBool,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: the value is used by none but the thread that has set its flag.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) const fn new() -> Self {
        Self { is_busy: AtomicBool::new(false), value: UnsafeCell::new(None) }
    }

    /// Runs `use_it` with the value; none where another thread uses it.
    pub(crate) fn with<R>(&self, use_it: impl FnOnce(&mut Option<T>) -> R) -> Option<R> {
        if self.is_busy.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: nobody else has set the flag.
        let result = use_it(unsafe { &mut *self.value.get() });
        self.is_busy.store(false, Ordering::Release);
        Some(result)
    }
}
