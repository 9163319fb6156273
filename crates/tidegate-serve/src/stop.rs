//! Handles that stop a server from any thread, and threads that stop when their owner is dropped.

use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::fd::{AsFd, BorrowedFd};
use tidegate::device::wake::Wake;

use crate::ServeError;

/// Stops a server from any thread. Copies stop the same server.
#[derive(Clone)]
pub struct StopHandle(Arc<Wake>);

impl StopHandle {
    /// Returns a handle for a server's `run`.
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub fn new() -> Result<Self, ServeError> {
        let wake = Wake::new().map_err(|error| ServeError::io("cannot make an eventfd", error))?;
        Ok(Self(Arc::new(wake)))
    }

    /// Asks the server to stop: it takes no more connections and no more requests, finishes those
    /// that it has received, and returns from its `run`.
    pub fn stop(&self) {
        self.0.wake();
    }
}

impl AsFd for StopHandle {
    /// Returns a descriptor that is readable once the server is to stop.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A thread that works until this is dropped.
pub struct Worker {
    stop: StopHandle,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a thread `name` that runs `work`, which must return soon after `stop` is signalled.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        name: &str,
        stop: StopHandle,
        work: impl FnOnce(&StopHandle) + Send + 'static,
    ) -> Result<Self, ServeError> {
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(&stopped));
        let thread = thread.map_err(|error| ServeError::io("cannot start a thread", error))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Asks the thread to end without waiting for its end.
    pub fn abandon(&mut self) {
        self.stop.stop();
        self.thread = None;
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            // The thread has printed its panic, if any.
            let _ = thread.join();
        }
    }
}
