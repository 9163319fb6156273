//! Memory of one connection beside its leases: an equal share of a quarter of all memory.
//!
//! Invariant: the shares of all connections and all leases together are at most
//! [`Limits::memory_bytes`].
//!
//! Sizes are fixed when the server starts. A request that is too large for its connection's own
//! buffers takes leased memory.

use super::limits::{LEASED_BYTES_MIN, Limits};
use super::{ServeError, protocol::REQUEST_BYTES};

/// The longest request that may run on the connection's own thread.
pub(super) const ATTEMPT_BYTES: usize = 256 << 10;
/// The longest data of a write that waits in the input, where that is large enough; longer data is
/// received into a payload.
const BUFFERED_WRITE_BYTES: usize = 64 << 10;
/// The largest input. Half of the buffer holds a request with buffered data, so that there is
/// always free space to receive.
const INPUT_BYTES: usize = 256 << 10;
/// The most bytes of waiting replies while requests are handled.
const HIGH_WATER_BYTES: usize = 128 << 10;
/// Space for the headers of a reply, or for a reply without data and extents.
pub(super) const HEADERS_BYTES: usize = 1024;
/// The largest output: the longest reply fits, even when the high water is just not reached.
const OUTPUT_BYTES: usize = HIGH_WATER_BYTES + ATTEMPT_BYTES + HEADERS_BYTES;
/// The smallest input and output together: they hold the longest option of a handshake, a write of
/// 4 KiB that waits, and the longest reply that carries no data, an answer about 1024 extents.
const BUFFERS_BYTES_MIN: usize = 25 << 10;

/// The most and the least bytes that TLS may hold back before it sends them.
const TLS_BUFFER_BYTES: usize = 256 << 10;
const TLS_BUFFER_BYTES_MIN: usize = 16 << 10;
/// Memory of TLS beside that: a received record, encrypted and in plain text.
const TLS_EXTRA_BYTES: usize = 48 << 10;

/// The most bytes of free payloads that a connection keeps if memory is plentiful.
const KEPT_BYTES: usize = 2 << 20;

/// The smallest and the largest send buffer that the server asks of the system. Above the largest,
/// the system's default is as good.
const SOCKET_BYTES_MIN: usize = 7 << 10;
const SOCKET_BYTES_MAX: usize = 104 << 10;
/// The system takes twice the buffer that was asked for, and half as much again for a message that
/// begins inside it.
const SOCKET_FACTOR: usize = 3;

/// Sizes of a connection's own buffers.
#[expect(clippy::struct_field_names, reason = "names have their unit")]
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    pub(super) input_bytes: usize,
    /// Replies are sent before more than this waits.
    pub(super) high_water_bytes: usize,
    /// The longest read right into the output.
    pub(super) attempt_bytes: usize,
    /// The longest data of a write that waits in the input.
    pub(super) buffered_write_bytes: usize,
    /// Bytes that TLS may hold back; 0 without TLS.
    pub(super) tls_buffer_bytes: usize,
    /// Bytes of finished requests' payloads that may be kept.
    pub(super) kept_bytes: usize,
    /// The send buffer to ask of the system, or `None` for the system's default.
    pub(super) socket_bytes: Option<usize>,
}

impl Share {
    /// Returns the share of each connection under `limits`.
    pub(super) fn new(limits: &Limits, has_tls: bool) -> Self {
        let connections = limits.connections.max(1);
        let share_bytes = limits.memory_bytes / 4 / connections;
        let tls_buffer_bytes = if has_tls {
            let rest_bytes = share_bytes.saturating_sub(BUFFERS_BYTES_MIN + TLS_EXTRA_BYTES);
            (rest_bytes / 3).clamp(TLS_BUFFER_BYTES_MIN, TLS_BUFFER_BYTES)
        } else {
            0
        };
        let tls_bytes = tls_bytes(tls_buffer_bytes);
        let buffers_bytes = share_bytes.saturating_sub(tls_bytes);
        let buffers_bytes = buffers_bytes.clamp(BUFFERS_BYTES_MIN, INPUT_BYTES + OUTPUT_BYTES);
        let input_bytes = (buffers_bytes / 5 * 2).min(INPUT_BYTES);
        let replies_bytes = buffers_bytes - input_bytes - HEADERS_BYTES;
        let high_water_bytes = replies_bytes / 3;
        let kept_bytes = share_bytes.saturating_sub(tls_bytes + buffers_bytes).min(KEPT_BYTES);
        let socket_bytes = limits.memory_bytes / 2 / connections / SOCKET_FACTOR;
        Self {
            input_bytes,
            high_water_bytes,
            attempt_bytes: replies_bytes - high_water_bytes,
            buffered_write_bytes: BUFFERED_WRITE_BYTES.min(input_bytes / 2 - REQUEST_BYTES),
            tls_buffer_bytes,
            kept_bytes,
            socket_bytes: (socket_bytes < SOCKET_BYTES_MAX)
                .then_some(socket_bytes.max(SOCKET_BYTES_MIN)),
        }
    }

