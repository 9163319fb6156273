//! PMBD (Chen, Mesnier, Hahn, MSST 2014) as the Caiti paper compares it: the cache is several
//! sub-buffers, and a write that finds its sub-buffer full drains all of it while it waits.
//!
//! One writer drains at a time (PMBD's flush lock); others of the same sub-buffer go on as soon as
//! it has freed a slot for them. What is written back is gone: the buffer is for writes.

use super::replacement::{Replacement, View};

/// Sub-buffers of a cache: PMBD's default.
pub(super) const SUB_BUFFERS: u32 = 16;

/// A sub-buffer that is drained when it is full.
pub(super) struct Pmbd {
    draining: bool,
}

impl Replacement for Pmbd {
    const SETS: u32 = SUB_BUFFERS;

    fn new(_slots: u32) -> Self {
        Self { draining: false }
    }

    fn victim(&self, view: View<'_>) -> Option<u32> {
        view.oldest_dirty()
    }

    fn begin_reclaim(&mut self, view: View<'_>) -> u32 {
        if self.draining {
            return 0;
        }
        self.draining = true;
        view.dirty.len().max(1)
    }

    fn end_reclaim(&mut self) {
        self.draining = false;
    }
}
