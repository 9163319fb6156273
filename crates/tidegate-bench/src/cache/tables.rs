//! The tables of a run, besides the tables that all measurements have.

use super::CACHE;
use super::cases::Kind;
use super::peer::OCF;
use crate::measure::{Key, Series, Traffic, of_policy, ratio_cells, throughput};
use crate::report::counterpart;
use crate::table::{Table, number_cell};

/// Makes the table of misses, hits and evictions: latency beside the floor, and write
/// amplification.
pub(crate) fn cases(all: &[Series]) -> Table {
    let mut shown: Vec<&Series> =
        all.iter().filter(|series| Kind::of(&series.key.case).is_some()).collect();
    let place = |case: &str| all.iter().position(|series| series.key.case == case);
    shown.sort_by_key(|series| (place(&series.key.case), series.key.threads));
    let rows = shown.iter().map(|series| row(series, &shown));
    Table::of_rows("cache-cases", "Random writes of 4 KiB, mode wb", rows)
}

/// Makes the table of the cache beside OCF, if OCF was measured.
pub(crate) fn beside_ocf(all: &[Series]) -> Table {
    let rows = all.iter().filter_map(|cache| {
        let ocf = of_policy(all, OCF, &cache.key)?;
        if cache.key.policy != CACHE || cache.key.threads != 1 {
            return None;
        }
        let kops = |it: &Series| format!("{:.0}", it.row().ops_per_s / 1e3);
        let micros = |it: &Series| format!("{:.2}", it.row().p50_ns as f64 / 1e3);
        let [ratio, ratio_range] = ratio_cells(cache.ratio(ocf, throughput));
        Some([
            ("case", cache.key.case.trim_start_matches("cache-").to_owned()),
            ("cache kops/s", kops(cache)),
            ("OCF kops/s", kops(ocf)),
            ("cache / OCF", ratio),
            ("min-max", ratio_range),
            ("cache p50 µs", micros(cache)),
            ("OCF p50 µs", micros(ocf)),
        ])
    });
    Table::of_rows("cache-ocf", "The cache beside OCF, the library in Open CAS", rows)
}

/// Returns whether `key` is a measurement of OCF.
pub(crate) fn is_ocf(key: &Key) -> bool {
    key.policy == OCF
}

fn row(series: &Series, all: &[&Series]) -> [(&'static str, String); 12] {
    let Series { key, .. } = series;
    let found = series.row();
    let floor = counterpart(all, series, "copy");
    let ratio = floor.and_then(|floor| series.ratio(floor, |sample| sample.p50_ns as f64));
    let micros = |ns: u64| format!("{:.2}", ns as f64 / 1e3);
    let a_byte = |part: fn(&Traffic) -> u64| {
        let an_op = series.traffic_per_op(part);
        number_cell(an_op.map(|bytes| bytes / key.block_bytes as f64), 3)
    };
    [
        ("policy", key.policy.clone()),
        ("case", key.case.clone()),
        ("threads", key.threads.to_string()),
        ("kops/s", format!("{:.0}", found.ops_per_s / 1e3)),
        ("p50 µs", micros(found.p50_ns)),
        ("/ copy", number_cell(ratio.map(|ratio| ratio.median), 2)),
        ("p99", micros(found.p99_ns)),
        ("p99.9", micros(found.p999_ns)),
        ("max", format!("{:.0}", found.max_ns as f64 / 1e3)),
        ("data B/B", a_byte(|traffic| traffic.data_bytes)),
        ("metadata B/B", a_byte(|traffic| traffic.metadata_bytes)),
        ("fences/op", number_cell(series.traffic_per_op(|traffic| traffic.fences), 2)),
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
