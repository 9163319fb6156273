//! Numbers: samples of repeated runs, their medians, spreads and ratios.
//!
//! Invariants:
//! 1. Every number reported is the median over repetitions, except `max_ns`, which is the largest.
//! 2. Ratios are taken pair by pair: repetition i of the subject against repetition i of the
//!    baseline, which ran next to each other. The median of these ratios is reported with the
//!    smallest and the largest.

use serde::{Deserialize, Serialize};
use tidegate::pmem::Region;

use crate::table::{Table, number_cell};
use crate::timeline::nanoseconds;
use crate::workload::{Latencies, Outcome};

/// Kind of request measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Op {
    /// Writes.
    Write,
    /// Reads.
    Read,
    /// Flushes.
    Flush,
}

impl Op {
    /// Returns the name in rows and tables.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The identity of a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct Key {
    /// The policy; `peer:NAME` for a peer.
    pub policy: String,
    /// The case, such as the access pattern.
    pub case: String,
    /// Kind of request.
    pub op: Op,
    /// Threads, or jobs, that request at the same time.
    pub threads: usize,
    /// Requests of one thread in flight.
    pub iodepth: u32,
    /// Size of a request in bytes.
    pub block_bytes: u64,
}

impl Key {
    /// Makes the key of requests of one thread, one at a time.
    pub fn new(
        policy: impl Into<String>,
        case: impl Into<String>,
        op: Op,
        block_bytes: u64,
    ) -> Self {
        let (policy, case) = (policy.into(), case.into());
        Self { policy, case, op, threads: 1, iodepth: 1, block_bytes }
    }
}

/// The stores of one run to persistent memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Bytes stored around the cache: blocks of data.
    pub data_bytes: u64,
    /// 64 bytes for each cache line written back: metadata.
    pub metadata_bytes: u64,
    /// Fences.
    pub fences: u64,
}

impl Traffic {
    /// Returns the stores to `region` so far.
    pub fn of(region: &Region) -> Self {
        let counters = region.counters();
        Self {
            data_bytes: counters.bytes_streamed,
            metadata_bytes: counters.lines_written_back * 64,
            fences: counters.fences,
        }
    }

    /// Returns all bytes stored.
    pub(crate) fn bytes(&self) -> u64 {
        self.data_bytes + self.metadata_bytes
    }

    /// Returns the stores between `before` and this.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            data_bytes: self.data_bytes - before.data_bytes,
            metadata_bytes: self.metadata_bytes - before.metadata_bytes,
            fences: self.fences - before.fences,
        }
    }
}

/// Result of one run; our own programs print it as JSON.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Requests answered.
    pub ops: u64,
    /// Requests answered in a second.
    pub ops_per_s: f64,
    /// Mean latency in nanoseconds.
    pub mean_ns: f64,
    /// Median latency in nanoseconds.
    pub p50_ns: u64,
    /// 99 of 100 requests took at most this many nanoseconds.
    pub p99_ns: u64,
    /// 999 of 1000.
    pub p999_ns: u64,
    /// 9999 of 10000.
    pub p9999_ns: u64,
    /// The longest latency.
    pub max_ns: u64,
    /// The stores; `None` if they are not visible, as for a peer.
    #[serde(skip)]
    pub traffic: Option<Traffic>,
}

impl Sample {
    /// Makes the sample of `latencies` collected in `elapsed_s` seconds.
    pub fn new(latencies: &Latencies, elapsed_s: f64, traffic: Option<Traffic>) -> Self {
        Self {
            ops: latencies.len(),
            ops_per_s: latencies.len() as f64 / elapsed_s,
            mean_ns: latencies.mean(),
            p50_ns: latencies.value_at_quantile(0.5),
            p99_ns: latencies.value_at_quantile(0.99),
            p999_ns: latencies.value_at_quantile(0.999),
            p9999_ns: latencies.value_at_quantile(0.9999),
            max_ns: latencies.max(),
            traffic,
        }
    }

    /// Returns the samples of a run that stored `traffic`, one for each kind of its requests.
    pub(crate) fn of_kinds(
        outcome: &Outcome,
        traffic: Option<Traffic>,
    ) -> impl Iterator<Item = (Op, Self)> {
        let Outcome { write, read, flush, .. } = outcome;
        let kinds = [(Op::Write, write), (Op::Read, read), (Op::Flush, flush)].into_iter();
        let made = kinds.filter(|(_, latencies)| !latencies.is_empty());
        let elapsed_s = outcome.elapsed.as_secs_f64();
        made.map(move |(op, latencies)| (op, Self::new(latencies, elapsed_s, traffic)))
    }

