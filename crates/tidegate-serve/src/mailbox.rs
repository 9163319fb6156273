//! How threads that complete requests reach the thread of the client that waits for them.
//!
//! Invariant: the client's thread is woken when its mailbox turns from empty to not empty.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::ServeError;
use crate::budget::Wakes;

/// An event that another thread can wait for with `poll`.
pub(crate) struct Wake(OwnedFd);

impl Wake {
    /// # Errors
    /// The system has no more descriptors.
    pub(crate) fn new() -> Result<Self, ServeError> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|error| ServeError::io("cannot make an eventfd", error))
    }

    /// Lets the waiting thread go on. The write fails only where the count is full: the event is
    /// readable then.
    #[expect(clippy::host_endian_bytes, reason = "the kernel takes the number as it is in memory")]
    pub(crate) fn wake(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Takes the event back, if it was there.
    pub(crate) fn reset(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Where a client's thread finds what other threads have finished for it.
pub(crate) struct Mailbox<T> {
    mail: Mutex<Vec<T>>,
    has_mail: AtomicBool,
    wake: Wake,
}

impl<T: Send> Wakes for Mailbox<T> {
    fn wake(&self) {
        self.wake.wake();
    }
}

impl<T> Mailbox<T> {
    /// # Errors
    /// The system has no more descriptors.
    pub(crate) fn new() -> Result<Self, ServeError> {
        let (mail, has_mail) = (Mutex::new(Vec::new()), AtomicBool::new(false));
        Ok(Self { mail, has_mail, wake: Wake::new()? })
    }

    /// The event that says that there is something to look at.
    pub(crate) fn wake(&self) -> &Wake {
        &self.wake
    }

    /// Moves the mail to `into`, which is empty.
    pub(crate) fn collect(&self, into: &mut Vec<T>) {
        if self.has_mail.load(Ordering::Acquire) {
            let mut mail = self.mail.lock();
            self.has_mail.store(false, Ordering::Relaxed);
            std::mem::swap(&mut *mail, into);
        }
    }

    /// Adds to the mail, and wakes the client's thread if there was none.
    pub(crate) fn post(&self, item: T) {
        let mut mail = self.mail.lock();
        mail.push(item);
        if !self.has_mail.swap(true, Ordering::Release) {
            self.wake.wake();
        }
    }
}
