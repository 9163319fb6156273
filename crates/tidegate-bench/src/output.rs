//! The options that say where results go besides the terminal.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::error::{BenchError, Result};

/// Where results go besides the terminal.
#[derive(Debug, Clone, Default, Args)]
pub struct OutputArgs {
    /// Write the results to FILE as one JSON object
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write DIR/index.html: tables and plots in one static file
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Replace the measured tables in the page PATH, or in each page of the directory PATH
    #[arg(long, value_name = "PATH")]
    pub update_docs: Option<PathBuf>,
}

impl OutputArgs {
    /// Checks before a measurement that all files to update are there.
    ///
    /// # Errors
    /// [`BenchError::Os`].
    pub(crate) fn check(&self) -> Result<()> {
        self.pages()?.iter().try_for_each(|page| read(page).map(drop))
    }

    /// Lists the pages to be updated: one, or the Markdown files of a directory.
    ///
    /// # Errors
    /// [`BenchError::Os`].
    pub(crate) fn pages(&self) -> Result<Vec<PathBuf>> {
        let Some(path) = &self.update_docs else { return Ok(Vec::new()) };
        if !path.is_dir() {
            return Ok(vec![path.clone()]);
        }
        let entries = std::fs::read_dir(path).map_err(BenchError::os("list", path))?;
        let entries: std::io::Result<Vec<_>> = entries.collect();
        let paths = entries.map_err(BenchError::os("list", path))?.into_iter().map(|it| it.path());
        Ok(paths.filter(|page| page.extension().is_some_and(|suffix| suffix == "md")).collect())
    }
}

/// Returns the text of the file `path`.
pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(BenchError::os("read", path))
}
