//! The figures of the AFCM paper, made again from traces: a section of docs/papers.md.
//!
//! The text between the markers is this command's. Every number of ours in it is of the run that
//! wrote it. Each trace is played by itself, as the paper does, with its sizes of memory; storage
//! is the model `paper`, and persistent memory is as fast as DRAM, for the paper's was DRAM.

use std::fmt::Write as _;
use std::path::Path;

use tidegate::pmem::MediaModel;
use tidegate_bench::table::Table;

use super::amount::Amount;
use super::{ReplayArgs, Replayed, Row};
use crate::error::Error;
use crate::papers::{self, Check};
use crate::time::SsdModel;

const SCHEMES: [&str; 6] = ["dram", "sccm", "sfcm", "afcm", "tidegate", "log"];
/// The default sizes of the paper's section 5.1, in percent of the workload.
const DRAM_PCT: f64 = 50.0;
const PMEM_PCT: f64 = 20.0;
/// Figures 10 and 11, and figure 12.
const PMEM_PCTS: [f64; 4] = [5.0, 10.0, 15.0, 20.0];
const DRAM_PCTS: [f64; 5] = [10.0, 20.0, 30.0, 40.0, 50.0];

/// What the names of traces begin with that the project makes.
const OWN_PREFIX: &str = "own-";

/// A number of a row.
type Measure = fn(&Row) -> f64;

/// A trace and what came of it.
struct Played {
    name: String,
    replayed: Replayed,
    /// The row of `afcm` with atomic syncs.
    atomic: Row,
}

/// Replays each trace of `args` and replaces the section in the file `path`, which is made if there
/// is none.
///
/// # Errors
/// A trace or the file cannot be read, the file not be written, or it has one marker alone.
pub(super) fn update(args: &ReplayArgs, path: &Path) -> Result<(), Error> {
    papers::update(path, "replay", || {
        let played = args.traces.iter().map(|trace| play(args, trace));
        Ok(section(&played.collect::<Result<Vec<_>, _>>()?))
    })
}

fn play(args: &ReplayArgs, trace: &Path) -> Result<Played, Error> {
    let ssd: SsdModel = "paper".parse().map_err(Error::Usage)?;
    let of = |schemes: &[&'static str], atomic| ReplayArgs {
        traces: vec![trace.to_path_buf()],
        format: args.format,
        schemes: schemes.to_vec(),
        dram: Amount::Pct(DRAM_PCT),
        pmem: Amount::Pct(PMEM_PCT),
        sweep_dram: if atomic { Vec::new() } else { DRAM_PCTS.map(Amount::Pct).into() },
        sweep_pmem: if atomic { Vec::new() } else { PMEM_PCTS.map(Amount::Pct).into() },
        real: None,
        atomic,
        ssd: ssd.clone(),
        pmem_media: MediaModel::dram(),
        json: None,
        report: None,
        papers: None,
    };
    let atomic = of(&["afcm"], true).replay()?.rows.pop();
    let atomic = atomic.ok_or_else(|| Error::Usage("no row of afcm".to_owned()))?;
    let name = trace.file_name().unwrap_or_default().to_string_lossy();
    let name =
        name.split_once(".csv").or_else(|| name.split_once(".txt")).map_or(&*name, |it| it.0);
    let name = name.trim_start_matches("mobigen.out.").trim_end_matches(".trace").to_owned();
    Ok(Played { name, replayed: of(&SCHEMES, false).replay()?, atomic })
}

impl Played {
    /// The row of `scheme` with the paper's sizes or with `dram` and `pmem` percent.
    fn row_at(&self, scheme: &str, dram_pct: f64, pmem_pct: f64) -> Option<&Row> {
        let pages = self.replayed.profile.footprint_pages;
        let dram_pages = Amount::Pct(dram_pct).pages(pages);
        let pmem_bytes = if scheme == "dram" { 0 } else { Amount::Pct(pmem_pct).bytes(pages) };
        let mut rows = self.replayed.rows.iter().filter(|row| row.scheme == scheme);
        rows.find(|row| (row.dram_pages, row.pmem_bytes) == (dram_pages, pmem_bytes))
    }

    fn row(&self, scheme: &str) -> Option<&Row> {
        self.row_at(scheme, DRAM_PCT, PMEM_PCT)
    }

