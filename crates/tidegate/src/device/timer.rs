//! Completes requests at their time, on one thread.
//!
//! Invariants:
//! 1. The thread starts with the first request and ends with the timer.
//! 2. Requests complete in the order of their times; requests of equal time, in order of arrival.
//! 3. When the timer is dropped, its requests complete at once: their times may be years away.

#![expect(
    clippy::disallowed_methods,
    reason = "a delay is made of time: what its caller waits for is nothing else"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::wake::join_from_outside;
use super::{AsyncRequest, Result};

/// Shorter waits spin, because waking up takes longer.
pub(super) const SPIN: Duration = Duration::from_micros(80);

/// Key of a waiting request: times beyond the clock come last, then time, then arrival.
type Due = (bool, Option<Instant>, u64);

#[derive(Default)]
struct State {
    waiting: BTreeMap<Due, (AsyncRequest, Result<()>)>,
    arrivals: u64,
    thread: Option<JoinHandle<()>>,
    is_stopping: bool,
}

/// The requests that wait for their time.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

/// A timer. Its thread starts with the first request.
#[derive(Default)]
pub(super) struct Timer(Arc<Queue>);

impl Timer {
    /// Returns the queue; any thread may add requests.
    pub(super) fn queue(&self) -> Arc<Queue> {
        Arc::clone(&self.0)
    }

    /// Returns the number of requests that wait for their time.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.0.state.lock().waiting.len()
    }
}

impl Queue {
    /// Completes `request` with `result` at `end`; `None` is a time beyond the clock, which never
    /// comes. Completes it at once if the system refuses a thread, or the timer was dropped.
    pub(super) fn complete_at(
        self: &Arc<Self>,
        end: Option<Instant>,
        request: AsyncRequest,
        result: Result<()>,
    ) {
        let mut state = self.state.lock();
        if state.thread.is_none() && !state.is_stopping {
            let queue = Arc::clone(self);
            let thread = std::thread::Builder::new().name("device-timer".into());
            state.thread = thread.spawn(move || queue.run()).ok();
        }
        if state.thread.is_none() {
            drop(state);
            return request.complete(result);
        }
        state.arrivals += 1;
        let due = (end.is_none(), end, state.arrivals);
        state.waiting.insert(due, (request, result));
        self.changed.notify_one();
    }

    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            let Some((&(_, end, _), _)) = state.waiting.first_key_value() else {
                if state.is_stopping {
                    return;
                }
                self.changed.wait(&mut state);
                continue;
            };
            let now = Instant::now();
            let left = end.map(|end| end.saturating_duration_since(now));
            match left {
                _ if state.is_stopping => complete_first(&mut state),
                Some(Duration::ZERO) => complete_first(&mut state),
                Some(left) if left <= SPIN => {
                    MutexGuard::unlocked(&mut state, std::hint::spin_loop);
                }
                Some(left) => {
                    self.changed.wait_for(&mut state, left.saturating_sub(SPIN));
                }
                None => self.changed.wait(&mut state),
            }
        }
    }
}

fn complete_first(state: &mut MutexGuard<'_, State>) {
    if let Some((_, (request, result))) = state.waiting.pop_first() {
        MutexGuard::unlocked(state, || request.complete(result));
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_stopping = true;
        self.0.changed.notify_one();
        let thread = state.thread.take();
        drop(state);
        join_from_outside(thread);
    }
}
