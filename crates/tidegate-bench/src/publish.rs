//! Publishes a report: to the terminal, and as JSON, HTML page or tables of documentation.

use std::path::Path;

use crate::error::{BenchError, Result};
use crate::output::{OutputArgs, read};
use crate::report::Report;
use crate::{docs, html};

/// Prints the tables of `report` and writes the files that `output` names.
///
/// # Errors
/// [`BenchError::Os`], and last [`BenchError::Program`] for a part that could not be measured.
pub(crate) fn publish(report: &Report, output: &OutputArgs) -> Result<()> {
    println!("{report}");
    if let Some(file) = &output.json {
        write(file, &report.json())?;
    }
    if let Some(dir) = &output.report {
        std::fs::create_dir_all(dir).map_err(BenchError::os("create", dir))?;
        write(&dir.join("index.html"), &html::page(report))?;
    }
    for page in output.pages()? {
        write(&page, &docs::update(&read(&page)?, report)?)?;
    }
    report.log.whole()
}

fn write(path: &Path, content: &str) -> Result<()> {
    std::fs::write(path, content).map_err(BenchError::os("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn files_are_written_where_asked() {
        let dir = tempfile::tempdir().unwrap();
        let (json, page) = (dir.path().join("a.json"), dir.path().join("new/dir"));
        let output =
            OutputArgs { json: Some(json.clone()), report: Some(page.clone()), update_docs: None };
        publish(&report(), &output).unwrap();
        assert_eq!(std::fs::read_to_string(json).unwrap(), report().json());
        let page = std::fs::read_to_string(page.join("index.html")).unwrap();
        assert!(page.starts_with("<!DOCTYPE html>") && page.contains("<svg"), "{page}");
    }

    #[test]
    fn each_page_of_a_directory_gets_its_tables() {
        let dir = tempfile::tempdir().unwrap();
        let page = |name: &str| dir.path().join(name);
        let markers = "<!-- table: block-write -->\n<!-- end -->\n";
        for name in ["a.md", "b.md", "c.txt"] {
            std::fs::write(page(name), markers).unwrap();
        }
        let update_docs = Some(dir.path().to_owned());
        publish(&report(), &OutputArgs { update_docs, ..OutputArgs::default() }).unwrap();
        let read = |name: &str| std::fs::read_to_string(page(name)).unwrap();
        assert!(read("a.md").contains("| policy") && read("a.md") == read("b.md"));
        assert_eq!(read("c.txt"), markers, "this is no page");
    }
}
