//! Figures of the papers that need a run on a machine: writes a section of docs/papers.md from the
//! JSON of `tidegate bench`.
//!
//! The command owns the text between the markers. Our numbers in it come from those JSON files; the
//! papers' claims are in `figures` and in `caiti`. The row of a figure says so if no file has its
//! measurement.

mod caiti;

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::papers::markdown::{Block, blocks};
use crate::papers::took::{self, Took};
use crate::papers::{self, Check};

/// Maximum relative difference of a number that counts as equal to the paper's.
const TOLERANCE: f64 = 0.15;

/// Arguments of `tidegate-replay papers`.
#[derive(Debug, clap::Args)]
pub struct PapersArgs {
    /// What `tidegate bench --json` wrote
    #[arg(value_name = "JSON")]
    pub reports: Vec<PathBuf>,
    /// Write all of the page, with plots, to DIR/index.html
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// How long a part of `make papers` took, or `all` of it: the page says so
    #[arg(long, value_name = "PART=SECONDS")]
    pub took: Vec<Took>,
    /// The page whose section is replaced
    #[arg(long, value_name = "FILE", default_value = "docs/papers.md")]
    pub page: PathBuf,
}

impl PapersArgs {
    /// Writes the section if there are reports, the duration if one is given, and the page with
    /// plots if it is requested.
    ///
    /// # Errors
    /// A file cannot be read or is not a report of `tidegate bench`, or the page cannot be written.
    pub fn run(&self) -> Result<()> {
        let reports = self.reports.iter().map(|path| Report::read(path));
        let reports = reports.collect::<Result<Vec<_>, _>>()?;
        if !reports.is_empty() {
            papers::update(&self.page, "measured", |old| Ok(section(&reports, old)))?;
        }
        if !self.took.is_empty() {
            took::update(&self.page, &self.took)?;
        }
        self.report.as_deref().map_or(Ok(()), |dir| papers::page::write(&self.page, dir))
    }
}

/// The part of a bench report that is read.
#[derive(Deserialize)]
struct Report {
    machine: Machine,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Machine {
    cpu: String,
    cores: u64,
    medium: String,
    load_average: String,
    seconds: f64,
    repetitions: u32,
}

#[derive(Deserialize)]
struct Row {
    policy: String,
    case: String,
    threads: u32,
    block_bytes: u64,
    ops_per_s: f64,
    p9999_ns: u64,
    pmem_data_bytes: Option<u64>,
    pmem_metadata_bytes: Option<u64>,
}

impl Report {
    fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
        serde_json::from_str(&text).map_err(|error| {
            let path = path.display();
            Error::Usage(format!("{path}: {error}; expected what `tidegate bench --json` writes"))
        })
    }

    /// Returns the row of `case` with the fewest threads; `block_bytes` 0 matches any size.
    fn find(&self, (policy, case, block_bytes): RowName) -> Option<&Row> {
        let is_it = |row: &&Row| {
            let is_size = block_bytes == 0 || row.block_bytes == block_bytes;
            (row.policy.as_str(), row.case.as_str()) == (policy, case) && is_size
        };
        self.rows.iter().filter(is_it).min_by_key(|row| row.threads)
    }
}

/// A policy, a case, and the bytes of a request.
type RowName = (&'static str, &'static str, u64);

/// A formula for our number, from the rows of reports.
enum Ours {
    /// Rate of the first row over that of the second.
    Ratio(RowName, RowName),
    /// How much slower the first row is than the second, in percent.
    SlowerPct(RowName, RowName),
    /// Bytes stored in persistent memory for each written byte.
    Stored(RowName, u64),
    /// Rate of the row over the highest rate of several policies in its case.
    OverBest(RowName, &'static [&'static str]),
    /// Lowest p99.99 of several policies in a case over the p99.99 of the row.
    OverBestTail(RowName, &'static [&'static str]),
}

