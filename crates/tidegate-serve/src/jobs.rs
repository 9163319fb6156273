//! A thread that performs the long requests of a queue in turn, and leaves the accepting thread
//! free.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use crate::{ServeError, StopHandle, Worker};

/// Requests that may wait behind the one in progress.
const WAITING_MAX: usize = 16;

/// Sends jobs to the thread, which ends once the sender is dropped.
pub(crate) struct Sender<J>(SyncSender<J>);

impl<J> Sender<J> {
    /// Queues `job`. Returns it as an error if too many jobs wait.
    pub(crate) fn send(&self, job: J) -> Result<(), J> {
        self.0.try_send(job).map_err(|error| match error {
            TrySendError::Full(job) | TrySendError::Disconnected(job) => job,
        })
    }
}

/// The thread. Dropping it waits for the jobs that were sent, so the sender must be dropped first.
pub(crate) struct Jobs {
    worker: Worker,
    is_abandoned: Arc<AtomicBool>,
}

impl Jobs {
    /// Starts a thread `name` that calls `perform` for each job.
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

    /// Ends the thread without waiting: a job in progress ends by itself, or with the process.
    pub(crate) fn abandon(mut self) {
        self.is_abandoned.store(true, Ordering::Release);
        self.worker.abandon();
    }
}
