//! Figures: each a table of policies by one varied parameter, and a plot of the same numbers. The
//! Caiti paper's figures are here, the Open CAS study's in [`cache::study`](crate::cache).

use crate::measure::{Key, Op, Sample, Series, Spread};
use crate::plan::{
    BURST_CASE, CACHES, DEPTH, DEPTHS, DUTIES, FLUSH_BYTES, MATRIX_CACHES, MATRIX_THREADS,
    READ_CASE, duty_case, flush_case, overrun_case, size_name,
};
use crate::policy::Policy;
use crate::table::Table;

/// One figure.
pub(crate) struct Figure {
    /// Name in the documentation's placeholders.
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// The varied parameter, a column for each value.
    pub(crate) axis: &'static str,
    /// The policies shown, in order.
    pub(crate) policies: Vec<&'static str>,
    pub(crate) columns: Vec<Column>,
    pub(crate) value: fn(&Sample) -> f64,
    /// The factor of the value.
    pub(crate) scale: f64,
    pub(crate) style: Style,
}

/// How a figure is plotted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// The numbers, joined to lines.
    Lines,
    /// Ratios to `btt`, joined: the numbers themselves differ more between columns than between
    /// policies.
    Ratios,
    /// The numbers alone: columns are unrelated.
    Dots,
}

/// Lines below this share of the largest number are left out of a plot, such as flushes of devices
/// that hold nothing back.
const PLOTTED_SHARE: f64 = 1e-3;

/// One value of the varied parameter.
pub(crate) struct Column {
    pub(crate) label: String,
    case: String,
    op: Op,
    threads: usize,
    iodepth: u32,
    /// Size of a request, if that varies.
    block_bytes: Option<u64>,
}

impl Column {
    pub(crate) fn new(label: String, case: String, op: Op, threads: usize, iodepth: u32) -> Self {
        Self { label, case, op, threads, iodepth, block_bytes: None }
    }

    /// Returns the column for requests of this size.
    pub(crate) fn of_blocks(self, block_bytes: u64) -> Self {
        Self { block_bytes: Some(block_bytes), ..self }
    }

    fn is(&self, key: &Key) -> bool {
        (key.op, key.threads, key.iodepth) == (self.op, self.threads, self.iodepth)
            && key.case == self.case
            && self.block_bytes.is_none_or(|bytes| bytes == key.block_bytes)
    }
}

/// One policy's numbers in a figure, with a spread for each measured column.
pub(crate) struct Line {
    pub(crate) policy: String,
    pub(crate) values: Vec<Option<Spread>>,
}

impl Line {
    fn top(&self) -> f64 {
        self.values.iter().flatten().map(|spread| spread.median).fold(0.0, f64::max)
    }
}

impl Figure {
    /// Returns the lines of all policies that have a number.
    pub(crate) fn lines(&self, series: &[Series]) -> Vec<Line> {
        let lines = self.policies.iter().map(|policy| self.line(policy, series));
        lines.filter(|line| line.values.iter().any(Option::is_some)).collect()
    }

    /// Returns the plot's title and lines: the table's lines, or their ratios to `btt`.
    pub(crate) fn plotted(&self, series: &[Series]) -> (String, Vec<Line>) {
        let mut lines = self.lines(series);
        let btt = lines.iter().find(|line| line.policy == Policy::Btt.name());
        let ratios = self.style == Style::Ratios;
        let Some(btt) = btt.filter(|_| ratios).map(|line| line.values.clone()) else {
            let top = lines.iter().map(Line::top).fold(0.0, f64::max);
            lines.retain(|line| line.top() >= top * PLOTTED_SHARE);
            return (self.title.to_owned(), lines);
        };
        for line in &mut lines {
            line.values = line.values.iter().zip(&btt).map(|(one, btt)| over(*one, *btt)).collect();
        }
        (format!("{} / btt", self.title), lines)
    }

    fn line(&self, policy: &str, series: &[Series]) -> Line {
        let value = |column: &Column| {
            let mut matching = series.iter();
            let found =
                matching.find(|series| series.key.policy == policy && column.is(&series.key));
            found.map(|series| series.spread(|sample| (self.value)(sample) * self.scale))
        };
        let values = self.columns.iter().map(value).collect();
        Line { policy: policy.to_owned(), values }
    }

    /// Makes the table of medians, with the smallest and the largest of the repetitions.
    pub(crate) fn table(&self, series: &[Series]) -> Table {
        let labels = self.columns.iter().map(|column| column.label.as_str());
        let headers: Vec<&str> = std::iter::once("policy").chain(labels).collect();
        let title = format!("{}, by {}", self.title, self.axis);
        let mut table = Table::new(self.name, title, &headers);
        for line in self.lines(series) {
            let cells = line.values.iter().map(|value| value.map_or(String::new(), cell));
            table.push(std::iter::once(line.policy.clone()).chain(cells).collect());
        }
        table
    }
}

