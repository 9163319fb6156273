//! Memory that all clients of a server take together for their requests.
//!
//! Invariants:
//! 1. Leases together never hold more than the budget.
//! 2. Large requests never take the last quarter: a client that asks for little does not wait for
//!    clients that ask for much and take no answers.
//! 3. Large requests do not overtake each other, and small ones do not: a client that finds too
//!    little free memory waits in a queue.
//! 4. The first client of each queue is woken when memory is given back, and when a client leaves.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

/// The largest request that counts as small, in bytes.
const SMALL_BYTES: usize = (1 << 20) + (64 << 10);

/// Wakes a client's thread.
pub(crate) trait Wakes: Send + Sync {
    /// Ends the thread's sleep, or prevents the next one.
    fn wake(&self);
}

/// The memory of a server.
pub(crate) struct Budget(Mutex<State>);

/// The memory for requests that the front ends of a server share.
#[derive(Clone)]
pub struct RequestMemory(pub(crate) Arc<Budget>);

impl RequestMemory {
    /// Returns a memory of `bytes` for front ends without a server that has one.
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(Budget::new(bytes)))
    }
}

struct State {
    free_bytes: usize,
    /// Memory that large requests leave free.
    reserve_bytes: usize,
    small: Queue,
    large: Queue,
}

#[derive(Default)]
struct Queue(VecDeque<Arc<dyn Wakes>>);

impl Budget {
    pub(crate) fn new(bytes: usize) -> Self {
        Self(Mutex::new(State {
            free_bytes: bytes,
            reserve_bytes: bytes / 4,
            small: Queue::default(),
            large: Queue::default(),
        }))
    }
}

impl State {
    fn wake_first(&self) {
        for Queue(waiting) in [&self.small, &self.large] {
            if let Some(first) = waiting.front() {
                first.wake();
            }
        }
    }

    fn is_free(&self, bytes: usize) -> bool {
        let kept_bytes = if bytes <= SMALL_BYTES { 0 } else { self.reserve_bytes };
        self.free_bytes.saturating_sub(kept_bytes) >= bytes
    }

    fn queue_for(&mut self, bytes: usize) -> &mut Queue {
        if bytes <= SMALL_BYTES { &mut self.small } else { &mut self.large }
    }
}

impl Queue {
    fn is_first(&self, client: &Arc<dyn Wakes>) -> bool {
        self.0.front().is_none_or(|first| Arc::ptr_eq(first, client))
    }

    fn enter(&mut self, client: &Arc<dyn Wakes>) {
        if !self.0.iter().any(|waiting| Arc::ptr_eq(waiting, client)) {
            self.0.push_back(Arc::clone(client));
        }
    }

    fn has_another(&self, client: &Arc<dyn Wakes>) -> bool {
        self.0.iter().any(|waiting| !Arc::ptr_eq(waiting, client))
    }

    fn leave(&mut self, client: &Arc<dyn Wakes>) {
        self.0.retain(|waiting| !Arc::ptr_eq(waiting, client));
    }
}

/// Memory of the budget that one client holds. Dropping the lease gives all back.
pub(crate) struct Lease {
    budget: Arc<Budget>,
    client: Arc<dyn Wakes>,
    bytes: usize,
    is_waiting: bool,
}

impl Lease {
    /// Returns an empty lease for the thread that `client` wakes.
    pub(crate) fn new(budget: Arc<Budget>, client: Arc<dyn Wakes>) -> Self {
        Self { budget, client, bytes: 0, is_waiting: false }
    }

    /// Takes `bytes` more. Returns false if they are not free or another client waits in front; the
    /// client is then woken when it should ask again for as much.
    pub(crate) fn grow(&mut self, bytes: usize) -> bool {
        if bytes == 0 {
            return true;
        }
        let mut state = self.budget.0.lock();
        if !state.queue_for(bytes).is_first(&self.client) || !state.is_free(bytes) {
            state.queue_for(bytes).enter(&self.client);
            self.is_waiting = true;
            return false;
        }
        state.free_bytes -= bytes;
        self.bytes += bytes;
        drop(state);
        self.stop_waiting();
        true
    }

    /// Leaves the queue, since the client needs no more than it holds.
    pub(crate) fn stop_waiting(&mut self) {
        if std::mem::take(&mut self.is_waiting) {
            let mut state = self.budget.0.lock();
            state.small.leave(&self.client);
            state.large.leave(&self.client);
            state.wake_first();
        }
    }

