//! An NBD server: newstyle fixed handshake, simple and structured replies, TLS, many exports.
//!
//! Invariants:
//! 1. A reply is sent only after the device has acknowledged the request; a flush covers all writes
//!    answered before it on any connection.
//! 2. What a client can make the server hold is bounded by [`Limits`]; nothing is allocated by a length
//!    that was not checked, and no client's fault touches another client.
//! 3. Requests of slow devices run in parallel and are answered as they finish; requests at memory
//!    speed run on the connection's thread, many to one receive and one send.
//!
//! Entry points: [`ServerBuilder`] makes a [`Server`] of [`Export`]s; [`Server::run`] serves until
//! its [`StopHandle`] says stop. Inside, bytes go through `transport` (socket or TLS), `connection` (the
//! event loop), `handshake` or `session` (what is said, without I/O; words in `protocol`, rules in
//! `transmission`), and for slow requests `worker`.

mod buffer;
mod connection;
mod export;
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
mod listen;
mod log;
mod protocol;
mod server;
mod session;
mod statistics;
mod tls;
mod transmission;
mod transport;
mod worker;

pub use export::Export;
pub use listen::ListenAddress;
pub use log::LogSink;
pub use server::{Limits, Server, ServerBuilder, StopHandle};
pub use statistics::{Statistics, StatisticsSource};
pub use tls::{Tls, TlsMode};

/// Why a server cannot start or go on. Each message names the object and says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// An address is malformed.
    #[error("{0}")]
    Address(String),
    /// Another server or file is where we should listen.
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
    /// The system refused something.
    #[error("{context}")]
    Io {
        /// What could not be done.
        context: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl ServeError {
    fn io(context: &str, source: impl Into<std::io::Error>) -> Self {
        Self::Io { context: context.into(), source: source.into() }
    }
}
