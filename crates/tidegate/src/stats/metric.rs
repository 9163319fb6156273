//! Metrics: the counts and measurements of each tier, described once, in a form that any page can
//! print.
//!
//! An engine declares a [`Metric`] as a constant beside its counter and hands its present value to
//! a [`Collector`]. `tidegate stat`, its JSON and later pages enumerate the [`Reading`]s and need
//! to know no engine.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::histogram::Latencies;

/// The unit of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Events or things.
    Count,
    /// Bytes.
    Bytes,
    /// Nanoseconds.
    Ns,
    /// Hundredths.
    Pct,
}

/// How a value changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// It only grows while the tier is open, but for a reset.
    Counter,
    /// It grows and shrinks.
    Gauge,
    /// It is a distribution of latencies.
    Histogram,
}

/// Name, kind, unit and help text of a metric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metric {
    /// Lower case, words joined by `_`, with the unit at the end unless the metric is a count.
    pub name: Cow<'static, str>,
    /// How its value changes.
    pub kind: Kind,
    /// The unit of its value.
    pub unit: Unit,
    /// One sentence for people.
    pub help: Cow<'static, str>,
}

impl Metric {
    /// Describes a value that only grows.
    pub const fn counter(name: &'static str, unit: Unit, help: &'static str) -> Self {
        Self { name: Cow::Borrowed(name), kind: Kind::Counter, unit, help: Cow::Borrowed(help) }
    }

    /// Describes a value that grows and shrinks.
    pub const fn gauge(name: &'static str, unit: Unit, help: &'static str) -> Self {
        Self { name: Cow::Borrowed(name), kind: Kind::Gauge, unit, help: Cow::Borrowed(help) }
    }

    /// Describes a distribution of latencies in nanoseconds.
    pub const fn latencies(name: &'static str, help: &'static str) -> Self {
        let (name, help) = (Cow::Borrowed(name), Cow::Borrowed(help));
        Self { name, kind: Kind::Histogram, unit: Unit::Ns, help }
    }
}

/// The value of a metric.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// A whole number.
    Whole(u64),
    /// A share or a mean.
    Real(f64),
    /// A distribution.
    Latencies(Latencies),
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Whole(number)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Real(number)
    }
}

impl From<Latencies> for Value {
    fn from(latencies: Latencies) -> Self {
        Self::Latencies(latencies)
    }
}

/// The labels that tell one reading of a metric from another, such as the tier.
pub type Labels = BTreeMap<Cow<'static, str>, String>;

/// A metric with its value at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// The metric.
    #[serde(flatten)]
    pub metric: Metric,
    /// The labels of the reading, such as the tier.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: Labels,
    /// The value.
    pub value: Value,
}

/// Gathers the readings of one or more tiers.
#[derive(Debug, Default)]
pub struct Collector {
    labels: Labels,
    readings: Vec<Reading>,
}

impl Collector {
    /// Adds a reading of `metric`.
    pub fn add(&mut self, metric: &Metric, value: impl Into<Value>) {
        let (metric, labels, value) = (metric.clone(), self.labels.clone(), value.into());
        self.readings.push(Reading { metric, labels, value });
    }

    /// Labels all readings that `collect` adds with `key` = `value`.
    pub fn labelled(
        &mut self,
        key: &'static str,
        value: impl Into<String>,
        collect: impl FnOnce(&mut Self),
    ) {
        let before = self.labels.clone();
        self.labels.insert(Cow::Borrowed(key), value.into());
        collect(self);
        self.labels = before;
    }

    /// Labels `readings` with the collector's present labels, and adds them.
    pub fn extend(&mut self, readings: Vec<Reading>) {
        for mut reading in readings {
            reading.labels.extend(self.labels.clone());
            self.readings.push(reading);
        }
    }

    /// Returns the readings, in the order of their addition.
    pub fn finish(self) -> Vec<Reading> {
        self.readings
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const WRITES: Metric = Metric::counter("writes", Unit::Count, "Writes acknowledged");
    const WRITE_NS: Metric = Metric::latencies("write_ns", "Latency of writes");

    #[test]
    fn readings_keep_description_labels_and_order() {
        let mut collector = Collector::default();
        collector.labelled("tier", "btt", |collector| {
            collector.add(&WRITES, 7);
            collector.labelled("phase", "copy", |it| it.add(&WRITE_NS, Latencies::default()));
        });
        collector.add(&WRITES, 0.5);
        let readings = collector.finish();
        let labels: Vec<_> = readings.iter().map(|it| it.labels.len()).collect();
        assert_eq!((labels, &readings[0].value), (vec![1, 2, 0], &Value::Whole(7)));
        let mut collector = Collector::default();
        collector.labelled("export", "db", |collector| collector.extend(readings));
        let readings = collector.finish();
        let labels: Vec<_> = readings.iter().map(|it| it.labels.len()).collect();
        assert_eq!((labels, &*readings[0].labels["export"]), (vec![2, 3, 1], "db"));
    }

    #[test]
    fn readings_survive_json() {
        let mut collector = Collector::default();
        let histogram = crate::stats::Histogram::new();
        histogram.record(100);
        collector.labelled("tier", "btt", |it| it.add(&WRITE_NS, histogram.snapshot()));
        collector.add(&WRITES, 3);
        let readings = collector.finish();
        let json = serde_json::to_value(&readings).unwrap();
        assert_eq!((&json[0]["kind"], &json[0]["unit"]), (&"histogram".into(), &"ns".into()));
        assert_eq!((&json[0]["labels"]["tier"], &json[1]["value"]), (&"btt".into(), &3.into()));
        assert_eq!(serde_json::from_value::<Vec<Reading>>(json).unwrap(), readings);
    }
}
