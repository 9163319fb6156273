//! The tables of a run, besides those that all measurements have.

use super::CACHE;
use super::cases::Kind;
use super::peer::OCF;
use crate::measure::{Key, Series, Traffic};
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

/// The cache beside OCF, where that was measured.
pub(crate) fn beside_ocf(all: &[Series]) -> Table {
    let headers = [
        "case",
        "cache kops/s",
        "OCF kops/s",
        "cache / OCF",
        "min-max",
        "cache p50 µs",
        "OCF p50 µs",
    ];
    let mut table =
        Table::new("cache-ocf", "The cache beside OCF, the library in Open CAS", &headers);
    let is_cache = |it: &&Series| it.key.policy == CACHE && it.key.threads == 1;
    for cache in all.iter().filter(is_cache) {
        let key = Key { policy: OCF.to_owned(), ..cache.key.clone() };
        let Some(ocf) = all.iter().find(|it| it.key == key) else { continue };
        let kops = |it: &Series| format!("{:.0}", it.row().ops_per_s / 1e3);
        let micros = |it: &Series| format!("{:.2}", it.row().p50_ns as f64 / 1e3);
        let ratio = cache.ratio(ocf, |sample| sample.ops_per_s);
        table.push(vec![
            key.case.trim_start_matches("cache-").to_owned(),
            kops(cache),
            kops(ocf),
            ratio.map_or(String::new(), |it| format!("{:.2}", it.median)),
            ratio.map_or(String::new(), |it| format!("{:.2}-{:.2}", it.min, it.max)),
            micros(cache),
            micros(ocf),
        ]);
    }
    table
}

/// A measurement of OCF.
pub(crate) fn is_ocf(key: &Key) -> bool {
    key.policy == OCF
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{Op, Sample};

    #[test]
    fn ocf_stands_beside_the_cache_in_the_cases_that_both_have() {
        let series = |policy: &str, case: &str, ops_per_s, p50_ns| {
            let (policy, case) = (policy.to_owned(), case.to_owned());
            let (op, threads, iodepth, block_bytes) = (Op::Write, 1, 1, 4096);
            Series {
                key: Key { policy, case, op, threads, iodepth, block_bytes },
                samples: vec![Sample { ops_per_s, p50_ns, ..Sample::single(1.0) }],
            }
        };
        let all = [
            series(CACHE, "miss", 1.5e6, 600),
            series(OCF, "miss", 0.5e6, 1800),
            series(CACHE, "evict", 1e6, 700),
        ];
        let markdown = beside_ocf(&all).markdown();
        let rows: Vec<_> = markdown.lines().skip(2).collect();
        assert_eq!(rows.len(), 1, "{markdown}");
        let cells: Vec<_> = rows[0].split_whitespace().collect();
        assert_eq!(cells.join(" "), "| miss | 1500 | 500 | 3.00 | 3.00-3.00 | 0.60 | 1.80 |");
    }
}
