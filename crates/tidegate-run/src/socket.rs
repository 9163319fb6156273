//! The conversation with a supervisor: whole messages over a unix socket.
//!
//! A message is one JSON object in one packet. Who connects and says nothing announces itself: the kernel tells the
//! supervisor its process. A connection that stays open counts as a member of the tree.
//!
//! Invariants: a message has at most [`MESSAGE_BYTES_MAX`] bytes; the supervisor never waits for a peer to read.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sockopt,
};
use rustix::process::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::stats::Statistics;

/// Most bytes in a message.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// What a supervisor is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The sender wants to keep its writes to a file from the kernel; its descriptor comes along.
    Absorb {
        /// The file's entry in the log's table, as a word.
        file: u64,
    },
    /// Tell the kernel of all that was kept from it about a file, and answer then. A process that absorbs the file sends a
    /// descriptor along, for a supervisor that has none of it.
    Settle {
        /// The file's entry, as a word.
        file: u64,
    },
    /// The same, without an answer: the sender does not use the file any more.
    Closed {
        /// The file's entry, as a word.
        file: u64,
    },
}

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
    /// The sender may keep its writes to the file from the kernel.
    Absorbed,
    /// The kernel knows all of the file.
    Settled,
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
    /// Connects to the supervisor that listens at `path`; none if nobody does.
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
        Ok(self.receive_all(RecvFlags::empty())?.map(|(message, _)| message))
    }

    /// The next message, if it is there already, and the descriptor that came along; `WouldBlock` where it is not.
    ///
    /// # Errors
    /// As for [`receive`](Self::receive).
    pub(crate) fn receive_now<M: DeserializeOwned>(
        &self,
    ) -> io::Result<Option<(M, Option<OwnedFd>)>> {
        self.receive_all(RecvFlags::DONTWAIT)
    }

    fn receive_all<M: DeserializeOwned>(
        &self,
        flags: RecvFlags,
    ) -> io::Result<Option<(M, Option<OwnedFd>)>> {
        let mut buffer = vec![0_u8; MESSAGE_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let received = loop {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            match rustix::net::recvmsg(&self.socket, &mut parts, &mut ancillary, flags) {
                // The second: the other end went with a message of ours unread; what it said before is still there.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                received => break received?.bytes,
            }
        };
        let descriptors = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let descriptor = descriptors.last();
        if received == 0 {
            return Ok(None);
        }
        let message = buffer.get(..received).unwrap_or_default();
        Ok(Some((serde_json::from_slice(message)?, descriptor)))
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
        let none = served.receive_now::<Request>().map(drop).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
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
