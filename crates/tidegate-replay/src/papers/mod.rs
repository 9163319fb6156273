//! Sections of docs/papers.md: each command that reproduces a paper's figures owns the text between
//! two markers with its name. Also the table of the papers' claims beside our results.

pub(crate) mod markdown;
pub(crate) mod page;
pub(crate) mod took;

use std::borrow::Cow;
use std::path::Path;

use tidegate_bench::table::Table;

use crate::error::{Error, Result};

const HEAD: &str = "# The papers' results, made again\n";

/// Returns the markers of the section `name`.
fn markers(name: &str) -> [String; 2] {
    ["begin", "end"].map(|part| format!("<!-- {name}:{part} -->"))
}

/// Replaces the section `name` of the page `path` with the text that `make` returns for the old
/// section. The page is created if missing.
///
/// # Errors
/// The page cannot be read or written, or has only one of the markers; the errors of `make`.
pub(crate) fn update(
    path: &Path,
    name: &str,
    make: impl FnOnce(&str) -> Result<String>,
) -> Result<()> {
    let [begin, end] = markers(name);
    let page = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            format!("{HEAD}\n{begin}\n{end}\n")
        }
        page => page.map_err(Error::io(path))?,
    };
    let (before, old, after) = around(&page, &begin, &end)
        .ok_or_else(|| Error::Usage(format!("{}: expected {begin} and {end}", path.display())))?;
    let section = make(old)?;
    let page = format!("{before}{begin}\n{section}{end}{after}");
    std::fs::write(path, page).map_err(Error::io(path))
}

/// Splits the page into the text before, inside and behind the section.
fn around<'p>(page: &'p str, begin: &str, end: &str) -> Option<(&'p str, &'p str, &'p str)> {
    let (before, rest) = page.split_once(begin)?;
    let (old, after) = rest.split_once(end)?;
    Some((before, old, after))
}

/// A number of a paper beside our number.
pub(crate) struct Check {
    pub(crate) figure: &'static str,
    pub(crate) what: String,
    pub(crate) paper: String,
    pub(crate) ours: String,
    pub(crate) verdict: Cow<'static, str>,
    /// Reason for a difference, or empty.
    pub(crate) reason: Cow<'static, str>,
}

/// Returns a table `name` of `checks`.
pub(crate) fn table(name: &'static str, title: &str, checks: &[Check]) -> Table {
    let headers = ["figure", "what", "paper", "ours", "verdict", "reason"];
    let mut table = Table::new(name, title, &headers);
    for it in checks {
        let cells = [it.figure, &it.what, &it.paper, &it.ours, &it.verdict, &it.reason];
        table.push(cells.map(str::to_owned).into());
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_found_between_its_markers() {
        let [begin, end] = markers("x");
        let page = format!("a\n{begin}\nold\n{end}\nb\n");
        assert_eq!(around(&page, &begin, &end), Some(("a\n", "\nold\n", "\nb\n")));
        assert_eq!(around("no marker", &begin, &end), None);
        assert_eq!(around(&page.replace(&end, ""), &begin, &end), None);
    }

    #[test]
    fn sections_of_one_page_keep_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let page = dir.path().join("papers.md");
        let make = |text: &str| Ok(format!("{text}\n"));
        update(&page, "x", |_| make("first")).unwrap();
        let text = std::fs::read_to_string(&page).unwrap();
        std::fs::write(&page, format!("{text}<!-- y:begin -->\n<!-- y:end -->\n")).unwrap();
        update(&page, "y", |_| make("second")).unwrap();
        update(&page, "x", |_| make("third")).unwrap();
        let text = std::fs::read_to_string(&page).unwrap();
        assert!(text.contains("third") && text.contains("second") && !text.contains("first"));
        assert!(update(&page, "z", |_| make("lost")).unwrap_err().is_usage());
    }
}
