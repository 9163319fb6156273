//! What a run found, as tables and as JSON.

use std::fmt;

use serde::Serialize;

use crate::cache::{CacheReport, is_cache};
use crate::figures::figures;
use crate::log::LogReport;
use crate::machine::Machine;
use crate::measure::{Amount, Key, Op, Row, Sample, Series, Spread};
use crate::open::{self, Opening};
use crate::table::Table;
use crate::targets::{Verdict, verdicts};
use crate::tiers::{Breakdown, IdleRow, PhaseRow, TierReport};
use crate::timeline::TimelineRow;
use crate::{cache, log, programs, tier_targets};

/// Everything that a run found.
#[derive(Debug, Clone)]
pub struct Report {
    /// What it was measured on.
    pub machine: Machine,
    /// The measurements.
    pub series: Vec<Series>,
    /// Opening after a crash, where it was measured.
    pub open: Option<Opening>,
    /// What was found about DRAM tiers.
    pub tiers: TierReport,
    /// What was found about the log.
    pub log: LogReport,
    /// What was found about the cache.
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

/// Throughput of each repetition, from which medians and ratios can be checked.
#[derive(Serialize)]
struct Repetitions<'a> {
    #[serde(flatten)]
    key: &'a Key,
    ops_per_s: Vec<f64>,
}

impl<'a> Repetitions<'a> {
    fn of(series: &'a Series) -> Self {
        let ops_per_s = series.samples.iter().map(|sample| sample.ops_per_s).collect();
        Self { key: &series.key, ops_per_s }
    }
}

impl Report {
    /// A report of measurements and nothing else.
    pub(crate) fn of(machine: Machine, series: Vec<Series>) -> Self {
        let (tiers, log) = (TierReport::default(), LogReport::default());
        Self { machine, series, open: None, tiers, log, cache: CacheReport::default() }
    }

    /// One JSON object with `machine`, `rows`, `repetitions` and `targets`; for DRAM tiers
    /// `phases`, `timelines`, `idle`; for programs under `tidegate run` and caches `amounts`.
    ///
    /// # Panics
    /// Never: the object is made of strings and numbers.
    pub fn json(&self) -> String {
        let object = Json {
            machine: &self.machine,
            rows: self.series.iter().map(Series::row).collect(),
            repetitions: self.series.iter().map(Repetitions::of).collect(),
            targets: self.verdicts(),
            open: self.open.as_ref(),
            phases: self.tiers.breakdowns.iter().flat_map(Breakdown::rows).collect(),
            timelines: self.tiers.timelines.iter().chain(&self.log.timelines).collect(),
            idle: &self.tiers.idle,
            amounts: self.amounts().collect(),
        };
        serde_json::to_string_pretty(&object).expect("strings and numbers are JSON") + "\n"
    }

    fn amounts(&self) -> impl Iterator<Item = &Amount> {
        let of_cache = self.cache.amounts.0.iter().chain(&self.cache.shares_of_backing.0);
        self.log.amounts.0.iter().chain(of_cache)
    }

    /// Whether the targets that this run measured are met.
    pub fn verdicts(&self) -> Vec<Verdict> {
        let mut found = self.device_verdicts();
        found.extend(self.cache_verdicts());
        found.extend(self.run_verdicts());
        found
    }

    fn cache_verdicts(&self) -> Vec<Verdict> {
        cache::verdicts(&self.series, &self.cache)
    }

    fn device_verdicts(&self) -> Vec<Verdict> {
        let mut found = verdicts(&self.series, self.open.as_ref());
        found.extend(tier_targets::verdicts(&self.series, &self.tiers));
        found
    }

    fn run_verdicts(&self) -> Vec<Verdict> {
        log::targets::verdicts(&self.series, &self.log)
    }

    /// All tables that have rows, in the order of the documentation. Of the paper's figures, the
    /// hundreds of cells behind them are in the JSON only.
    pub fn tables(&self) -> Vec<Table> {
        let mut tables = if self.tiers.paper { self.figure_tables() } else { self.case_tables() };
        tables.extend([self.tiers.breakdown_table(), self.tiers.idle_table()]);
        tables.push(target_table("targets", "Targets", self.device_verdicts()));
        tables.extend(self.cache_tables());
        tables.extend(self.run_tables());
        tables
            .into_iter()
            .filter(|table| !table.is_empty())
            .map(Table::without_empty_columns)
            .collect()
    }

