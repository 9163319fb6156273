//! Reproduces the figures of the AFCM paper from traces: a section of docs/papers.md.
//!
//! The command owns the text between the markers. Our numbers in it come from the run that wrote
//! it. As in the paper, each trace is played alone, with the paper's memory sizes, and the paper's
//! groups of workloads are played together. Storage is the model `paper`. Persistent memory is as
//! fast as DRAM, because the paper's was DRAM. Each CPU plays one trace at a time.

#![allow(clippy::cast_precision_loss, reason = "ratios for people")]

mod claims;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use tidegate::pmem::MediaModel;
use tidegate_bench::table::Table;

use super::amount::Amount;
use super::output::mib;
use super::{ReplayArgs, Replayed, Row};
use crate::error::{Error, Result};
use crate::model::costs::Costs;
use crate::papers;
use crate::parallel;
use crate::report::grid;
use crate::time::SsdModel;
use crate::trace::BadLines;

const SCHEMES: [&str; 6] = ["dram", "sccm", "sfcm", "afcm", "tidegate", "log"];
/// The default sizes of the paper's section 5.1, in percent of the workload.
const DRAM_PCT: f64 = 50.0;
const PMEM_PCT: f64 = 20.0;
/// Sizes in figures 10 and 11, and in figure 12.
const PMEM_PCTS: [f64; 4] = [5.0, 10.0, 15.0, 20.0];
const DRAM_PCTS: [f64; 5] = [10.0, 20.0, 30.0, 40.0, 50.0];

/// Prefix of the names of traces that the project generates.
const OWN_PREFIX: &str = "own-";
/// Generated traces of partly dirty pages, which stand for the paper's Iphoto, Usr1 and Usr2.
const PARTLY_DIRTY: [&str; 3] = [IPHOTO, USR1, USR2];
const IPHOTO: &str = "own-iphoto";
const USR1: &str = "own-usr1";
const USR2: &str = "own-usr2";
/// Parts of the names of traces that are, or stand for, the paper's other workloads.
const FACEBOOK: &str = "facebook";
const TWITTER: &str = "twitter";
const TPCC: &str = "sysbench-tpcc";
/// The paper's groups of workloads that run together (figure 7b).
const GROUPS: [(&str, &[&str]); 4] = [
    ("usr1 + iphoto", &[USR1, IPHOTO]),
    ("TPC-C + twitter", &[TPCC, TWITTER]),
    ("facebook + usr1 + usr2", &[FACEBOOK, USR1, USR2]),
    ("TPC-C + iphoto", &[TPCC, IPHOTO]),
];

/// A function that returns a number of a row.
type Measure = fn(&Row) -> f64;

/// A trace, or a group of traces that are merged by time.
struct Task {
    name: String,
    traces: Vec<PathBuf>,
}

impl Task {
    /// Plays the traces; a group only with the default sizes.
    fn play(&self, args: &ReplayArgs, ssd: &SsdModel) -> Result<Played> {
        let of = |schemes: &[&'static str], atomic, has_sweeps| ReplayArgs {
            traces: self.traces.clone(),
            schemes: schemes.to_vec(),
            dram: Amount::Pct(DRAM_PCT),
            pmem: Amount::Pct(PMEM_PCT),
            sweep_dram: if has_sweeps { DRAM_PCTS.map(Amount::Pct).into() } else { Vec::new() },
            sweep_pmem: if has_sweeps { PMEM_PCTS.map(Amount::Pct).into() } else { Vec::new() },
            real: None,
            atomic,
            ssd: ssd.clone(),
            pmem_media: MediaModel::dram(),
            machine: Costs::optane(),
            ..args.clone()
        };
        let replayed = of(&SCHEMES, false, self.traces.len() == 1).replay()?;
        let atomic = of(&["afcm"], true, false).replay()?.rows.pop();
        let atomic = atomic.ok_or_else(|| Error::Usage("no row of afcm".to_owned()))?;
        Ok(Played { name: self.name.clone(), replayed, atomic })
    }
}

/// A trace or a group of traces, and the results.
struct Played {
    name: String,
    replayed: Replayed,
    /// The row of `afcm` with atomic syncs.
    atomic: Row,
}

/// Replays each trace of `args` and replaces the section in the file `path`, which is created if
/// missing.
///
/// # Errors
/// A trace or the file cannot be read, the file cannot be written or has only one marker.
pub(super) fn update(args: &ReplayArgs, path: &Path) -> Result<()> {
    papers::update(path, "replay", |_| {
        let ssd: SsdModel = "paper".parse().map_err(Error::Usage)?;
        let played = parallel::map(&tasks(&args.traces), |task| task.play(args, &ssd));
        let mut traces = played.into_iter().collect::<Result<Vec<_>>>()?;
        let groups = traces.split_off(args.traces.len());
        Ok(section(&traces, &groups))
    })
}

