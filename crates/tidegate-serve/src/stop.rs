//! How any thread stops a server.

use std::sync::Arc;

use rustix::fd::{AsFd, BorrowedFd};
use tidegate::device::wake::Wake;

use crate::ServeError;

/// Stops a server from any thread. Copies stop the same server.
#[derive(Clone)]
pub struct StopHandle(Arc<Wake>);

impl StopHandle {
    /// A handle to give to a server's `run`.
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
    /// Readable once the server is to stop.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