    fn figure_tables(&self) -> Vec<Table> {
        figures().iter().map(|figure| figure.table(&self.series)).collect()
    }

    fn case_tables(&self) -> Vec<Table> {
        let peer = "peer:libpmemblk";
        let has_peer = self.series.iter().any(|series| series.key.policy == peer);
        let baseline = if has_peer { peer } else { "btt" };
        let elsewhere = |key: &Key| is_nbd(key) || is_program(key) || is_log(key) || is_cache(key);
        let in_process = |key: &Key| !elsewhere(key) && key.case != open::CASE;
        let block = |op| move |key: &Key| key.op == op && in_process(key);
        let nbd = |op| move |key: &Key| key.op == op && is_nbd(key) && !is_single(key);
        vec![
            latencies(
                "block-write",
                "Write, in process",
                &self.matching(block(Op::Write)),
                baseline,
            ),
            latencies("block-read", "Read, in process", &self.matching(block(Op::Read)), baseline),
            latencies(
                "block-flush",
                "Flush, in process",
                &self.matching(block(Op::Flush)),
                baseline,
            ),
            latencies(
                "nbd-write",
                "Random write over NBD, fio",
                &self.matching(nbd(Op::Write)),
                "peer:nbdkit-memory",
            ),
            latencies(
                "nbd-read",
                "Random read over NBD, fio",
                &self.matching(nbd(Op::Read)),
                "peer:nbdkit-memory",
            ),
            times(
                "nbdcopy",
                "Whole device by nbdcopy",
                &self.matching(|key| is_nbd(key) && is_single(key)),
                "peer:nbdkit-memory",
            ),
            self.open_table(),
            latencies("programs", "Programs on ext4 over NBD", &self.programs(), "btt"),
        ]
    }

    /// Those of programs, policy beside policy.
    fn programs(&self) -> Vec<&Series> {
        let all = self.matching(is_program);
        let place = |series: &&Series| all.iter().position(|s| s.key.case == series.key.case);
        let mut sorted = all.clone();
        sorted.sort_by_key(place);
        sorted
    }

    /// What stands at a place in documentation that wants to know the machine of a run; `None` for
    /// other places.
    pub(crate) fn machine_at(&self, place: &str) -> Option<&Machine> {
        let has = |wanted: fn(&Key) -> bool| self.series.iter().any(|series| wanted(&series.key));
        let measured = match place {
            "machine" => has(|key| !is_program(key) && !is_log(key) && !is_cache(key)),
            "machine-cache" => has(|key| is_cache(key) && !is_by_cost(key)),
            "machine-cost" => has(is_by_cost),
            "machine-ocf" => has(cache::tables::is_ocf),
            "machine-programs" => has(is_program),
            "machine-run" => has(is_log),
            _ => false,
        };
        let own = match place {
            "machine-run" => self.log.machine.as_ref(),
            "machine-cache" | "machine-ocf" => self.cache.machine.as_ref(),
            "machine-cost" => self.cache.machine_by_cost.as_ref(),
            _ => None,
        };
        measured.then(|| own.unwrap_or(&self.machine))
    }

    fn matching(&self, wanted: impl Fn(&Key) -> bool) -> Vec<&Series> {
        self.series.iter().filter(|series| wanted(&series.key)).collect()
    }

    fn open_table(&self) -> Table {
        let headers = ["policy", "size GiB", "ms median", "min-max", "peak memory MiB"];
        let mut table = Table::new("open", "Opening after a crash", &headers);
        let opened = self.matching(|key| key.case == open::CASE);
        for (series, opening) in opened.into_iter().zip(&self.open) {
            let time = series.spread(|sample| sample.mean_ns / 1e6);
            table.push(vec![
                series.key.policy.clone(),
                format!("{:.1}", series.key.block_bytes as f64 / f64::from(1 << 30)),
                format!("{:.2}", time.median),
                range(time, 2),
                format!("{:.1}", opening.peak_memory_bytes as f64 / f64::from(1 << 20)),
            ]);
        }
        table
    }

