//! The results of a run, as tables and as JSON.

use std::fmt;

use serde::Serialize;

use crate::cache::{CacheReport, is_cache};
use crate::figures::figures;
use crate::log::LogReport;
use crate::machine::Machine;
use crate::measure::{
    Amount, Key, Op, Row, Sample, Series, Spread, Traffic, ratio_cells, throughput,
};
use crate::open::{self, Opening};
use crate::published;
use crate::table::{Table, number_cell};
use crate::targets::{Verdict, verdicts};
use crate::tiers::{Breakdown, IdleRow, PhaseRow, TierReport};
use crate::timeline::TimelineRow;
use crate::{cache, log, pmemblk, programs, tier_targets};

/// All results of a run.
#[derive(Debug, Clone)]
pub struct Report {
    /// The machine of the measurement.
    pub machine: Machine,
    /// The measurements.
    pub series: Vec<Series>,
    /// Opening after a crash, where it was measured.
    pub open: Option<Opening>,
    /// Results about DRAM tiers.
    pub tiers: TierReport,
    /// Results about the log.
    pub log: LogReport,
    /// Results about the cache.
    pub cache: CacheReport,
}

/// The JSON object.
#[derive(Serialize)]
struct Json<'a> {
    machine: &'a Machine,
    rows: Vec<Row>,
    repetitions: Vec<Repetitions<'a>>,
    targets: Vec<Verdict>,
    #[serde(skip_serializing_if = "Option::is_none")]
    open: Option<&'a Opening>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    phases: Vec<PhaseRow<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    timelines: Vec<&'a TimelineRow>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    idle: &'a [IdleRow],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    amounts: Vec<&'a Amount>,
}

/// Throughput of each repetition, to check medians and ratios.
#[derive(Serialize)]
struct Repetitions<'a> {
    #[serde(flatten)]
    key: &'a Key,
    ops_per_s: Vec<f64>,
}

impl Report {
    /// Makes a report of measurements alone.
    pub(crate) fn of(machine: Machine, series: Vec<Series>) -> Self {
        let (tiers, log) = (TierReport::default(), LogReport::default());
        Self { machine, series, open: None, tiers, log, cache: CacheReport::default() }
    }

    /// Returns one JSON object with `machine`, `rows`, `repetitions` and `targets`; for DRAM tiers
    /// `phases`, `timelines`, `idle`; for programs under `tidegate run` and caches `amounts`.
    ///
    /// # Panics
    /// Never: the object is made of strings and numbers.
    pub fn json(&self) -> String {
        let repetitions = self.series.iter().map(|Series { key, samples }| {
            let ops_per_s = samples.iter().map(throughput).collect();
            Repetitions { key, ops_per_s }
        });
        let amounts = [&self.log.amounts, &self.cache.amounts, &self.cache.shares_of_backing];
        let object = Json {
            machine: &self.machine,
            rows: self.series.iter().map(Series::row).collect(),
            repetitions: repetitions.collect(),
            targets: self.verdicts(),
            open: self.open.as_ref(),
            phases: self.tiers.breakdowns.iter().flat_map(Breakdown::rows).collect(),
            timelines: self.tiers.timelines.iter().chain(&self.log.timelines).collect(),
            idle: &self.tiers.idle,
            amounts: amounts.into_iter().flat_map(|amounts| &amounts.0).collect(),
        };
        serde_json::to_string_pretty(&object).expect("strings and numbers are JSON") + "\n"
    }

    /// Returns the verdicts on the targets that this run measured.
    pub fn verdicts(&self) -> Vec<Verdict> {
        let cache = cache::verdicts(&self.series, &self.cache);
        let run = log::targets::verdicts(&self.series, &self.log);
        [self.device_verdicts(), cache, run].concat()
    }

    fn device_verdicts(&self) -> Vec<Verdict> {
        let mut found = verdicts(&self.series, self.open.as_ref());
        found.extend(tier_targets::verdicts(&self.series, &self.tiers));
        found
    }

