//! Builds a page of a replay's results that can be sent to other people.

use super::output::mib;
use super::{ReplayArgs, Replayed, Row, advice, output};
use crate::report::{Axis, Bar, Bars, Line, Lines, Plot, Report, Section, command_line, distinct};
use crate::scheme::page::PAGE_BYTES;
use crate::scheme::{Pmem, scheme};
use tidegate::size::Size;

/// A plotted quantity of a row: title, unit, and number.
type Measure = (&'static str, &'static str, fn(&Row) -> f64);

#[expect(clippy::cast_precision_loss, reason = "numbers of a plot")]
const MEASURES: [Measure; 3] = [
    ("Time", "seconds", |row| row.seconds),
    ("Written to storage", "pages of 4 KiB", |row| row.totals.ssd_pages_written as f64),
    ("Written to persistent memory", "MiB", |row| mib(row.pmem_traffic_bytes())),
];

/// Returns the page.
pub(super) fn page(args: &ReplayArgs, replayed: &Replayed) -> Report {
    let pages = replayed.profile.footprint_pages;
    let (dram_pages, pmem_bytes) = (args.dram.pages(pages), args.pmem.bytes(pages));
    let has_dram = |row: &Row| row.dram_pages == dram_pages;
    let has_pmem = |row: &Row| [0, pmem_bytes].contains(&chosen_pmem_bytes(row));
    let rows = |is_it: &dyn Fn(&Row) -> bool| -> Vec<&Row> {
        replayed.rows.iter().filter(|row| is_it(row)).collect()
    };
    let here = rows(&|row| has_dram(row) && has_pmem(row));
    let mut sections = vec![one_size(&here, dram_pages, pmem_bytes)];
    sections.extend(by_size(&rows(&has_dram), "By persistent memory", chosen_pmem_bytes));
    let dram_bytes = |row: &Row| row.dram_pages * PAGE_BYTES;
    sections.extend(by_size(&rows(&has_pmem), "By DRAM for pages", dram_bytes));
    sections.push(Section {
        title: "All numbers".to_owned(),
        table: Some(output::table(args, replayed)),
        ..Section::default()
    });
    Report {
        title: format!("A replay of {}", names(args)),
        asked: output::workload(replayed),
        command_line: command_line(),
        verdict: advice::advice(args, replayed),
        sections,
    }
}

/// Returns the row's persistent memory if users choose its size; 0 for other schemes.
fn chosen_pmem_bytes(row: &Row) -> u64 {
    let is_chosen = scheme(row.scheme).is_some_and(|entry| entry.pmem == Pmem::Chosen);
    if is_chosen { row.pmem_bytes } else { 0 }
}