/// Returns a task for each trace, followed by the paper's groups whose members are all present.
fn tasks(traces: &[PathBuf]) -> Vec<Task> {
    let single = |path: &PathBuf| Task { name: name_of(path), traces: vec![path.clone()] };
    let mut tasks: Vec<Task> = traces.iter().map(single).collect();
    for (name, members) in GROUPS {
        let member = |part: &&str| traces.iter().find(|path| name_of(path).contains(part)).cloned();
        if let Some(traces) = members.iter().map(member).collect() {
            tasks.push(Task { name: name.to_owned(), traces });
        }
    }
    tasks
}

/// Returns the name of a trace in the tables: its file's name, without format suffixes.
fn name_of(trace: &Path) -> String {
    let name = trace.file_name().unwrap_or_default().to_string_lossy();
    let name =
        name.split_once(".csv").or_else(|| name.split_once(".txt")).map_or(&*name, |it| it.0);
    name.trim_start_matches("mobigen.out.").trim_end_matches(".trace").to_owned()
}

impl Played {
    /// Returns the row of `scheme` with these percentages of DRAM and persistent memory.
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

    /// Returns `of` for `one` divided by `of` for `other`, with the default sizes.
    fn ratio(&self, one: &str, other: &str, of: Measure) -> Option<f64> {
        self.ratio_at((one, other), (DRAM_PCT, PMEM_PCT), of)
    }

    /// Returns `of` for `one` divided by `of` for `other`, with these percentages of memory.
    fn ratio_at(
        &self,
        (one, other): (&str, &str),
        (dram_pct, pmem_pct): (f64, f64),
        of: Measure,
    ) -> Option<f64> {
        let at = |scheme| self.row_at(scheme, dram_pct, pmem_pct).map(of);
        let (one, other) = (at(one)?, at(other)?);
        (other > 0.0).then(|| one / other)
    }

    /// Returns whether the trace has syncs. Without syncs the paper's schemes use no persistent
    /// memory.
    fn has_syncs(&self) -> bool {
        self.row("dram").is_some_and(|row| row.requests.synced_pages > 0)
    }
}

const fn seconds(row: &Row) -> f64 {
    row.seconds
}

const fn written(row: &Row) -> f64 {
    row.totals.ssd_pages_written as f64
}

const fn traffic(row: &Row) -> f64 {
    row.pmem_traffic_bytes() as f64
}

fn section(played: &[Played], groups: &[Played]) -> String {
    let (partly, whole): (Vec<_>, Vec<_>) =
        played.iter().partition(|it| PARTLY_DIRTY.contains(&it.name.as_str()));
    let mut text = String::from(HEAD);
    if whole.iter().all(|it| it.name.starts_with(OWN_PREFIX)) {
        text.push_str(
            "No traces were given: these are made by `crates/tidegate-replay/examples/make_traces.rs`,\n\
             by the ways in which programs are known to write.\n\n",
        );
    }
    if whole.iter().any(|it| [FACEBOOK, TWITTER].contains(&it.name.as_str())) {
        text.push_str(LOST_OPENS);
    }
    let claims = claims::whole(&whole);
    let mut tables =
        vec![papers::table("papers-checks", "The paper's claims, on traces of programs", &claims)];
    if !partly.is_empty() {
        text.push_str(MADE);
        let claims = claims::partly_dirty(played, groups);
        tables.push(papers::table("papers-checks", claims::PARTLY_TITLE, &claims));
    }
    tables.push(workloads(played));
    tables.extend(FIGURES.map(|(title, of, digits)| by_scheme(played, title, of, digits)));
    if !groups.is_empty() {
        tables.push(by_scheme(groups, "Execution time in seconds (figure 7b)", seconds, 3));
    }
    tables.extend(sweeps(played));
    for table in tables {
        let _ = writeln!(text, "{}\n\n{}", table.title, table.markdown());
    }
    text
}

const HEAD: &str = "
## AFCM: granularity, from traces

Written by `tidegate replay TRACE... --papers docs/papers.md` (`make papers TRACES=DIR`).
Storage is the model `paper`, memory as the paper's: DRAM for half of the workload's
pages, persistent memory for a fifth of them, as fast as DRAM. Each trace is played by
itself, groups (figure 7b) by time.

