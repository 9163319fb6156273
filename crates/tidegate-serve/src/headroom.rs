//! Memory that limits of this process (`ulimit -v`, `ulimit -d`) leave.
//!
//! A failed allocation ends the process, unless its code handles the failure. So a request that
//! takes memory is refused while a reserve is left. Code of the device and of the threads below
//! that cannot handle a failed allocation uses that reserve.

use std::fs::File;
use std::io::Read;

use rustix::process::{Resource, getrlimit};

/// Bytes that are left for the device's threads and for short allocations, which must not fail.
const RESERVE_BYTES: u64 = 8 << 20;
/// Bytes that a connection with its thread takes, with a margin.
const CONNECTION_BYTES: u64 = 3 << 20;

/// The limits, each with the field of `/proc/self/statm` that counts its pages.
const LIMITS: [(Resource, usize); 2] = [(Resource::As, 0), (Resource::Data, 5)];

/// Returns whether the limits leave memory for `bytes` of a request's data and one copy.
pub(crate) fn for_request(bytes: usize) -> bool {
    has(RESERVE_BYTES.saturating_add((bytes as u64).saturating_mul(2)))
}

/// Returns whether the limits leave memory for one more connection.
pub(crate) fn for_connection() -> bool {
    has(CONNECTION_BYTES)
}

fn has(needed: u64) -> bool {
    let limited = LIMITS.map(|(resource, field)| (getrlimit(resource).current, field));
    if limited.iter().all(|(limit, _)| limit.is_none()) {
        return true;
    }
    let mut text = [0; 256];
    let statm = File::open("/proc/self/statm").and_then(|mut file| file.read(&mut text));
    let text = std::str::from_utf8(&text[..statm.unwrap_or(0)]).unwrap_or_default();
    let fits = |(limit, field): (Option<u64>, usize)| {
        let Some(limit) = limit else { return true };
        // Without a count of used pages, the limit itself decides.
        let Some(used_bytes) = used_bytes(text, field) else { return true };
        limit.saturating_sub(used_bytes) >= needed
    };
    limited.into_iter().all(fits)
}

/// Returns field number `field` of a `statm`, in bytes.
fn used_bytes(statm: &str, field: usize) -> Option<u64> {
    let pages: u64 = statm.split_whitespace().nth(field)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_limits_has_memory_for_any_request() {
        assert!(for_request(usize::MAX) && for_connection());
    }

    #[test]
    fn the_fields_of_statm_are_pages() {
        let page = rustix::param::page_size() as u64;
        let statm = "21300 512 400 10 0 8123 0\n";
        assert_eq!(used_bytes(statm, 0), Some(21300 * page));
        assert_eq!(used_bytes(statm, 5), Some(8123 * page));
        assert_eq!(used_bytes("", 0), None);
    }
}