impl Ours {
    fn of(&self, reports: &[Report]) -> Option<f64> {
        let row = |name: &RowName| reports.iter().find_map(|report| report.find(*name));
        let rate = |name: &RowName| row(name).map(|row| row.ops_per_s);
        match self {
            Self::Ratio(one, other) => Some(rate(one)? / rate(other)?),
            Self::SlowerPct(one, other) => Some(100.0 - rate(one)? * 100.0 / rate(other)?),
            Self::Stored(name, written) => {
                let row = row(name)?;
                let stored = row.pmem_data_bytes? + row.pmem_metadata_bytes?;
                #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
                Some(stored as f64 / *written as f64)
            }
            Self::OverBest((one, case, bytes), others) => {
                let rate_of = |policy: &&'static str| rate(&(*policy, *case, *bytes));
                let others = others.iter().map(rate_of).collect::<Option<Vec<_>>>()?;
                Some(rate_of(one)? / others.into_iter().fold(0.0, f64::max))
            }
            Self::OverBestTail((one, case, bytes), others) => {
                #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
                let tail_of = |policy: &&'static str| {
                    row(&(*policy, *case, *bytes)).map(|row| row.p9999_ns as f64)
                };
                let others = others.iter().map(tail_of).collect::<Option<Vec<_>>>()?;
                Some(others.into_iter().fold(f64::INFINITY, f64::min) / tail_of(one)?)
            }
        }
    }
}

/// A paper's claim about a number.
enum Claim {
    /// The number is equal.
    Is(f64),
    /// The number is at least this.
    AtLeast(f64),
    /// The number is equal; less is better.
    Cost(f64),
    /// The number is greater; the paper states this in words.
    MoreThan(f64, &'static str),
}

impl Claim {
    fn text(&self, unit: &str) -> String {
        match self {
            Self::Is(number) | Self::Cost(number) => format!("{number} {unit}"),
            Self::AtLeast(number) => format!("at least {number} {unit}"),
            Self::MoreThan(_, words) => (*words).to_owned(),
        }
    }

    fn verdict(&self, ours: f64) -> &'static str {
        match self {
            Self::AtLeast(paper) if ours >= paper * (1.0 - TOLERANCE) => "holds",
            Self::MoreThan(least, _) if ours > *least => "holds",
            Self::AtLeast(_) | Self::MoreThan(..) => "does not hold",
            Self::Is(paper) | Self::Cost(paper) if (ours - paper).abs() <= paper * TOLERANCE => {
                "same"
            }
            Self::Cost(paper) if ours < *paper => "less: better",
            Self::Is(paper) if ours < *paper => "less",
            Self::Is(_) | Self::Cost(_) => "more",
        }
    }
}

/// A figure of a paper, its claim, and our formula.
struct Figure {
    name: &'static str,
    what: String,
    claim: Claim,
    unit: &'static str,
    ours: Ours,
    reason: &'static str,
}

const KIB: u64 = 1 << 10;

