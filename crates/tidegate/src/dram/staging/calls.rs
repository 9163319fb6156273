//! The calls of sets for a worker.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::sync::lock::Mutex;
use crate::tier::background::Waker;

/// The sets that call for a worker.
pub(super) struct Calls {
    queue: Mutex<VecDeque<usize>>,
    waker: Arc<Waker>,
}

impl Calls {
    /// No calls, for `workers` workers.
    pub(super) fn new(workers: u32) -> Self {
        Self { queue: Mutex::default(), waker: Arc::new(Waker::new(workers)) }
    }

    /// What wakes the workers.
    pub(super) fn waker(&self) -> &Arc<Waker> {
        &self.waker
    }

    /// Set `number` has work.
    ///
    /// No wake-up is lost: a worker that turns idle looks at the queue under its lock, either after
    /// this, and sees the number, or before, and then this sees that the worker is idle.
    pub(super) fn call(&self, number: usize) {
        self.queue.lock().push_back(number);
        self.waker.wake_another();
    }

    /// Takes the oldest call: the number of its set.
    pub(super) fn answer(&self) -> Option<usize> {
        self.queue.lock().pop_front()
    }

    /// Whether a call waits for a worker.
    pub(super) fn is_open(&self) -> bool {
        !self.queue.lock().is_empty()
    }
}
