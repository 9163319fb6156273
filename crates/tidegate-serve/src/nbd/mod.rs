//! An NBD server: newstyle fixed handshake, simple and structured replies, TLS, many exports.
//!
//! Invariants:
//! 1. A reply is sent only after the device has acknowledged the request; a flush covers all writes
//!    answered before it on any connection.
//! 2. [`Limits`] bound the memory that a client makes the server hold. No allocation has a length
//!    that was not checked, and no client's fault touches another client.
//! 3. A request that has to wait for nothing runs on the connection's thread; one receive and one
//!    send carry many. Each other request is started, and is answered when it is complete.
//!
//! Entry points: [`ServerBuilder`] makes a [`Server`] of [`Export`]s; [`Server::run`] serves until
//! its [`StopHandle`] says stop. Inside, bytes go through `transport` (socket or TLS), `connection`
//! (the event loop), and `handshake` or `session` (the protocol without I/O; encoding in
//! `protocol`, rules in `transmission`). Requests that wait go through the front ends' `queue`.

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
mod users;

pub use crate::{ListenAddress, LogSink, ServeError, Statistics, StatisticsSource, StopHandle};
pub use export::Export;
pub use limits::{DESCRIPTORS_PER_CONNECTION, Limits, MEMORY_BYTES_MIN};
pub use server::{ExportTable, Server, ServerBuilder};
pub use share::check_limits;
pub use tls::{Tls, TlsMode};
