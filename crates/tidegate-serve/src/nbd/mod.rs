//! An NBD server: newstyle fixed handshake, simple and structured replies, TLS, many exports.
//!
//! Invariants:
//! 1. A reply is sent only after the device has acknowledged the request; a flush covers all writes
//!    answered before it on any connection.
//! 2. What a client can make the server hold is bounded by [`Limits`]; nothing is allocated by a
//!    length that was not checked, and no client's fault touches another client.
//! 3. A request that has to wait for nothing runs on the connection's thread, many to one receive
//!    and one send. Each other request is started, and is answered when it is complete.
//!
//! Entry points: [`ServerBuilder`] makes a [`Server`] of [`Export`]s; [`Server::run`] serves until
//! its [`StopHandle`] says stop. Inside, bytes go through `transport` (socket or TLS), `connection`
//! (the event loop), `handshake` or `session` (what is said, without I/O; words in `protocol`,
//! rules in `transmission`), and requests that wait through the `queue` that front ends share.

mod buffer;
mod connection;
mod export;
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
mod limits;
mod member;
mod pace;
mod protocol;
mod server;
mod service;
mod session;
mod share;
mod shortage;
mod tls;
mod transmission;
mod transport;

pub use crate::{ListenAddress, LogSink, ServeError, Statistics, StatisticsSource, StopHandle};
pub use export::Export;
pub use limits::{Limits, MEMORY_BYTES_MIN};
pub use server::{Server, ServerBuilder};
pub use tls::{Tls, TlsMode};
