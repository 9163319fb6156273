//! What a replay found, as a page that a person can send to a colleague.

use super::{ReplayArgs, Replayed, Row, advice, output};
use crate::report::{Axis, Bar, Bars, Line, Lines, Plot, Report, Section, command_line};
use tidegate::size::Size;

const MIB: f64 = 1_048_576.0;

/// What is drawn of a row: title, unit, and its number.
type Measure = (&'static str, &'static str, fn(&Row) -> f64);

#[expect(clippy::cast_precision_loss, reason = "numbers of a plot")]
const MEASURES: [Measure; 3] = [
    ("Time", "seconds", |row| row.seconds),
    ("Written to storage", "pages of 4 KiB", |row| row.ssd_pages_written as f64),
    ("Written to persistent memory", "MiB", |row| pmem_mib(row)),
];

#[expect(clippy::cast_precision_loss, reason = "numbers of a plot")]
fn pmem_mib(row: &Row) -> f64 {
    (row.pmem_data_bytes + row.pmem_metadata_bytes) as f64 / MIB
}

/// The page.
pub(super) fn page(args: &ReplayArgs, replayed: &Replayed) -> Report {
    let mut sections = vec![one_size(args, replayed)];
    sections.extend(by_size(&replayed.rows, "By persistent memory", |row| row.pmem_bytes));
    sections.extend(by_size(&replayed.rows, "By DRAM for pages", |row| row.dram_pages * 4096));
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

fn names(args: &ReplayArgs) -> String {
    let name = |path: &std::path::PathBuf| {
        path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
    };
    args.traces.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Bars for the amounts that are not swept.
fn one_size(args: &ReplayArgs, replayed: &Replayed) -> Section {
    let bytes = |amount: &super::Amount| amount.bytes(replayed.profile.footprint_pages);
    let (dram_pages, pmem_bytes) = ((bytes(&args.dram) / 4096).max(1), bytes(&args.pmem));
    let is_here =
        |row: &&Row| row.dram_pages == dram_pages && [0, pmem_bytes].contains(&row.pmem_bytes);
    let here: Vec<&Row> = replayed.rows.iter().filter(is_here).collect();
    let whole = |(title, label, of): &Measure| {
        let bars = here.iter().map(|row| Bar::whole(row.scheme, of(row))).collect();
        Plot::Bars(Bars { title: (*title).to_owned(), label: (*label).to_owned(), bars })
    };
    let mut plots: Vec<Plot> = MEASURES[..2].iter().map(whole).collect();
    plots.push(pmem_traffic(&here));
    let (dram, pmem) = (Size { bytes: dram_pages * 4096 }, Size { bytes: pmem_bytes });
    Section {
        title: format!("With {dram} of DRAM for pages and {pmem} of persistent memory"),
        text: "Less is better in all of them.".to_owned(),
        plots,
        table: None,
    }
}

#[expect(clippy::cast_precision_loss, reason = "numbers of a plot")]
fn pmem_traffic(rows: &[&Row]) -> Plot {
    let bar = |row: &&Row| {
        let part = |name: &str, bytes: u64| (name.to_owned(), bytes as f64 / MIB);
        let parts =
            vec![part("data", row.pmem_data_bytes), part("metadata", row.pmem_metadata_bytes)];
        Bar { name: row.scheme.to_owned(), parts }
    };
    let (title, label, _) = MEASURES[2];
    Plot::Bars(Bars {
        title: title.to_owned(),
        label: label.to_owned(),
        bars: rows.iter().map(bar).collect(),
    })
}

/// Lines over one amount of memory, if several were asked for.
fn by_size(rows: &[Row], title: &str, amount: fn(&Row) -> u64) -> Option<Section> {
    let mut amounts: Vec<u64> = rows.iter().map(amount).filter(|bytes| *bytes > 0).collect();
    amounts.sort_unstable();
    amounts.dedup();
    if amounts.len() < 2 {
        return None;
    }
    let mut schemes: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| !schemes.contains(&row.scheme)).collect::<Vec<_>>() {
        if !schemes.contains(&row.scheme) {
            schemes.push(row.scheme);
        }
    }
    let plot = |(title, label, of): &Measure| {
        let line = |scheme: &&str| {
            let at = |bytes: &u64| {
                let mut found = rows.iter().filter(|row| row.scheme == *scheme);
                found.find(|row| amount(row) == *bytes).map(of)
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
