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
    /// Replace the measured tables in FILE
    #[arg(long, value_name = "FILE")]
    pub update_docs: Option<PathBuf>,
}

impl OutputArgs {
    /// Finds out before anything is measured that a file to be updated is not there.
    ///
    /// # Errors
    /// [`BenchError::Os`].
    pub(crate) fn check(&self) -> Result<()> {
        self.update_docs.as_deref().map_or(Ok(()), |path| read(path).map(drop))
    }
}

/// The text of the file `path`.
pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(BenchError::os("read", path))
}
