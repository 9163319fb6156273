//! Formats results as tables and as JSON.

#![allow(clippy::cast_precision_loss, reason = "results are shown to a few digits")]

use std::path::Path;

use hdrhistogram::Histogram;
use serde::Serialize;
use tidegate::dram::Phases;
use tidegate::dram::phases::Phase;
use tidegate::size::Size;
use tidegate_bench::table::Table;

use super::case::Outcome;
use super::costs::Costs;
use super::plan::Ran;
use crate::error::{Error, Result};
use crate::report::{distinct, grid};
use crate::stdout::print;

/// One item of `rows` in the JSON output: the columns of `tidegate bench`, and the machine.
#[derive(Debug, Serialize)]
struct Row<'a> {
    policy: &'a str,
    case: String,
    op: &'static str,
    threads: u32,
    iodepth: u32,
    block_bytes: u32,
    ops_per_s: f64,
    mean_ns: f64,
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    p9999_ns: u64,
    max_ns: u64,
    cores: u32,
    cache_bytes: u64,
}

/// One phase of a run. 100 % is the time of the run's jobs, inside and outside of the DRAM tier.
#[derive(Debug, Serialize)]
struct PhaseRow<'a> {
    policy: &'a str,
    threads: u32,
    cores: u32,
    cache_bytes: u64,
    #[serde(flatten)]
    share: Share,
}

#[derive(Serialize)]
struct Results<'a> {
    costs: &'a Costs,
    rows: Vec<Row<'a>>,
    phases: Vec<PhaseRow<'a>>,
}

/// Prints the tables of `results`, and writes them to `json`.
///
/// # Errors
/// The file cannot be written.
pub(super) fn publish(results: &[Ran], costs: &Costs, json: Option<&Path>) -> Result<()> {
    if json == Some(Path::new("-")) {
        return print(&(text(results, costs) + "\n"));
    }
    print(&format!("Costs of {}, media {}; virtual time\n\n", costs.name, costs.media))?;
    for table in tables(results) {
        print(&format!("{table}\n"))?;
    }
    match json {
        None => Ok(()),
        Some(path) => std::fs::write(path, text(results, costs) + "\n").map_err(Error::io(path)),
    }
}

fn text(results: &[Ran], costs: &Costs) -> String {
    let rows = results.iter().flat_map(rows_of).collect();
    let phases = results.iter().flat_map(phases_of).collect();
    let results = Results { costs, rows, phases };
    serde_json::to_string_pretty(&results).expect("numbers and text are JSON")
}

fn rows_of(ran: &Ran) -> impl Iterator<Item = Row<'_>> {
    let Ran { case, outcome } = ran;
    case.depths.iter().zip(&outcome.latencies).map(move |(&iodepth, latencies)| Row {
        policy: case.policy.name(),
        case: format!("uniform-{}", size(case.cache_bytes)),
        op: "write",
        threads: case.jobs,
        iodepth,
        block_bytes: case.block_bytes,
        ops_per_s: outcome.ops_per_s(),
        mean_ns: latencies.mean(),
        p50_ns: latencies.value_at_quantile(0.5),
        p99_ns: latencies.value_at_quantile(0.99),
        p999_ns: latencies.value_at_quantile(0.999),
        p9999_ns: latencies.value_at_quantile(0.9999),
        max_ns: latencies.max(),
        cores: case.cores,
        cache_bytes: case.cache_bytes,
    })
}

fn phases_of(ran: &Ran) -> impl Iterator<Item = PhaseRow<'_>> {
    let Ran { case, outcome } = ran;
    shares(outcome, case.jobs).into_iter().map(move |share| PhaseRow {
        policy: case.policy.name(),
        threads: case.jobs,
        cores: case.cores,
        cache_bytes: case.cache_bytes,
        share,
    })
}

/// The share of a phase of the DRAM tier in the time of the jobs.
#[derive(Debug, Serialize)]
pub(super) struct Share {
    pub(super) phase: Phase,
    count: u64,
    #[serde(rename = "share_pct")]
    pub(super) time_pct: f64,
    /// Occurrences per 100 writes.
    pub(super) writes_pct: f64,
    /// Mean duration in nanoseconds.
    #[serde(skip)]
    pub(super) mean_ns: f64,
}

impl Share {
    /// Returns the share of a phase that did not occur.
    pub(super) const fn none(phase: Phase) -> Self {
        Self { phase, count: 0, time_pct: 0.0, writes_pct: 0.0, mean_ns: 0.0 }
    }
}

/// Returns the phases of a run of `jobs` jobs. Evictions run beside the jobs, so their share is 0.
pub(super) fn shares(outcome: &Outcome, jobs: u32) -> Vec<Share> {
    let Some((before, after)) = &outcome.phases else { return Vec::new() };
    let all_ns = outcome.elapsed_ns as f64 * f64::from(jobs);
    let share = |phase| {
        let of = |phases: &Phases| phases.get(phase).map_or((0, 0), |it| (it.count, it.total_ns));
        let ((count, ns), (count_before, ns_before)) = (of(after), of(before));
        let time_ns = if phase == Phase::Eviction { 0 } else { ns.saturating_sub(ns_before) };
        let count = count - count_before;
        let mean_ns = ns.saturating_sub(ns_before) as f64 / count.max(1) as f64;
        let time_pct = time_ns as f64 * 100.0 / all_ns;
        let writes_pct = count as f64 * 100.0 / outcome.requests.max(1) as f64;
        Share { phase, count, time_pct, writes_pct, mean_ns }
    };
    Phase::ALL.iter().copied().map(share).filter(|share| share.count > 0).collect()
}