    /// Returns all tables that have rows, in the order of the documentation. The hundreds of cells
    /// behind the paper's figures are in the JSON only.
    pub fn tables(&self) -> Vec<Table> {
        let figures = || figures().iter().map(|figure| figure.table(&self.series)).collect();
        let mut tables = if self.tiers.paper { figures() } else { self.case_tables() };
        tables.extend([self.tiers.breakdown_table(), self.tiers.idle_table()]);
        tables.push(target_table("targets", "Targets", self.device_verdicts()));
        tables.extend(self.cache_tables());
        tables.extend(self.run_tables());
        tables.retain(|table| !table.is_empty());
        tables.into_iter().map(Table::without_empty_columns).collect()
    }

    fn case_tables(&self) -> Vec<Table> {
        let peer = "peer:libpmemblk";
        let has_peer = self.series.iter().any(|series| series.key.policy == peer);
        let baseline = if has_peer { peer } else { "btt" };
        let elsewhere = |key: &Key| {
            is_nbd(key) || is_pmemblk(key) || is_program(key) || is_log(key) || is_cache(key)
        };
        let in_process = |key: &Key| !elsewhere(key) && key.case != open::CASE;
        let block = |op| move |key: &Key| key.op == op && in_process(key);
        let nbd = |op| move |key: &Key| key.op == op && is_nbd(key) && !is_single(key);
        let pmemblk = |op| move |key: &Key| key.op == op && is_pmemblk(key);
        let nbdkit = "peer:nbdkit-memory";
        vec![
            self.latencies("block-write", "Write, in process", block(Op::Write), baseline),
            self.latencies("block-read", "Read, in process", block(Op::Read), baseline),
            self.latencies("block-flush", "Flush, in process", block(Op::Flush), baseline),
            self.latencies(
                "pmemblk-write",
                "Random write, fio's pmemblk",
                pmemblk(Op::Write),
                peer,
            ),
            self.latencies("pmemblk-read", "Random read, fio's pmemblk", pmemblk(Op::Read), peer),
            self.latencies("nbd-write", "Random write over NBD, fio", nbd(Op::Write), nbdkit),
            self.latencies("nbd-read", "Random read over NBD, fio", nbd(Op::Read), nbdkit),
            self.times("nbdcopy", "Whole device by nbdcopy", is_single, nbdkit),
            self.open_table(),
            latencies("programs", "Programs on ext4 over NBD", &self.programs(), "btt"),
        ]
    }

    /// Returns the series of programs, policy beside policy.
    fn programs(&self) -> Vec<&Series> {
        let all = self.matching(is_program);
        let place = |series: &&Series| all.iter().position(|s| s.key.case == series.key.case);
        let mut sorted = all.clone();
        sorted.sort_by_key(place);
        sorted
    }

    /// Makes the table of all `wanted` latencies, beside `baseline`.
    fn latencies(
        &self,
        name: &'static str,
        title: &str,
        wanted: impl Fn(&Key) -> bool,
        baseline: &str,
    ) -> Table {
        latencies(name, title, &self.matching(wanted), baseline)
    }

    /// Makes the table of all `wanted` single operations, beside `baseline`.
    fn times(
        &self,
        name: &'static str,
        title: &str,
        wanted: impl Fn(&Key) -> bool,
        baseline: &str,
    ) -> Table {
        let all = self.matching(wanted);
        let to_baseline = format!("/ {}", baseline.trim_start_matches("peer:"));
        let rows = all.iter().map(|series| {
            let time_ms = series.spread(|sample| sample.mean_ns / 1e6);
            let base = counterpart(&all, series, baseline);
            let ratio = base.and_then(|base| series.ratio(base, |sample| sample.mean_ns));
            let [ratio, ratio_range] = ratio_cells(ratio);
            [
                ("policy", series.key.policy.clone()),
                ("case", shown(&series.key.case).to_owned()),
                ("MiB", (series.key.block_bytes >> 20).to_string()),
                ("ms median", format!("{:.0}", time_ms.median)),
                ("min-max", time_ms.range(0)),
                (&to_baseline, ratio),
                ("min-max", ratio_range),
            ]
        });
        Table::of_rows(name, title, rows)
    }

