//! What may go wrong when a trace is recorded or replayed, or a machine modelled.

use std::path::{Path, PathBuf};

/// What came of a part of them.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why `tidegate replay`, `tidegate model` or `tidegate record` gave up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arguments contradict each other or name what does not exist.
    #[error("{0}")]
    Usage(String),
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// A program could not be started to be recorded.
    #[error("{0}")]
    Start(String),
    /// A trace could not be read.
    #[error(transparent)]
    Trace(#[from] tidegate_trace::Error),
}

impl Error {
    /// What the kernel said of the file `path`.
    pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Io { path: path.into(), source }
    }

    /// True where the command line was wrong: exit status 2 instead of 1.
    #[must_use]
    pub const fn is_usage(&self) -> bool {
        matches!(self, Self::Usage(_) | Self::Trace(tidegate_trace::Error::Format(_)))
    }
}
