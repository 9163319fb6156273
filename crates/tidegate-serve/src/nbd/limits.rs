//! What clients may make a server hold.

use std::time::Duration;

use super::{Export, ServeError};

/// How much clients may ask for.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections at a time; more are closed at once.
    pub connections: usize,
    /// Data of one read or write, in bytes: at least a block, at most 32 MiB, a power of two.
    pub max_request_bytes: u32,
    /// Data of one connection's requests that may wait in memory, in bytes; one request is always
    /// let in.
    pub in_flight_bytes: usize,
    /// Requests of one connection that may be started and not complete.
    pub in_flight_requests: usize,
    /// Time that a client has for its handshake.
    pub handshake_timeout: Duration,
    /// Time that clients have for reading their last replies when the server stops.
    pub stop_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            max_request_bytes: 32 << 20,
            in_flight_bytes: 64 << 20,
            in_flight_requests: 256,
            handshake_timeout: Duration::from_secs(30),
            stop_grace: Duration::from_secs(5),
        }
    }
}

impl Limits {
    /// Checks the limits against `exports`.
    ///
    /// # Errors
    /// [`ServeError::Limit`].
    pub(super) fn check(&self, exports: &[Export]) -> Result<(), ServeError> {
        let most = self.max_request_bytes;
        let block_bytes = exports.iter().map(|it| it.geometry().block_bytes).max().unwrap_or(0);
        if most.is_power_of_two() && most <= 32 << 20 && most >= block_bytes {
            return Ok(());
        }
        Err(ServeError::Limit(format!(
            "a largest request of {most} bytes: expected a power of two from a block \
             ({block_bytes}) to 32 MiB"
        )))
    }
}
