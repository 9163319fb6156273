//! The limit of open files, which also bounds the connections of a server.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidegate_serve::nbd::{DESCRIPTORS_PER_CONNECTION, Statistics};

use crate::log::{Level, say};

/// Raises the limit as far as this user may.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If the system refuses, the present limit counts.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Warns if the limit keeps the server from `most` connections. `now` has the present ones.
pub(crate) fn warn_if_few(most: usize, now: &Statistics) {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return };
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return };
    let of_clients = now.connections_open.saturating_mul(DESCRIPTORS_PER_CONNECTION);
    let own = (open.count() as u64).saturating_sub(of_clients);
    let possible = possible_connections(limit, own);
    if possible < most as u64 {
        say(
            Level::Warning,
            format_args!(
                "{limit} files may be open, enough for {possible} connections of {most} \
                 (--max-connections): more clients wait; raise the limit (ulimit -n, \
                 LimitNOFILE=), or allow fewer connections"
            ),
        );
    }
}

/// Returns the number of connections that `limit` descriptors are enough for, when the server
/// itself needs `own`. One more is accepted before the server closes it.
fn possible_connections(limit: u64, own: u64) -> u64 {
    (limit.saturating_sub(own) / DESCRIPTORS_PER_CONNECTION).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_get_what_the_server_leaves() {
        assert_eq!(possible_connections(1024, 20), 501);
        assert_eq!(possible_connections(24, 20), 1);
        assert_eq!([possible_connections(20, 20), possible_connections(4, 20)], [0, 0]);
    }
}