fn over(one: Option<Spread>, base: Option<Spread>) -> Option<Spread> {
    let base = base?.median;
    one.map(|Spread { median, min, max }| Spread {
        median: median / base,
        min: min / base,
        max: max / base,
    })
}

/// Formats a cell to three digits, more than the machine repeats.
fn cell(spread: Spread) -> String {
    let digits = match spread.median {
        median if median < 10.0 => 2,
        median if median < 100.0 => 1,
        _ => 0,
    };
    format!("{:.digits$} ({})", spread.median, spread.range(digits))
}

/// Returns all figures of the Caiti paper except those over time and of the breakdown.
pub(crate) fn figures() -> Vec<Figure> {
    let overruns = |label, bytes, threads, depth| {
        Column::new(label, overrun_case(bytes), Op::Write, threads, depth)
    };
    let main = MATRIX_CACHES[0];
    let depths = || DEPTHS.map(|depth| overruns(depth.to_string(), main, 1, depth));
    let threads = MATRIX_THREADS.map(|count| overruns(count.to_string(), main, count, DEPTH));
    let caches = CACHES.map(|bytes| overruns(size_name(bytes), bytes, 1, DEPTH));
    let flushes =
        FLUSH_BYTES.map(|bytes| Column::new(size_name(bytes), flush_case(bytes), Op::Flush, 1, 1));
    let duties = DUTIES.map(|pct| Column::new(format!("{pct} %"), duty_case(pct), Op::Flush, 1, 1));
    let bursts = [
        Column::new("write in bursts".to_owned(), BURST_CASE.to_owned(), Op::Write, 1, 1),
        Column::new("read miss".to_owned(), READ_CASE.to_owned(), Op::Read, 1, 1),
    ];
    let mean_us = |sample: &Sample| sample.mean_ns / 1e3;
    let mean_ms = |sample: &Sample| sample.mean_ns / 1e6;
    let kops_per_s = |sample: &Sample| sample.ops_per_s / 1e3;
    let p9999_us = |sample: &Sample| sample.p9999_ns as f64 / 1e3;
    let mean = figure("tier-depth", "Mean write latency, µs (5a)", "depth", depths(), mean_us);
    let tail = figure("tier-tail", "p99.99 of write latency, µs (5d)", "depth", depths(), p9999_us);
    let bursts = figure("tier-burst", "Mean latency, µs", "workload", bursts, mean_us);
    let by_cache = "Mean write latency, µs (table 1)";
    vec![
        Figure { style: Style::Ratios, ..mean },
        Figure { style: Style::Ratios, ..tail },
        figure("tier-threads", "Writes, 1000/s (5e)", "threads", threads, kops_per_s),
        figure("tier-cache", by_cache, "cache size", caches, mean_us),
        figure("tier-fsync", "Flush, ms (2b)", "bytes between flushes", flushes, mean_ms),
        figure("tier-duty", "Flush after 64 MiB, ms", "duty cycle", duties, mean_ms),
        Figure { style: Style::Dots, ..bursts },
    ]
}

fn figure(
    name: &'static str,
    title: &'static str,
    axis: &'static str,
    columns: impl Into<Vec<Column>>,
    value: fn(&Sample) -> f64,
) -> Figure {
    let policies = Policy::all().into_iter().map(Policy::name).collect();
    let columns = columns.into();
    Figure { name, title, axis, policies, columns, value, scale: 1.0, style: Style::Lines }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_a_line_for_each_policy_and_a_gap_where_it_was_not_measured() {
        let series = |policy: &str, iodepth, mean_ns| Series {
            key: Key {
                policy: policy.to_owned(),
                case: "overrun-64M".to_owned(),
                op: Op::Write,
                threads: 1,
                iodepth,
                block_bytes: 4096,
            },
            samples: vec![Sample { mean_ns, ..Sample::single(1.0) }],
        };
        let measured = [series("btt", 1, 2500.0), series("lru", 1, 4e3), series("btt", 32, 40e3)];
        let table = figures()[0].table(&measured).without_empty_columns().to_string();
        let lines: Vec<Vec<_>> =
            table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["policy", "1", "32"]);
        assert_eq!(lines[2], ["btt", "2.50", "(2.50-2.50)", "40.0", "(40.0-40.0)"]);
        assert_eq!(lines[3], ["lru", "4.00", "(4.00-4.00)"]);
        let (title, plotted) = figures()[0].plotted(&measured);
        let lru = plotted[1].values[0].map(|spread| format!("{:.2}", spread.median));
        assert!(title.ends_with("/ btt") && lru.as_deref() == Some("1.60"), "{title} {lru:?}");
    }
}
