//! Small servers on a thread of their own, which answer one client at a time.
//!
//! Invariants:
//! 1. A client keeps the others waiting for at most [`TIMEOUT`].
//! 2. The thread sleeps while nobody asks, and ends when the server is dropped.
//! 3. While `conversation` is locked by another thread, no conversation begins.

use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::SendFlags;

use crate::listen::Listener;
use crate::{ServeError, StopHandle, Worker};

/// How long a conversation may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server that cannot accept a connection waits before it tries again: the system is out
/// of descriptors.
const ACCEPT_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A thread that answers clients until this is dropped.
pub(crate) struct SerialServer {
    worker: Worker,
    desk: Arc<Desk>,
}

/// Where clients come.
struct Desk {
    listeners: Vec<Listener>,
    /// Locked by the thread while it holds a conversation.
    conversation: Mutex<()>,
}

impl SerialServer {
    /// Has a thread `name` hold a conversation with each client of `listeners`.
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

    /// Ends the server, and does not wait for a conversation that is under way: it ends by itself,
    /// or with the process.
    pub(crate) fn abandon(mut self) {
        let desk = Arc::clone(&self.desk);
        let idle = desk.conversation.try_lock();
        if idle.is_none() {
            self.worker.abandon();
            desk.listeners.iter().for_each(Listener::remove_file);
        }
        // The thread begins no conversation before it has ended.
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
                // A client that breaks off does not concern the others.
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
    /// Not blocking.
    socket: OwnedFd,
    deadline: Instant,
}

impl Peer {
    /// The conversation begins. `socket` does not block.
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, deadline: Instant::now() + TIMEOUT }
    }

    /// The conversation begins again.
    pub(crate) fn restart(&mut self) {
        self.deadline = Instant::now() + TIMEOUT;
    }

    /// Waits for the other end without a limit; then the conversation begins again.
    ///
    /// # Errors
    /// The system cannot wait.
    pub(crate) fn wait_for_reply(&mut self) -> io::Result<()> {
        retry_on_intr(|| poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], None))?;
        self.restart();
        Ok(())
    }

    /// Reads until `is_whole` says that what was read is whole, or up to the end of the connection.
    ///
    /// # Errors
    /// That takes more than `most` bytes, or too long.
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

    /// Waits until the socket is ready for `flags`.
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
