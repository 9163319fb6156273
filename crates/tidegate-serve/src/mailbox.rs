//! Mailboxes: threads that complete requests put them there for the client's thread.
//!
//! Invariant: the client's thread is woken when its mailbox turns from empty to not empty.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tidegate::device::wake::Wake;

use crate::ServeError;
use crate::budget::Wakes;

/// Completed work that other threads leave for a client's thread.
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
    /// Creates an empty mailbox.
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub(crate) fn new() -> Result<Self, ServeError> {
        let (mail, has_mail) = (Mutex::new(Vec::new()), AtomicBool::new(false));
        let wake = Wake::new().map_err(|error| ServeError::io("cannot make an eventfd", error))?;
        Ok(Self { mail, has_mail, wake })
    }

    /// Returns the event that signals new mail.
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
