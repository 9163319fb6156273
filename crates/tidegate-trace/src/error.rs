//! What may go wrong when a trace is read.

use std::path::PathBuf;

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// Its format cannot be told from its first lines.
    #[error("{0}")]
    Format(String),
    /// It is not what it was taken for.
    #[error("{}: {what}", path.display())]
    Bad {
        /// The file.
        path: PathBuf,
        /// What was found, what was expected, and what to do.
        what: String,
    },
}
