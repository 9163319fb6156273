//! The conversation with a supervisor: whole messages over a unix socket.
//!
//! A message is one JSON object in one packet. A process that connects and closes without a message
//! announces itself: the kernel tells the supervisor its process. A connection that stays open
//! counts as a member of the tree.
//!
//! Invariants: a message has at most [`MESSAGE_BYTES_MAX`] bytes; the supervisor never waits for a
//! peer to read.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tidegate::log::cover::Cause;

use super::stats::Statistics;

/// Most bytes in a message.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// What a supervisor is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// The sender launches a program: the pool stays open until it leaves.
    Join {
        /// It will want to know how long writes took.
        latencies: bool,
    },
    /// The sender's program ended.
    Leave,
    /// Write all that the log holds to the files' disks.
    Flush,
    /// Tell what was counted.
    Stat,
    /// `process` is about to become, or is, a process that cannot be watched: nothing is logged
    /// while it lives. Answered once the log is retired.
    Suspend {
        /// The sender, or a child of it; 0: the session, until it ends.
        process: i32,
        /// Why it cannot be watched.
        #[serde(default)]
        cause: Option<Cause>,
        /// The program that it will run.
        #[serde(default)]
        program: Option<String>,
    },
    /// One suspension for `process` is taken back: it did not become such a process, or a child of
    /// it did.
    Resume {
        /// As for [`Suspend`](Self::Suspend).
        process: i32,
    },
    /// The sender syncs files that are plain. Not answered.
    Plain {
        /// Why they are.
        cause: Cause,
        /// The name of the sender's program.
        #[serde(default)]
        program: Option<String>,
    },
}

/// The process of a [`Request::Suspend`] that lasts as long as the session.
pub(crate) const SESSION: i32 = 0;

/// What a supervisor says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// How far recovery is.
    Progress {
        /// Steps done.
        done: u64,
        /// Steps in all.
        total: u64,
    },
    /// The pool is open; programs may start.
    Welcome(Welcome),
    /// What was asked for failed.
    Failed {
        /// Why, in one line.
        message: String,
    },
    /// Something that people should know.
    Notice {
        /// One line.
        message: String,
    },
    /// All is on the files' disks that was in the log when it was asked for.
    Flushed {
        /// Bytes of the log that became free.
        retired_bytes: u64,
    },
    /// What was counted.
    Statistics(Box<Statistics>),
    /// Nothing is logged, and all that was logged is retired.
    Suspended,
    /// The suspension was taken back.
    Resumed,
    /// The launcher may go.
    Farewell {
        /// Processes of the tree that live on; the log is empty where there are none.
        remaining: u64,
        /// What was counted.
        statistics: Box<Statistics>,
    },
}

/// The pool that a launcher joined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// What its memory is.
    pub kind: String,
    /// What a power cut does to it.
    pub power_cut: String,
    /// What recovery did, where there was something to do.
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
    /// Connects to the supervisor that listens at `path`; none if there is none.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub(crate) fn to(path: &Path) -> io::Result<Option<Self>> {
        let socket = new_socket()?;
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
            Ok(()) => Ok(Some(Self { socket })),
            Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Both ends of a conversation.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self { socket: ours }, theirs))
    }

    /// The conversation over `socket`.
    pub(crate) fn over(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// The process at the other end when it connected.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub(crate) fn peer(&self) -> io::Result<Pid> {
        Ok(sockopt::socket_peercred(&self.socket)?.pid)
    }

    /// Sends `message` without ever waiting.
    ///
    /// # Errors
    /// The other end is gone, or does not read.
    pub(crate) fn send(&self, message: &impl Serialize) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        rustix::net::send(&self.socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        Ok(())
    }

    /// Waits for the next message; none when the other end has closed.
    ///
    /// # Errors
    /// The other end broke off, or sent something else.
    pub(crate) fn receive<M: DeserializeOwned>(&self) -> io::Result<Option<M>> {
        self.receive_with(RecvFlags::empty())
    }

    /// The next message, if it is there already; `WouldBlock` where it is not.
    ///
    /// # Errors
    /// As for [`receive`](Self::receive).
    pub(crate) fn receive_now<M: DeserializeOwned>(&self) -> io::Result<Option<M>> {
        self.receive_with(RecvFlags::DONTWAIT)
    }

    fn receive_with<M: DeserializeOwned>(&self, flags: RecvFlags) -> io::Result<Option<M>> {
        let mut buffer = vec![0_u8; MESSAGE_BYTES_MAX];
        let received = loop {
            match rustix::net::recv(&self.socket, &mut buffer[..], flags) {
                // The second: the other end went with a message of ours unread; what it said before
                // is still there.
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

/// Where a supervisor is reached.
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
    /// Listens at `path`, in the place of a supervisor that died. The caller keeps others out.
    ///
    /// # Errors
    /// The socket cannot be made.
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

    /// The next connection, if one waits.
    ///
    /// # Errors
    /// None can be accepted now.
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
        client.send(&Request::Join { latencies: true }).unwrap();
        client.send(&Request::Flush).unwrap();
        assert_eq!(served.receive().unwrap(), Some(Request::Join { latencies: true }));
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
