//! Wakes a thread out of its wait for a ring or a socket.

use std::thread::JoinHandle;

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

/// Waits for the end of a device's thread, which was told to stop. Not on that thread itself: a
/// completion that it runs may hold the last reference to the device.
pub(in crate::device) fn join_from_outside(thread: Option<JoinHandle<()>>) {
    let is_other = |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
    if let Some(thread) = thread.filter(is_other) {
        let _ = thread.join();
    }
}
