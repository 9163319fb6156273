//! The eventfds of a virtual machine.
//!
//! Invariant: no read and no write of an event waits, whatever its other owners do with it.

use std::fs::File;
use std::io;

use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use zerocopy::IntoBytes;

/// An eventfd that a client has passed.
pub(super) struct Event(File);

impl Event {
    /// Takes a descriptor over.
    ///
    /// # Errors
    /// It is no eventfd: of other files, reads may wait or find input for ever.
    pub(super) fn new(file: File) -> io::Result<Self> {
        let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        if name.as_os_str() != "anon_inode:[eventfd]" {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "an eventfd is expected"));
        }
        fcntl_setfl(&file, fcntl_getfl(&file)? | OFlags::NONBLOCK)?;
        Ok(Self(file))
    }

    /// Signals the event. An event that cannot be signalled more often is signalled already.
    pub(super) fn signal(&self) {
        let _ = rustix::io::write(&self.0, 1_u64.as_bytes());
    }

    /// Makes the event wait for the next signal.
    pub(super) fn reset(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn only_an_eventfd_is_taken_and_no_call_waits() {
        assert!(Event::new(File::open("/dev/zero").expect("opened")).is_err());
        let event = Event::new(File::from(eventfd(0, EventfdFlags::CLOEXEC).expect("made")));
        let event = event.expect("an eventfd");
        event.reset();
        rustix::io::write(&event, (u64::MAX - 1).as_bytes()).expect("written");
        event.signal();
        event.reset();
    }
}
