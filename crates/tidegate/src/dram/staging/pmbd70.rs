//! PMBD with its syncer: a worker starts to drain a sub-buffer when 70 % of its slots are used, and
//! stops at 10 %, the watermarks of PMBD's source.
//!
//! A write that finds its sub-buffer full nevertheless waits for the syncer if it runs, else drains
//! as in [`Pmbd`]. The number of syncers is that of the sub-buffers, as in PMBD's source, but at
//! most that of the CPUs.

use super::pmbd::{Pmbd, SUB_BUFFERS};
use super::replacement::{Replacement, View};

const HIGH_WATERMARK_PCT: u64 = 70;
const LOW_WATERMARK_PCT: u64 = 10;

/// A sub-buffer with a syncer.
pub(super) struct Pmbd70 {
    on_demand: Pmbd,
    syncing: bool,
    high: u32,
    low: u32,
}

impl Replacement for Pmbd70 {
    const SETS: u32 = SUB_BUFFERS;
    const WORKERS: u32 = SUB_BUFFERS;

    fn new(slots: u32) -> Self {
        let share = |percent: u64| (u64::from(slots) * percent).div_ceil(100);
        let watermark = |percent| u32::try_from(share(percent)).unwrap_or(slots);
        Self {
            on_demand: Pmbd::new(slots),
            syncing: false,
            high: watermark(HIGH_WATERMARK_PCT),
            low: watermark(LOW_WATERMARK_PCT),
        }
    }

    fn victim(&self, view: View<'_>) -> Option<u32> {
        self.on_demand.victim(view)
    }

    fn begin_reclaim(&mut self, view: View<'_>) -> u32 {
        if self.syncing { 0 } else { self.on_demand.begin_reclaim(view) }
    }

    fn end_reclaim(&mut self) {
        self.on_demand.end_reclaim();
    }

    fn wants_background(&self, view: View<'_>) -> bool {
        !self.syncing && view.used >= self.high && view.oldest_dirty().is_some()
    }

    fn background(&mut self, view: View<'_>) -> Option<u32> {
        let mark = if self.syncing { self.low } else { self.high };
        let next = (view.used >= mark).then(|| view.oldest_dirty()).flatten();
        self.syncing = next.is_some();
        next
    }

    fn end_background(&mut self) {
        self.syncing = false;
    }
}
