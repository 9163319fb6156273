//! Errors of reading a trace.

use std::path::PathBuf;

/// A reason why a trace could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The first lines do not determine the format.
    #[error("{0}")]
    Format(String),
    /// The content does not fit the format.
    #[error("{}: {what}", path.display())]
    Bad {
        /// The file.
        path: PathBuf,
        /// A message: the content found, the content expected, and a remedy.
        what: String,
    },
}
