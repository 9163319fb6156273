//! Limits of the memory and time that clients may take from a server.

use std::path::Path;
use std::time::Duration;

use super::{Export, ServeError};

/// The least memory for requests, in bytes: one of the largest requests must be possible.
pub const MEMORY_BYTES_MIN: usize = 64 << 20;
/// The least memory for leases, in bytes: large requests get three quarters, enough for the
/// largest.
pub(super) const LEASED_BYTES_MIN: usize = MEMORY_BYTES_MIN / 4 * 3;

/// Descriptors that a connection takes: its socket, and the event that wakes its thread.
pub const DESCRIPTORS_PER_CONNECTION: u64 = 2;

/// Limits for clients.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections at a time. At the limit a new connection replaces one whose client does nothing;
    /// if there is none, the new one is closed at once.
    pub connections: usize,
    /// Memory for the requests of all connections together, in bytes: at least
    /// [`MEMORY_BYTES_MIN`]. It includes each connection's own buffers, which take a quarter, or
    /// more where connections are very many: 25 KB to 0.7 MB, with TLS 64 KB to 0.3 MB more. Each
    /// connection also has a thread and a socket.
    pub memory_bytes: usize,
    /// Data of one read or write, in bytes: at least a block, at most 32 MiB, a power of two.
    pub max_request_bytes: u32,
    /// Data of one connection's requests that may wait in memory, in bytes; one always may.
    pub in_flight_bytes: usize,
    /// Requests of one connection that may be started and not complete.
    pub in_flight_requests: usize,
    /// Timeout of a client's handshake.
    pub handshake_timeout: Duration,
    /// Timeout within which a client must take some of its answers, or send some data of its write.
    pub stall_timeout: Duration,
    /// Timeout within which a client that holds memory while other clients wait for memory must
    /// take or send 1 MiB, or all that is left where that is less.
    pub stall_timeout_under_pressure: Duration,
    /// At the limit of connections: a connection without any request gives up its place after this.
    pub silent_timeout: Duration,
    /// At the limit of connections: time after which any connection gives up its place if its
    /// client has had no request done, and has neither sent nor taken 64 KiB. Connections that have
    /// never had a request go first, then those that have been idle for longest. A connection that
    /// waits for the device or for memory keeps its place.
    pub idle_timeout: Duration,
    /// Time that a client has to read its last replies when the server stops, from the end of its
    /// last request on.
    pub stop_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            memory_bytes: default_memory_bytes(),
            max_request_bytes: 32 << 20,
            in_flight_bytes: 64 << 20,
            in_flight_requests: 256,
            handshake_timeout: Duration::from_secs(30),
            stall_timeout: Duration::from_secs(30),
            stall_timeout_under_pressure: Duration::from_secs(2),
            silent_timeout: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(2),
            stop_grace: Duration::from_secs(5),
        }
    }
}

/// Returns a quarter of the memory that this process may have.
fn default_memory_bytes() -> usize {
    let machine = field_of("/proc/meminfo", "MemTotal:").map(|kib| kib.saturating_mul(1024));
    let allowed = machine.into_iter().chain(control_group_bytes()).min();
    allowed.map_or(0, |bytes| bytes / 4).max(MEMORY_BYTES_MIN)
}

/// Returns the least memory limit of this process's control groups, of both versions, and of their
/// ancestors. Returns `None` if no limit is set.
fn control_group_bytes() -> Option<usize> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    groups.lines().filter_map(limit_of_group).min()
}

/// Returns the memory limit of the control group that `line` of `/proc/self/cgroup` names.
fn limit_of_group(line: &str) -> Option<usize> {
    let (_, named) = line.split_once(':')?;
    let (controllers, group) = named.split_once(":/")?;
    let (hierarchy, file) = match controllers {
        "" => ("", "memory.max"),
        _ if controllers.split(',').any(|it| it == "memory") => ("memory", "memory.limit_in_bytes"),
        _ => return None,
    };
    let hierarchy = Path::new("/sys/fs/cgroup").join(hierarchy);
    let limit = |group: &Path| {
        let limit = std::fs::read_to_string(hierarchy.join(group).join(file)).ok()?;
        limit.trim().parse().ok()
    };
    Path::new(group).ancestors().filter_map(limit).min()
}

/// Returns the number behind `name` in a file of the kernel.
fn field_of(file: &str, name: &str) -> Option<usize> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

impl Limits {
    /// Checks the limits against the blocks of an export, or of none.
    ///
    /// # Errors
    /// [`ServeError::Limit`].
    pub(super) fn check(&self, export: Option<&Export>) -> Result<(), ServeError> {
        let most = self.max_request_bytes;
        let block_bytes = export.map_or(0, |export| export.geometry().block_bytes);
        if self.memory_bytes < MEMORY_BYTES_MIN {
            return Err(ServeError::Limit(format!(
                "memory of {} bytes for all requests: expected at least {MEMORY_BYTES_MIN}",
                self.memory_bytes
            )));
        }
        if most.is_power_of_two() && most <= 32 << 20 && most >= block_bytes {
            return Ok(());
        }
        Err(ServeError::Limit(format!(
            "a largest request of {most} bytes: expected a power of two from a block \
             ({block_bytes}) to 32 MiB"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table "Limits" of the manual, docs/operations/serve.md.
    #[test]
    fn the_default_limits_are_those_of_the_manual() {
        let limits = Limits::default();
        assert_eq!(limits.connections, 256);
        assert_eq!((limits.silent_timeout.as_secs(), limits.idle_timeout.as_secs()), (2, 2));
        let machine = field_of("/proc/meminfo", "MemTotal:").expect("a machine has memory") * 1024;
        let allowed = control_group_bytes().map_or(machine, |group| group.min(machine));
        assert_eq!(limits.memory_bytes, (allowed / 4).max(64 << 20));
        assert_eq!(limits.max_request_bytes, 32 << 20);
        assert_eq!((limits.in_flight_bytes, limits.in_flight_requests), (64 << 20, 256));
        assert_eq!(limits.handshake_timeout.as_secs(), 30);
        assert_eq!(limits.stall_timeout.as_secs(), 30);
        assert_eq!(limits.stall_timeout_under_pressure.as_secs(), 2);
        assert_eq!(super::super::pace::LAP_BYTES, 1 << 20);
        assert_eq!(limits.stop_grace.as_secs(), 5);
    }
}
