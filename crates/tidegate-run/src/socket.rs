//! The conversation with a supervisor: whole messages over a unix socket.
//!
//! A message is one JSON object in one packet. A process that connects and closes without a message
//! announces itself: the kernel tells the supervisor the process's number. A connection that stays
//! open counts as a member of the tree.
//!
//! Invariants: a message has at most [`MESSAGE_BYTES_MAX`] bytes; the supervisor never waits for a
//! peer to read.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tidegate::log::cover::Cause;

use super::stats::Statistics;

/// The most bytes in a message.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// A message to a supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// The sender launches a program: the pool stays open until it leaves.
    Join {
        /// Whether to measure latencies of writes.
        latencies: bool,
        /// The sender's PID namespace.
        #[serde(default)]
        pid_namespace: Option<u64>,
    },
    /// The sender's program ended.
    Leave,
    /// Destage all records of the log, and make them durable.
    Flush,
    /// Return the counters.
    Stat,
    /// `process` cannot be watched, or is about to become such a process: nothing is logged while
    /// it lives. Answered once the log is retired.
    Suspend {
        /// The sender, or a child of the sender; 0: the session, until it ends, or until it is
        /// resumed if no cause is given.
        process: i32,
        /// The reason why it cannot be watched.
        #[serde(default)]
        cause: Option<Cause>,
        /// The program that it will run.
        #[serde(default)]
        program: Option<String>,
    },
    /// Takes one suspension for `process` back: it did not become a process that cannot be watched,
    /// or its child became that process.
    Resume {
        /// As for [`Suspend`](Self::Suspend).
        process: i32,
    },
    /// The sender syncs files that are plain. Not answered.
    Plain {
        /// The reason why they are plain.
        cause: Cause,
        /// The name of the sender's program.
        #[serde(default)]
        program: Option<String>,
    },
}

/// The process of a [`Request::Suspend`] that lasts as long as the session.
pub(crate) const SESSION: i32 = 0;

/// A message of a supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Progress of recovery.
    Progress {
        /// Steps done.
        done: u64,
        /// Steps in all.
        total: u64,
    },
    /// The pool is open; programs may start.
    Welcome(Welcome),
    /// The request failed.
    Failed {
        /// The reason, in one line.
        message: String,
    },
    /// An event that the user should know of.
    Notice {
        /// One line.
        message: String,
    },
    /// All records that were in the log at the request are on the files' disks.
    Flushed {
        /// Bytes of the log that became free.
        retired_bytes: u64,
    },
    /// The counters.
    Statistics(Box<Statistics>),
    /// Nothing is logged, and all that was logged is retired.
    Suspended,
    /// The suspension was taken back.
    Resumed,
    /// The launcher may end.
    Farewell {
        /// Processes of the tree that live on; 0: the log is empty.
        remaining: u64,
        /// The counters.
        statistics: Box<Statistics>,
    },
}

/// The pool that a launcher joined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// The kind of the pool's memory.
    pub kind: String,
    /// How a power cut affects that memory.
    pub power_cut: String,
    /// Describes the changes of recovery, if it made any.
    pub recovered: Option<String>,
}