    /// `of` of the one scheme divided by that of the other.
    fn ratio(&self, one: &str, other: &str, of: Measure) -> Option<f64> {
        let (one, other) = (of(self.row(one)?), of(self.row(other)?));
        (other > 0.0).then(|| one / other)
    }

    /// Programs sync in this trace: without, no scheme of the paper uses persistent memory.
    fn has_syncs(&self) -> bool {
        self.row("dram").is_some_and(|row| row.synced_pages > 0)
    }
}

const fn seconds(row: &Row) -> f64 {
    row.seconds
}

#[expect(clippy::cast_precision_loss, reason = "ratios for people")]
const fn written(row: &Row) -> f64 {
    row.ssd_pages_written as f64
}

#[expect(clippy::cast_precision_loss, reason = "ratios for people")]
const fn traffic(row: &Row) -> f64 {
    row.pmem_traffic_bytes() as f64
}

fn mean(values: &[f64]) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "few values")]
    let count = values.len().max(1) as f64;
    values.iter().sum::<f64>() / count
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

fn section(played: &[Played]) -> String {
    let mut text = String::from(
        "\n## AFCM: granularity, from traces\n\n\
         Written by `tidegate replay TRACE... --papers docs/papers.md` (`make papers TRACES=DIR`).\n\
         Storage is the model `paper`, memory as the paper's: DRAM for half of the workload's\n\
         pages, persistent memory for a fifth of them, as fast as DRAM. Each trace is played by\n\
         itself.\n\n",
    );
    if played.iter().all(|it| it.name.starts_with(OWN_PREFIX)) {
        text.push_str(
            "No traces were given: these are made by `crates/tidegate-replay/examples/make_traces.rs`,\n\
             by the ways in which programs are known to write.\n\n",
        );
    }
    for table in
        [papers::table("papers-checks", "The paper's claims", &checks(played)), workloads(played)]
    {
        let _ = writeln!(text, "{}\n\n{}", table.title, table.markdown());
    }
    let figures: [(&str, Measure, usize); 3] = [
        ("Execution time in seconds (figure 7a)", seconds, 3),
        ("Pages written to flash (figure 7c)", written, 0),
        ("Bytes stored in persistent memory, data and metadata, in MiB (figure 8)", mib_of, 2),
    ];
    for (title, of, digits) in figures {
        let table = by_scheme(played, title, of, digits);
        let _ = writeln!(text, "{}\n\n{}", table.title, table.markdown());
    }
    for table in sweeps(played) {
        let _ = writeln!(text, "{}\n\n{}", table.title, table.markdown());
    }
    text
}

fn mib_of(row: &Row) -> f64 {
    traffic(row) / 1_048_576.0
}

fn workloads(played: &[Played]) -> Table {
    let headers = ["trace", "pages", "synced %", "dirty bytes", "all dirty %", "bad lines"];
    let title = "The traces: share of written bytes that a sync covers (figure 1), mean of the \
                 dirty\nbytes of a synced page, and how many of these are all dirty (figure 2)";
    let mut table = Table::new("papers-traces", title, &headers);
    let pct = |share: Option<f64>| share.map_or(String::new(), |it| format!("{:.0}", it * 100.0));
    for it in played {
        let profile = &it.replayed.profile;
        table.push(vec![
            it.name.clone(),
            profile.footprint_pages.to_string(),
            pct(profile.synced_share()),
            profile.mean_dirty_bytes().map_or(String::new(), |bytes| format!("{bytes:.0}")),
            pct(profile.whole_share()),
            it.replayed.bad_lines.iter().map(|(_, bad)| bad.count).sum::<u64>().to_string(),
        ]);
    }
    table
}

fn by_scheme(played: &[Played], title: &str, of: Measure, digits: usize) -> Table {
    let headers: Vec<_> = std::iter::once("trace").chain(SCHEMES).collect();
    let mut table = Table::new("papers-schemes", title, &headers);
    for it in played {
        let cell =
            |scheme| it.row(scheme).map_or(String::new(), |row| format!("{:.digits$}", of(row)));
        table.push(std::iter::once(it.name.clone()).chain(SCHEMES.map(cell)).collect());
    }
    table
}

