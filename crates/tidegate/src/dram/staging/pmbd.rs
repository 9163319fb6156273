//! PMBD (Chen, Mesnier, Hahn, MSST 2014) as the Caiti paper compares it: the cache consists of
//! several sub-buffers, and a write to a full sub-buffer drains the whole sub-buffer first.
//!
//! One writer drains a sub-buffer at a time (PMBD's flush lock); others go on as soon as it has
//! freed enough slots. A block leaves the buffer with its write-back: the buffer is for writes.

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