fn names(args: &ReplayArgs) -> String {
    let name = |path: &std::path::PathBuf| {
        path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
    };
    args.traces.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Returns bars for the amounts of memory without a sweep, which the rows `here` have.
fn one_size(here: &[&Row], dram_pages: u64, pmem_bytes: u64) -> Section {
    let whole = |(title, label, of): &Measure| {
        let bars = here.iter().map(|row| Bar::whole(row.scheme, of(row))).collect();
        Plot::Bars(Bars { title: (*title).to_owned(), label: (*label).to_owned(), bars })
    };
    let mut plots: Vec<Plot> = MEASURES[..2].iter().map(whole).collect();
    plots.push(pmem_traffic(here));
    let (dram, pmem) = (Size { bytes: dram_pages * PAGE_BYTES }, Size { bytes: pmem_bytes });
    Section {
        title: format!("With {dram} of DRAM for pages and {pmem} of persistent memory"),
        text: "Less is better in all of them.".to_owned(),
        plots,
        table: None,
    }
}

fn pmem_traffic(rows: &[&Row]) -> Plot {
    let bar = |row: &&Row| {
        let part = |name: &str, bytes: u64| (name.to_owned(), mib(bytes));
        let parts = vec![
            part("data", row.totals.pmem_data_bytes),
            part("metadata", row.totals.pmem_metadata_bytes),
        ];
        Bar { name: row.scheme.to_owned(), parts }
    };
    let (title, label, _) = MEASURES[2];
    Plot::Bars(Bars {
        title: title.to_owned(),
        label: label.to_owned(),
        bars: rows.iter().map(bar).collect(),
    })
}

/// Returns lines over one amount of memory, or `None` if all rows have the same amount.
fn by_size(rows: &[&Row], title: &str, amount: fn(&Row) -> u64) -> Option<Section> {
    let mut amounts: Vec<u64> =
        rows.iter().map(|row| amount(row)).filter(|bytes| *bytes > 0).collect();
    amounts.sort_unstable();
    amounts.dedup();
    if amounts.len() < 2 {
        return None;
    }
    let schemes = distinct(rows.iter().map(|row| row.scheme));
    let plot = |(title, label, of): &Measure| {
        let line = |scheme: &&str| {
            let at = |bytes: &u64| {
                let mut found = rows.iter().filter(|row| row.scheme == *scheme);
                found.find(|row| amount(row) == *bytes).map(|row| of(row))
            };
            Line::of_columns(*scheme, &amounts.iter().map(at).collect::<Vec<_>>())
        };
        Plot::Lines(Lines {
            title: (*title).to_owned(),
            x_label: "memory".to_owned(),
            x: Axis::Columns(amounts.iter().map(|&bytes| Size { bytes }.to_string()).collect()),
            y_label: (*label).to_owned(),
            y: Axis::Linear,
            lines: schemes.iter().map(line).collect(),
        })
    };
    let plots = MEASURES.iter().map(plot).collect();
    Some(Section { title: title.to_owned(), plots, ..Section::default() })
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    /// Returns the page of a generated trace, with these options, and its rows.
    fn page_of(options: &[&str]) -> (Report, Vec<Row>) {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("t.csv");
        let mut lines = String::from("ts_us,tid,op,file,offset,len\n");
        for at in 0..2000_u64 {
            let offset = at * at % 97 * 4096;
            let _ = writeln!(lines, "{at},1,write,/data,{offset},300");
            let _ = writeln!(lines, "{at},1,fsync,/data,0,0");
            let _ = writeln!(lines, "{at},1,read,/data,{},4096", at * 7 % 97 * 4096);
        }
        std::fs::write(&trace, lines).unwrap();
        let words = std::iter::once(trace.to_str().unwrap()).chain(options.iter().copied());
        let args = ReplayArgs::of(words);
        let replayed = args.replay().unwrap();
        (page(&args, &replayed), replayed.rows)
    }

    fn titles(report: &Report) -> Vec<&str> {
        report.sections.iter().map(|section| section.title.as_str()).collect()
    }

    /// Returns the points of a scheme in the plot `title` of a section.
    fn line(section: &Section, title: &str, scheme: &str) -> Vec<(f64, f64)> {
        let lines = section.plots.iter().find_map(|plot| match plot {
            Plot::Lines(lines) if lines.title == title => Some(lines),
            _ => None,
        });
        let mut lines = lines.unwrap().lines.iter();
        lines.find(|line| line.name == scheme).unwrap().points.clone()
    }

    #[test]
    fn one_amount_of_memory_is_shown_by_bars_only() {
        let (report, _) = page_of(&[]);
        assert_eq!(titles(&report).len(), 2, "{:?}", titles(&report));
        assert!(report.verdict.starts_with("Advice: ") && report.title.ends_with("t.csv"));
        let [bars, all] = &report.sections[..] else { panic!("two sections") };
        assert_eq!((bars.plots.len(), all.plots.len()), (3, 0));
        for name in ["dram", "sccm", "sfcm", "afcm", "tidegate"] {
            assert!(bars.plots.iter().all(|plot| plot.names().contains(&name)), "{name}");
        }
    }

    #[test]
    fn a_sweep_of_one_amount_keeps_the_other() {
        let (report, rows) = page_of(&[
            "--schemes=dram,sccm,tidegate",
            "--dram=50",
            "--sweep-dram=5,20",
            "--pmem=20",
            "--sweep-pmem=5,60",
        ]);
        let [_, by_pmem, by_dram, _] = &report.sections[..] else {
            panic!("{:?}", titles(&report));
        };
        let most_dram = rows.iter().map(|row| row.dram_pages).max();
        let mut sccm: Vec<&Row> = rows.iter().filter(|row| row.scheme == "sccm").collect();
        sccm.retain(|row| Some(row.dram_pages) == most_dram);
        sccm.sort_by_key(|row| row.pmem_bytes);
        let seconds: Vec<f64> = sccm.iter().map(|row| row.seconds).collect();
        let shown: Vec<f64> =
            line(by_pmem, "Time", "sccm").iter().map(|(_, seconds)| *seconds).collect();
        assert_eq!((shown.len(), shown), (3, seconds));
        assert!(line(by_pmem, "Time", "dram").is_empty(), "it has no persistent memory");
        assert_eq!(line(by_dram, "Time", "dram").len(), 3);
        let at_most_dram = line(by_dram, "Time", "sccm")[2].1;
        assert_eq!(at_most_dram.to_bits(), sccm[1].seconds.to_bits());
    }
}
