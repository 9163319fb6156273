//! Why there is no connection to an NBD server, or no more.

use std::io;
use std::time::Duration;

use super::protocol::rep;

/// A failure of a connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdError {
    /// The system refused.
    #[error("cannot {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server is being shut down, it says.
    #[error("the server says that it is being shut down")]
    ShuttingDown,
    /// The server failed to make writes durable; which ones, it does not say.
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
        /// What the server said, for people.
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
    /// The system refused to do `action`.
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