    /// Returns the longest reply that must fit the output before a request is handled.
    pub(super) fn reply_bytes(&self) -> usize {
        self.attempt_bytes + HEADERS_BYTES
    }

    pub(super) fn output_bytes(&self) -> usize {
        self.high_water_bytes + self.reply_bytes()
    }

    /// Returns the most memory that a connection holds without a lease. Memory of the system for
    /// the socket is not included.
    fn bytes(&self) -> usize {
        let tls_bytes = tls_bytes(self.tls_buffer_bytes);
        self.input_bytes + self.output_bytes() + tls_bytes + self.kept_bytes
    }

    /// Returns the memory that the leases of all connections may hold.
    ///
    /// # Errors
    /// [`ServeError::Limit`] if so many connections leave too little.
    pub(super) fn leased_bytes(&self, limits: &Limits) -> Result<usize, ServeError> {
        let Limits { memory_bytes, connections, .. } = *limits;
        let own_bytes = self.bytes().saturating_mul(connections).max(memory_bytes / 4);
        let leased_bytes = memory_bytes.saturating_sub(own_bytes);
        if leased_bytes >= LEASED_BYTES_MIN {
            return Ok(leased_bytes);
        }
        let most = memory_bytes.saturating_sub(LEASED_BYTES_MIN) / self.bytes();
        Err(ServeError::Limit(format!(
            "{connections} connections with {memory_bytes} bytes of memory for all requests: \
             expected at most {most}, or more memory"
        )))
    }
}

/// Checks `limits`, also against each other: connections take memory, with TLS more.
///
/// # Errors
/// [`ServeError::Limit`].
pub fn check_limits(limits: &Limits, has_tls: bool) -> Result<(), ServeError> {
    limits.check(None)?;
    Share::new(limits, has_tls).leased_bytes(limits).map(drop)
}

/// Returns the memory that TLS takes with a buffer of `buffer_bytes`.
fn tls_bytes(buffer_bytes: usize) -> usize {
    if buffer_bytes == 0 { 0 } else { buffer_bytes + TLS_EXTRA_BYTES }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(memory_bytes: usize, connections: usize, has_tls: bool) -> (Share, Limits) {
        let limits = Limits { connections, memory_bytes, ..Limits::default() };
        (Share::new(&limits, has_tls), limits)
    }

    #[test]
    fn where_memory_is_plenty_buffers_have_their_full_size() {
        let (share, limits) = share(4 << 30, 256, true);
        assert_eq!((share.input_bytes, share.output_bytes()), (INPUT_BYTES, OUTPUT_BYTES));
        assert_eq!((share.attempt_bytes, share.high_water_bytes), (256 << 10, 128 << 10));
        assert_eq!(share.buffered_write_bytes, 64 << 10);
        assert_eq!((share.tls_buffer_bytes, share.kept_bytes), (256 << 10, KEPT_BYTES));
        assert_eq!(share.socket_bytes, None);
        assert_eq!(share.leased_bytes(&limits).expect("enough"), 3 << 30);
    }

    #[test]
    fn connections_and_leases_have_no_more_than_there_is() {
        for memory_bytes in [64 << 20, 100 << 20, 1 << 30, 6 << 30] {
            for connections in [1, 16, 256, 600, 2010, 100_000] {
                for has_tls in [false, true] {
                    let (share, limits) = share(memory_bytes, connections, has_tls);
                    let Ok(leased_bytes) = share.leased_bytes(&limits) else { continue };
                    let own_bytes = connections * share.bytes();
                    assert!(leased_bytes + own_bytes <= memory_bytes, "{share:?}");
                    assert!(leased_bytes >= LEASED_BYTES_MIN, "{share:?}");
                }
            }
        }
    }

    #[test]
    fn the_smallest_buffers_hold_what_they_must() {
        let (share, limits) = share(100 << 20, 2010, false);
        assert!(share.leased_bytes(&limits).is_ok(), "2000 clients in 400 MiB");
        assert_eq!(share.bytes(), BUFFERS_BYTES_MIN);
        assert!(share.input_bytes > super::super::handshake::MAX_OPTION_BYTES + 64);
        assert!(share.buffered_write_bytes >= 4096);
        assert!(share.reply_bytes() > 1024 * 8 + 64, "an answer of 1024 extents");
    }

    #[test]
    fn too_many_connections_are_refused_with_the_most_that_there_may_be() {
        let (share, limits) = share(64 << 20, 10_000, false);
        let Err(ServeError::Limit(said)) = share.leased_bytes(&limits) else { panic!("too many") };
        assert!(said.contains("10000 connections") && said.contains("at most 655"), "{said}");
    }

    #[test]
    fn as_many_connections_as_the_manual_says_are_taken() {
        for (most, memory_bytes, has_tls) in
            [(655, 64 << 20, false), (2129, 100 << 20, false), (184, 64 << 20, true)]
        {
            let leases = |connections| {
                let (share, limits) = share(memory_bytes, connections, has_tls);
                share.leased_bytes(&limits)
            };
            assert!((1..=most).all(|connections| leases(connections).is_ok()), "{most}");
            assert!(leases(most + 1).is_err(), "{most}");
        }
    }
}