/// Returns all tables that `results` have data for.
pub(super) fn tables(results: &[Ran]) -> Vec<Table> {
    let mut machines: Vec<(u32, u64)> = Vec::new();
    for Ran { case, .. } in results {
        if case.policy.has_tier() && !machines.contains(&(case.cores, case.cache_bytes)) {
            machines.push((case.cores, case.cache_bytes));
        }
    }
    let mut tables = Vec::new();
    for (cores, cache_bytes) in machines.iter().copied() {
        let here = |ran: &&Ran| {
            let case = &ran.case;
            case.cores == cores && (!case.policy.has_tier() || case.cache_bytes == cache_bytes)
        };
        let here: Vec<_> = results.iter().filter(here).collect();
        tables.extend(machine_tables(&here, cores, cache_bytes));
    }
    if machines.is_empty() {
        let cores = results.first().map_or(1, |ran| ran.case.cores);
        tables.extend(machine_tables(&results.iter().collect::<Vec<_>>(), cores, 0));
    }
    tables
}

fn machine_tables(here: &[&Ran], cores: u32, cache_bytes: u64) -> Vec<Table> {
    let on = match cache_bytes {
        0 => format!("{cores} cores"),
        bytes => format!("{cores} cores, cache of {}", size(bytes)),
    };
    let jobs = distinct(here.iter().map(|ran| ran.case.jobs));
    let rate = |policy: &'static str| {
        let of = |jobs: &u32| {
            let is_it = |ran: &&&Ran| ran.case.policy.name() == policy && ran.case.jobs == *jobs;
            let ran = here.iter().find(is_it);
            ran.map_or_else(String::new, |ran| format!("{:.0}", ran.outcome.ops_per_s() / 1e3))
        };
        (policy, jobs.iter().map(of).collect())
    };
    let title = format!("Thousands of writes a second by jobs; {on}");
    let policies = distinct(here.iter().map(|ran| ran.case.policy.name()));
    let by_jobs = grid(("jobs", &title), ("policy", &jobs), policies.into_iter().map(rate));
    let fewest = jobs.first().copied().unwrap_or(1);
    let with_fewest: Vec<_> = here.iter().copied().filter(|ran| ran.case.jobs == fewest).collect();
    let depth_table = |name, what: &str, cell: fn(&Histogram<u64>) -> String| {
        let title = format!("{what} by depth, µs; {fewest} jobs, {on}");
        let depths = with_fewest.first().map_or(&[][..], |ran| &ran.case.depths);
        let row =
            |ran: &&Ran| (ran.case.policy.name(), ran.outcome.latencies.iter().map(cell).collect());
        grid((name, &title), ("policy", depths), with_fewest.iter().map(row))
    };
    let mean = depth_table("mean", "Mean latency", |it| micros(it.mean()));
    let tail = depth_table("tail", "99.99th percentile of latency", |it| {
        micros(it.value_at_quantile(0.9999) as f64)
    });
    vec![by_jobs, mean, tail, breakdown(&with_fewest, &format!("{fewest} jobs, {on}"))]
}

const SHOWN: [(Phase, &str); 6] = [
    (Phase::Metadata, "metadata"),
    (Phase::StalledWrite, "stalled"),
    (Phase::Bypass, "bypass"),
    (Phase::CacheWrite, "copy"),
    (Phase::Enqueue, "enqueue"),
    (Phase::Other, "other"),
];

fn breakdown(results: &[&Ran], of: &str) -> Table {
    let columns: Vec<_> =
        SHOWN.iter().map(|(_, name)| *name).chain(["outside", "stalls", "bypasses"]).collect();
    let title = format!("Where the time of jobs goes, %; stalls and bypasses by 100 writes; {of}");
    let row = |ran: &&Ran| {
        let shares = shares(&ran.outcome, ran.case.jobs);
        let of = |phase| shares.iter().find(|share| share.phase == phase);
        let time_pct = |phase| of(phase).map_or(0.0, |share| share.time_pct);
        let mut cells = SHOWN.map(|(phase, _)| format!("{:.1}", time_pct(phase))).to_vec();
        let inside: f64 = shares.iter().map(|share| share.time_pct).sum();
        cells.push(format!("{:.1}", (100.0 - inside).max(0.0)));
        let entries = |phase| of(phase).map_or(0.0, |share| share.writes_pct);
        cells.extend([Phase::StalledWrite, Phase::Bypass].map(|it| format!("{:.2}", entries(it))));
        (ran.case.policy.name(), cells)
    };
    let with_phases = results.iter().filter(|ran| ran.outcome.phases.is_some());
    grid(("breakdown", &title), ("policy", &columns), with_phases.map(row))
}

pub(super) fn micros(ns: f64) -> String {
    let micros = ns / 1e3;
    if micros < 99.95 { format!("{micros:.2}") } else { format!("{micros:.0}") }
}

pub(super) fn size(bytes: u64) -> String {
    Size { bytes }.to_string()
}
