//! Errors of measurements.

use std::error::Error;
use std::path::PathBuf;

use tidegate::cache::CacheError;
use tidegate::device::DeviceError;
use tidegate::pmem::PmemError;

/// Result of a measurement.
pub type Result<T> = std::result::Result<T, BenchError>;

/// The reason why a measurement failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The request makes no sense; nothing was run.
    #[error("{0}")]
    Usage(String),
    /// A program or library of a peer is not installed.
    #[error("{what} was not found: install the Debian package {package}, or leave the peer out")]
    Missing {
        /// The program or library.
        what: String,
        /// The package that holds it.
        package: &'static str,
    },
    /// A device under test failed.
    #[error("{policy} failed while it was measured")]
    Device {
        /// The policy of the device.
        policy: String,
        /// The error of the device.
        #[source]
        source: DeviceError,
    },
    /// The persistent memory under a device is not available.
    #[error(transparent)]
    Pmem(#[from] PmemError),
    /// A cache could not be made or opened.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Another program failed, or printed an unexpected output.
    #[error("{program}: {found}")]
    Program {
        /// The program.
        program: String,
        /// The failure or output, with the expected one.
        found: String,
    },
    /// The operating system refused something.
    #[error("cannot {action} {path}")]
    Os {
        /// The attempted action, as in "cannot *create* /dev/shm/pool".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
}

impl BenchError {
    /// Returns whether the request was wrong (exit status 2) or the measurement failed (1).
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Usage(_))
    }

    /// Returns the error and its causes in one line.
    pub fn with_causes(&self) -> String {
        let causes = std::iter::successors(Some(self as &dyn Error), |&error| error.source());
        causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
    }

    pub(crate) fn device<E: Into<DeviceError>>(
        policy: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let policy = policy.into();
        move |error| Self::Device { policy, source: error.into() }
    }

    pub(crate) fn os(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Os { action, path, source }
    }

    pub(crate) fn program(program: &str, found: impl Into<String>) -> Self {
        Self::Program { program: program.to_owned(), found: found.into() }
    }
}

/// Fails with [`BenchError::Usage`] and `message` unless `is_met`.
pub(crate) fn require(is_met: bool, message: &str) -> Result<()> {
    if is_met { Ok(()) } else { Err(BenchError::Usage(message.to_owned())) }
}
