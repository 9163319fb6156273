//! The tables of a run, besides those that all measurements have.

use super::cases::Kind;
use crate::measure::{Series, Traffic};
use crate::report::counterpart;
use crate::table::Table;

/// Misses, hits and evictions: latency beside the floor, and bytes to the memory a byte.
pub(crate) fn cases(all: &[Series]) -> Table {
    let headers = [
        "policy",
        "case",
        "threads",
        "kops/s",
        "p50 µs",
        "/ copy",
        "p99",
        "p99.9",
        "max",
        "data B/B",
        "metadata B/B",
        "fences/op",
    ];
    let mut table = Table::new("cache-cases", "Random writes of 4 KiB, mode wb", &headers);
    let mut shown: Vec<&Series> =
        all.iter().filter(|series| Kind::of(&series.key.case).is_some()).collect();
    let place = |case: &str| all.iter().position(|series| series.key.case == case);
    shown.sort_by_key(|series| (place(&series.key.case), series.key.threads));
    for series in &shown {
        table.push(row(series, &shown));
    }
    table
}

fn row(series: &Series, all: &[&Series]) -> Vec<String> {
    let found = series.row();
    let floor = counterpart(all, series, "copy");
    let ratio = floor.and_then(|floor| series.ratio(floor, |sample| sample.p50_ns as f64));
    let micros = |ns: u64| format!("{:.2}", ns as f64 / 1e3);
    let a_byte = |part: fn(&Traffic) -> u64| {
        let each = series.traffic_per_op(part);
        each.map_or(String::new(), |bytes| format!("{:.3}", bytes / series.key.block_bytes as f64))
    };
    let fences = series.traffic_per_op(|traffic| traffic.fences);
    vec![
        series.key.policy.clone(),
        series.key.case.clone(),
        series.key.threads.to_string(),
        format!("{:.0}", found.ops_per_s / 1e3),
        micros(found.p50_ns),
        ratio.map_or(String::new(), |ratio| format!("{:.2}", ratio.median)),
        micros(found.p99_ns),
        micros(found.p999_ns),
        format!("{:.0}", found.max_ns as f64 / 1e3),
        a_byte(|traffic| traffic.data_bytes),
        a_byte(|traffic| traffic.metadata_bytes),
        fences.map_or(String::new(), |fences| format!("{fences:.2}")),
    ]
}
