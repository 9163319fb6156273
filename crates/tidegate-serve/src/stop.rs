//! Handles that stop a server from any thread, and threads that stop when their owner is dropped.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::fd::{AsFd, BorrowedFd};
use tidegate::device::wake::Wake;

use crate::ServeError;

/// Stops a server from any thread. Copies stop the same server.
#[derive(Clone)]
pub struct StopHandle(Arc<Stop>);

struct Stop {
    wake: Wake,
    /// The handles of the server's parts; `None` once the server was stopped.
    parts: Mutex<Option<Vec<Weak<Stop>>>>,
}

impl StopHandle {
    /// Returns a handle for a server's `run`.
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub fn new() -> Result<Self, ServeError> {
        let wake = Wake::new().map_err(|error| ServeError::io("cannot make an eventfd", error))?;
        Ok(Self(Arc::new(Stop { wake, parts: Mutex::new(Some(Vec::new())) })))
    }

    /// Returns a handle for a part of the server, which stops with the server or before it.
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub fn part(&self) -> Result<Self, ServeError> {
        let part = Self::new()?;
        match &mut *self.0.parts.lock() {
            Some(parts) => {
                parts.retain(|part| part.strong_count() > 0);
                parts.push(Arc::downgrade(&part.0));
            }
            None => part.stop(),
        }
        Ok(part)
    }

    /// Asks the server to stop: it takes no more connections and no more requests, finishes those
    /// that it has received, and returns from its `run`.
    pub fn stop(&self) {
        self.0.wake.wake();
        let parts = self.0.parts.lock().take();
        parts.iter().flatten().filter_map(Weak::upgrade).for_each(|part| Self(part).stop());
    }

    /// Returns whether the server was asked to stop.
    pub fn is_stopped(&self) -> bool {
        self.0.parts.lock().is_none()
    }
}

impl AsFd for StopHandle {
    /// Returns a descriptor that is readable once the server is to stop.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
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

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_stopped(handle: &StopHandle) -> bool {
        let mut ready = [PollFd::new(handle, PollFlags::IN)];
        let is_readable = poll(&mut ready, Some(&Timespec::default())).expect("poll") == 1;
        assert_eq!(is_readable, handle.is_stopped());
        is_readable
    }

    #[test]
    fn a_part_stops_by_itself_and_with_its_server() {
        let server = StopHandle::new().expect("a handle");
        let [first, second] = [0, 1].map(|_| server.part().expect("a part"));
        let inner = second.part().expect("a part of a part");
        first.stop();
        assert!(is_stopped(&first) && !is_stopped(&second) && !is_stopped(&server));
        server.stop();
        assert!(is_stopped(&server) && is_stopped(&second) && is_stopped(&inner));
        assert!(is_stopped(&server.part().expect("a late part")), "it is late");
    }
}
