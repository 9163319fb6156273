//! What writes cost, measured: whether a cache write is worth it.
//!
//! Moving medians over sampled operations: a thread that lost its CPU in between says nothing about
//! the cost, however long it took. Races between updates lose a sample, which does no harm.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A sample moves a median by one part in `1 << STEP_LOG2` towards itself, and the first ones by
/// more.
const STEP_LOG2: u32 = 5;
const FIRST_STEP_LOG2: u32 = 2;
/// Samples before a median is believed.
const ENOUGH_SAMPLES: u32 = 16;
/// Time without a cache write after which the cost of one is measured again: the load may have
/// changed.
const TIME_TO_DOUBT_NS: u64 = 500_000_000;

/// Which way is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Worth {
    /// Too little was measured.
    Unknown,
    /// A block gets into the cache in less than half the time that it takes below.
    Cache,
    /// Caching would only add the work of the eviction.
    Bypass,
}

/// Times of one block.
#[derive(Default)]
pub(super) struct Costs {
    /// Of a request, written to the device below.
    bypass: Median,
    /// Of the cache, written to the device below: slower, since its data comes from memory.
    eviction: Median,
    /// Put into the cache, bookkeeping included.
    cached: Median,
    /// When the last cache write was sampled, or doubt began.
    cached_at_ns: AtomicU64,
}

#[derive(Default)]
struct Median {
    ns: AtomicU64,
    samples: AtomicU32,
}

impl Costs {
    /// A block of a request was written below in `ns`, until `now_ns`.
    pub(super) fn sample_bypass(&self, ns: u64, now_ns: u64) {
        self.bypass.sample(ns);
        let cached_at_ns = self.cached_at_ns.load(Ordering::Relaxed);
        if now_ns.saturating_sub(cached_at_ns) >= TIME_TO_DOUBT_NS {
            self.cached.forget();
            self.cached_at_ns.store(now_ns, Ordering::Relaxed);
        }
    }

    /// A block of the cache was written below in `ns`.
    pub(super) fn sample_eviction(&self, ns: u64) {
        self.eviction.sample(ns);
    }

    /// A block was put into the cache in `ns`, until `now_ns`.
    pub(super) fn sample_cached(&self, ns: u64, now_ns: u64) {
        self.cached.sample(ns);
        self.cached_at_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Whether caching is worth it: it takes at most half the time of a bypass, for the write-back
    /// comes on top.
    pub(super) fn worth(&self) -> Worth {
        match (self.bypass.ns(), self.cached.ns()) {
            (Some(bypass_ns), Some(cached_ns)) if bypass_ns < cached_ns * 2 => Worth::Bypass,
            (Some(_), Some(_)) => Worth::Cache,
            _ => Worth::Unknown,
        }
    }

    /// A bypass should be measured now and then: evictions, which take longer, do not rule out that
    /// it is the better way.
    pub(super) fn bypass_may_be_better(&self) -> bool {
        match (self.eviction.ns(), self.cached.ns()) {
            (Some(eviction_ns), Some(cached_ns)) => eviction_ns < cached_ns * 3,
            _ => false,
        }
    }
}

impl Median {
    /// None while too little was measured.
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
        (0..50).for_each(|_| costs.sample_bypass(950, 1));
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
        (0..50).for_each(|_| costs.sample_eviction(1400));
        assert!(costs.bypass_may_be_better());
        (0..50).for_each(|_| costs.sample_eviction(1600));
        assert!(!costs.bypass_may_be_better());
    }
}
