//! Latency histograms: eight buckets to a power of two, so a quantile is at most 12.5 % too high.
//!
//! [`bucket_of`] and [`upper_bound_ns`] are the one bucket layout of all latencies. [`Histogram`]
//! is sharded by thread: recording takes three plain stores to cache lines that no other thread
//! writes. [`Samples`] is one shard, for recorders with shards of their own. [`Latencies`] is a
//! snapshot with quantiles.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};

use crate::sync::shard::{Shards, add};

/// Number of buckets: eight to a power of two, up to 2^41 ns (37 minutes).
pub const BUCKETS: usize = 312;

/// Returns the bucket of `latency_ns`; the first eight buckets hold 0 to 7 ns.
#[inline]
pub fn bucket_of(latency_ns: u64) -> usize {
    if latency_ns < 8 {
        return usize::try_from(latency_ns).unwrap_or(0);
    }
    let exponent = latency_ns.ilog2();
    let eighth = usize::try_from((latency_ns >> (exponent - 3)) & 7).unwrap_or(0);
    ((exponent as usize - 2) * 8 + eighth).min(BUCKETS - 1)
}

/// Returns the longest latency of bucket `bucket`, in nanoseconds.
pub fn upper_bound_ns(bucket: usize) -> u64 {
    let bucket = bucket.min(BUCKETS - 1);
    if bucket < 8 {
        return bucket as u64;
    }
    let (shift, eighth) = (bucket / 8 - 1, bucket as u64 % 8);
    ((9 + eighth) << shift) - 1
}

/// Latencies recorded by one thread, or by several that share a shard.
pub struct Samples {
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Samples {
    fn default() -> Self {
        let buckets = [const { AtomicU64::new(0) }; BUCKETS];
        Self { sum_ns: AtomicU64::new(0), max_ns: AtomicU64::new(0), buckets }
    }
}

impl Samples {
    /// Adds one latency. `exclusive` says that no other thread records here.
    #[inline]
    pub fn record(&self, latency_ns: u64, exclusive: bool) {
        add(&self.buckets[bucket_of(latency_ns)], 1, exclusive);
        add(&self.sum_ns, latency_ns, exclusive);
        if latency_ns > self.max_ns.load(Ordering::Relaxed) {
            self.max_ns.fetch_max(latency_ns, Ordering::Relaxed);
        }
    }
}

/// A histogram that many threads record into without waiting for each other.
#[derive(Default)]
pub struct Histogram {
    /// Allocated at a thread's first latency: most threads never record one.
    shards: Shards<OnceLock<Box<Samples>>>,
}

impl Histogram {
    /// Makes an empty histogram.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one latency for the calling thread.
    #[inline]
    pub fn record(&self, latency_ns: u64) {
        let (shard, exclusive) = self.shards.mine();
        shard.get_or_init(Box::default).record(latency_ns, exclusive);
    }

    /// Takes a snapshot of all latencies so far; the newest of running threads may be missing.
    pub fn snapshot(&self) -> Latencies {
        Latencies::of(self.shards.iter().filter_map(OnceLock::get).map(|samples| &**samples))
    }
}

/// A snapshot of latencies. Its serialized form has the percentiles `p50_ns`, `p99_ns` and
/// `p999_ns` beside the fields.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Latencies {
    /// Number of latencies.
    pub count: u64,
    /// Sum of all latencies.
    pub sum_ns: u64,
    /// Longest latency.
    pub max_ns: u64,
    /// The latencies by length, shortest first; empty buckets are left out.
    pub buckets: Vec<Bucket>,
}

/// A bucket of a histogram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Longest latency that falls into it.
    pub upto_ns: u64,
    /// Number of latencies in it.
    pub samples: u64,
}

impl Latencies {
    /// Merges shards.
    pub fn of<'a>(shards: impl Iterator<Item = &'a Samples>) -> Self {
        let (mut counts, mut sum_ns, mut max_ns) = ([0_u64; BUCKETS], 0_u64, 0);
        for shard in shards {
            for (count, bucket) in counts.iter_mut().zip(&shard.buckets) {
                *count += bucket.load(Ordering::Relaxed);
            }
            sum_ns = sum_ns.wrapping_add(shard.sum_ns.load(Ordering::Relaxed));
            max_ns = shard.max_ns.load(Ordering::Relaxed).max(max_ns);
        }
        Self { sum_ns, max_ns, ..Self::of_counts(&counts) }
    }

    /// Makes a snapshot from the number of latencies in each bucket: the sum and the longest
    /// latency are upper bounds.
    pub fn of_counts(counts: &[u64; BUCKETS]) -> Self {
        let bucket = |(bucket, &samples)| Bucket { upto_ns: upper_bound_ns(bucket), samples };
        let buckets: Vec<_> =
            counts.iter().enumerate().map(bucket).filter(|bucket| bucket.samples > 0).collect();
        let weight = |bucket: &Bucket| bucket.upto_ns.saturating_mul(bucket.samples);
        Self {
            count: counts.iter().sum(),
            sum_ns: buckets.iter().map(weight).fold(0, u64::saturating_add),
            max_ns: buckets.last().map_or(0, |bucket| bucket.upto_ns),
            buckets,
        }
    }

    /// Returns the latencies that were recorded after `before`, an earlier snapshot of the same
    /// histogram. Their longest latency may be the upper bound of its bucket.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let earlier: BTreeMap<u64, u64> =
            before.buckets.iter().map(|bucket| (bucket.upto_ns, bucket.samples)).collect();
        let new = |bucket: &Bucket| {
            let earlier = earlier.get(&bucket.upto_ns).copied().unwrap_or(0);
            let samples = bucket.samples.saturating_sub(earlier);
            (samples > 0).then_some(Bucket { samples, ..*bucket })
        };
        let buckets: Vec<Bucket> = self.buckets.iter().filter_map(new).collect();
        Self {
            count: buckets.iter().map(|bucket| bucket.samples).sum(),
            sum_ns: self.sum_ns.saturating_sub(before.sum_ns),
            max_ns: buckets.last().map_or(0, |last| last.upto_ns.min(self.max_ns)),
            buckets,
        }
    }

    /// Returns the mean latency; 0 without latencies.
    pub fn mean_ns(&self) -> u64 {
        self.sum_ns.checked_div(self.count).unwrap_or(0)
    }

    /// Returns the latency that `millionths` of all latencies do not exceed: the upper bound of its
    /// bucket, at most the longest latency. Returns 0 without latencies.
    pub fn quantile_ns(&self, millionths: u64) -> u64 {
        let rank = (u128::from(self.count) * u128::from(millionths)).div_ceil(1_000_000);
        let mut seen = 0_u128;
        let found = self.buckets.iter().find(|bucket| {
            seen += u128::from(bucket.samples);
            seen >= rank
        });
        found.map_or(0, |bucket| bucket.upto_ns.min(self.max_ns))
    }
}

