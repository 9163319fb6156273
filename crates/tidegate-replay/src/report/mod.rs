//! Writes the report of a replay or of a model: one static page that can be sent to other people.
//!
//! [`write()`] creates `DIR/index.html`, which is self-contained: the question, the best choice and
//! its gain, plots, tables, and the command that creates the report again. Plots are those of
//! [`tidegate_bench::chart`]; a name has one colour, dash and mark in all plots.

use std::fs;
use std::path::Path;

use maud::{Markup, html};
use tidegate_bench::chart::figures;
pub use tidegate_bench::chart::{Axis, Bar, Bars, Line, Lines, Plot};
use tidegate_bench::look::Looks;
use tidegate_bench::page;
pub use tidegate_bench::table::Table;

use crate::error::{Error, Result};

#[cfg(test)]
mod tests;

/// The content of a page.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The page's title.
    pub title: String,
    /// The question, one sentence per line: traces, schemes, sizes, devices.
    pub asked: String,
    /// The command that creates the report again.
    pub command_line: String,
    /// The best choice and its gain.
    pub verdict: String,
    /// The sections, in order.
    pub sections: Vec<Section>,
}

/// A part of the page.
#[derive(Debug, Clone, Default)]
pub struct Section {
    /// The heading.
    pub title: String,
    /// An explanation, one paragraph per line; may be empty.
    pub text: String,
    /// Plots, side by side if the page is wide enough.
    pub plots: Vec<Plot>,
    /// The numbers.
    pub table: Option<Table>,
}

/// Writes `report` to `dir`/index.html; creates `dir` if missing.
///
/// # Errors
/// [`Error::Io`] if the directory or the file cannot be written.
pub fn write(dir: &Path, report: &Report) -> Result<()> {
    fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let path = dir.join("index.html");
    fs::write(&path, page(report)).map_err(Error::io(&path))
}

/// Returns the command of this process, as typed in a shell.
#[must_use]
pub fn command_line() -> String {
    let quoted = |word: String| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+%".contains(c);
        let is_one = !word.is_empty() && word.chars().all(is_plain);
        if is_one { word } else { format!("'{}'", word.replace('\'', "'\\''")) }
    };
    let words = std::env::args_os().skip(1).map(|word| quoted(word.to_string_lossy().into()));
    std::iter::once("tidegate".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

/// Returns `values` without repetitions.
pub(crate) fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for value in values {
        if !seen.contains(&value) {
            seen.push(value);
        }
    }
    seen
}

/// Returns a table with a header for `first` and for each of `columns`, and with a row for each
/// name and its cells.
pub(crate) fn grid(
    (name, title): (&'static str, &str),
    (first, columns): (&str, &[impl ToString]),
    rows: impl IntoIterator<Item = (impl ToString, Vec<String>)>,
) -> Table {
    let columns: Vec<String> = columns.iter().map(ToString::to_string).collect();
    let headers: Vec<&str> =
        std::iter::once(first).chain(columns.iter().map(String::as_str)).collect();
    let mut table = Table::new(name, title, &headers);
    for (name, cells) in rows {
        table.push(std::iter::once(name.to_string()).chain(cells).collect());
    }
    table
}

fn page(report: &Report) -> String {
    let plots = || report.sections.iter().flat_map(|section| &section.plots);
    let looks = Looks::new(plots().flat_map(Plot::names));
    let body = html! {
        h1 { (report.title) }
        (paragraphs(&report.asked))
        @if !report.verdict.is_empty() {
            div.verdict { @for line in report.verdict.lines() { div { (line) } } }
        }
        @for section in &report.sections { (shown(section, &looks)) }
        h2 { "Run it again" }
        pre { code { (report.command_line) } }
        p { "Made by Tidegate " (env!("CARGO_PKG_VERSION")) "." }
    };
    page::page(&report.title, &body)
}

fn shown(section: &Section, looks: &Looks) -> Markup {
    html! {
        section {
            h2 { (section.title) }
            (paragraphs(&section.text))
            @if !section.plots.is_empty() { (figures(&section.plots, looks)) }
            @if let Some(table) = &section.table { (table.html()) }
        }
    }
}

fn paragraphs(text: &str) -> Markup {
    html! { @for line in text.lines().filter(|line| !line.is_empty()) { p { (line) } } }
}