";

/// Reason why traces that the paper's authors publish have bad lines.
const LOST_OPENS: &str = "\
A bad line gives no event. About nine of ten bad lines of AFCM's own traces, `facebook` and
`twitter`, use a descriptor after its close with no open between them: the tracer lost the
open, so the file that such a line reads, writes or syncs is not known. Most others use a
descriptor that no line of the trace opens.

";

/// Known and assumed facts about the generated workloads.
const MADE: &str = "\
The paper's Iphoto, Usr1 and Usr2 are not to be had, and of their figure 2 the text says
only that a large proportion of their synced pages is dirty to much less than 100 %.
`own-iphoto`, `own-usr1` and `own-usr2` stand for them
(`crates/tidegate-replay/examples/make_traces.rs`): small files and whole pages that are
saved again and again, each save synced, beside data that is read. Assumed are the sizes
of the files (a third of the synced pages is partly dirty), that they take about 30 % of
all pages, nearly equally popular, and the share of reads. These numbers are chosen so
that figure 11 comes out near the paper's. So the rows show that pages as dirty as these
give gains as the paper's, and how all schemes do on them; they do not show what the
paper's own traces would give.

";

const FIGURES: [(&str, Measure, usize); 5] = [
    ("Execution time in seconds (figure 7a)", seconds, 3),
    ("Pages written to flash (figure 7c)", written, 0),
    (
        "Data stored in persistent memory, in MiB (figure 8)",
        |row| mib(row.totals.pmem_data_bytes),
        2,
    ),
    (
        "Metadata stored in persistent memory, in MiB (figure 8)",
        |row| mib(row.totals.pmem_metadata_bytes),
        2,
    ),
    ("Most DRAM for the index, in KiB (figure 9)", |row| row.index_bytes as f64 / 1024.0, 1),
];

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
            it.replayed.bad_lines.first().map_or(String::new(), |(_, bad)| bad_lines_cell(bad)),
        ]);
    }
    table
}

/// Returns the number of bad lines, and their share if there are any.
fn bad_lines_cell(bad: &BadLines) -> String {
    if bad.count == 0 { "0".to_owned() } else { format!("{} ({:.1} %)", bad.count, bad.pct()) }
}

fn by_scheme(played: &[Played], title: &str, of: Measure, digits: usize) -> Table {
    let row = |it: &Played| {
        let cell =
            |scheme| it.row(scheme).map_or(String::new(), |row| format!("{:.digits$}", of(row)));
        (it.name.clone(), SCHEMES.map(cell).into())
    };
    grid(("papers-schemes", title), ("trace", &SCHEMES), played.iter().map(row))
}

/// Returns figures 10 to 12 for each trace with syncs: seconds, and pages written.
fn sweeps(played: &[Played]) -> Vec<Table> {
    let cell = |row: Option<&Row>| {
        row.map_or(String::new(), |row| {
            format!("{:.2} s, {}", row.seconds, row.totals.ssd_pages_written)
        })
    };
    let table = |it: &Played| {
        let title = format!(
            "{}: seconds and pages written to flash,\nby persistent memory (figures 10, 11) and by \
             DRAM (figure 12), in percent of the workload",
            it.name
        );
        let row = |name: String, dram, pmem| {
            (name, SCHEMES.map(|scheme| cell(it.row_at(scheme, dram, pmem))).into())
        };
        let by_pmem = PMEM_PCTS.map(|pct| row(format!("PMem {pct} %"), DRAM_PCT, pct));
        let by_dram = DRAM_PCTS.map(|pct| row(format!("DRAM {pct} %"), pct, PMEM_PCT));
        let rows = by_pmem.into_iter().chain(by_dram);
        grid(("papers-sweep", &title), ("memory", &SCHEMES), rows)
    };
    played.iter().filter(|it| it.has_syncs()).map(table).collect()
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
        assert!(!first.contains("lost the"), "{first}");
    }

    #[test]
    fn bad_lines_have_their_share_and_their_reason() {
        let dir = tempfile::tempdir().unwrap();
        let (trace, page) = (dir.path().join("mobigen.out.facebook"), dir.path().join("papers.md"));
        let good = "1,1,write,/data,0,300\n".repeat(19);
        std::fs::write(&trace, format!("{good}no line\n")).unwrap();
        update(&ReplayArgs::of([trace.to_str().unwrap()]), &page).unwrap();
        let text = std::fs::read_to_string(&page).unwrap();
        assert!(text.contains("1 (5.0 %) |") && text.contains("the tracer lost the"), "{text}");
    }
}