    /// Returns the machine for a placeholder of documentation that names the machine of a run;
    /// `None` for other placeholders.
    pub(crate) fn machine_at(&self, place: &str) -> Option<&Machine> {
        let (wanted, own): (fn(&Key) -> bool, Option<&Machine>) = match place {
            "machine" => (|key| !is_program(key) && !is_log(key) && !is_cache(key), None),
            "machine-cache" => {
                (|key| is_cache(key) && !is_by_cost(key), self.cache.machine.as_ref())
            }
            "machine-cost" => (is_by_cost, self.cache.machine_by_cost.as_ref()),
            "machine-ocf" => (cache::tables::is_ocf, self.cache.machine.as_ref()),
            "machine-programs" => (is_program, None),
            "machine-run" => (is_log, self.log.machine.as_ref()),
            _ => return None,
        };
        let measured = self.series.iter().any(|series| wanted(&series.key));
        measured.then(|| own.unwrap_or(&self.machine))
    }

    fn matching(&self, wanted: impl Fn(&Key) -> bool) -> Vec<&Series> {
        self.series.iter().filter(|series| wanted(&series.key)).collect()
    }

    fn open_table(&self) -> Table {
        let opened = self.matching(|key| key.case == open::CASE);
        let rows = opened.into_iter().zip(&self.open).map(|(series, opening)| {
            let (pool_bytes, peak_bytes) = (series.key.block_bytes, opening.peak_memory_bytes);
            let time_ms = series.spread(|sample| sample.mean_ns / 1e6);
            [
                ("policy", series.key.policy.clone()),
                ("size GiB", format!("{:.1}", pool_bytes as f64 / f64::from(1 << 30))),
                ("ms median", format!("{:.2}", time_ms.median)),
                ("min-max", time_ms.range(2)),
                ("peak memory MiB", format!("{:.1}", peak_bytes as f64 / f64::from(1 << 20))),
            ]
        });
        Table::of_rows("open", "Opening after a crash", rows)
    }

    /// Returns the tables of caches.
    fn cache_tables(&self) -> Vec<Table> {
        let table = |name, title, prefix, base| self.latencies(name, title, of(&[prefix]), base);
        let by_op = |name, title, op, prefix, base| {
            let wanted = |key: &Key| key.op == op && of(&[prefix])(key);
            self.latencies(name, title, wanted, base)
        };
        let (write, read) = (Op::Write, Op::Read);
        let (modes, cleaning) = (cache::choices::MODES, cache::choices::CLEANING);
        let mut tables = vec![cache::tables::cases(&self.series)];
        let targets = cache::verdicts(&self.series, &self.cache);
        let figures = cache::study::figures();
        tables.extend(figures.iter().map(|figure| figure.table(&self.series)));
        tables.extend([
            cache::study::deep_table(&self.series),
            cache::study::table(&self.series),
            by_op("cache-nbd-write", "Write hits over NBD, fio", write, "cache-nbd", "btt"),
            by_op("cache-nbd-read", "Read hits over NBD, fio", read, "cache-nbd", "btt"),
            table("cache-full", "A full cache", "cache-full", cache::BACKING),
            table("cache-fill", "A cache until it is dirty to 90 %", "cache-fill", "cache-null"),
            table("cache-read", "Reads that miss", "cache-read", cache::BACKING),
            cache::tables::beside_ocf(&self.series),
            cache::cost::table(&self.series, &self.cache.shares_of_backing),
            by_op("cache-modes-write", "Modes: writes", write, modes, "wb"),
            by_op("cache-modes-read", "Modes: reads", read, modes, "wb"),
            table("cache-cleaning", "Cleaning between bursts of writes", cleaning, "watermark"),
            self.times("cache-open", "Opening a cache after a crash", of(&["cache-open"]), "btt"),
            self.cache.amounts.table("cache-amounts", "Caches: other numbers"),
            self.cache.backing_work.table("cache-backing-work", "Work of the backing"),
            target_table("cache-targets", "Cache: targets", targets),
        ]);
        tables
    }

