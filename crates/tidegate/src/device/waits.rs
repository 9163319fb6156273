//! The list of waits: requests and background threads of this process that wait, and since when.
//!
//! A thread that may wait long for something slower than memory, and a request that waits without a
//! thread, enters the list. A server reads the list and reports waits that take too long.
//! docs/waits.md says how each wait ends.

#![expect(clippy::disallowed_methods, reason = "a wait that is too long is seen by the real clock")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Number of lists, so that requests of several clients rarely contend.
const LISTS: usize = 16;

static ENTRIES: [Mutex<Vec<Entry>>; LISTS] = [const { Mutex::new(Vec::new()) }; LISTS];
static NEXT: AtomicU64 = AtomicU64::new(0);

struct Entry {
    id: u64,
    waiter: &'static str,
    what: &'static str,
    since: Instant,
}

/// Waits of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waits {
    /// Which kind of request or thread waits.
    pub waiter: &'static str,
    /// The event that they wait for.
    pub what: &'static str,
    /// Number of waits.
    pub count: usize,
    /// How long the oldest one has waited.
    pub longest: Duration,
}

/// An entry of the list. Dropping it removes the entry.
pub struct Waiting(u64);

/// Enters `waiter`, which waits for `what`, into the list.
#[must_use]
pub fn begin(waiter: &'static str, what: &'static str) -> Waiting {
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    list(id).lock().push(Entry { id, waiter, what, since: Instant::now() });
    Waiting(id)
}

fn list(id: u64) -> &'static Mutex<Vec<Entry>> {
    &ENTRIES[usize::try_from(id).unwrap_or(0) % LISTS]
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut entries = list(self.0).lock();
        if let Some(own) = entries.iter().position(|it| it.id == self.0) {
            entries.swap_remove(own);
        }
    }
}

/// Returns the waits longer than `limit`, by kind.
pub fn longer_than(limit: Duration) -> Vec<Waits> {
    let mut found: Vec<Waits> = Vec::new();
    for entries in &ENTRIES {
        for Entry { waiter, what, since, .. } in &*entries.lock() {
            let waited = since.elapsed();
            if waited <= limit {
                continue;
            }
            match found.iter_mut().find(|it| (it.waiter, it.what) == (*waiter, *what)) {
                Some(kind) => {
                    kind.count += 1;
                    kind.longest = kind.longest.max(waited);
                }
                None => found.push(Waits { waiter, what, count: 1, longest: waited }),
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_listed_by_kind_while_they_last() {
        let (waiter, what) = ("a test", "nothing");
        let of_test = || {
            let found = longer_than(Duration::ZERO);
            found.into_iter().find(|it| (it.waiter, it.what) == (waiter, what)).map(|it| it.count)
        };
        let first = begin(waiter, what);
        let rest: Vec<_> = (0..40).map(|_| begin(waiter, what)).collect();
        assert_eq!(of_test(), Some(41));
        drop(rest);
        assert_eq!(of_test(), Some(1));
        assert!(longer_than(Duration::from_secs(600)).iter().all(|it| it.waiter != waiter));
        drop(first);
        assert_eq!(of_test(), None);
    }
}
