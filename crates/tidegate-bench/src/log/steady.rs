//! A steady load: random writes of 4 KiB to a new file, each synced, for a minute. There is no
//! warm-up: each run counts from its first write.
//!
//! Each log is measured twice: in a new pool, and in the same pool again. At full speed the load
//! exceeds any disk; at a pace, it takes half of the disk's speed.

use std::time::Duration;

use super::bed::{PLAIN_NO_SYNC, Pool};
use super::files::{Case, DRIVER, steady_case};
use super::io::{Measured, Sync};
use super::{Bench, LogArgs, LogReport, Plan, Runner};
use crate::error::{BenchError, Result};
use crate::measure::Spread;
use crate::table::Table;
use crate::timeline::TimelineRow;

/// Cases and the bytes of their file.
pub(super) const CASES: [(&str, u64); 2] =
    [("run-steady-256m", 256 << 20), ("run-steady-2g", 2 << 30)];
/// Pools: the policy of a run in a new pool, of the next run in it, and bytes of the log.
pub(super) const POOLS: [(&str, &str, u64); 2] =
    [("run-log-1g-new", "run-log-1g", 1 << 30), ("run-log-2g-new", "run-log-2g", 2 << 30)];
/// Cases at a pace, and the bytes of their file; with the first of [`POOLS`] alone.
pub(super) const PACED: [(&str, u64); 2] =
    [("run-steady-256m-paced", 256 << 20), ("run-steady-2g-paced", 2 << 30)];
/// The pace, as a share of the disk's speed.
const PACED_PART: f64 = 0.5;
/// Number of stalls in the table.
const STALLS: usize = 3;

/// Returns the plan of `cases` cases in `pools` pools, including their files.
pub(super) fn plan(args: &LogArgs, cases: usize, pools: usize) -> Plan {
    let runs = |runner: &Runner| if *runner == Runner::Plain { 1 } else { 2 * pools };
    let runs: usize = args.policies.iter().map(runs).sum();
    let steps = u32::try_from(cases * runs).unwrap_or(u32::MAX);
    Plan { steps, cost: run_cost(args) }
}

fn run_cost(args: &LogArgs) -> Duration {
    Duration::from_secs_f64(args.steady_seconds + 0.2 + 3.0 * args.scale)
}

/// Measures all cases at full speed.
pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    for (name, bytes) in CASES {
        let case = case(bench, name, bytes);
        in_pools(bench, &case, &POOLS)?;
    }
    Ok(())
}

/// Measures all cases at a pace.
pub(super) fn measure_paced(bench: &mut Bench<'_>) -> Result<()> {
    for (name, bytes) in PACED {
        let case = case(bench, name, bytes);
        let disk = bench.disk_itself(&case)?;
        let pace = Duration::from_secs_f64((disk.ops_per_s * PACED_PART).max(1.0).recip());
        in_pools(bench, &Case { pace, ..case }, &POOLS[..1])?;
    }
    Ok(())
}

/// Makes a case without a pool.
fn case(bench: &Bench<'_>, name: &'static str, bytes: u64) -> Case {
    let (bytes, none) = (bench.args.scaled(bytes, 1 << 20), Pool { name: "none", bytes: 0 });
    steady_case(name, bytes, bench.args.steady_seconds, none)
}

/// Measures `case` without syncs and without a pool, and with each of `pools`.
fn in_pools(bench: &mut Bench<'_>, case: &Case, pools: &[(&str, &str, u64)]) -> Result<()> {
    if bench.args.policies.contains(&Runner::Plain) {
        run(bench, PLAIN_NO_SYNC, Runner::Plain, &Case { sync: Sync::None, ..*case })?;
    }
    for runner in bench.tidegates() {
        for (in_new, in_used, log_bytes) in pools {
            let pool = bench.args.pool("steady.pool", *log_bytes);
            let case = Case { pool, ..*case };
            run(bench, in_new, runner, &case)?;
            run(bench, in_used, runner, &case)?;
            let pool = bench.bed.pool(pool);
            std::fs::remove_file(&pool).map_err(BenchError::os("remove", pool))?;
        }
    }
    Ok(())
}

fn run(bench: &mut Bench<'_>, policy: &str, runner: Runner, case: &Case) -> Result<()> {
    bench.progress.step(&format!("{policy} {}", case.name), run_cost(bench.args));
    let file = bench.bed.random_file("steady", case.file_bytes)?;
    let output = bench.drive_on(runner, case, std::slice::from_ref(&file))?;
    std::fs::remove_file(&file).map_err(BenchError::os("remove", file))?;
    let printed = |error| BenchError::program(DRIVER, format!("printed no result: {error}"));
    let Measured { sample, timeline } = serde_json::from_str(&output).map_err(printed)?;
    bench.collector.add(case.key(policy), sample);
    let (policy, case) = (policy.to_owned(), case.name.to_owned());
    bench.found.timelines.extend(timeline.map(|row| TimelineRow { policy, case, ..row }));
    Ok(())
}

/// Makes the table of the writes of each second, and of the longest writes.
pub(crate) fn table(report: &LogReport) -> Table {
    let rows = report.timelines.iter().filter_map(|row| {
        let kops: Vec<f64> = whole(row).iter().map(|requests| *requests as f64 / 1e3).collect();
        let all = Spread::of(kops.iter().copied())?;
        let cell = |kops: f64| format!("{kops:.0}");
        Some([
            ("policy", row.policy.clone()),
            ("case", row.case.trim_start_matches("run-").to_owned()),
            ("kops in the first s", cell(kops[0])),
            ("in the slowest s", cell(all.min)),
            ("in the median s", cell(all.median)),
            ("in the fastest s", cell(all.max)),
            ("longest stalls, ms", stalls_ms(row).join(", ")),
        ])
    });
    Table::of_rows("run-steady-seconds", "A steady load by second", rows)
}

/// Returns the requests of each second, except the last second, which the end of the run cuts off.
fn whole(row: &TimelineRow) -> &[u64] {
    let count = row.requests.len();
    if count > 1 { &row.requests[..count - 1] } else { &row.requests }
}

/// Formats the longest requests, one for each second.
fn stalls_ms(row: &TimelineRow) -> Vec<String> {
    let mut longest_ns = row.max_ns.clone();
    longest_ns.sort_unstable_by(|one, other| other.cmp(one));
    let shown = longest_ns.iter().take(STALLS);
    shown.map(|ns| format!("{:.1}", *ns as f64 / 1e6)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_seconds_and_stalls() {
        let row = TimelineRow {
            policy: "run-log-1g".to_owned(),
            case: "run-steady-2g".to_owned(),
            tick_ns: 1_000_000_000,
            requests: vec![400_000, 100_000, 0, 300_000, 1],
            max_ns: vec![2_000_000, 50_000_000, 0, 7_000_000, 1_900_000_000],
            mean_ns: vec![2000, 10_000, 0, 3000, 1_900_000_000],
        };
        let report = LogReport { timelines: vec![row], ..LogReport::default() };
        let text = table(&report).markdown();
        let cells: Vec<_> = text.lines().last().unwrap().split('|').map(str::trim).collect();
        assert_eq!(cells[1..3], ["run-log-1g", "steady-2g"]);
        assert_eq!(cells[3], "400");
        assert_eq!(cells[4], "0", "a second without an answer: {text}");
        assert_eq!(cells[6], "400");
        assert_eq!(cells[7], "1900.0, 50.0, 7.0", "the last one counts too");
    }
}
