//! Waits for whole messages of a monitor.
//!
//! Invariants:
//! 1. A message is announced once all of its bytes are there, and the socket has space for an
//!    answer: neither its receiver nor the sender of the answer waits.
//! 2. A monitor that sends a part of a message, or takes no answers, is given up after
//!    [`MESSAGE_TIMEOUT`].

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{RecvFlags, recv};

use super::event::is_ready;
use crate::StopHandle;
use crate::listen::Listener;

/// The longest wait for the rest of a message, and for space for an answer.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// The front of a message: its number, flags, and the size of the rest.
const HEADER_BYTES: usize = 12;
/// The longest rest that is waited for; the protocol's crate refuses longer ones.
const REST_BYTES_MAX: usize = 4096;

/// The next event of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A whole message is there, or the monitor has left.
    Message,
    /// Another monitor connects.
    Other,
    /// The server stops.
    Stop,
}

/// Waits for the messages of one connection.
pub(super) struct Arrival<'a> {
    socket: &'a UnixStream,
    /// Tells each arrival of bytes once: a part of a message is not looked at again and again.
    epoll: OwnedFd,
}

impl<'a> Arrival<'a> {
    /// # Errors
    /// The system has no more descriptors.
    pub(super) fn new(socket: &'a UnixStream) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wanted = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&epoll, socket, EventData::new_u64(0), wanted)?;
        Ok(Self { socket, epoll })
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] if the rest of a message does not come, or answers are not
    /// taken; the system cannot wait.
    pub(super) fn next(&self, stop: &StopHandle, listener: &Listener) -> io::Result<Next> {
        let mut began = None;
        loop {
            if stop.is_stopped() {
                return Ok(Next::Stop);
            }
            let available = usize::try_from(ioctl_fionread(self.socket)?).unwrap_or(usize::MAX);
            if available >= self.message_bytes(available)? || self.has_left() {
                return self.await_space(stop);
            }
            if is_ready(listener, PollFlags::IN) {
                return Ok(Next::Other);
            }
            let limit = (available > 0).then(|| {
                let began = *began.get_or_insert_with(Instant::now);
                MESSAGE_TIMEOUT.saturating_sub(began.elapsed())
            });
            self.wait(stop, listener, limit)?;
        }
    }

    /// Returns the size of the message at the front, of which `available` bytes are there.
    fn message_bytes(&self, available: usize) -> io::Result<usize> {
        if available < HEADER_BYTES {
            return Ok(HEADER_BYTES);
        }
        let mut header = [0; HEADER_BYTES];
        recv(self.socket, &mut header, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
        let [.., a, b, c, d] = header;
        let rest = usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        Ok(HEADER_BYTES + rest.min(REST_BYTES_MAX))
    }

    fn has_left(&self) -> bool {
        is_ready(self.socket, PollFlags::RDHUP)
    }

    /// Waits until the socket has space for an answer.
    fn await_space(&self, stop: &StopHandle) -> io::Result<Next> {
        let mut ready =
            [PollFd::new(stop, PollFlags::IN), PollFd::new(self.socket, PollFlags::OUT)];
        match poll(&mut ready, Timespec::try_from(MESSAGE_TIMEOUT).ok().as_ref()) {
            Ok(0) => Err(timed_out("the monitor takes no answers")),
            Ok(_) if !ready[0].revents().is_empty() => Ok(Next::Stop),
            Ok(_) | Err(Errno::INTR) => Ok(Next::Message),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for bytes, the stop, or another monitor, `limit` at most.
    fn wait(
        &self,
        stop: &StopHandle,
        listener: &Listener,
        limit: Option<Duration>,
    ) -> io::Result<()> {
        let mut ready = [
            PollFd::new(&self.epoll, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
            PollFd::new(listener, PollFlags::IN),
        ];
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match poll(&mut ready, limit.as_ref()) {
            Ok(0) => return Err(timed_out("the rest of a message does not come")),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // Takes the note of arrival, so that the next one is of bytes that came since.
        let mut events = Vec::with_capacity(1);
        let now = Timespec::default();
        let taken =
            epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&now));
        match taken {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn timed_out(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, what)
}
