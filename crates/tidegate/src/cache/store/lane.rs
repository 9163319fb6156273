//! Lanes: each stores one batch of slots at a time and fences it.
//!
//! Invariant: a lane's batch is fenced before its next one begins, whichever threads take the lane.
//! So only the newest batch of a lane can be torn by a crash.

use crossbeam_utils::CachePadded;

use crate::pmem::Region;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// Number of lanes of a pool.
pub(in crate::cache) const LANES: u16 = 64;

/// The lanes of one pool.
pub(in crate::cache) struct Lanes {
    lanes: Box<[CachePadded<Lane>]>,
}

struct Lane {
    taken: AtomicBool,
    /// Number of the last batch.
    batch: AtomicU64,
}

/// A lane taken for a batch; dropping it releases the lane.
pub(in crate::cache) struct LaneGuard<'a> {
    lane: &'a Lane,
    pub(in crate::cache) number: u16,
    /// The number of the batch that the holder may store.
    pub(in crate::cache) batch: u64,
}

impl Lanes {
    /// Returns free lanes whose last batches have the numbers `newest`.
    pub(in crate::cache) fn new(newest: &[u64]) -> Self {
        let lane = |batch: &u64| {
            CachePadded::new(Lane { taken: AtomicBool::new(false), batch: AtomicU64::new(*batch) })
        };
        Self { lanes: newest.iter().map(lane).collect() }
    }

    /// Takes a lane for one batch, preferably the thread's own. Waits until one is free.
    pub(in crate::cache) fn take(&self, region: &Region) -> LaneGuard<'_> {
        let first = region.thread_ordinal();
        loop {
            for step in 0..self.lanes.len() {
                let number = (first + step) % self.lanes.len();
                let lane = &self.lanes[number];
                if !lane.taken.swap(true, Ordering::Acquire) {
                    let batch = lane.batch.load(Ordering::Relaxed) + 1;
                    lane.batch.store(batch, Ordering::Relaxed);
                    let number = u16::try_from(number).unwrap_or_default();
                    return LaneGuard { lane, number, batch };
                }
            }
            region.relax();
        }
    }
}

impl Drop for LaneGuard<'_> {
    fn drop(&mut self) {
        self.lane.taken.store(false, Ordering::Release);
    }
}
