//! The queue of sets that call for a worker.

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
    /// Makes an empty queue for `workers` workers.
    pub(super) fn new(workers: u32) -> Self {
        Self { queue: Mutex::default(), waker: Arc::new(Waker::new(workers)) }
    }

    /// Returns the waker of the workers.
    pub(super) fn waker(&self) -> &Arc<Waker> {
        &self.waker
    }

    /// Queues set `number`, which has work, and wakes a worker.
    ///
    /// No wake-up is lost. A worker that turns idle reads the queue under its lock: after this
    /// push, and sees the number, or before it, and then this call sees the idle worker.
    pub(super) fn call(&self, number: usize) {
        self.queue.lock().push_back(number);
        self.waker.wake_another();
    }

    /// Takes the oldest call. Returns the number of its set.
    pub(super) fn answer(&self) -> Option<usize> {
        self.queue.lock().pop_front()
    }

    /// Reports whether a call waits for a worker.
    pub(super) fn is_open(&self) -> bool {
        !self.queue.lock().is_empty()
    }
}
