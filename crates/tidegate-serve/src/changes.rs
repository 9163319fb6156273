//! The changes of an export that were started and have not ended.
//!
//! A client whose connection breaks sends a change again on another connection, while the device
//! may still work on the first one: a long change can wait for space between its blocks. If both
//! ran at once, the older change could end last, over changes that were acknowledged meanwhile.
//!
//! Invariant: a change begins only when no change of another client that overlaps it is under way.
//! Changes that run at once on their client's thread are not noted: they end before any later
//! change is received.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::budget::Wakes;

/// The started changes of all clients of an export.
#[derive(Default)]
pub(crate) struct Changes {
    /// Length of [`State::running`].
    count: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Client and bytes of each change.
    running: Vec<(u64, Range<u64>)>,
    /// Clients to wake when a change ends.
    waiting: Vec<Arc<dyn Wakes>>,
}

impl Changes {
    /// Notes a change by `client`.
    pub(crate) fn begin(&self, client: u64, bytes: Range<u64>) {
        let mut state = self.state.lock();
        state.running.push((client, bytes));
        self.count.store(state.running.len(), Ordering::Release);
    }

    /// Ends a change that [`begin`](Self::begin) noted, and wakes the clients that wait.
    pub(crate) fn end(&self, client: u64, bytes: &Range<u64>) {
        let mut state = self.state.lock();
        let found = state.running.iter().position(|(by, at)| *by == client && at == bytes);
        if let Some(found) = found {
            state.running.swap_remove(found);
        }
        self.count.store(state.running.len(), Ordering::Release);
        state.waiting.drain(..).for_each(|waiting| waiting.wake());
    }

    /// Returns whether a change of `bytes` must wait for one of another client; `wakes` is then
    /// called when it may begin. The client itself has `own` changes under way.
    pub(crate) fn must_wait(
        &self,
        (client, own): (u64, usize),
        bytes: &Range<u64>,
        wakes: &Arc<dyn Wakes>,
    ) -> bool {
        if self.count.load(Ordering::Acquire) == own {
            return false;
        }
        let mut state = self.state.lock();
        let overlaps = |(by, at): &(u64, Range<u64>)| {
            *by != client && at.start < bytes.end && bytes.start < at.end
        };
        let must_wait = state.running.iter().any(overlaps);
        if must_wait && !state.waiting.iter().any(|waiting| Arc::ptr_eq(waiting, wakes)) {
            state.waiting.push(Arc::clone(wakes));
        }
        must_wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Wakings(AtomicUsize);

    impl Wakes for Wakings {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_change_waits_for_those_of_other_clients_that_overlap_it() {
        let (changes, wakings) = (Changes::default(), Arc::new(Wakings::default()));
        let wakes = Arc::<Wakings>::clone(&wakings) as Arc<dyn Wakes>;
        let must_wait = |client, own, bytes| changes.must_wait((client, own), &bytes, &wakes);
        changes.begin(1, 4096..12288);
        assert!(must_wait(2, 0, 0..4097) && must_wait(2, 0, 8192..16384));
        assert!(!must_wait(2, 0, 0..4096) && !must_wait(2, 0, 12288..16384));
        assert!(!must_wait(1, 1, 4096..8192), "its own changes are the client's to order");
        changes.begin(2, 0..4096);
        assert!(must_wait(2, 1, 4096..8192), "it has one of its own under way");
        changes.end(1, &(4096..12288));
        assert!(!must_wait(2, 1, 4096..8192));
        assert!(wakings.0.load(Ordering::Relaxed) > 0);
    }
}
