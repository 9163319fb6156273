//! Readings in the text format of `OpenMetrics` 1.0, which Prometheus reads.
//!
//! Names follow that format's conventions: a prefix, base units (bytes, seconds, ratios), `_total`
//! behind counters. An engine's metric `read_ns` is `tidegate_read_seconds` here.

use std::borrow::Cow;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use tidegate::stats;
use tidegate::stats::{Kind, Latencies, Metric, Reading, Value};

const PREFIX: &str = "tidegate";
/// Histograms have a bucket for each power of two from 128 ns to 34 s.
const BUCKETS_LOG2_NS: std::ops::RangeInclusive<u32> = 7..=35;

/// Returns the page that shows `readings`. Readings of one metric need not be adjacent.
pub(super) fn page(readings: Vec<Reading>) -> String {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(Readings(readings)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)
        .expect("a string takes all text");
    text
}

#[derive(Debug)]
struct Readings(Vec<Reading>);

impl Collector for Readings {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (number, reading) in self.0.iter().enumerate() {
            let metric = &reading.metric;
            let is_of_it = |other: &&Reading| other.metric.name == metric.name;
            if self.0[..number].iter().any(|earlier| is_of_it(&earlier)) {
                continue;
            }
            let (name, unit) = name_of(metric);
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
            };
            let mut family = encoder.encode_descriptor(&name, &metric.help, unit.as_ref(), kind)?;
            for reading in self.0[number..].iter().filter(is_of_it) {
                encode(reading, &mut family)?;
            }
        }
        Ok(())
    }
}

/// Returns the name of `metric` without its unit, and the base unit to append.
fn name_of(metric: &Metric) -> (Cow<'_, str>, Option<Unit>) {
    let (ending, unit) = match metric.unit {
        stats::Unit::Count => return (Cow::Borrowed(&metric.name), None),
        stats::Unit::Bytes => ("_bytes", Unit::Bytes),
        stats::Unit::Ns => ("_ns", Unit::Seconds),
        stats::Unit::Pct => ("_pct", Unit::Other("ratio".into())),
    };
    (Cow::Borrowed(metric.name.strip_suffix(ending).unwrap_or(&metric.name)), Some(unit))
}

fn encode(reading: &Reading, family: &mut MetricEncoder<'_>) -> fmt::Result {
    let labels: Vec<_> = reading.labels.iter().map(|(key, value)| (&**key, &**value)).collect();
    if labels.is_empty() {
        return encode_value(reading, family);
    }
    encode_value(reading, &mut family.encode_family(&labels)?)
}

fn encode_value(reading: &Reading, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
    match (&reading.value, reading.metric.kind) {
        (Value::Latencies(latencies), _) => encode_latencies(latencies, encoder),
        (Value::Whole(number), Kind::Counter) if reading.metric.unit != stats::Unit::Ns => {
            encoder.encode_counter::<NoLabelSet, _, f64>(number, None)
        }
        (value, Kind::Counter) => {
            encoder.encode_counter::<NoLabelSet, _, f64>(&in_base_unit(value, reading), None)
        }
        (value, _) => encoder.encode_gauge(&in_base_unit(value, reading)),
    }
}

#[allow(clippy::cast_precision_loss)]
fn in_base_unit(value: &Value, reading: &Reading) -> f64 {
    let number = match value {
        Value::Whole(number) => *number as f64,
        Value::Real(number) => *number,
        Value::Latencies(latencies) => latencies.count as f64,
    };
    match reading.metric.unit {
        stats::Unit::Count | stats::Unit::Bytes => number,
        stats::Unit::Ns => number / 1e9,
        stats::Unit::Pct => number / 100.0,
    }
}

#[allow(clippy::cast_precision_loss)]
fn encode_latencies(latencies: &Latencies, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
    let seconds = |ns: u64| ns as f64 / 1e9;
    let mut left = latencies.buckets.iter().peekable();
    let mut buckets: Vec<(f64, u64)> = Vec::new();
    for log2 in BUCKETS_LOG2_NS {
        let bound_ns = 1 << log2;
        let mut samples = 0;
        while let Some(bucket) = left.next_if(|bucket| bucket.upto_ns < bound_ns) {
            samples += bucket.samples;
        }
        buckets.push((seconds(bound_ns), samples));
    }
    buckets.push((f64::INFINITY, left.map(|bucket| bucket.samples).sum()));
    let count = buckets.iter().map(|(_, samples)| samples).sum();
    encoder.encode_histogram::<NoLabelSet>(seconds(latencies.sum_ns), count, &buckets, None)
}

#[cfg(test)]
mod tests {
    use tidegate::stats::{Collector, Histogram};

    use super::*;

    const READS: Metric = Metric::counter("reads", stats::Unit::Count, "Reads answered");
    const READ_NS: Metric = Metric::latencies("read_ns", "Latency of reads");
    const HIT_PCT: Metric = Metric::gauge("hit_pct", stats::Unit::Pct, "Share of hits");
    const READ_BYTES: Metric = Metric::counter("read_bytes", stats::Unit::Bytes, "Bytes read");

    #[test]
    fn readings_of_a_metric_stand_together_in_base_units() {
        let histogram = Histogram::new();
        for ns in [100, 120, 128, 1_000_000, 60_000_000_000] {
            histogram.record(ns);
        }
        let mut collector = Collector::default();
        for tier in ["dram \"a\"", "pmem"] {
            collector.labelled("tier", tier, |it| {
                it.add(&READS, 7);
                it.add(&READ_BYTES, 1 << 60);
                it.add(&HIT_PCT, 12.5);
            });
        }
        collector.add(&READ_NS, histogram.snapshot());
        let page = page(collector.finish());
        for line in [
            "# TYPE tidegate_reads counter",
            "tidegate_reads_total{tier=\"dram \\\"a\\\"\"} 7",
            "tidegate_reads_total{tier=\"pmem\"} 7",
            "# UNIT tidegate_read_bytes bytes",
            "tidegate_read_bytes_total{tier=\"pmem\"} 1152921504606846976",
            "tidegate_hit_ratio{tier=\"pmem\"} 0.125",
            "tidegate_read_seconds_bucket{le=\"1.28e-7\"} 2",
            "tidegate_read_seconds_bucket{le=\"2.56e-7\"} 3",
            "tidegate_read_seconds_bucket{le=\"+Inf\"} 5",
            "tidegate_read_seconds_count 5",
        ] {
            let found = page.lines().filter(|it| *it == line).count();
            assert_eq!(found, 1, "{line}: {page}");
        }
        assert!(page.ends_with("# EOF\n"), "{page}");
    }
}