    /// Of caches.
    fn cache_tables(&self) -> Vec<Table> {
        let of = |prefix: &'static str| self.matching(move |key| key.case.starts_with(prefix));
        let table = |name, title, prefix, base| latencies(name, title, &of(prefix), base);
        let nbd = |op| self.matching(move |key| key.case.starts_with("cache-nbd") && key.op == op);
        let modes = |op| {
            self.matching(move |key| key.case.starts_with(cache::choices::MODES) && key.op == op)
        };
        let mut tables = vec![cache::tables::cases(&self.series)];
        let figures = cache::study::figures();
        tables.extend(figures.iter().map(|figure| figure.table(&self.series)));
        tables.extend([
            cache::study::deep_table(&self.series),
            cache::study::table(&self.series),
            latencies("cache-nbd-write", "Write hits over NBD, fio", &nbd(Op::Write), "btt"),
            latencies("cache-nbd-read", "Read hits over NBD, fio", &nbd(Op::Read), "btt"),
            table("cache-full", "A full cache", "cache-full", cache::BACKING),
            table("cache-fill", "A cache until it is dirty to 90 %", "cache-fill", "cache-null"),
            table("cache-read", "Reads that miss", "cache-read", cache::BACKING),
            cache::tables::beside_ocf(&self.series),
            cache::cost::table(&self.series, &self.cache.shares_of_backing),
            latencies("cache-modes-write", "Modes: writes", &modes(Op::Write), "wb"),
            latencies("cache-modes-read", "Modes: reads", &modes(Op::Read), "wb"),
            table(
                "cache-cleaning",
                "Cleaning between bursts of writes",
                cache::choices::CLEANING,
                "watermark",
            ),
            times("cache-open", "Opening a cache after a crash", &of("cache-open"), "btt"),
            self.cache.amounts.table("cache-amounts", "Caches: other numbers"),
            self.cache.backing_work.table("cache-backing-work", "Work of the backing"),
            target_table("cache-targets", "Cache: targets", self.cache_verdicts()),
        ]);
        tables
    }

    /// Of the log, and of programs under `tidegate run`.
    fn run_tables(&self) -> Vec<Table> {
        let of = |prefixes: &'static [&'static str]| {
            self.matching(move |key| prefixes.iter().any(|prefix| key.case.starts_with(prefix)))
        };
        let table = |name, title, prefixes, base| latencies(name, title, &of(prefixes), base);
        let (plain, no_sync) = ("plain", "plain-nosync");
        let title = "Programs under run: targets";
        vec![
            table("log-append", "Appends to the log, in process", &[log::append::CASE], "copy"),
            table(
                "log-batch",
                "A full log, by the batch of its cleaner",
                &[log::batch::CASE],
                log::batch::ONE,
            ),
            table("run-write", "Durable writes of a program", &["run-write", "run-append"], plain),
            table("run-full", "Durable writes, the log full", &["run-full"], plain),
            table("run-steady", "A steady load", &["run-steady"], no_sync),
            log::steady_table(&self.log),
            times("run-unsynced", "Programs that never sync", &of(&["run-unsynced"]), plain),
            table("run-read", "Reads of a program", &["run-read"], plain),
            table("run-names", "What programs do with their syncs", &["run-names"], no_sync),
            table(
                "run-databases",
                "Databases",
                &["run-sqlite", "run-rocksdb", "run-postgres"],
                no_sync,
            ),
            table("run-apps", "Programs by their own benchmarks", &["run-app-"], no_sync),
            times("run-recovery", "Recovery of a full log", &of(&["run-recovery"]), "in-order"),
            self.log.table(),
            target_table("run-targets", title, self.run_verdicts()),
        ]
    }
}

