//! A thread that performs long requests one after another. The thread that accepts clients stays
//! free.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use crate::{ServeError, StopHandle, Worker};

/// Requests that may wait for the one under way.
const WAITING_MAX: usize = 16;

/// Sends jobs to the thread, which ends once the sender is dropped.
pub(crate) struct Sender<J>(SyncSender<J>);

impl<J> Sender<J> {
    /// Has `job` done after those that wait; hands it back where too many wait.
    pub(crate) fn send(&self, job: J) -> Result<(), J> {
        self.0.try_send(job).map_err(|error| match error {
            TrySendError::Full(job) | TrySendError::Disconnected(job) => job,
        })
    }
}

/// The thread. Dropping it waits for the jobs that were sent, and needs the sender dropped.
pub(crate) struct Jobs {
    worker: Worker,
    is_abandoned: Arc<AtomicBool>,
}

impl Jobs {
    /// Starts a thread `name` that does each job by `perform`.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(crate) fn start<J: Send + 'static>(
        name: &str,
        perform: impl Fn(J) + Send + 'static,
    ) -> Result<(Self, Sender<J>), ServeError> {
        let (sender, jobs) = sync_channel(WAITING_MAX);
        let is_abandoned = Arc::<AtomicBool>::default();
        let abandoned = Arc::clone(&is_abandoned);
        let run = move |_: &StopHandle| {
            let wanted = jobs.into_iter().take_while(|_| !abandoned.load(Ordering::Acquire));
            wanted.for_each(perform);
        };
        let worker = Worker::start(name, StopHandle::new()?, run)?;
        Ok((Self { worker, is_abandoned }, Sender(sender)))
    }

    /// Waits for no job: one that is under way ends by itself, or with the process.
    pub(crate) fn abandon(mut self) {
        self.is_abandoned.store(true, Ordering::Release);
        self.worker.abandon();
    }
}