/// Figures 10 to 12 for each trace with syncs: seconds, and pages written.
fn sweeps(played: &[Played]) -> Vec<Table> {
    let cell = |row: Option<&Row>| {
        row.map_or(String::new(), |row| format!("{:.2} s, {}", row.seconds, row.ssd_pages_written))
    };
    let headers: Vec<_> = std::iter::once("memory").chain(SCHEMES).collect();
    let table = |it: &Played| {
        let title = format!(
            "{}: seconds and pages written to flash,\nby persistent memory (figures 10, 11) and by \
             DRAM (figure 12), in percent of the workload",
            it.name
        );
        let mut table = Table::new("papers-sweep", title, &headers);
        let sizes = PMEM_PCTS.map(|pct| ("PMem", DRAM_PCT, pct));
        for (what, dram, pmem) in
            sizes.into_iter().chain(DRAM_PCTS.map(|pct| ("DRAM", pct, PMEM_PCT)))
        {
            let pct = if what == "PMem" { pmem } else { dram };
            let cells = SCHEMES.map(|scheme| cell(it.row_at(scheme, dram, pmem)));
            table.push(std::iter::once(format!("{what} {pct} %")).chain(cells).collect());
        }
        table
    };
    played.iter().filter(|it| it.has_syncs()).map(table).collect()
}

/// Traces with syncs, and what the checks ask of them.
struct Synced<'a>(Vec<&'a Played>);

impl Synced<'_> {
    fn ratios(&self, one: &str, other: &str, of: Measure) -> Vec<f64> {
        self.0.iter().filter_map(|it| it.ratio(one, other, of)).collect()
    }

    /// How much less `of` is of `one` than of `other`, in the mean.
    fn less_pct(&self, one: &str, other: &str, of: Measure) -> f64 {
        100.0 - mean(&self.ratios(one, other, of)) * 100.0
    }

    fn index_pct(&self) -> f64 {
        largest(&self.0.iter().filter_map(|it| index_pct(it)).collect::<Vec<_>>())
    }

    fn atomic_pct(&self) -> f64 {
        let pct = |it: &&Played| Some((it.atomic.seconds / it.row("afcm")?.seconds - 1.0) * 100.0);
        mean(&self.0.iter().filter_map(pct).collect::<Vec<_>>())
    }

    /// A row for our own aim.
    fn aim(&self, what: &'static str, of: Measure, reason: &'static str) -> Check {
        let is_no_worse = |it: &&&Played| it.row("tidegate").map(of) <= it.row("afcm").map(of);
        let no_worse = self.0.iter().filter(is_no_worse).count();
        let ours = format!("{no_worse} of {}", self.0.len());
        let holds = no_worse == self.0.len();
        check(("-", what), ("all (our aim)".to_owned(), ours), holds, reason)
    }

    fn share_check(&self) -> Check {
        let most = |it: &&&Played| it.replayed.profile.synced_share() > Some(0.7);
        let count = self.0.iter().filter(most).count();
        check(
            ("1", "workloads of whose written bytes a sync covers 70 % or more"),
            ("5 of 6".to_owned(), format!("{count} of {}", self.0.len())),
            count * 6 >= self.0.len() * 5,
            "other workloads; traces without syncs are not counted",
        )
    }
}

/// A row for a claim of a figure: what the paper says and what we find, and why, if it differs.
fn check(
    (figure, what): (&'static str, &'static str),
    (paper, ours): (String, String),
    holds: bool,
    reason: &'static str,
) -> Check {
    let (verdict, reason) = if holds { ("holds", "") } else { ("differs", reason) };
    Check { figure, what: what.to_owned(), paper, ours, verdict, reason }
}

/// A row for a number that the paper has, with `unit` behind it; it holds from 85 % of that on.
fn at_least(
    claim: (&'static str, &'static str),
    (paper, ours): (f64, f64),
    unit: &str,
    reason: &'static str,
) -> Check {
    let numbers = (format!("{paper} {unit}"), format!("{ours:.2} {unit}"));
    check(claim, numbers, ours >= paper * 0.85, reason)
}

/// The same; it holds up to 115 %.
fn at_most(
    claim: (&'static str, &'static str),
    (paper, ours): (f64, f64),
    reason: &'static str,
) -> Check {
    check(claim, (format!("{paper} %"), format!("{ours:.2} %")), ours <= paper * 1.15, reason)
}