    /// Makes the sample of a single operation that took `elapsed_s` seconds.
    pub fn single(elapsed_s: f64) -> Self {
        let ns = nanoseconds(std::time::Duration::from_secs_f64(elapsed_s));
        Self {
            ops: 1,
            ops_per_s: 1.0 / elapsed_s,
            mean_ns: elapsed_s * 1e9,
            p50_ns: ns,
            p99_ns: ns,
            p999_ns: ns,
            p9999_ns: ns,
            max_ns: ns,
            traffic: None,
        }
    }
}

/// Returns the throughput, for comparisons.
pub(crate) fn throughput(sample: &Sample) -> f64 {
    sample.ops_per_s
}

/// The repetitions of one measurement.
#[derive(Debug, Clone)]
pub struct Series {
    /// The identity of the measurement.
    pub key: Key,
    /// One for each repetition, in order; never empty.
    pub samples: Vec<Sample>,
}

/// One line of `rows` in the JSON output. The names are a contract with scripts.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The identity of the measurement.
    #[serde(flatten)]
    pub key: Key,
    /// Median throughput.
    pub ops_per_s: f64,
    /// Median of the means.
    pub mean_ns: f64,
    /// Median of the medians.
    pub p50_ns: u64,
    /// Median of the 99th percentiles.
    pub p99_ns: u64,
    /// Median of the 99.9th percentiles.
    pub p999_ns: u64,
    /// Median of the 99.99th percentiles.
    pub p9999_ns: u64,
    /// The longest latency of all.
    pub max_ns: u64,
    /// Bytes of data stored by a run (median); null if they are not visible.
    pub pmem_data_bytes: Option<u64>,
    /// Bytes of metadata stored by a run (median); null if they are not visible.
    pub pmem_metadata_bytes: Option<u64>,
    /// Fences of a run (median); null if they are not visible.
    pub fences: Option<u64>,
}

/// A median with the smallest and the largest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Returns the spread of `values`, or `None` if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = match values.len() % 2 {
            1 => values[middle],
            _ => f64::midpoint(values[middle - 1], values[middle]),
        };
        Some(Self { median, min, max })
    }

    /// Formats the smallest and the largest with `digits` digits.
    pub(crate) fn range(self, digits: usize) -> String {
        format!("{:.digits$}-{:.digits$}", self.min, self.max)
    }
}

/// Formats the cells of a ratio: median, and smallest and largest; empty if there is no ratio.
pub(crate) fn ratio_cells(ratio: Option<Spread>) -> [String; 2] {
    let range = ratio.map_or(String::new(), |ratio| ratio.range(2));
    [number_cell(ratio.map(|ratio| ratio.median), 2), range]
}

impl Series {
    /// Returns the spread of `value` over the repetitions.
    ///
    /// # Panics
    /// Never: a series has a sample.
    pub fn spread(&self, value: impl Fn(&Sample) -> f64) -> Spread {
        Spread::of(self.samples.iter().map(value)).expect("a series has a sample")
    }

    /// Returns the median of the bytes requested in a second, in millions.
    pub(crate) fn mb_per_s(&self) -> f64 {
        self.spread(|sample| sample.ops_per_s * self.key.block_bytes as f64 / 1e6).median
    }

    /// Returns the ratios of `value` to that of `baseline`, repetition by repetition, or `None` if
    /// the baseline is zero.
    pub fn ratio(&self, baseline: &Self, value: impl Fn(&Sample) -> f64) -> Option<Spread> {
        let pairs = self.samples.iter().zip(&baseline.samples);
        let ratios = pairs.map(|(mine, theirs)| value(mine) / value(theirs));
        Spread::of(ratios).filter(|ratio| ratio.max.is_finite())
    }