/// One end of a conversation.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// Connects to the supervisor that listens at `path`; `None` if there is none.
    ///
    /// # Errors
    /// Fails if the socket cannot be used.
    pub(crate) fn to(path: &Path) -> io::Result<Option<Self>> {
        let socket = new_socket()?;
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
            Ok(()) => Ok(Some(Self { socket })),
            Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Makes both ends of a conversation.
    ///
    /// # Errors
    /// Fails if no descriptors are left.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self { socket: ours }, theirs))
    }

    /// Makes a connection over `socket`.
    pub(crate) fn over(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Returns the process that was at the other end when it connected.
    ///
    /// # Errors
    /// Fails if the socket cannot be used.
    pub(crate) fn peer(&self) -> io::Result<Pid> {
        Ok(sockopt::socket_peercred(&self.socket)?.pid)
    }

    /// Sends `message` without ever waiting.
    ///
    /// # Errors
    /// Fails if the other end is gone, or does not read.
    pub(crate) fn send(&self, message: &impl Serialize) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        rustix::net::send(&self.socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        Ok(())
    }

    /// Waits for the next message; returns `None` when the other end has closed.
    ///
    /// # Errors
    /// Fails if the connection broke, or the other end sent something else.
    pub(crate) fn receive<M: DeserializeOwned>(&self) -> io::Result<Option<M>> {
        self.receive_with(RecvFlags::empty())
    }

    /// Returns the next message if it has arrived; else the error `WouldBlock`.
    ///
    /// # Errors
    /// As for [`receive`](Self::receive).
    pub(crate) fn receive_now<M: DeserializeOwned>(&self) -> io::Result<Option<M>> {
        self.receive_with(RecvFlags::DONTWAIT)
    }

    /// Waits for the next message as [`receive`](Self::receive) does, but at most `timeout`.
    ///
    /// # Errors
    /// As for [`receive`](Self::receive), or `WouldBlock`.
    pub(crate) fn receive_within<M: DeserializeOwned>(
        &self,
        timeout: Duration,
    ) -> io::Result<Option<M>> {
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(timeout))?;
        self.receive()
    }

    /// Ends the conversation: a thread that waits for a message gets the end.
    pub(crate) fn shut_down(&self) {
        // It fails only if the other end is gone.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    fn receive_with<M: DeserializeOwned>(&self, flags: RecvFlags) -> io::Result<Option<M>> {
        let mut buffer = vec![0_u8; MESSAGE_BYTES_MAX];
        let received = loop {
            match rustix::net::recv(&self.socket, &mut buffer[..], flags) {
                // `CONNRESET`: the other end closed with an unread message of ours. Its own
                // messages can still be received.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                received => break received?.0,
            }
        };
        let message = buffer.get(..received).unwrap_or_default();
        if message.is_empty() { Ok(None) } else { Ok(Some(serde_json::from_slice(message)?)) }
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// The socket where a supervisor accepts connections.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Listener {
    /// Listens at `path`, and replaces the socket of a dead supervisor. The caller keeps other
    /// supervisors out.
    ///
    /// # Errors
    /// Fails if the socket cannot be made.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = new_socket()?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&socket, BACKLOG)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self { socket })
    }

    /// Returns the next connection, or `None` if none waits.
    ///
    /// # Errors
    /// Fails if no connection can be accepted now.
    pub(crate) fn accept(&self) -> io::Result<Option<Connection>> {
        loop {
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) {
                Ok(socket) => return Ok(Some(Connection { socket })),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_whole_and_the_end_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert!(Connection::to(&path).unwrap().is_none());
        let listener = Listener::bind(&path).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let client = Connection::to(&path).unwrap().unwrap();
        let served = listener.accept().unwrap().unwrap();
        assert_eq!(served.peer().unwrap(), rustix::process::getpid());
        client.send(&Request::Join { latencies: true, pid_namespace: None }).unwrap();
        client.send(&Request::Flush).unwrap();
        let join = Request::Join { latencies: true, pid_namespace: None };
        assert_eq!(served.receive().unwrap(), Some(join));
        assert_eq!(served.receive().unwrap(), Some(Request::Flush));
        let none = served.receive_now::<Request>().unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
        let suspend = r#"{"request":"suspend","process":7,"later":1}"#;
        rustix::net::send(&client, suspend.as_bytes(), SendFlags::empty()).unwrap();
        let suspend = Request::Suspend { process: 7, cause: None, program: None };
        assert_eq!(served.receive().unwrap(), Some(suspend), "without what it need not say");
        drop(client);
        assert!(served.receive_now::<Request>().unwrap().is_none());
    }

    #[test]
    fn nonsense_is_an_error_and_a_dead_supervisor_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        let client = Connection::to(&path).unwrap().unwrap();
        let served = listener.accept().unwrap().unwrap();
        rustix::net::send(&client, b"\xff{", SendFlags::empty()).unwrap();
        let error = served.receive::<Request>().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop((listener, served));
        assert!(Connection::to(&path).unwrap().is_none());
        Listener::bind(&path).unwrap();
    }
}
