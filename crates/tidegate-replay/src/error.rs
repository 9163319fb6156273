//! Errors of recording and replaying traces, and of modelling machines.

use std::path::{Path, PathBuf};

/// The result of a part of these commands.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A reason why `tidegate replay`, `tidegate model` or `tidegate record` failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arguments contradict each other, or name an object that does not exist.
    #[error("{0}")]
    Usage(String),
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// A program could not be started to be recorded.
    #[error("{0}")]
    Start(String),
    /// A scheme cannot be made, or fails.
    #[error("{0}")]
    Scheme(String),
    /// A signal asked the process to end.
    #[error("interrupted; what was made in {} is removed", folder.display())]
    Interrupted {
        /// The directory of the real files.
        folder: PathBuf,
    },
    /// A trace could not be read.
    #[error(transparent)]
    Trace(#[from] tidegate_trace::Error),
}

impl Error {
    /// Returns a function that makes an error of the kernel an [`Error::Io`] of the file `path`.
    pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Io { path: path.into(), source }
    }

    /// Returns whether the command line was wrong: exit status 2 instead of 1.
    #[must_use]
    pub const fn is_usage(&self) -> bool {
        matches!(self, Self::Usage(_) | Self::Trace(tidegate_trace::Error::Format(_)))
    }
}

/// Returns `error` with its causes as one line.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