    /// Gives back all but `bytes`.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        let given = self.bytes.saturating_sub(bytes);
        if given > 0 {
            self.bytes -= given;
            let mut state = self.budget.0.lock();
            state.free_bytes += given;
            state.wake_first();
        }
    }

    /// Returns whether this lease holds memory while other clients wait for memory.
    pub(crate) fn is_wanted(&self) -> bool {
        if self.bytes == 0 {
            return false;
        }
        let state = self.budget.0.lock();
        [&state.small, &state.large].into_iter().any(|queue| queue.has_another(&self.client))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.shrink_to(0);
        self.stop_waiting();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct Client(AtomicU32);

    impl Wakes for Client {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn lease(budget: &Arc<Budget>) -> (Arc<Client>, Lease) {
        let client = Arc::new(Client::default());
        (Arc::clone(&client), Lease::new(Arc::clone(budget), client))
    }

    fn wakes(client: &Client) -> u32 {
        client.0.swap(0, Ordering::Relaxed)
    }

    #[test]
    fn who_asks_for_much_is_not_overtaken() {
        const MB: usize = 2 << 20;
        let budget = Arc::new(Budget::new(100 * MB));
        let (_, mut first) = lease(&budget);
        let (second_client, mut second) = lease(&budget);
        let (third_client, mut third) = lease(&budget);
        assert!(first.grow(50 * MB));
        assert!(!second.grow(60 * MB) && !third.grow(10 * MB), "25 are free for large requests");
        first.shrink_to(30 * MB);
        assert_eq!((wakes(&second_client), wakes(&third_client)), (1, 0));
        assert!(!second.grow(60 * MB) && !third.grow(10 * MB));
        drop(first);
        assert!(second.grow(60 * MB));
        assert_eq!(wakes(&third_client), 1);
        assert!(third.grow(10 * MB) && third.grow(0));
    }

    #[test]
    fn who_asks_for_little_does_not_wait_for_those_who_ask_for_much() {
        let budget = Arc::new(Budget::new(64 << 20));
        let mut large: Vec<_> = (0..4).map(|_| lease(&budget).1).collect();
        assert!(large[0].grow(48 << 20));
        assert!(!large[1].grow(8 << 20) && !large[2].grow(2 << 20));
        assert!(large[0].is_wanted() && !large[3].is_wanted());
        let mut small: Vec<_> = (0..17).map(|_| lease(&budget)).collect();
        assert!(small[..16].iter_mut().all(|(_, lease)| lease.grow(1 << 20)));
        assert!(!small[16].1.grow(1 << 20), "all is taken");
        small.remove(0);
        assert_eq!(wakes(&small[15].0), 1);
        assert!(small[15].1.grow(1 << 20));
    }

    #[test]
    fn who_waits_for_more_does_not_want_its_own_memory() {
        let budget = Arc::new(Budget::new(64 << 20));
        let (_, mut greedy) = lease(&budget);
        assert!(greedy.grow(40 << 20) && !greedy.grow(40 << 20));
        assert!(!greedy.is_wanted(), "nobody else is there");
        let (_, mut other) = lease(&budget);
        assert!(!other.grow(30 << 20) && greedy.is_wanted());
    }

    #[test]
    fn who_leaves_the_queue_makes_way() {
        let budget = Arc::new(Budget::new(100));
        let (_, mut first) = lease(&budget);
        let (_, mut second) = lease(&budget);
        let (client, mut third) = lease(&budget);
        assert!(first.grow(50) && !second.grow(60) && !third.grow(50));
        drop(second);
        assert_eq!(wakes(&client), 1);
        assert!(third.grow(50));
    }

    proptest! {
        /// Clients never hold more than the budget together, and all memory comes back.
        #[test]
        fn leases_stay_inside_the_budget(
            steps in prop::collection::vec((0_usize..4, 0_usize..60, any::<bool>()), 1..200)
        ) {
            let budget = Arc::new(Budget::new(100));
            let mut leases: Vec<_> = (0..4).map(|_| lease(&budget).1).collect();
            for (client, bytes, grows) in steps {
                if grows {
                    leases[client].grow(bytes);
                } else {
                    leases[client].shrink_to(bytes);
                }
                let held: usize = leases.iter().map(|lease| lease.bytes).sum();
                prop_assert_eq!(held + budget.0.lock().free_bytes, 100);
            }
            leases.clear();
            let state = budget.0.lock();
            prop_assert_eq!((state.free_bytes, state.small.0.len()), (100, 0));
        }
    }
}