    /// Returns the row of the JSON output.
    pub fn row(&self) -> Row {
        let traffic = |value: fn(&Traffic) -> u64| {
            let seen = self.samples.iter().all(|sample| sample.traffic.is_some());
            seen.then(|| self.median_u64(|sample| sample.traffic.as_ref().map_or(0, value)))
        };
        Row {
            key: self.key.clone(),
            ops_per_s: self.spread(|sample| sample.ops_per_s).median,
            mean_ns: self.spread(|sample| sample.mean_ns).median,
            p50_ns: self.median_u64(|sample| sample.p50_ns),
            p99_ns: self.median_u64(|sample| sample.p99_ns),
            p999_ns: self.median_u64(|sample| sample.p999_ns),
            p9999_ns: self.median_u64(|sample| sample.p9999_ns),
            max_ns: self.samples.iter().map(|sample| sample.max_ns).max().unwrap_or(0),
            pmem_data_bytes: traffic(|traffic| traffic.data_bytes),
            pmem_metadata_bytes: traffic(|traffic| traffic.metadata_bytes),
            fences: traffic(|traffic| traffic.fences),
        }
    }

    /// Returns the median over the repetitions of `part` of the traffic for each request, or `None`
    /// if the traffic is not visible.
    pub fn traffic_per_op(&self, part: impl Fn(&Traffic) -> u64) -> Option<f64> {
        let each =
            |sample: &Sample| Some(part(sample.traffic.as_ref()?) as f64 / sample.ops as f64);
        let values: Option<Vec<f64>> = self.samples.iter().map(each).collect();
        Some(Spread::of(values?)?.median)
    }

    fn median_u64(&self, value: impl Fn(&Sample) -> u64) -> u64 {
        let mut values: Vec<u64> = self.samples.iter().map(value).collect();
        values.sort_unstable();
        values[(values.len() - 1) / 2]
    }
}

/// Finds the first series of `policy` in `case` with this number of threads and this I/O depth.
pub(crate) fn find<'a>(
    series: &'a [Series],
    policy: &str,
    case: &str,
    op: Op,
    (threads, iodepth): (usize, u32),
) -> Option<&'a Series> {
    series.iter().find(|Series { key, .. }| {
        key.policy == policy
            && key.case == case
            && (key.op, key.threads, key.iodepth) == (op, threads, iodepth)
    })
}

/// Finds the series of `policy` whose key is otherwise `key`.
pub(crate) fn of_policy<'a>(series: &'a [Series], policy: &str, key: &Key) -> Option<&'a Series> {
    let wanted = Key { policy: policy.to_owned(), ..key.clone() };
    series.iter().find(|series| series.key == wanted)
}

/// The names in `rows`, in order.
pub const ROW_KEYS: [&str; 16] = [
    "policy",
    "case",
    "op",
    "threads",
    "iodepth",
    "block_bytes",
    "ops_per_s",
    "mean_ns",
    "p50_ns",
    "p99_ns",
    "p999_ns",
    "p9999_ns",
    "max_ns",
    "pmem_data_bytes",
    "pmem_metadata_bytes",
    "fences",
];

/// Collects the samples of repeated runs under their keys, in order of first appearance.
#[derive(Debug, Default)]
pub struct Collector {
    series: Vec<Series>,
}

impl Collector {
    /// Adds a repetition of `key`.
    pub fn add(&mut self, key: Key, sample: Sample) {
        match self.series.iter_mut().find(|series| series.key == key) {
            Some(series) => series.samples.push(sample),
            None => self.series.push(Series { key, samples: vec![sample] }),
        }
    }

    /// Returns all series.
    pub fn into_series(self) -> Vec<Series> {
        self.series
    }
}

/// An amount other than a latency, with its value in each repetition.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Amount {
    /// The name of the amount.
    pub measure: String,
    /// The policy.
    pub policy: String,
    /// Its unit.
    pub unit: &'static str,
    /// One for each repetition; never empty.
    pub values: Vec<f64>,
}

/// Amounts, in order of first appearance.
#[derive(Debug, Clone, Default)]
pub struct Amounts(pub Vec<Amount>);

impl Amounts {
    /// Adds a repetition of `measure`, in `unit`, of `policy`.
    pub fn add(&mut self, measure: &str, unit: &'static str, policy: &str, value: f64) {
        let same = |amount: &&mut Amount| amount.measure == measure && amount.policy == policy;
        if let Some(amount) = self.0.iter_mut().find(same) {
            amount.values.push(value);
        } else {
            let (measure, policy) = (measure.to_owned(), policy.to_owned());
            let values = vec![value];
            self.0.push(Amount { measure, policy, unit, values });
        }
    }

