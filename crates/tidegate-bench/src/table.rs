//! Tables: one content, rendered for a terminal, for Markdown and for HTML.

use std::fmt;

use maud::{Markup, html};

/// A table of text. The first column is left-aligned, the others right-aligned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Name in the documentation's placeholders.
    pub name: &'static str,
    /// The title.
    pub title: String,
    headers: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes an empty table.
    pub fn new(name: &'static str, title: impl Into<String>, headers: &[&str]) -> Self {
        let headers = headers.iter().map(|&header| header.to_owned()).collect();
        Self { name, title: title.into(), headers, rows: Vec::new() }
    }

    /// Makes a table of `rows`: each cell comes with the header of its column, as in all rows.
    pub(crate) fn of_rows<'h, const COLUMNS: usize>(
        name: &'static str,
        title: impl Into<String>,
        rows: impl IntoIterator<Item = [(&'h str, String); COLUMNS]>,
    ) -> Self {
        let mut table = Self::new(name, title, &[]);
        for row in rows {
            table.headers = row.iter().map(|(header, _)| (*header).to_owned()).collect();
            table.push(row.map(|(_, cell)| cell).into());
        }
        table
    }

    /// Adds a row with a cell for each header; a cell may be empty.
    pub fn push(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.headers.len());
        self.rows.push(cells);
    }

    /// Returns whether the table has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the table without columns that are empty in every row.
    #[must_use]
    pub fn without_empty_columns(self) -> Self {
        let keep: Vec<bool> = (0..self.headers.len())
            .map(|column| self.rows.iter().any(|row| !row[column].is_empty()))
            .collect();
        let strip = |cells: Vec<String>| {
            cells.into_iter().zip(&keep).filter(|(_, keep)| **keep).map(|(cell, _)| cell).collect()
        };
        Self {
            headers: strip(self.headers),
            rows: self.rows.into_iter().map(strip).collect(),
            ..self
        }
    }

    /// Renders the table in Markdown, with columns aligned in the source too.
    pub fn markdown(&self) -> String {
        let widths = self.widths();
        let mut lines = vec![markdown_line(&self.headers, &widths)];
        let rules = widths.iter().enumerate().map(|(column, &width)| match column {
            0 => "-".repeat(width.max(3)),
            _ => format!("{}:", "-".repeat(width.max(3) - 1)),
        });
        lines.push(format!("| {} |", rules.collect::<Vec<_>>().join(" | ")));
        lines.extend(self.rows.iter().map(|row| markdown_line(row, &widths)));
        lines.join("\n") + "\n"
    }

    /// Renders the table in HTML.
    pub fn html(&self) -> Markup {
        html! {
            @if !self.title.is_empty() { h2 { (self.title) } }
            table {
                thead { tr { @for header in &self.headers { th { (header) } } } }
                tbody { @for row in &self.rows { tr { @for cell in row { td { (cell) } } } } }
            }
        }
    }

    fn widths(&self) -> Vec<usize> {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.headers[column].chars().count()]).max().unwrap_or(0)
        };
        (0..self.headers.len()).map(width).collect()
    }
}

/// Formats a number with `digits` digits as a cell; empty if there is no number.
pub(crate) fn number_cell(number: Option<f64>, digits: usize) -> String {
    number.map_or(String::new(), |number| format!("{number:.digits$}"))
}

fn markdown_line(cells: &[String], widths: &[usize]) -> String {
    let widths: Vec<_> = widths.iter().map(|&width| width.max(3)).collect();
    format!("| {} |", aligned(cells, &widths).join(" | "))
}

fn aligned(cells: &[String], widths: &[usize]) -> Vec<String> {
    let pad = |(column, (cell, &width)): (usize, (&String, &usize))| match column {
        0 => format!("{cell:<width$}"),
        _ => format!("{cell:>width$}"),
    };
    cells.iter().zip(widths).enumerate().map(pad).collect()
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        writeln!(f, "{}", self.title)?;
        for row in std::iter::once(&self.headers).chain(&self.rows) {
            writeln!(f, "  {}", aligned(row, &widths).join("  ").trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new("t", "Title", &["policy", "µs", "none"]);
        table.push(vec!["btt".into(), "1.25".into(), String::new()]);
        table.push(vec!["peer:x".into(), "10".into(), String::new()]);
        table.without_empty_columns()
    }

    #[test]
    fn text_is_aligned() {
        assert_eq!(table().to_string(), "Title\n  policy    µs\n  btt     1.25\n  peer:x    10\n");
    }

    #[test]
    fn markdown_is_aligned_and_empty_columns_are_gone() {
        let expected =
            "| policy |   µs |\n| ------ | ---: |\n| btt    | 1.25 |\n| peer:x |   10 |\n";
        assert_eq!(table().markdown(), expected);
    }

    #[test]
    fn html_escapes_text() {
        let table = Table::new("t", "<script>", &["a"]);
        assert!(table.html().into_string().contains("&lt;script&gt;"));
    }
}
