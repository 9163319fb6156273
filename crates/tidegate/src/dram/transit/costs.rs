//! Measures the costs of writes, to decide whether cache writes are worthwhile.
//!
//! The costs are moving medians over sampled operations: one whose thread lost its CPU shifts them
//! little, however long it took. Races between updates lose a sample, which is harmless.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A sample moves a median towards itself by one part in `1 << STEP_LOG2`; the first samples move
/// it further.
const STEP_LOG2: u32 = 5;
const FIRST_STEP_LOG2: u32 = 2;
/// Samples before a median is used.
const ENOUGH_SAMPLES: u32 = 16;
/// Time without a cache write after which its cost is measured again, because the load may have
/// changed.
const TIME_TO_DOUBT_NS: u64 = 500_000_000;

/// The cheaper way to write a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Worth {
    /// Too few samples.
    Unknown,
    /// A cache write takes at most two thirds of the time of a write below.
    Cache,
    /// Caching only adds the work of the eviction.
    Bypass,
}

/// Measured times by block.
#[derive(Default)]
pub(super) struct Costs {
    /// A request's write to the device below.
    bypass: Median,
    /// An eviction's write to the device below: slower, because its data comes from memory.
    eviction: Median,
    /// A write to the cache, bookkeeping included.
    cached: Median,
    /// Time of the last sampled cache write, or of the last reset of its samples.
    cached_at_ns: AtomicU64,
}

#[derive(Default)]
struct Median {
    ns: AtomicU64,
    samples: AtomicU32,
}

impl Costs {
    /// Samples a request's write of a block below, which took `ns` until `now_ns`.
    pub(super) fn sample_bypass(&self, ns: u64, now_ns: u64) {
        self.bypass.sample(ns);
        let cached_at_ns = self.cached_at_ns.load(Ordering::Relaxed);
        if now_ns.saturating_sub(cached_at_ns) >= TIME_TO_DOUBT_NS {
            self.cached.forget();
            self.cached_at_ns.store(now_ns, Ordering::Relaxed);
        }
    }

    /// Samples an eviction's write of a block below, which took `ns`.
    pub(super) fn sample_eviction(&self, ns: u64) {
        self.eviction.sample(ns);
    }

    /// Samples a cache write of a block, which took `ns` until `now_ns`.
    pub(super) fn sample_cached(&self, ns: u64, now_ns: u64) {
        self.cached.sample(ns);
        self.cached_at_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Returns whether caching is worthwhile: only if it takes at most two thirds of the time of a
    /// bypass. The write-back comes on top, on another CPU, and slows the writer a little; if no
    /// CPU is left for it, the write mode finds the cache overrun.
    pub(super) fn worth(&self) -> Worth {
        match (self.bypass.ns(), self.cached.ns()) {
            (Some(bypass_ns), Some(cached_ns)) if bypass_ns * 2 < cached_ns * 3 => Worth::Bypass,
            (Some(_), Some(_)) => Worth::Cache,
            _ => Worth::Unknown,
        }
    }

    /// Returns whether a bypass should be measured now and then: the times of evictions, which take
    /// longer, leave it possible that a bypass is cheaper.
    pub(super) fn bypass_may_be_better(&self) -> bool {
        match (self.eviction.ns(), self.cached.ns()) {
            (Some(eviction_ns), Some(cached_ns)) => eviction_ns < cached_ns * 2,
            _ => false,
        }
    }
}

impl Median {
    /// Returns the median; `None` with too few samples.
    fn ns(&self) -> Option<u64> {
        let enough = self.samples.load(Ordering::Relaxed) >= ENOUGH_SAMPLES;
        enough.then(|| self.ns.load(Ordering::Relaxed))
    }

    fn sample(&self, ns: u64) {
        let samples = self.samples.load(Ordering::Relaxed);
        let before = self.ns.load(Ordering::Relaxed);
        let step = before >> if samples < ENOUGH_SAMPLES { FIRST_STEP_LOG2 } else { STEP_LOG2 };
        let after = match samples {
            0 => ns,
            _ if ns > before => ns.min(before + step.max(1)),
            _ => ns.max(before - step),
        };
        self.ns.store(after, Ordering::Relaxed);
        self.samples.store(samples.saturating_add(1), Ordering::Relaxed);
    }

    fn forget(&self) {
        self.samples.store(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_way_wins_and_one_outlier_does_not_turn_it() {
        let costs = Costs::default();
        (0..15).for_each(|_| costs.sample_bypass(2000, 1));
        (0..50).for_each(|_| costs.sample_cached(500, 1));
        assert_eq!(costs.worth(), Worth::Unknown);
        costs.sample_bypass(2000, 1);
        assert_eq!(costs.worth(), Worth::Cache);
        costs.sample_cached(9000, 1);
        assert_eq!(costs.worth(), Worth::Cache);
        (0..50).for_each(|_| costs.sample_bypass(800, 1));
        assert_eq!(costs.worth(), Worth::Cache);
        (0..50).for_each(|_| costs.sample_bypass(700, 1));
        assert_eq!(costs.worth(), Worth::Bypass);
    }

    #[test]
    fn a_cache_that_is_not_written_is_tried_again() {
        let costs = Costs::default();
        (0..50).for_each(|_| costs.sample_cached(500, 1));
        (0..50).for_each(|_| costs.sample_bypass(500, TIME_TO_DOUBT_NS));
        assert_eq!(costs.worth(), Worth::Bypass);
        costs.sample_bypass(500, TIME_TO_DOUBT_NS + 1);
        assert_eq!(costs.worth(), Worth::Unknown);
    }

    #[test]
    fn a_slow_device_is_not_tried_for_nothing() {
        let costs = Costs::default();
        (0..50).for_each(|_| costs.sample_cached(500, 1));
        assert!(!costs.bypass_may_be_better());
        (0..50).for_each(|_| costs.sample_eviction(900));
        assert!(costs.bypass_may_be_better());
        (0..50).for_each(|_| costs.sample_eviction(1100));
        assert!(!costs.bypass_may_be_better());
    }
}