    /// Returns the tables of the log, and of programs under `tidegate run`.
    fn run_tables(&self) -> Vec<Table> {
        let table = |name, title, prefixes, base| self.latencies(name, title, of(prefixes), base);
        let times = |name, title, prefix, base| self.times(name, title, of(&[prefix]), base);
        let (plain, no_sync) = ("plain", "plain-nosync");
        let targets = log::targets::verdicts(&self.series, &self.log);
        let batches = "A full log, by the batch of its cleaner";
        let databases = ["run-sqlite", "run-rocksdb", "run-postgres"];
        vec![
            table("log-append", "Appends to the log, in process", &[log::append::CASE], "copy"),
            table("log-batch", batches, &[log::batch::CASE], log::batch::ONE),
            table("run-write", "Durable writes of a program", &["run-write", "run-append"], plain),
            table("run-full", "Durable writes, the log full", &["run-full"], plain),
            table("run-steady", "A steady load", &["run-steady"], no_sync),
            log::steady_table(&self.log),
            times("run-unsynced", "Programs that never sync", "run-unsynced", plain),
            table("run-read", "Reads of a program", &["run-read"], plain),
            table("run-names", "What programs do with their syncs", &["run-names"], no_sync),
            table("run-databases", "Databases", &databases, no_sync),
            table("run-apps", "Programs by their own benchmarks", &["run-app-"], no_sync),
            times("run-recovery", "Recovery of a full log", "run-recovery", "in-order"),
            self.log.table(),
            target_table("run-targets", "Programs under run: targets", targets),
        ]
    }
}

fn target_table(name: &'static str, title: &str, verdicts: Vec<Verdict>) -> Table {
    let rows = verdicts.into_iter().map(|Verdict { target, wanted, measured, met }| {
        let before = published::of_target(&target).unwrap_or_default().to_owned();
        [
            ("target", target),
            ("wanted", wanted),
            ("last release", before),
            ("measured", format!("{measured:.2}")),
            ("verdict", if met { "PASS" } else { "MISS" }.to_owned()),
        ]
    });
    Table::of_rows(name, title, rows)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.machine)?;
        for table in self.tables() {
            write!(f, "\n{table}")?;
        }
        Ok(())
    }
}

/// Returns a test whether a case begins with one of `prefixes`.
fn of(prefixes: &[&str]) -> impl Fn(&Key) -> bool {
    move |key| prefixes.iter().any(|prefix| key.case.starts_with(prefix))
}

fn is_nbd(key: &Key) -> bool {
    key.case.starts_with("nbd")
}

/// Returns whether `key` belongs to fio on a libpmemblk.
fn is_pmemblk(key: &Key) -> bool {
    key.case == pmemblk::RANDOM
}

/// Returns whether `key` belongs to the log, or to a program under `tidegate run`.
fn is_log(key: &Key) -> bool {
    of(&[log::LOG_PREFIX, log::RUN_PREFIX])(key)
}

/// Returns whether `key` belongs to the setting `cost=auto` of a cache.
fn is_by_cost(key: &Key) -> bool {
    key.case.starts_with(cache::cost::PREFIX)
}

/// Returns the name of a case in tables.
fn shown(case: &str) -> &str {
    let prefixes = [programs::CASE_PREFIX, log::RUN_PREFIX, "cache-"];
    prefixes.iter().find_map(|prefix| case.strip_prefix(prefix)).unwrap_or(case)
}

/// Returns whether `key` belongs to a program on a file system.
fn is_program(key: &Key) -> bool {
    key.case.starts_with(programs::CASE_PREFIX)
}

/// Returns whether `key` belongs to one operation over the whole device, timed as one.
fn is_single(key: &Key) -> bool {
    key.case.starts_with("nbdcopy")
}

/// Finds the measurement of `baseline` under the same conditions as `series`.
pub(crate) fn counterpart<'a>(
    all: &[&'a Series],
    series: &Series,
    baseline: &str,
) -> Option<&'a Series> {
    let conditions = |key: &Key| (key.op, key.threads, key.iodepth, key.block_bytes);
    let matching = |other: &&&Series| {
        conditions(&other.key) == conditions(&series.key)
            && other.key.policy == baseline
            && (series.key.policy == "copy" || other.key.case == series.key.case)
    };
    all.iter().find(matching).copied()
}

fn latencies(name: &'static str, title: &str, all: &[&Series], baseline: &str) -> Table {
    let mut sorted = all.to_vec();
    sorted.sort_by_key(|series| (series.key.threads, series.key.iodepth));
    let to_baseline = format!("/ {}", baseline.trim_start_matches("peer:"));
    let rows = sorted.into_iter().map(|series| {
        let base = counterpart(all, series, baseline);
        let ratio = base.and_then(|base| series.ratio(base, throughput));
        latency_row(series, &to_baseline, ratio)
    });
    Table::of_rows(name, title, rows)
}

