//! Wakes a thread out of its wait for a ring or a socket, and gives it requests.

use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// An event that a thread waits for beside its ring or its socket.
pub struct Wake(OwnedFd);

impl Wake {
    /// An event that has not come.
    ///
    /// # Errors
    /// The system has no event to give.
    pub fn new() -> rustix::io::Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// Lets the event come, and so wakes the thread.
    #[expect(clippy::host_endian_bytes, reason = "the kernel takes the number as it is in memory")]
    pub fn wake(&self) {
        // This fails only where the count is full: the event is there then.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Takes the event back: the thread waits for the next one.
    pub fn reset(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What a device's thread has to look at, which waits for the event beside its ring or its socket.
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
    /// An empty one.
    ///
    /// # Errors
    /// As for [`Wake::new`].
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

    /// The requests that are new, and whether the device has ended.
    pub(in crate::device) fn take(&self) -> (Vec<T>, bool) {
        self.wake.reset();
        let mut state = self.state.lock();
        (std::mem::take(&mut state.requests), state.is_stopping)
    }

    /// Takes no more requests; returns those that are new.
    pub(in crate::device) fn close(&self) -> Vec<T> {
        let mut state = self.state.lock();
        state.is_closed = true;
        std::mem::take(&mut state.requests)
    }

    /// The device has ended: waits until its thread has.
    pub(in crate::device) fn stop(&self, thread: Option<JoinHandle<()>>) {
        self.state.lock().is_stopping = true;
        self.wake.wake();
        join_from_outside(thread);
    }
}

/// Waits for the end of a device's thread, which was told to stop. Not on that thread itself: a
/// completion that it runs may hold the last reference to the device.
pub(in crate::device) fn join_from_outside(thread: Option<JoinHandle<()>>) {
    let is_other = |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
    if let Some(thread) = thread.filter(is_other) {
        let _ = thread.join();
    }
}
