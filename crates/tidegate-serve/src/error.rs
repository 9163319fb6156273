//! Errors of servers.

/// Why a server cannot start or go on. Each message names the object and says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// An address is malformed.
    #[error("{0}")]
    Address(String),
    /// Another server listens at the path, or another file is there.
    #[error("{0}")]
    InUse(String),
    /// Exports contradict each other or the protocol.
    #[error("{0}")]
    Export(String),
    /// A limit is out of its range.
    #[error("{0}")]
    Limit(String),
    /// A certificate or key cannot be used.
    #[error("{0}")]
    Tls(String),
    /// The kernel has no ublk driver, or this process may not use it.
    #[error("{0}")]
    NoUblk(String),
    /// A ublk device cannot be made, taken up or stopped.
    #[error("{0}")]
    UblkDevice(String),
    /// The operating system refused something.
    #[error("{context}")]
    Io {
        /// The operation that failed.
        context: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl ServeError {
    pub(crate) fn io(context: &str, source: impl Into<std::io::Error>) -> Self {
        Self::Io { context: context.into(), source: source.into() }
    }
}