impl Serialize for Latencies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Latencies", 7)?;
        fields.serialize_field("count", &self.count)?;
        fields.serialize_field("sum_ns", &self.sum_ns)?;
        fields.serialize_field("max_ns", &self.max_ns)?;
        fields.serialize_field("p50_ns", &self.quantile_ns(500_000))?;
        fields.serialize_field("p99_ns", &self.quantile_ns(990_000))?;
        fields.serialize_field("p999_ns", &self.quantile_ns(999_000))?;
        fields.serialize_field("buckets", &self.buckets)?;
        fields.end()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_serialized_form_has_percentiles_and_is_read_again() {
        let histogram = Histogram::new();
        (0..99).for_each(|_| histogram.record(100));
        histogram.record(10_000);
        let latencies = histogram.snapshot();
        let value = serde_json::to_value(&latencies).unwrap();
        assert_eq!([&value["p50_ns"], &value["p99_ns"], &value["p999_ns"]], [103, 103, 10_000]);
        assert_eq!(serde_json::from_value::<Latencies>(value).unwrap(), latencies);
    }

    #[test]
    fn buckets_are_adjacent_and_hold_their_latencies() {
        for bucket in 0..BUCKETS - 1 {
            assert_eq!(bucket_of(upper_bound_ns(bucket)), bucket);
            assert_eq!(bucket_of(upper_bound_ns(bucket) + 1), bucket + 1);
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(upper_bound_ns(usize::MAX), (1 << 41) - 1);
    }

    #[test]
    fn quantiles_are_upper_bounds_of_at_most_an_eighth_too_much() {
        let histogram = Histogram::new();
        (0..99).for_each(|_| histogram.record(100));
        histogram.record(10_000);
        let latencies = histogram.snapshot();
        assert_eq!((latencies.count, latencies.mean_ns(), latencies.max_ns), (100, 199, 10_000));
        let quantiles = [0, 500_000, 990_000, 999_000].map(|which| latencies.quantile_ns(which));
        assert_eq!(quantiles, [103, 103, 103, 10_000]);
        assert_eq!(Latencies::default().quantile_ns(500_000), 0);
    }

    #[test]
    fn latencies_of_all_threads_are_merged() {
        let histogram = Histogram::new();
        std::thread::scope(|scope| {
            for thread in 1..=4 {
                let histogram = &histogram;
                scope.spawn(move || (0..1000).for_each(|_| histogram.record(thread)));
            }
        });
        let latencies = histogram.snapshot();
        assert_eq!((latencies.count, latencies.sum_ns, latencies.max_ns), (4000, 10_000, 4));
        let expected = [1, 2, 3, 4].map(|upto_ns| Bucket { upto_ns, samples: 1000 });
        assert_eq!(latencies.buckets, expected);
    }

    #[test]
    fn latencies_since_a_snapshot_are_those_that_came_after_it() {
        let histogram = Histogram::new();
        (0..10).for_each(|_| histogram.record(1000));
        let before = histogram.snapshot();
        assert_eq!(before.since(&before), Latencies::default());
        assert_eq!(before.since(&Latencies::default()), before);
        (0..3).for_each(|_| histogram.record(100));
        let since = histogram.snapshot().since(&before);
        assert_eq!((since.count, since.sum_ns, since.max_ns), (3, 300, 103));
        histogram.record(2000);
        let since = histogram.snapshot().since(&before);
        assert_eq!((since.count, since.sum_ns, since.max_ns), (4, 2300, 2000));
        assert_eq!(since.quantile_ns(500_000), 103);
        // The other histogram counted more: nothing overflows.
        assert_eq!(Latencies::default().since(&before), Latencies::default());
    }

    #[test]
    fn counts_alone_give_bounds() {
        let mut counts = [0; BUCKETS];
        counts[3] = 2;
        counts[bucket_of(100)] = 1;
        let latencies = Latencies::of_counts(&counts);
        assert_eq!((latencies.count, latencies.sum_ns, latencies.max_ns), (3, 3 + 3 + 103, 103));
    }
}