fn checks(played: &[Played]) -> Vec<Check> {
    let synced = Synced(played.iter().filter(|it| it.has_syncs()).collect());
    let over_dram = largest(&synced.ratios("dram", "afcm", seconds));
    let over_sccm = largest(&synced.ratios("sccm", "afcm", seconds));
    let fewer = synced.less_pct("afcm", "sccm", written);
    let than_sccm = synced.less_pct("afcm", "sccm", traffic);
    let than_sfcm = synced.less_pct("afcm", "sfcm", traffic);
    let slower = ("7a", "afcm is faster than dram, up to");
    let stores_sccm = ("8", "afcm stores fewer bytes in persistent memory than sccm, in the mean");
    let stores_sfcm = ("8", "afcm stores fewer bytes in persistent memory than sfcm, in the mean");
    let writes = ("7c", "afcm writes fewer pages to flash than sccm, in the mean");
    let index = ("9", "DRAM for the index of afcm, of the workload, at most");
    let atomic = ("13", "atomic syncs make afcm slower, in the mean by");
    vec![
        synced.share_check(),
        at_least(slower, (8.8, over_dram), "times", "as many syncs stand beside reads of flash"),
        at_least(("7a", "afcm is faster than sccm, up to"), (1.84, over_sccm), "times", WHOLE),
        at_least(writes, (63.0, fewer), "%", WHOLE),
        at_least(stores_sccm, (13.4, than_sccm), "%", WHOLE),
        at_least(stores_sfcm, (10.6, than_sfcm), "%", "stores of words are counted, not 512 of 56"),
        at_most(index, (2.0, synced.index_pct()), "72 bytes a page, 32 an extent more"),
        at_most(atomic, (0.14, synced.atomic_pct()), "old versions take space until a sync ends"),
        synced.aim("traces on which tidegate takes no longer than afcm", seconds, OWN_SECONDS),
        synced.aim(
            "traces on which tidegate writes no more pages to flash than afcm",
            written,
            OWN_WRITTEN,
        ),
        synced.aim(
            "traces on which tidegate stores no more in persistent memory",
            traffic,
            OWN_STORED,
        ),
    ]
}

/// Why there is less to gain than in the paper.
const WHOLE: &str =
    "these traces write mostly whole pages, the paper's Iphoto, Usr1 and Usr2 did not";
/// Why the aims are missed where they are.
const OWN_SECONDS: &str = "a record takes a slot; slots are made free in batches";
const OWN_WRITTEN: &str =
    "the 44 KiB of headers are a quarter of the smallest pool; a record takes a slot";
const OWN_STORED: &str = "pages that DRAM gives up unsynced are stored too, which spares flash; a page \
                          costs a header of 64 bytes, and blocks of 512 bytes are stored whole";

fn index_pct(it: &Played) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
    let of = |bytes: u64, pages: u64| bytes as f64 * 100.0 / (pages as f64 * 4096.0);
    Some(of(it.row("afcm")?.index_bytes, it.replayed.profile.footprint_pages))
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    #[test]
    fn a_page_is_written_and_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let (trace, page) = (dir.path().join("t.csv"), dir.path().join("papers.md"));
        let mut lines = String::from("ts_us,tid,op,file,offset,len\n");
        for at in 0..400_u64 {
            let offset = at % 37 * 4096 + at % 5 * 128;
            let _ = writeln!(lines, "{at},1,write,/data,{offset},300");
            let _ = writeln!(lines, "{at},1,fsync,/data,0,0");
        }
        std::fs::write(&trace, lines).unwrap();
        std::fs::write(&page, "kept\n<!-- replay:begin -->\n<!-- replay:end -->\nkept too\n")
            .unwrap();
        let args = ReplayArgs::of([trace.to_str().unwrap()]);
        update(&args, &page).unwrap();
        let first = std::fs::read_to_string(&page).unwrap();
        assert!(first.starts_with("kept\n") && first.ends_with("kept too\n"), "{first}");
        for part in ["| figure |", "| t ", "figure 7c", "PMem 5 %", "DRAM 10 %", "0.14 %"] {
            assert!(first.contains(part), "{part} is not in {first}");
        }
        update(&args, &page).unwrap();
        assert_eq!(std::fs::read_to_string(&page).unwrap(), first);
    }
}
