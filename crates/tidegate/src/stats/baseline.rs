//! The counts at a reset, which are subtracted from later readings.
//!
//! The counters themselves go on: no engine is told of a reset, and an engine's own use of a
//! counter is undisturbed.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::metric::{Kind, Labels, Reading, Value};

/// Counters and histograms as they were at a reset.
#[derive(Debug, Default)]
pub struct Baseline {
    by_name: BTreeMap<Cow<'static, str>, BTreeMap<Labels, Value>>,
}

impl Baseline {
    /// Remembers the counts of `readings`.
    pub fn of(readings: Vec<Reading>) -> Self {
        let mut baseline = Self::default();
        for Reading { metric, labels, value } in readings {
            if metric.kind != Kind::Gauge {
                baseline.by_name.entry(metric.name).or_default().insert(labels, value);
            }
        }
        baseline
    }

    /// Returns the counts of `readings` since the reset. Gauges stay, and so do readings that are
    /// new since.
    #[must_use]
    pub fn since(&self, mut readings: Vec<Reading>) -> Vec<Reading> {
        for Reading { metric, labels, value } in &mut readings {
            let then = self.by_name.get(&metric.name).and_then(|values| values.get(labels));
            if let Some(then) = then.filter(|_| metric.kind != Kind::Gauge) {
                *value = value.since(then);
            }
        }
        readings
    }
}

impl Value {
    /// Returns the growth of a counter or histogram since `before`; at least 0, since another
    /// thread may have read `before` later.
    fn since(&self, before: &Self) -> Self {
        match (self, before) {
            (Self::Whole(now), Self::Whole(before)) => Self::Whole(now.saturating_sub(*before)),
            (Self::Real(now), Self::Real(before)) => Self::Real((now - before).max(0.0)),
            (Self::Latencies(now), Self::Latencies(before)) => Self::Latencies(now.since(before)),
            // All values of a metric have one kind.
            (now, _) => now.clone(),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stats::{Collector, Histogram, Metric, Unit};

    const WRITES: Metric = Metric::counter("writes", Unit::Count, "Writes");
    const BUSY_PCT: Metric = Metric::counter("busy_pct", Unit::Pct, "Real numbers");
    const DIRTY_BYTES: Metric = Metric::gauge("dirty_bytes", Unit::Bytes, "Dirty");
    const WRITE_NS: Metric = Metric::latencies("write_ns", "Latency of writes");

    /// A counter, a gauge and a histogram of each of two tiers.
    #[derive(Default)]
    struct Tiers {
        writes: [u64; 2],
        dirty_bytes: u64,
        write_ns: Histogram,
    }

    impl Tiers {
        fn write(&mut self, tier: usize, latency_ns: u64) {
            self.writes[tier] += 1;
            self.dirty_bytes += 4096;
            self.write_ns.record(latency_ns);
        }

        fn read(&self) -> Vec<Reading> {
            let mut collector = Collector::default();
            for (tier, writes) in ["dram", "pmem"].into_iter().zip(self.writes) {
                collector.labelled("tier", tier, |it| it.add(&WRITES, writes));
            }
            collector.add(&DIRTY_BYTES, self.dirty_bytes);
            collector.add(&WRITE_NS, self.write_ns.snapshot());
            collector.finish()
        }
    }

    fn values(readings: &[Reading]) -> Vec<&Value> {
        readings.iter().map(|reading| &reading.value).collect()
    }

    #[test]
    fn what_was_not_there_at_the_reset_counts_from_its_beginning() {
        let mut tiers = Tiers::default();
        tiers.write(0, 7);
        let baseline = Baseline::of(tiers.read());
        let mut collector = Collector::default();
        collector.labelled("tier", "new", |it| it.add(&WRITES, 5));
        collector.add(&BUSY_PCT, 0.5);
        let since = baseline.since(collector.finish());
        assert_eq!(values(&since), [&Value::Whole(5), &Value::Real(0.5)]);
    }

    #[test]
    fn a_counter_that_is_behind_the_reset_counts_nothing() {
        let mut collector = Collector::default();
        collector.add(&WRITES, 5);
        collector.add(&BUSY_PCT, 0.5);
        let baseline = Baseline::of(collector.finish());
        let mut collector = Collector::default();
        collector.add(&WRITES, 3);
        collector.add(&BUSY_PCT, 0.25);
        let since = baseline.since(collector.finish());
        assert_eq!(values(&since), [&Value::Whole(0), &Value::Real(0.0)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// After a reset, counters and histograms are equal to those that began at the reset;
        /// gauges do not change.
        #[test]
        fn counts_after_a_reset_are_those_of_a_new_beginning(
            before in prop::collection::vec((0_usize..2, 0_u64..1 << 20), 0..50),
            after in prop::collection::vec((0_usize..2, 0_u64..1 << 20), 0..50),
        ) {
            let (mut tiers, mut others) = (Tiers::default(), Tiers::default());
            for (tier, ns) in &before {
                tiers.write(*tier, *ns);
            }
            let baseline = Baseline::of(tiers.read());
            for (tier, ns) in &after {
                tiers.write(*tier, *ns);
                others.write(*tier, *ns);
            }
            let (found, expected) = (baseline.since(tiers.read()), others.read());
            prop_assert_eq!(&values(&found)[..2], &values(&expected)[..2]);
            prop_assert_eq!(&found[2].value, &Value::Whole(tiers.dirty_bytes));
            let [Value::Latencies(found), Value::Latencies(expected)] =
                [&found[3].value, &expected[3].value] else { panic!("latencies") };
            prop_assert_eq!((found.count, found.sum_ns), (expected.count, expected.sum_ns));
            prop_assert_eq!(&found.buckets, &expected.buckets);
            // The longest latency may be the upper bound of its bucket.
            let most_ns = expected.buckets.last().map_or(0, |bucket| bucket.upto_ns);
            prop_assert!((expected.max_ns..=most_ns).contains(&found.max_ns));
        }
    }
}
