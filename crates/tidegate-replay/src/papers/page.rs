//! All of docs/papers.md as one page with plots, joined from the parts that commands wrote.

use std::path::Path;

use super::markdown::{Block, blocks};
use crate::error::Error;
use crate::report::{self, Axis, Line, Lines, Plot, Report, Section, Table};

/// First headers of tables whose numbers are drawn: a line a row, or a line a column.
const BY_ROW: [&str; 1] = ["policy"];
const BY_COLUMN: [&str; 2] = ["trace", "memory"];

/// Writes `dir`/index.html from the page `path`.
///
/// # Errors
/// The page cannot be read, or the new one not be written.
pub(crate) fn write(path: &Path, dir: &Path) -> Result<(), Error> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    report::write(dir, &report(&std::fs::read_to_string(path).map_err(io)?))
}

fn report(page: &str) -> Report {
    let mut sections: Vec<Section> = Vec::new();
    let mut asked = String::new();
    let mut text = String::new();
    for block in blocks(page) {
        match block {
            Block::Heading(title) => {
                flush(&mut sections, &mut text, &mut asked);
                sections.push(Section { title, ..Section::default() });
            }
            Block::Text(line) => text.push_str(&(line.replace("**", "") + "\n")),
            Block::Table(headers, rows) => {
                let title = take_last_line(&mut text);
                flush(&mut sections, &mut text, &mut asked);
                sections.push(section(title, &headers, rows));
            }
        }
    }
    flush(&mut sections, &mut text, &mut asked);
    Report {
        title: "The papers' results, made again".to_owned(),
        asked,
        command_line: "make papers TRACES=DIR".to_owned(),
        verdict: counts(page),
        sections,
    }
}

/// Puts `text` below the last heading, or before all of them.
fn flush(sections: &mut Vec<Section>, text: &mut String, asked: &mut String) {
    let text = std::mem::take(text);
    match sections.last_mut() {
        None => asked.push_str(&text),
        Some(section) if section.table.is_none() => section.text.push_str(&text),
        Some(_) if text.is_empty() => {}
        Some(_) => sections.push(Section { text, ..Section::default() }),
    }
}

/// Takes the last line of `text`, which is what the table below it shows.
fn take_last_line(text: &mut String) -> String {
    let kept = text.trim_end().rfind('\n').map_or(0, |at| at + 1);
    text.split_off(kept).trim_end().to_owned()
}

/// How many of the papers' numbers are met.
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
    let plots = plots(headers, &rows);
    let names: Vec<&str> = headers.iter().map(String::as_str).collect();
    let mut table = Table::new("papers", "", &names);
    for row in rows {
        table.push(row);
    }
    Section { title, text: String::new(), plots, table: Some(table) }
}

/// The plots of a table: one, or two where a cell has seconds and pages.
fn plots(headers: &[String], rows: &[Vec<String>]) -> Vec<Plot> {
    let Some(first) = headers.first().map(String::as_str) else { return Vec::new() };
    let by_row = BY_ROW.contains(&first);
    if !by_row && !BY_COLUMN.contains(&first) || rows.len() < 2 {
        return Vec::new();
    }
    let units: &[(usize, &str)] =
        if first == "memory" { &[(0, "seconds"), (1, "pages written")] } else { &[(0, "")] };
    units.iter().filter_map(|(part, unit)| plot(headers, rows, by_row, (*part, unit))).collect()
}

fn plot(
    headers: &[String],
    rows: &[Vec<String>],
    by_row: bool,
    (part, unit): (usize, &str),
) -> Option<Plot> {
    let value = |row: &[String], column: usize| number(row.get(column)?.split(", ").nth(part)?);
    let columns = 1..headers.len();
    let lines: Vec<Line> = if by_row {
        let line = |row: &Vec<String>| {
            Line::of_columns(
                &*row[0],
                &columns.clone().map(|at| value(row, at)).collect::<Vec<_>>(),
            )
        };
        rows.iter().map(line).collect()
    } else {
        let line = |at: usize| {
            let values: Vec<_> = rows.iter().map(|row| value(row, at)).collect();
            Line::of_columns(&*headers[at], &values)
        };
        columns.map(line).collect()
    };
    let x: Vec<String> = if by_row {
        headers[1..].to_vec()
    } else {
        rows.iter().map(|row| row[0].clone()).collect()
    };
    let has_points = lines.iter().any(|line| !line.points.is_empty());
    has_points.then(|| {
        Plot::Lines(Lines {
            title: unit.to_owned(),
            x_label: headers[0].clone(),
            x: Axis::Columns(x),
            y_label: unit.to_owned(),
            y: Axis::Linear,
            lines,
        })
    })
}

/// The number that `cell` begins with.
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
    }
}
