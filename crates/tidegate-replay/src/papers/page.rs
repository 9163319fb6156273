//! Builds one page with plots of docs/papers.md, joined from the sections that commands wrote.

use std::path::Path;

use super::markdown::{Block, blocks};
use crate::error::{Error, Result};
use crate::report::{self, Axis, Line, Lines, Plot, Report, Section, Table};

/// First headers of the tables that have plots, with one line per row or one line per column.
const BY_ROW: [&str; 1] = ["policy"];
const BY_COLUMN: [&str; 2] = ["trace", "memory"];
/// Parts of table titles, and the unit of all numbers in such a table.
const UNITS: [(&str, &str); 6] = [
    (" in seconds", "seconds"),
    (" in MiB", "MiB"),
    (" in KiB", "KiB"),
    (" in µs", "µs"),
    ("Pages written", "pages"),
    ("thousands of writes a second", "thousands of writes a second"),
];

/// Writes `dir`/index.html from the page `path`.
///
/// # Errors
/// The page cannot be read, or the new page cannot be written.
pub(crate) fn write(path: &Path, dir: &Path) -> Result<()> {
    let page = std::fs::read_to_string(path).map_err(Error::io(path))?;
    report::write(dir, &report(&page))
}

fn report(page: &str) -> Report {
    // The text before all headings is the first section.
    let mut sections = vec![Section::default()];
    let mut text = String::new();
    for block in blocks(page) {
        match block {
            Block::Heading(title) => {
                flush(&mut sections, &mut text);
                sections.push(Section { title, ..Section::default() });
            }
            Block::Text(line) => text.push_str(&(line.replace("**", "") + "\n")),
            Block::Table(headers, rows) => {
                let title = take_last_line(&mut text);
                flush(&mut sections, &mut text);
                sections.push(section(title, &headers, rows));
            }
        }
    }
    flush(&mut sections, &mut text);
    let asked = sections.remove(0).text;
    Report {
        title: "The papers' results, made again".to_owned(),
        asked,
        command_line: "make papers TRACES=DIR".to_owned(),
        verdict: counts(page),
        sections,
    }
}

/// Appends `text` to the last section, or adds a section if the last one has a table.
fn flush(sections: &mut Vec<Section>, text: &mut String) {
    let text = std::mem::take(text);
    match sections.last_mut() {
        Some(section) if section.table.is_none() => section.text.push_str(&text),
        _ if text.is_empty() => {}
        _ => sections.push(Section { text, ..Section::default() }),
    }
}

/// Takes the last line of `text`, which is the title of the table below it.
fn take_last_line(text: &mut String) -> String {
    let kept = text.trim_end().rfind('\n').map_or(0, |at| at + 1);
    text.split_off(kept).trim_end().to_owned()
}

/// Returns a sentence with the number of claims that are met.
fn counts(page: &str) -> String {
    let (mut met, mut other, mut open) = (0, 0, 0);
    for block in blocks(page) {
        let Block::Table(headers, rows) = block else { continue };
        let Some(at) = headers.iter().position(|header| header == "verdict") else { continue };
        for row in rows {
            match row[at].as_str() {
                "holds" | "same" | "less: better" | "insensitive too" => met += 1,
                "not measured" | "an input" => open += 1,
                _ => other += 1,
            }
        }
    }
    format!(
        "{met} numbers of the papers come out as there or better, {other} differ, each with its \
         reason, and {open} are not measured or nothing to compare."
    )
}

fn section(title: String, headers: &[String], rows: Vec<Vec<String>>) -> Section {
    let plots = plots(&title, headers, &rows);
    let names: Vec<&str> = headers.iter().map(String::as_str).collect();
    let mut table = Table::new("papers", "", &names);
    for row in rows {
        table.push(row);
    }
    Section { title, text: String::new(), plots, table: Some(table) }
}

/// The content of a plot of a table.
struct Shown {
    title: String,
    unit: &'static str,
    /// Index of the part of a cell, between commas.
    part: usize,
}

/// Returns the plots of the table `title` whose first header is `first`: seconds and pages by
/// memory, or one plot if all numbers have one unit.
fn shown(title: &str, first: &str) -> Vec<Shown> {
    if first == "memory" {
        let (name, _) = title.split_once(':').unwrap_or((title, ""));
        let part = |(unit, part)| Shown { title: format!("{name}: {unit}"), unit, part };
        return [("seconds", 0), ("pages written", 1)].map(part).into();
    }
    let unit = UNITS.iter().find(|(part, _)| title.contains(part));
    let Some((_, unit)) = unit else { return Vec::new() };
    vec![Shown { title: title.trim_end_matches('.').to_owned(), unit, part: 0 }]
}

/// Returns the plots of the table `title`: one, or two if a cell has seconds and pages.
fn plots(title: &str, headers: &[String], rows: &[Vec<String>]) -> Vec<Plot> {
    let Some(first) = headers.first().map(String::as_str) else { return Vec::new() };
    let by_row = BY_ROW.contains(&first);
    if !by_row && !BY_COLUMN.contains(&first) || rows.len() < 2 {
        return Vec::new();
    }
    let columns = by_row.then(|| columns_of(title));
    let shown = shown(title, first).into_iter();
    shown.filter_map(|shown| plot(headers, rows, columns, shown)).collect()
}

