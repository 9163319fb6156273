//! What writes cost, measured: whether a cache write is worth it.
//!
//! Moving averages over sampled operations. Races between updates lose a sample, which does no harm.

use std::sync::atomic::{AtomicU64, Ordering};

/// A new sample weighs one part in `1 << WEIGHT_LOG2`.
const WEIGHT_LOG2: u32 = 4;

/// Averages in nanoseconds; 0 until the first sample.
#[derive(Default)]
#[expect(clippy::struct_field_names, reason = "the unit")]
pub(super) struct Costs {
    /// A block of a request written to the device below.
    bypass_ns: AtomicU64,
    /// A block of the cache written to the device below: dearer, for its data comes from memory.
    eviction_ns: AtomicU64,
    /// A block put into the cache, bookkeeping included.
    cached_ns: AtomicU64,
}

impl Costs {
    /// A block of a request was written below in `ns`.
    pub(super) fn sample_bypass(&self, ns: u64) {
        average(&self.bypass_ns, ns);
    }

    /// A block of the cache was written below in `ns`.
    pub(super) fn sample_eviction(&self, ns: u64) {
        average(&self.eviction_ns, ns);
    }

    /// A block was put into the cache in `ns`.
    pub(super) fn sample_cached(&self, ns: u64) {
        average(&self.cached_ns, ns);
    }

    /// The device below is no slower than the cache, so caching would only add the work of the eviction. Until
    /// something went past the cache, evictions tell how fast the device is at least.
    pub(super) fn favour_bypass(&self) -> bool {
        let below_ns = match self.bypass_ns.load(Ordering::Relaxed) {
            0 => self.eviction_ns.load(Ordering::Relaxed),
            bypass_ns => bypass_ns,
        };
        below_ns > 0 && below_ns <= self.cached_ns.load(Ordering::Relaxed)
    }
}

fn average(into: &AtomicU64, ns: u64) {
    let before = into.load(Ordering::Relaxed);
    let after = if before == 0 {
        ns
    } else {
        // A thread that lost its CPU in between says nothing about the cost.
        before - (before >> WEIGHT_LOG2) + (ns.min(before * 4) >> WEIGHT_LOG2)
    };
    into.store(after.max(1), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_way_wins_and_one_outlier_does_not_turn_it() {
        let costs = Costs::default();
        assert!(!costs.favour_bypass());
        (0..50).for_each(|_| costs.sample_bypass(2000));
        (0..50).for_each(|_| costs.sample_cached(500));
        assert!(!costs.favour_bypass());
        costs.sample_cached(9000);
        assert!(!costs.favour_bypass());
        (0..50).for_each(|_| costs.sample_bypass(300));
        assert!(costs.favour_bypass());
    }

    #[test]
    fn evictions_count_until_a_bypass_is_measured() {
        let costs = Costs::default();
        (0..50).for_each(|_| costs.sample_cached(500));
        costs.sample_eviction(400);
        assert!(costs.favour_bypass());
        (0..50).for_each(|_| costs.sample_eviction(900));
        assert!(!costs.favour_bypass());
        costs.sample_bypass(400);
        costs.sample_eviction(900);
        assert!(costs.favour_bypass());
    }
}
