//! Wakes the thread of a file's ring.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// Wakes the thread out of its ring.
pub(super) struct Wake(OwnedFd);

impl Wake {
    pub(super) fn new() -> rustix::io::Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// Fails only where the count is full: the event is there then.
    pub(super) fn wake(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_le_bytes());
    }

    pub(super) fn reset(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