/// Returns the variable of the columns of the table `title`: the text behind the last "by".
fn columns_of(title: &str) -> &str {
    let (_, columns) = title.rsplit_once(" by ").unwrap_or(("", "column"));
    columns.strip_prefix("the ").unwrap_or(columns).trim_end_matches('.')
}

/// Returns a plot with one line per row over the variable `columns`, or else one per column.
fn plot(
    headers: &[String],
    rows: &[Vec<String>],
    columns: Option<&str>,
    Shown { title, unit, part }: Shown,
) -> Option<Plot> {
    let value = |row: &[String], column: usize| number(row.get(column)?.split(", ").nth(part)?);
    let numbers = 1..headers.len();
    let of_row = |row: &Vec<String>| {
        let values: Vec<_> = numbers.clone().map(|at| value(row, at)).collect();
        Line::of_columns(&*row[0], &values)
    };
    let of_column = |at: usize| {
        let values: Vec<_> = rows.iter().map(|row| value(row, at)).collect();
        Line::of_columns(&*headers[at], &values)
    };
    let (lines, x): (Vec<Line>, Vec<String>) = match columns {
        Some(_) => (rows.iter().map(of_row).collect(), headers[1..].to_vec()),
        None => (numbers.map(of_column).collect(), rows.iter().map(|row| row[0].clone()).collect()),
    };
    let has_points = lines.iter().any(|line| !line.points.is_empty());
    has_points.then(|| {
        Plot::Lines(Lines {
            title,
            x_label: columns.unwrap_or(&headers[0]).to_owned(),
            x: Axis::Columns(x),
            y_label: unit.to_owned(),
            y: Axis::Linear,
            lines,
        })
    })
}

/// Returns the number at the start of `cell`.
fn number(cell: &str) -> Option<f64> {
    cell.split(' ').next()?.replace(',', "").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# T\n\nBefore.\n\n## One\n\nText.\n\nThe claims\n\n\
        | figure | verdict |\n|---|---|\n| 1 | holds |\n| 2 | differs |\n| 3 | not measured |\n\n\
        x: by memory\n\n| memory | a | b |\n|---|---|---|\n| 5 % | 0.5 s, 7 | 1.5 s, 8 |\n\
        | 9 % | 0.4 s, 6 | 1.0 s, 2 |\n\n## Two\n\nEnd.\n";

    #[test]
    fn all_parts_of_the_page_are_in_the_report() {
        let report = report(PAGE);
        let titles: Vec<_> = report.sections.iter().map(|it| it.title.as_str()).collect();
        assert_eq!(titles, ["One", "The claims", "x: by memory", "Two"]);
        assert_eq!(
            (report.asked.as_str(), report.sections[3].text.as_str()),
            ("Before.\n", "End.\n")
        );
        assert!(report.verdict.starts_with("1 numbers") && report.verdict.contains("1 differ"));
        let plots = report.sections[2].plots.len();
        assert_eq!((plots, report.sections[1].plots.len()), (2, 0));
        let Plot::Lines(lines) = &report.sections[2].plots[1] else { panic!("lines") };
        assert_eq!(lines.lines[0].points, [(0.0, 7.0), (1.0, 6.0)]);
    }

    #[test]
    fn the_page_of_the_project_becomes_a_report_with_plots() {
        let dir = tempfile::tempdir().unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/papers.md");
        write(&path, dir.path()).unwrap();
        let html = std::fs::read_to_string(dir.path().join("index.html")).unwrap();
        for part in ["AFCM", "Caiti", "NVCache", "<svg", "figure 7a"] {
            assert!(html.contains(part), "{part}");
        }
        let report = report(&std::fs::read_to_string(path).unwrap());
        let plots = report.sections.iter().flat_map(|section| &section.plots);
        let labels = plots.map(|plot| match plot {
            Plot::Lines(it) => [&*it.title, &*it.x_label, &*it.y_label],
            Plot::Bars(_) => panic!("no table is drawn as bars"),
        });
        let labels: Vec<_> = labels.collect();
        assert!(labels.iter().flatten().all(|label| !label.is_empty()), "{labels:?}");
        for expected in [
            ["Execution time in seconds (figure 7a)", "trace", "seconds"],
            ["Pages written to flash (figure 7c)", "trace", "pages"],
            ["Most DRAM for the index, in KiB (figure 9)", "trace", "KiB"],
            ["Figure 5e: thousands of writes a second by jobs", "jobs", UNITS[5].1],
            [
                "Table 1: mean time of a request in µs, one job, by the size of the cache",
                "size of the cache",
                "µs",
            ],
        ] {
            assert!(labels.contains(&expected), "{expected:?} is not in {labels:?}");
        }
    }

    #[test]
    fn a_table_of_several_units_is_not_drawn() {
        let page = "## One\n\nThe traces\n\n| trace | pages | bytes |\n|---|---|---|\n| a | 1 | 2 |\n\
                    | b | 3 | 4 |\n";
        assert!(report(page).sections[1].plots.is_empty());
    }
}
