//! Small servers on a thread of their own, which answer one client at a time.
//!
//! Invariants:
//! 1. A client delays the other clients for at most [`TIMEOUT`].
//! 2. The thread sleeps while no client connects, and ends when the server is dropped.
//! 3. While `conversation` is locked by another thread, no conversation begins.

use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendFlags, Shutdown};

use crate::listen::Listener;
use crate::{ServeError, StopHandle, Worker};

/// The longest time of a conversation.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a failed accept: the system is out of descriptors.
const ACCEPT_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A thread that answers clients until this is dropped.
pub(crate) struct SerialServer {
    worker: Worker,
    desk: Arc<Desk>,
}

/// The listeners, and the lock of a conversation.
struct Desk {
    listeners: Vec<Listener>,
    /// Locked by the thread while it holds a conversation.
    conversation: Mutex<()>,
}

impl SerialServer {
    /// Starts a thread `name` that calls `converse` for each client of `listeners`.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(crate) fn start(
        name: &str,
        listeners: Vec<Listener>,
        converse: impl Fn(Peer) -> io::Result<()> + Send + 'static,
    ) -> Result<Self, ServeError> {
        let desk = Arc::new(Desk { listeners, conversation: Mutex::default() });
        let served = Arc::clone(&desk);
        let run = move |stop: &StopHandle| serve(&served, stop, &converse);
        let worker = Worker::start(name, StopHandle::new()?, run)?;
        Ok(Self { worker, desk })
    }

    /// Ends the server at once. A conversation in progress ends by itself, or with the process.
    pub(crate) fn abandon(mut self) {
        let desk = Arc::clone(&self.desk);
        let idle = desk.conversation.try_lock();
        if idle.is_none() {
            self.worker.abandon();
            desk.listeners.iter().for_each(Listener::remove_file);
        }
        // The conversation stays locked until the thread has ended, so the thread begins none.
        drop(self);
        drop(idle);
    }
}

fn serve(desk: &Desk, stop: &StopHandle, converse: &dyn Fn(Peer) -> io::Result<()>) {
    let Desk { listeners, conversation } = desk;
    loop {
        let mut ready = vec![PollFd::new(stop, PollFlags::IN)];
        ready.extend(listeners.iter().map(|it| PollFd::new(it, PollFlags::IN)));
        let polled = poll(&mut ready, None);
        let is_ready: Vec<_> = ready.iter().map(|it| !it.revents().is_empty()).collect();
        if is_ready[0] {
            return;
        }
        if polled.is_err() {
            continue;
        }
        let asked = listeners.iter().zip(&is_ready[1..]).filter(|(_, is_ready)| **is_ready);
        for (listener, _) in asked {
            let Some(_conversation) = conversation.try_lock() else { return };
            match listener.accept() {
                // A client that disconnects does not concern the other clients.
                Ok((socket, _)) => drop(converse(Peer::new(socket))),
                Err(Errno::AGAIN | Errno::CONNABORTED) => {}
                Err(_) => {
                    let mut stopped = [PollFd::new(stop, PollFlags::IN)];
                    let _ = poll(&mut stopped, Some(&ACCEPT_PAUSE));
                }
            }
        }
    }
}

/// The other end of a connection, for one conversation of at most [`TIMEOUT`].
pub(crate) struct Peer {
    /// A nonblocking socket.
    socket: OwnedFd,
    deadline: Instant,
}

impl Peer {
    /// Starts a conversation over `socket`, which must be nonblocking.
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, deadline: Instant::now() + TIMEOUT }
    }

    /// Restarts the time of the conversation.
    pub(crate) fn restart(&mut self) {
        self.deadline = Instant::now() + TIMEOUT;
    }

    /// Returns whether the other end has closed its socket.
    pub(crate) fn has_left(&self) -> bool {
        let mut socket = [PollFd::new(&self.socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let polled = retry_on_intr(|| poll(&mut socket, Some(&now)));
        polled.is_ok() && socket[0].revents().contains(PollFlags::HUP)
    }

    /// Waits up to [`TIMEOUT`] for bytes of the other end, or for its end. Returns whether they
    /// came. If so, restarts the time of the conversation.
    ///
    /// # Errors
    /// The system cannot wait.
    pub(crate) fn has_replied(&mut self) -> io::Result<bool> {
        let most = Timespec::try_from(TIMEOUT).map_err(io::Error::other)?;
        let mut socket = [PollFd::new(&self.socket, PollFlags::IN)];
        let is_ready = retry_on_intr(|| poll(&mut socket, Some(&most)))? > 0;
        if is_ready {
            self.restart();
        }
        Ok(is_ready)
    }

    /// Reads until `is_whole` is true for the bytes so far, or up to the end of the connection.
    ///
    /// # Errors
    /// Fails if the data exceeds `most` bytes, or the conversation takes too long.
    pub(crate) fn read_until(
        &mut self,
        most: usize,
        is_whole: impl Fn(&[u8]) -> bool,
    ) -> io::Result<Vec<u8>> {
        let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
        loop {
            let read = self.read(&mut part)?;
            bytes.extend_from_slice(&part[..read]);
            if bytes.len() > most {
                let message = format!("it has more than {most} bytes");
                return Err(io::Error::new(ErrorKind::InvalidData, message));
            }
            if read == 0 || is_whole(&bytes) {
                return Ok(bytes);
            }
        }
    }

    /// Sends `answer` to a client whose request may not have been read to its end, and drops what
    /// the client still sends. A socket that closes with unread bytes takes the answer back, or
    /// lets the client fail before it reads the answer.
    ///
    /// # Errors
    /// The connection fails, or the conversation takes too long.
    pub(crate) fn refuse(mut self, answer: &[u8]) -> io::Result<()> {
        self.write_all(answer)?;
        rustix::net::shutdown(&self.socket, Shutdown::Write)?;
        let mut dropped = [0; 4096];
        while Instant::now() < self.deadline && self.read(&mut dropped)? > 0 {}
        Ok(())
    }

    /// Waits until the socket is ready for `flags`, or fails at the deadline.
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&self.socket, flags)], Some(&left)) {
            Ok(0) => Err(io::Error::new(ErrorKind::TimedOut, "it takes too long")),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Calls `transfer` when the socket is ready for `flags`, until it has moved bytes or failed.
    fn when(
        &self,
        flags: PollFlags,
        mut transfer: impl FnMut(&OwnedFd) -> rustix::io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            self.wait(flags)?;
            match transfer(&self.socket) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                done => return Ok(done?),
            }
        }
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Read for Peer {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.when(PollFlags::IN, |socket| rustix::io::read(socket, &mut *buf))
    }
}

impl Write for Peer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.when(PollFlags::OUT, |socket| rustix::net::send(socket, bytes, SendFlags::NOSIGNAL))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// The client sends its request only after the server has refused it.
    #[test]
    fn a_client_that_is_refused_early_gets_its_answer() {
        let (server, mut client) = UnixStream::pair().expect("sockets");
        server.set_nonblocking(true).expect("nonblocking");
        std::thread::scope(|scope| {
            let refused = scope.spawn(|| Peer::new(server.into()).refuse(b"no\n"));
            let mut answer = [0; 3];
            client.read_exact(&mut answer).expect("an answer");
            client.write_all(&vec![b'x'; 1 << 20]).expect("the server still receives");
            client.shutdown(Shutdown::Write).expect("ended");
            assert_eq!(client.read(&mut [0]).expect("the end"), 0);
            refused.join().expect("no panic").expect("refused");
            assert_eq!(&answer, b"no\n");
        });
    }
}