fn figure(
    name: &'static str,
    what: impl Into<String>,
    (claim, unit): (Claim, &'static str),
    ours: Ours,
    reason: &'static str,
) -> Figure {
    Figure { name, what: what.into(), claim, unit, ours, reason }
}

/// Returns the ratio of the first policy in the first case to the second policy in the second case.
fn ratio(policies: [&'static str; 2], cases: [&'static str; 2], bytes: u64) -> Ours {
    Ours::Ratio((policies[0], cases[0], bytes), (policies[1], cases[1], bytes))
}

/// Returns how much slower the first policy and case is than the second policy and case.
fn slower(policies: [&'static str; 2], cases: [&'static str; 2], bytes: u64) -> Ours {
    Ours::SlowerPct((policies[0], cases[0], bytes), (policies[1], cases[1], bytes))
}

/// Returns all figures, in the order of the papers.
fn figures() -> Vec<Figure> {
    [nvcache(), study(), caiti::figures()].into_iter().flatten().collect()
}

fn nvcache() -> Vec<Figure> {
    let synced = [
        ("SQLite with a rollback journal, each insert synced", "run-sqlite-delete"),
        ("SQLite with a write-ahead log", "run-sqlite-wal"),
        ("RocksDB, fillrandom, each write synced", "run-rocksdb-fillrandom"),
    ];
    let over_disk = |(what, case)| {
        let what = format!("{what}: run over the disk alone");
        let ours = ratio(["run", "plain"], [case; 2], 0);
        figure("NVCache 3", what, (Claim::AtLeast(1.9), "x"), ours, DISK)
    };
    let mut figures: Vec<_> = synced.map(over_disk).into();
    figures.extend([
        figure(
            "NVCache 3",
            "reads of clean pages: run over the disk alone",
            (Claim::Is(1.0), "x"),
            ratio(["run", "plain"], ["run-read-clean"; 2], 0),
            "reads of a second or less from the kernel's page cache: the runs differ by as much",
        ),
        figure(
            "NVCache 4",
            "random synced writes of 4 KiB: run over the disk alone (22 min over 42 s)",
            (Claim::AtLeast(31.0), "x"),
            ratio(["run", "plain"], ["run-write-fdatasync"; 2], 0),
            "the disk here syncs faster than the paper's SATA SSD, so less is gained",
        ),
        figure(
            "NVCache 5",
            "the same before the log is full, over after it is full (556 over 78 MiB/s)",
            (Claim::Is(7.1), "x"),
            ratio(["run"; 2], ["run-write-fdatasync", "run-full-random"], 0),
            "what is left then is the disk's speed: that of a disk here, of a SATA SSD there",
        ),
        figure(
            "NVCache 6",
            "rate of a full log, cleaned in batches of 1000 over batches of 1 write (78 over 21 \
             MiB/s)",
            (Claim::AtLeast(3.7), "x"),
            ratio(["batch-1000", "batch-1"], ["log-batch"; 2], 0),
            "a sync costs less here than on the paper's disk",
        ),
        figure(
            "NVCache 6",
            "the same, batches of 5000 over batches of 100: little difference",
            (Claim::Is(1.0), "x"),
            ratio(["batch-5000", "batch-100"], ["log-batch"; 2], 0),
            "the disk here takes more at once, so larger batches still gain",
        ),
        figure(
            "NVCache 7",
            "no read cache but the kernel's: reads of pages with pending writes over clean ones",
            (Claim::MoreThan(1.0 - TOLERANCE, "no influence"), "x"),
            ratio(["run"; 2], ["run-read-dirty", "run-read-clean"], 0),
            "a read looks up what the log has of the file",
        ),
    ]);
    figures
}

/// The study's accesses: to a file of half the cache's size, and to a file larger than the cache.
const SMALL_1ST: &str = "study-50pct-1st";
const SMALL_2ND: &str = "study-50pct-2nd";
const LARGE_1ST: &str = "study-125pct-1st";
const LARGE_2ND: &str = "study-125pct-2nd";

fn study() -> Vec<Figure> {
    let without_cache = |(size, kib)| {
        let what = format!("writes of {size}: persistent memory over the disk, without a cache");
        let ours = ratio(["btt", "backing"], [SMALL_1ST; 2], kib * KIB);
        figure("study 1", what, (Claim::AtLeast(1.0), "x"), ours, MODELLED)
    };
    let first_access = |(policy, kib, pct)| {
        let what = format!(
            "file below the cache, writes and lines of {kib} KiB: 1st access slower than the 2nd"
        );
        let ours = slower([policy; 2], [SMALL_1ST, SMALL_2ND], kib * KIB);
        figure("study 3", what, (Claim::Cost(pct), "%"), ours, HEADER)
    };
    let cpu = |(access, case, pct)| {
        let what = format!(
            "CPU of the cache of all, {access} access (ours: of a write, all but copy and fences)"
        );
        let ours = slower(["cache", "copy"], [case; 2], 4 * KIB);
        figure("study table 1", what, (Claim::Cost(pct), "%"), ours, NO_LAYERS)
    };
    let stored = |(of, case, written_bytes, ratio)| {
        let what = format!("bytes stored for each written, {of}");
        let ours = Ours::Stored(("cache", case, 4 * KIB), written_bytes);
        figure("study 3.3.2", what, (Claim::Cost(ratio), "x"), ours, HEADER)
    };
    let mut figures: Vec<_> = [("4 KiB", 4), ("1 MiB", 1024)].map(without_cache).into();
    figures.extend(
        [("cache", 4, 40.0), ("cache-16k", 16, 25.0), ("cache-64k", 64, 14.0)].map(first_access),
    );
    figures.extend([
        figure(
            "study 3",
            "file of 125 % of the cache, 4 KiB: 2nd access slower than with a file of 50 %",
            (Claim::MoreThan(50.0, "drastically"), "%"),
            slower(["cache"; 2], [LARGE_2ND, SMALL_2ND], 4 * KIB),
            "counted as drastic above 50 %: each write evicts a dirty page",
        ),
        figure(
            "study 4",
            "writes of 16 KiB, file of 125 %: 2nd access slower than with a file of 50 %",
            (Claim::MoreThan(50.0, "as figure 3"), "%"),
            slower(["cache"; 2], [LARGE_2ND, SMALL_2ND], 16 * KIB),
            "counted as drastic above 50 %: each write evicts dirty pages",
        ),
        figure(
            "study 4",
            "writes of 512 KiB: 1st access of a file of 125 % over that of 50 %",
            (Claim::MoreThan(1.0, "slightly above 1"), "x"),
            ratio(["cache"; 2], [LARGE_1ST, SMALL_1ST], 512 * KIB),
            "Open CAS goes round a cache that has not 128 free lines; ours evicts and keeps its \
             promise",
        ),
    ]);
    figures.extend([("1st", SMALL_1ST, 45.0), ("2nd", SMALL_2ND, 38.0)].map(cpu));
    figures.extend(
        [
            ("1st access, 4 KiB, a file of 50 %", SMALL_1ST, STUDY_BYTES / 2, 2.0),
            ("2nd access, 4 KiB, a file of 125 %", LARGE_2ND, STUDY_BYTES / 4 * 5, 3.0),
        ]
        .map(stored),
    );
    figures
}

/// Bytes of the study's cache: a quarter of the `--size` of [`COMMANDS`].
const STUDY_BYTES: u64 = 64 << 20;
const MODELLED: &str = "the disk is modelled: 20 µs a request, 1.4 GB/s";
const DISK: &str = "the disk here syncs faster than the paper's SATA SSD";
const HEADER: &str = "a page costs a header of 64 bytes, not a block of metadata of 4 KiB";
const NO_LAYERS: &str = "the study's profile has fio, ext4 and the block layer in all: here they \
                         are in none";

/// The commands that produce the reports.
const COMMANDS: &str = "\
`scripts/papers` writes this section from short runs on one machine:

    tidegate bench log --quick --parts batch,write,full,read,sqlite,rocksdb --json log.json
    tidegate bench cache --only study --size 256M --repetitions 1 --json cache.json
    tidegate bench programs --parts rocksdb,ycsb,filebench --data 64M --repetitions 3 \\
        --policies btt,transit,pmbd,pmbd70,lru,coactive --json programs.json
    tidegate-replay papers log.json cache.json programs.json

docs/benchmarks.md has the same cases from long runs on a machine with nothing else to do.";

/// The parts of figures without a row, and the reasons.
const NOT_MADE: &str = "\
Parts of figures that are not made:

- Caiti 8 and 10, DAX, PMem and NOVA: these are file systems of the kernel on persistent memory,
  and the bench compares what serves a block device.
- Caiti 8d: the bench does not run `readhot`.
- Caiti 9a: reports of the bench have percentiles of `fillrandom` and no curve, so a row compares
  p99.99 alone.
- Caiti 9b and 9d: the YCSB of the bench chooses records by a Zipf distribution alone, which is 9c.
- Caiti 10b: the Filebench of the bench times reads and writes together.
- Study, table 1: the shares of fio, VFS, ext4 and block I/O have no counterpart, because the bench
  calls the cache without them. The estimate that metadata takes up to half of the CPU time of Open
  CAS is not compared, because no run of the bench leaves out the metadata alone.";

fn section(reports: &[Report], old: &str) -> String {
    let machines: Vec<String> = reports.iter().map(|report| text_of(&report.machine)).collect();
    let mut checks = checks(reports);
    let kept = keep_old(&mut checks, old);
    let kept = if kept.is_empty() {
        String::new()
    } else {
        format!("Rows of an earlier run, for this one has not measured them: {kept}.\n\n")
    };
    format!(
        "## NVCache, the Open CAS study, and what of Caiti takes a machine\n\n{COMMANDS}\n\n\
         {NOT_MADE}\n\n{}\n\n{kept}{}",
        machines.join("\n"),
        papers::table("papers-measured", "", &checks).markdown(),
    )
}

/// Replaces rows that are not measured with the rows of the section `old`; returns their figures.
fn keep_old(checks: &mut [Check], old: &str) -> String {
    let mut kept = Vec::new();
    let rows: Vec<_> = blocks(old).into_iter().filter_map(rows_of).flatten().collect();
    for check in checks.iter_mut().filter(|check| check.verdict == NOT_MEASURED) {
        let is_it = |row: &&Vec<String>| row[..2] == [check.figure, &check.what];
        let Some([.., ours, verdict, reason]) = rows.iter().find(is_it).map(Vec::as_slice) else {
            continue;
        };
        if !ours.is_empty() {
            check.ours.clone_from(ours);
            check.verdict = verdict.clone().into();
            check.reason = reason.clone().into();
            kept.push(check.figure);
        }
    }
    kept.dedup();
    kept.join(", ")
}

/// Returns the rows of a table of claims, or `None` for another block.
fn rows_of(block: Block) -> Option<Vec<Vec<String>>> {
    match block {
        Block::Table(headers, rows) if headers.len() == 6 => Some(rows),
        _ => None,
    }
}

fn text_of(machine: &Machine) -> String {
    let Machine { cpu, cores, medium, load_average, seconds, repetitions } = machine;
    format!(
        "- {cpu}, {cores} CPUs, load before the run {load_average}; runs of {seconds} s, \
         {repetitions} of each\n  {}",
        medium.replace("; ", ";\n  "),
    )
}

fn checks(reports: &[Report]) -> Vec<Check> {
    figures().iter().map(|figure| check(figure, reports)).collect()
}

fn check(figure: &Figure, reports: &[Report]) -> Check {
    let Figure { name, what, claim, unit, ours, reason } = figure;
    let (ours, verdict) = match ours.of(reports) {
        None => (String::new(), NOT_MEASURED),
        Some(ours) => (format!("{ours:.2} {unit}"), claim.verdict(ours)),
    };
    let reason = if ["same", "holds"].contains(&verdict) { &"" } else { reason };
    let (what, paper) = (what.clone(), claim.text(unit));
    Check { figure: name, what, paper, ours, verdict: verdict.into(), reason: (*reason).into() }
}

/// The verdict on a figure that no report contains.
const NOT_MEASURED: &str = "not measured";

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn row(policy: &str, case: &str, ops_per_s: f64) -> Row {
        Row {
            policy: policy.to_owned(),
            case: case.to_owned(),
            threads: 1,
            block_bytes: 4096,
            ops_per_s,
            p9999_ns: 1000,
            pmem_data_bytes: Some(STUDY_BYTES / 2),
            pmem_metadata_bytes: Some(STUDY_BYTES / 8),
        }
    }

    pub(super) fn report(rows: Vec<Row>) -> Report {
        let machine = Machine {
            cpu: "a CPU".into(),
            cores: 2,
            medium: "tmpfs".into(),
            load_average: "0.0".into(),
            seconds: 0.2,
            repetitions: 1,
        };
        Report { machine, rows }
    }

    #[test]
    fn a_row_is_made_of_what_was_measured_and_of_nothing_else() {
        let rows = vec![
            row("run", "run-sqlite-wal", 500.0),
            row("plain", "run-sqlite-wal", 100.0),
            row("cache", "study-50pct-1st", 90.0),
            row("cache", "study-50pct-2nd", 100.0),
        ];
        let made: Vec<_> = checks(&[report(rows)])
            .into_iter()
            .filter(|check| !check.ours.is_empty())
            .map(|check| (check.figure, check.ours, check.verdict.into_owned()))
            .collect();
        let expected = [
            ("NVCache 3", "5.00 x", "holds"),
            ("study 3", "10.00 %", "less: better"),
            ("study 3.3.2", "1.25 x", "less: better"),
        ];
        let expected =
            expected.map(|(figure, ours, verdict)| (figure, ours.into(), verdict.into()));
        assert_eq!(made, expected);
    }

    #[test]
    fn rows_that_a_run_has_not_measured_stay_as_they_were() {
        let wal = ["run", "plain"].map(|policy| row(policy, "run-sqlite-wal", 100.0));
        let first = section(&[report(wal.into())], "");
        let delete = ["run", "plain"].map(|policy| row(policy, "run-sqlite-delete", 100.0));
        let second = section(&[report(delete.into())], &first);
        assert_eq!(second.matches("1.00 x").count(), 2, "{second}");
        assert!(
            second.contains("Rows of an earlier run, for this one") && !first.contains("earlier")
        );
    }

    #[test]
    fn what_is_no_report_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        std::fs::write(&path, "{}").unwrap();
        let error = Report::read(&path).err().expect("no machine").to_string();
        assert!(error.contains("x.json") && error.contains("bench"), "{error}");
    }

    #[test]
    fn verdicts_follow_the_numbers() {
        assert_eq!(
            [Claim::AtLeast(2.0).verdict(1.8), Claim::AtLeast(2.0).verdict(1.6)],
            ["holds", "does not hold"]
        );
        let verdicts = [1.1, 0.5, 2.0].map(|ours| Claim::Is(1.0).verdict(ours));
        assert_eq!(verdicts, ["same", "less", "more"]);
        assert_eq!(Claim::Cost(3.0).verdict(1.0), "less: better");
        let more = Claim::MoreThan(1.0, "above");
        assert_eq!([more.verdict(1.1), more.verdict(0.9)], ["holds", "does not hold"]);
    }

    #[test]
    fn what_may_differ_has_a_reason() {
        for figure in figures() {
            assert!(!figure.reason.is_empty(), "{}", figure.what);
        }
    }

    #[test]
    fn lines_of_the_cache_are_as_large_as_the_writes_of_the_study() {
        let rows = vec![
            Row { block_bytes: 16 * KIB, ..row("cache", "study-50pct-1st", 1.0) },
            Row { block_bytes: 16 * KIB, ..row("cache", "study-50pct-2nd", 2.0) },
            Row { block_bytes: 16 * KIB, ..row("cache-16k", "study-50pct-1st", 3.0) },
            Row { block_bytes: 16 * KIB, ..row("cache-16k", "study-50pct-2nd", 4.0) },
        ];
        let made = checks(&[report(rows)]);
        let found = made.iter().find(|check| check.what.contains("lines of 16 KiB"));
        assert_eq!(found.map(|check| check.ours.as_str()), Some("25.00 %"));
    }
}
