//! The eventfds of a virtual machine.
//!
//! Invariant: no read of an event waits, whatever its other owners do, and no write unless another
//! owner fills the event in the same moment.

use std::fs::File;
use std::io::{self, IoSliceMut};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{ReadWriteFlags, preadv2};
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
        // Another owner may have made it one whose writes wait.
        if is_ready(&self.0, PollFlags::OUT) {
            let _ = rustix::io::write(&self.0, 1_u64.as_bytes());
        }
    }

    /// Makes the event wait for the next signal.
    pub(super) fn reset(&self) {
        let mut count = [0; 8];
        let mut buffers = [IoSliceMut::new(&mut count)];
        // At the present position, which an eventfd does not have.
        let _ = preadv2(&self.0, &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT);
    }
}

/// Returns whether `of` is in the `wanted` state now.
pub(super) fn is_ready(of: impl AsFd, wanted: PollFlags) -> bool {
    let mut ready = [PollFd::new(&of, wanted)];
    poll(&mut ready, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
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
        assert!(!is_ready(&event, PollFlags::IN), "the signals are taken");
        // A monitor may change the flags of the file at any time.
        let flags = fcntl_getfl(&event).expect("flags");
        fcntl_setfl(&event, flags - OFlags::NONBLOCK).expect("set");
        event.reset();
        rustix::io::write(&event, (u64::MAX - 1).as_bytes()).expect("written");
        event.signal();
    }
}