    /// Returns the spread of `measure` of `policy`, if it was measured.
    pub fn find(&self, measure: &str, policy: &str) -> Option<Spread> {
        let same = |amount: &&Amount| amount.measure == measure && amount.policy == policy;
        Spread::of(self.0.iter().find(same)?.values.iter().copied())
    }

    /// Makes a table of all amounts.
    pub fn table(&self, name: &'static str, title: &str) -> Table {
        let rows = self.0.iter().filter_map(|Amount { measure, policy, unit, values }| {
            let spread = Spread::of(values.iter().copied())?;
            Some([
                ("what", measure.clone()),
                ("policy", policy.clone()),
                ("unit", (*unit).to_owned()),
                ("median", format!("{:.2}", spread.median)),
                ("min-max", spread.range(2)),
            ])
        });
        Table::of_rows(name, title, rows)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn key(policy: &str) -> Key {
        Key {
            policy: policy.to_owned(),
            case: "uniform".to_owned(),
            op: Op::Write,
            threads: 1,
            iodepth: 1,
            block_bytes: 4096,
        }
    }

    fn series(policy: &str, throughputs: &[f64]) -> Series {
        let sample = |&ops_per_s: &f64| Sample { ops_per_s, ..Sample::single(1.0) };
        Series { key: key(policy), samples: throughputs.iter().map(sample).collect() }
    }

    #[test]
    fn ratios_pair_repetitions_that_ran_side_by_side() {
        // A machine that halves its speed in the middle changes no ratio.
        let subject = series("a", &[200.0, 100.0, 220.0]);
        let baseline = series("b", &[100.0, 50.0, 100.0]);
        let ratio = subject.ratio(&baseline, |sample| sample.ops_per_s).unwrap();
        assert_eq!(ratio, Spread { median: 2.0, min: 2.0, max: 2.2 });
        assert_eq!(subject.ratio(&series("c", &[0.0]), |sample| sample.ops_per_s), None);
    }

    #[test]
    fn medians_of_odd_and_even_counts() {
        let median =
            |values: &[f64]| Spread::of(values.iter().copied()).map(|spread| spread.median);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn rows_have_exactly_the_keys_of_the_contract() {
        let Value::Object(row) = serde_json::to_value(series("btt", &[1.0]).row()).unwrap() else {
            panic!("a row is an object");
        };
        let mut found: Vec<_> = row.keys().map(String::as_str).collect();
        let mut expected = ROW_KEYS;
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected);
        assert_eq!(row["op"], "write");
        assert_eq!(row["fences"], Value::Null, "what was not seen is not a number");
    }

    #[test]
    fn a_row_holds_medians_the_largest_maximum_and_traffic() {
        let mut measured = series("btt", &[10.0, 30.0, 20.0]);
        for (number, sample) in (1..).zip(&mut measured.samples) {
            sample.max_ns = 100 * number;
            sample.ops = 10;
            sample.traffic = Some(Traffic { data_bytes: 40960, metadata_bytes: 1280, fences: 20 });
        }
        let row = measured.row();
        assert_eq!(row.ops_per_s.to_bits(), 20.0f64.to_bits());
        assert_eq!((row.max_ns, row.fences, row.pmem_data_bytes), (300, Some(20), Some(40960)));
        assert_eq!(measured.traffic_per_op(|traffic| traffic.fences), Some(2.0));
    }

    #[test]
    fn a_sample_reads_the_histogram() {
        let mut latencies = Latencies::new(3).unwrap();
        for ns in 1..=1000 {
            latencies.record(ns).unwrap();
        }
        let sample = Sample::new(&latencies, 2.0, None);
        assert_eq!(
            (sample.ops, sample.p50_ns, sample.p99_ns, sample.max_ns),
            (1000, 500, 990, 1000)
        );
        assert_eq!(sample.ops_per_s.to_bits(), 500.0f64.to_bits());
    }

    #[test]
    fn repetitions_collect_under_their_key() {
        let mut collector = Collector::default();
        for policy in ["a", "b", "a"] {
            collector.add(key(policy), Sample::single(1.0));
        }
        let series = collector.into_series();
        let counts: Vec<_> = series.iter().map(|s| (&*s.key.policy, s.samples.len())).collect();
        assert_eq!(counts, [("a", 2), ("b", 1)]);
    }
}