fn latency_row<'h>(
    series: &Series,
    to_baseline: &'h str,
    ratio: Option<Spread>,
) -> [(&'h str, String); 17] {
    let Key { policy, case, threads, iodepth, .. } = &series.key;
    let kops_per_s = series.spread(|sample| sample.ops_per_s / 1e3);
    let digits = if kops_per_s.median < 10.0 { 2 } else { 0 };
    let micros = |value: fn(&Sample) -> f64| format!("{:.2}", series.spread(value).median / 1e3);
    let per_op = |part: fn(&Traffic) -> u64| number_cell(series.traffic_per_op(part), 1);
    let [ratio, ratio_range] = ratio_cells(ratio);
    [
        ("policy", policy.clone()),
        ("case", shown(case).to_owned()),
        ("threads", threads.to_string()),
        ("depth", iodepth.to_string()),
        ("kops/s", format!("{:.digits$}", kops_per_s.median)),
        ("min-max", kops_per_s.range(digits)),
        (to_baseline, ratio),
        ("min-max", ratio_range),
        ("mean µs", micros(|sample| sample.mean_ns)),
        ("p50", micros(|sample| sample.p50_ns as f64)),
        ("p99", micros(|sample| sample.p99_ns as f64)),
        ("p99.9", micros(|sample| sample.p999_ns as f64)),
        ("p99.99", micros(|sample| sample.p9999_ns as f64)),
        ("max", format!("{:.0}", series.row().max_ns as f64 / 1e3)),
        ("data B/op", per_op(|traffic| traffic.data_bytes)),
        ("metadata B/op", per_op(|traffic| traffic.metadata_bytes)),
        ("fences/op", per_op(|traffic| traffic.fences)),
    ]
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::measure::ROW_KEYS;

    pub(crate) fn report() -> Report {
        let series = |policy: &str, case: &str, ops_per_s| Series {
            key: Key {
                policy: policy.to_owned(),
                case: case.to_owned(),
                op: Op::Write,
                threads: 1,
                iodepth: 1,
                block_bytes: 4096,
            },
            samples: vec![Sample {
                ops_per_s,
                traffic: (policy == "btt").then_some(Traffic {
                    data_bytes: 4096,
                    metadata_bytes: 192,
                    fences: 2,
                }),
                ..Sample::single(1e-6)
            }],
        };
        Report {
            machine: Machine {
                cpu: "a CPU".to_owned(),
                cores: 2,
                kernel: "6.1".to_owned(),
                medium: "tmpfs".to_owned(),
                domain: "adr",
                media: "dram".to_owned(),
                clock_overhead_ns: 20.0,
                load_average: "0.00".to_owned(),
                seconds: 1.0,
                repetitions: 1,
            },
            series: vec![
                series("btt", "uniform", 2e6),
                series("peer:libpmemblk", "uniform", 1e6),
                series("btt", "nbd-random", 3e5),
            ],
            open: None,
            tiers: TierReport::default(),
            log: LogReport::default(),
            cache: CacheReport::default(),
        }
    }

    #[test]
    fn json_holds_rows_with_the_keys_of_the_contract_only() {
        let json: serde_json::Value = serde_json::from_str(&report().json()).unwrap();
        for row in json["rows"].as_array().unwrap() {
            let mut keys: Vec<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
            let mut expected = ROW_KEYS;
            keys.sort_unstable();
            expected.sort_unstable();
            assert_eq!(keys, expected);
        }
        assert_eq!(json["rows"].as_array().unwrap().len(), 3);
        assert_eq!(json["targets"][0]["met"], true);
    }

    #[test]
    fn tables_show_ratios_traffic_and_targets_and_keep_nbd_apart() {
        let text = report().to_string();
        let btt =
            text.lines().find(|line| line.contains("btt") && line.contains("uniform")).unwrap();
        let cells: Vec<_> = btt.split_whitespace().collect();
        assert_eq!(
            cells[..8],
            ["btt", "uniform", "1", "1", "2000", "2000-2000", "2.00", "2.00-2.00"]
        );
        assert_eq!(cells[cells.len() - 3..], ["4096.0", "192.0", "2.0"]);
        assert!(text.contains("PASS"), "{text}");
        let names: Vec<_> = report().tables().into_iter().map(|table| table.name).collect();
        assert_eq!(names, ["block-write", "nbd-write", "targets"]);
    }
}
