//! Wakes a thread from its wait for a ring or a socket, and passes requests to it.

use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// An event that wakes a thread from a wait for its ring or its socket.
pub struct Wake(OwnedFd);

impl Wake {
    /// Makes an event that is not signalled.
    ///
    /// # Errors
    /// Fails if the system cannot create an event.
    pub fn new() -> rustix::io::Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// Signals the event, which wakes the thread.
    #[expect(clippy::host_endian_bytes, reason = "the kernel takes the number as it is in memory")]
    pub fn wake(&self) {
        // This fails only if the counter is full: the event is signalled then anyway.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Clears the event, so that the thread waits for the next one.
    pub fn reset(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// New requests for a device's thread, with an event that signals them.
pub(in crate::device) struct Inbox<T> {
    state: Mutex<InboxState<T>>,
    pub(in crate::device) wake: Arc<Wake>,
}

struct InboxState<T> {
    requests: Vec<T>,
    is_stopping: bool,
    is_closed: bool,
}

impl<T> Inbox<T> {
    /// Makes an empty inbox.
    ///
    /// # Errors
    /// Fails as [`Wake::new`] does.
    pub(in crate::device) fn new() -> rustix::io::Result<Self> {
        let state = InboxState { requests: Vec::new(), is_stopping: false, is_closed: false };
        Ok(Self { state: Mutex::new(state), wake: Arc::new(Wake::new()?) })
    }

    /// Gives `request` to the thread. Returns it if the inbox is closed.
    pub(in crate::device) fn add(&self, request: T) -> Option<T> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Some(request);
        }
        state.requests.push(request);
        if state.requests.len() == 1 {
            self.wake.wake();
        }
        None
    }

    /// Takes the new requests. Also returns whether the device has ended.
    pub(in crate::device) fn take(&self) -> (Vec<T>, bool) {
        self.wake.reset();
        let mut state = self.state.lock();
        (std::mem::take(&mut state.requests), state.is_stopping)
    }

    /// Closes the inbox for new requests. Returns those that the thread has not taken.
    pub(in crate::device) fn close(&self) -> Vec<T> {
        let mut state = self.state.lock();
        state.is_closed = true;
        std::mem::take(&mut state.requests)
    }

    /// Tells the thread that the device has ended, and waits until the thread ends.
    pub(in crate::device) fn stop(&self, thread: Option<JoinHandle<()>>) {
        self.state.lock().is_stopping = true;
        self.wake.wake();
        join_from_outside(thread);
    }
}

/// Waits until a device's thread, which was told to stop, ends. Does nothing on that thread itself:
/// a completion that it runs may hold the last reference to the device.
pub(in crate::device) fn join_from_outside(thread: Option<JoinHandle<()>>) {
    let is_other = |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
    if let Some(thread) = thread.filter(is_other) {
        let _ = thread.join();
    }
}
