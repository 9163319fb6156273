//! Reasons why a connection to an NBD server fails.

use std::io;
use std::time::Duration;

use super::protocol::rep;

/// A failure of a connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdError {
    /// A system call failed.
    #[error("cannot {action}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server says that it is shutting down.
    #[error("the server says that it is being shut down")]
    ShuttingDown,
    /// The server failed to make writes durable; it does not say which ones.
    #[error("the server failed to make writes durable")]
    NotDurable,
    /// The server did not finish the handshake in time.
    #[error("no answer within {0:?}")]
    Silent(Duration),
    /// The server refused the export.
    #[error("the server refuses the export: {}{}", refusal(*.reply), said(.message))]
    Refused {
        /// One of [`rep`], or unknown.
        reply: u32,
        /// The server's message for people.
        message: String,
    },
    /// The server broke the protocol.
    #[error("{0}: this is no NBD server, or one with a fault")]
    Protocol(String),
    /// The export cannot be used.
    #[error("{0}")]
    Unfit(String),
}

impl NbdError {
    /// Makes the error of a system call in `action`.
    pub(super) fn os(action: &'static str) -> impl Fn(rustix::io::Errno) -> Self {
        move |errno| Self::Io { action, source: errno.into() }
    }
}

fn refusal(reply: u32) -> String {
    match reply {
        rep::ERR_UNSUP => "it does not know NBD_OPT_GO, use a later server".into(),
        rep::ERR_POLICY => "not allowed to this client".into(),
        rep::ERR_TLS_REQD => "it requires TLS, which backings do not speak".into(),
        rep::ERR_UNKNOWN => "it has no export of this name".into(),
        rep::ERR_BLOCK_SIZE_REQD => "it requires block sizes that it does not tell".into(),
        other => format!("answer {other:#x}"),
    }
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" ({message})") }
}