fn target_table(name: &'static str, title: &str, verdicts: Vec<Verdict>) -> Table {
    let mut table = Table::new(name, title, &["target", "wanted", "measured", "verdict"]);
    for verdict in verdicts {
        let Verdict { target, wanted, measured, met } = verdict;
        let word = if met { "PASS" } else { "MISS" };
        table.push(vec![target, wanted, format!("{measured:.2}"), word.to_owned()]);
    }
    table
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

fn is_nbd(key: &Key) -> bool {
    key.case.starts_with("nbd")
}

/// The log, or a program under `tidegate run`.
fn is_log(key: &Key) -> bool {
    [log::LOG_PREFIX, log::RUN_PREFIX].iter().any(|prefix| key.case.starts_with(prefix))
}

/// The setting `cost=auto` of a cache.
fn is_by_cost(key: &Key) -> bool {
    key.case.starts_with(cache::cost::PREFIX)
}

/// A case as tables have it.
fn shown(case: &str) -> &str {
    let prefixes = [programs::CASE_PREFIX, log::RUN_PREFIX, "cache-"];
    prefixes.iter().find_map(|prefix| case.strip_prefix(prefix)).unwrap_or(case)
}

/// A program on a file system.
fn is_program(key: &Key) -> bool {
    key.case.starts_with(programs::CASE_PREFIX)
}

/// One operation over the whole device, timed as one.
fn is_single(key: &Key) -> bool {
    key.case.starts_with("nbdcopy")
}

/// The measurement of `baseline` under the same conditions as `series`.
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
    let throughput_ratio = format!("/ {}", baseline.trim_start_matches("peer:"));
    let headers = [
        "policy",
        "case",
        "threads",
        "depth",
        "kops/s",
        "min-max",
        &throughput_ratio,
        "min-max",
        "mean µs",
        "p50",
        "p99",
        "p99.9",
        "p99.99",
        "max",
        "data B/op",
        "metadata B/op",
        "fences/op",
    ];
    let mut table = Table::new(name, title, &headers);
    let mut sorted = all.to_vec();
    sorted.sort_by_key(|series| (series.key.threads, series.key.iodepth));
    for series in sorted {
        let ratio = counterpart(all, series, baseline)
            .and_then(|base| series.ratio(base, |sample| sample.ops_per_s));
        table.push(latency_row(series, ratio));
    }
    table
}

fn latency_row(series: &Series, ratio: Option<Spread>) -> Vec<String> {
    let Key { policy, case, threads, iodepth, .. } = &series.key;
    let throughput = series.spread(|sample| sample.ops_per_s / 1e3);
    let digits = if throughput.median < 10.0 { 2 } else { 0 };
    let micros = |value: fn(&Sample) -> f64| format!("{:.2}", series.spread(value).median / 1e3);
    let per_op = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.1}"));
    vec![
        policy.clone(),
        shown(case).to_owned(),
        threads.to_string(),
        iodepth.to_string(),
        format!("{:.digits$}", throughput.median),
        range(throughput, digits),
        ratio.map_or(String::new(), |ratio| format!("{:.2}", ratio.median)),
        ratio.map_or(String::new(), |ratio| range(ratio, 2)),
        micros(|sample| sample.mean_ns),
        micros(|sample| sample.p50_ns as f64),
        micros(|sample| sample.p99_ns as f64),
        micros(|sample| sample.p999_ns as f64),
        micros(|sample| sample.p9999_ns as f64),
        format!("{:.0}", series.row().max_ns as f64 / 1e3),
        per_op(series.traffic_per_op(|traffic| traffic.data_bytes)),
        per_op(series.traffic_per_op(|traffic| traffic.metadata_bytes)),
        per_op(series.traffic_per_op(|traffic| traffic.fences)),
    ]
}

fn times(name: &'static str, title: &str, all: &[&Series], baseline: &str) -> Table {
    let ratio = format!("/ {}", baseline.trim_start_matches("peer:"));
    let headers = ["policy", "case", "MiB", "ms median", "min-max", &ratio, "min-max"];
    let mut table = Table::new(name, title, &headers);
    for series in all {
        let time = series.spread(|sample| sample.mean_ns / 1e6);
        let base = counterpart(all, series, baseline);
        let ratio = base.and_then(|base| series.ratio(base, |sample| sample.mean_ns));
        table.push(vec![
            series.key.policy.clone(),
            shown(&series.key.case).to_owned(),
            (series.key.block_bytes >> 20).to_string(),
            format!("{:.0}", time.median),
            range(time, 0),
            ratio.map_or(String::new(), |ratio| format!("{:.2}", ratio.median)),
            ratio.map_or(String::new(), |ratio| range(ratio, 2)),
        ]);
    }
    table
}

fn range(spread: Spread, digits: usize) -> String {
    format!("{:.digits$}-{:.digits$}", spread.min, spread.max)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::measure::{ROW_KEYS, Traffic};

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
