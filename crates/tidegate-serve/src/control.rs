//! The control sockets of a server. Their owner reads a stack's counts, resets them, changes
//! settings, destages or empties a cache, copies a pool, lists the devices, and has the
//! configuration read again.
//!
//! A client sends one request and gets one reply; each is a JSON object in a line.
//!
//! Invariants:
//! 1. Only the server's own user and root are answered: the socket has mode 0600, and the kernel
//!    names the client's user.
//! 2. A client makes the server hold at most [`REQUEST_BYTES_MAX`] bytes until a timeout.
//! 3. A client gets a reply or the end of its connection, whatever bytes it sends.
//! 4. A request that may take long delays only others of its queue, and never statistics. Settings
//!    have a queue of their own, and change in the order of the requests.
//! 5. A request whose client has left before its turn is not carried out.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fd::{AsFd, BorrowedFd};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use tidegate::stack::Stat;

use crate::jobs::{self, Jobs};
use crate::listen::{self, Listener};
use crate::serial::{Peer, SerialServer};
use crate::{ListenAddress, ServeError};

/// Most bytes of a request.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Most bytes of a reply that a client takes.
const REPLY_BYTES_MAX: usize = 64 << 20;
/// Successive requests for statistics without an answer after which a server counts as hung. One
/// may have waited for other clients.
const SILENCES_MOST: u32 = 2;

/// A request of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Describe the stack and its counts.
    Stat,
    /// Change settings in this order, all or none.
    Set {
        /// Keys and new values.
        settings: Vec<(String, String)>,
    },
    /// Describe the stack and its counts, then start counters and histograms from 0.
    Reset,
    /// Destage everything that the tiers hold.
    Flush,
    /// Destage everything that the tiers hold, and remove it from the pool.
    Purge,
    /// Copy the pool, or its backing if it has one, to a new file, as it is at one instant.
    Snapshot {
        /// The file, absolute.
        file: PathBuf,
    },
    /// List the devices of the server.
    List,
    /// Read the server's configuration file again.
    Reload {
        /// The file, absolute: a server of another one does nothing. Without it, each server of a
        /// file reads its own.
        config: Option<PathBuf>,
    },
    /// End the server, whose one pool is a block device that nobody uses.
    End {
        /// The pool, absolute.
        pool: PathBuf,
    },
}

/// A device of a server; the keys are a contract with scripts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// The name of its export.
    pub export: String,
    /// The block device of this machine, such as `/dev/ublkb0`.
    pub block_device: Option<PathBuf>,
    /// `up`, `down`, `opening` or `closing`.
    pub state: String,
    /// Why it is down.
    pub cause: Option<String>,
    /// Bytes that the tiers hold and the backing lacks, or the pool without a backing.
    pub dirty_bytes: Option<u64>,
    /// The pool.
    pub pool: PathBuf,
    /// The URL of the backing.
    pub backing: Option<String>,
    /// The addresses that clients connect to.
    pub addresses: Vec<String>,
    /// The control socket that the configuration names.
    pub control: Option<PathBuf>,
    /// The process of the server.
    pub process: u32,
}

/// The server's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// The description and the counts.
    Stat {
        /// The stack's description and counts.
        stat: Box<Stat>,
    },
    /// All settings have changed.
    Set,
    /// The tiers destaged all that they held when the request came, except uncommitted bytes.
    Flushed {
        /// Bytes that the tiers hold for the backing now.
        left_bytes: u64,
        /// The part of `left_bytes` that no flush of a client has committed.
        uncommitted_bytes: u64,
        /// The pool has no backing, and holds all data itself.
        #[serde(default)]
        has_no_backing: bool,
    },
    /// The pool has destaged and removed its pages.
    Purged {
        /// Bytes of the pages that were given up.
        freed_bytes: u64,
        /// Bytes of the pages that are left in the pool.
        left_bytes: u64,
    },
    /// The file holds the copy and is durable.
    Snapshot {
        /// Its size.
        bytes: u64,
        /// Time that writes of clients had to wait.
        held_ns: u64,
        /// The backing that was copied, or `None` if the pool was.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        backing: Option<String>,
    },
    /// The devices of the server, in the order of its configuration.
    List {
        /// The devices.
        devices: Vec<Listed>,
    },
    /// The configuration file was read again.
    Reloaded {
        /// The file.
        config: PathBuf,
        /// A line for each change.
        changes: Vec<String>,
        /// A line for each failure, which left all as it was before.
        failures: Vec<String>,
    },
    /// The server has no such configuration file.
    NotReloaded,
    /// The server has begun to end.
    Ending,
    /// The request was refused.
    Failed {
        /// Why, in one line.
        message: String,
    },
}

impl Request {
    /// Returns whether the request waits for devices or for their clients.
    fn may_take_long(&self) -> bool {
        match self {
            Self::Stat | Self::Reset | Self::List | Self::End { .. } => false,
            Self::Set { .. }
            | Self::Flush
            | Self::Purge
            | Self::Snapshot { .. }
            | Self::Reload { .. } => true,
        }
    }
}

impl Reply {
    fn failed(message: impl std::fmt::Display) -> Self {
        Self::Failed { message: message.to_string() }
    }
}

/// Reads a request.
///
/// # Errors
/// Returns a one-line reason if the request is malformed.
pub fn parse(line: &[u8]) -> Result<Request, String> {
    serde_json::from_slice(line).map_err(|error| format!("the request is malformed: {error}"))
}

/// Answers a request; the second argument is the client's socket, which hangs up with the client.
type Answer = dyn Fn(Request, BorrowedFd<'_>) -> Reply + Send + Sync;

/// A request that may take long, with its client.
type Job = (Request, Peer);

/// Threads that answer clients until this is dropped: one accepts, one changes settings, and one
/// performs the other long requests.
pub struct ControlServer {
    /// Owns the senders of the jobs, so it is dropped first.
    server: SerialServer,
    jobs: [Jobs; 2],
}

/// Senders of long requests.
struct Queues {
    settings: jobs::Sender<Job>,
    others: jobs::Sender<Job>,
}

impl Queues {
    /// Queues `job`. Returns it as an error if too many jobs wait.
    fn send(&self, job: Job) -> Result<(), Job> {
        match job.0 {
            Request::Set { .. } => self.settings.send(job),
            _ => self.others.send(job),
        }
    }
}

impl ControlServer {
    /// Listens at the unix sockets `paths`, and answers each request by `answer`. The second
    /// argument of `answer` is the client's socket, which hangs up when the client leaves.
    ///
    /// # Errors
    /// Another server listens there, or the system refuses.
    pub fn start(
        paths: &[PathBuf],
        answer: impl Fn(Request, BorrowedFd<'_>) -> Reply + Send + Sync + 'static,
    ) -> Result<Self, ServeError> {
        let listeners = paths.iter().map(|path| Listener::bind(&ListenAddress::Unix(path.clone())));
        let listeners = listeners.collect::<Result<Vec<_>, _>>()?;
        let answer = Arc::new(answer);
        let start = |name| {
            let answer = Arc::clone(&answer);
            Jobs::start(name, move |job| perform(job, &*answer))
        };
        let (set, settings) = start("control-set")?;
        let (others_done, others) = start("control-jobs")?;
        let queues = Queues { settings, others };
        let converse = move |client| converse(client, &*answer, &queues);
        let server = SerialServer::start("control", listeners, converse)?;
        Ok(Self { server, jobs: [set, others_done] })
    }

    /// Ends the server without waiting for a request in progress, which ends by itself or with the
    /// process. Dropping the server waits.
    pub fn abandon(self) {
        self.server.abandon();
        self.jobs.into_iter().for_each(Jobs::abandon);
    }
}

/// Carries out a request in its turn, unless its client has left: a client that gave up may have
/// sent another request since, which this one must not undo.
fn perform((request, client): Job, answer: &Answer) {
    if client.has_left() {
        return;
    }
    let answered = answer(request, client.as_fd());
    // A client that disconnects does not concern the other clients.
    drop(reply(client, &answered));
}

fn converse(mut client: Peer, answer: &Answer, queues: &Queues) -> io::Result<()> {
    let request = match request_of(&mut client) {
        Ok(request) => request,
        Err(message) => return client.refuse(&line_of(&Reply::failed(message))?),
    };
    if !request.may_take_long() {
        let answered = answer(request, client.as_fd());
        return reply(client, &answered);
    }
    match queues.send((request, client)) {
        Ok(()) => Ok(()),
        Err((_, client)) => reply(client, &Reply::failed("too many requests wait; try later")),
    }
}

/// Reads the request of a client that may ask.
fn request_of(client: &mut Peer) -> Result<Request, String> {
    if !is_owner(client).unwrap_or(false) {
        return Err("only the server's own user may use its control socket".into());
    }
    let line = read_line(client, REQUEST_BYTES_MAX);
    parse(&line.map_err(|error| format!("the request cannot be read: {error}"))?)
}

fn reply(mut client: Peer, reply: &Reply) -> io::Result<()> {
    // The request may have taken long: the client gets the full time for the reply.
    client.restart();
    client.write_all(&line_of(reply)?)
}

fn line_of(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

/// Returns whether the client's user is the server's or root.
fn is_owner(client: &Peer) -> io::Result<bool> {
    let user = rustix::net::sockopt::socket_peercred(client.as_fd())?.uid;
    Ok(user == rustix::process::geteuid() || user.is_root())
}

/// Reads up to the end of a line or of the connection, at most `most` bytes.
fn read_line(peer: &mut Peer, most: usize) -> io::Result<Vec<u8>> {
    let mut line = peer.read_until(most, |bytes| bytes.contains(&b'\n'))?;
    if let Some(end) = line.iter().position(|byte| *byte == b'\n') {
        line.truncate(end);
    }
    Ok(line)
}

/// Removes the socket at `path` if its server has ended. Leaves it if a server begins to listen
/// there at the moment.
pub fn remove_dead_socket(path: &Path) {
    // The socket is of no use, and the next server tries again.
    let _ = listen::remove_if_dead(path);
}

/// The outcome of [`ask`].
#[derive(Debug, PartialEq)]
pub enum Asked {
    /// The server answered.
    Reply(Reply),
    /// No server listens at the socket, or there is no socket.
    Nobody,
    /// Another kind of server listens there, such as the supervisor of `tidegate run`.
    Other,
}

/// Asks the server that listens at `path`.
///
/// # Errors
/// Fails if the connection breaks, or the answer is malformed.
pub fn ask(path: &Path, request: &Request) -> io::Result<Asked> {
    ask_if(path, request, |_| true)
}

/// Asks the server that listens at `path` if its process is the expected one.
///
/// # Errors
/// As for [`ask`].
pub fn ask_if(
    path: &Path,
    request: &Request,
    is_expected: impl FnOnce(Pid) -> bool,
) -> io::Result<Asked> {
    let server = match UnixStream::connect(path) {
        Ok(server) => server,
        Err(error) => return not_connected(error),
    };
    // The kernel's answer is the process that began to listen.
    if !is_expected(rustix::net::sockopt::socket_peercred(&server)?.pid) {
        return Ok(Asked::Nobody);
    }
    server.set_nonblocking(true)?;
    let mut server = Peer::new(server.into());
    server.write_all(&line_of(request)?)?;
    if request.may_take_long() {
        wait_for_reply(path, &mut server)?;
    }
    let reply = read_line(&mut server, REPLY_BYTES_MAX)?;
    Ok(Asked::Reply(serde_json::from_slice(&reply)?))
}

/// Waits for the reply of a request that may take long, as long as the server at `path` answers
/// other requests.
fn wait_for_reply(path: &Path, server: &mut Peer) -> io::Result<()> {
    let mut silences = 0;
    while !server.has_replied()? {
        silences = if ask(path, &Request::Stat).is_ok() { 0 } else { silences + 1 };
        if silences == SILENCES_MOST {
            return Err(io::Error::new(ErrorKind::TimedOut, "it answers no request"));
        }
    }
    Ok(())
}

fn not_connected(error: io::Error) -> io::Result<Asked> {
    let is_other = error.raw_os_error() == Some(rustix::io::Errno::PROTOTYPE.raw_os_error());
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => Ok(Asked::Nobody),
        _ if is_other => Ok(Asked::Other),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::mpsc::channel;

    use parking_lot::Mutex;
    use proptest::prelude::*;

    use super::*;

    fn server(dir: &Path) -> (ControlServer, PathBuf) {
        let path = dir.join("control");
        let answer = |request, _: BorrowedFd<'_>| match request {
            Request::Stat => Reply::failed("stat"),
            Request::Set { settings } if settings.is_empty() => Reply::failed("empty"),
            Request::Set { .. } => Reply::Set,
            Request::Reset => Reply::failed("reset"),
            Request::Flush => Reply::failed("flush"),
            Request::Purge => Reply::Purged { freed_bytes: 4096, left_bytes: 0 },
            Request::Snapshot { file } => Reply::failed(file.display()),
            Request::List => Reply::List { devices: vec![Listed::default()] },
            Request::Reload { .. } => Reply::NotReloaded,
            Request::End { .. } => Reply::Ending,
        };
        (ControlServer::start(std::slice::from_ref(&path), answer).expect("it listens"), path)
    }

    #[test]
    fn requests_are_answered_until_the_server_is_dropped() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (server, path) = server(dir.path());
        let mode = std::fs::metadata(&path).expect("socket").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let stat = ask(&path, &Request::Stat).expect("an answer");
        assert_eq!(stat, Asked::Reply(Reply::failed("stat")));
        let settings = vec![("key".into(), "v".repeat(REQUEST_BYTES_MAX / 2))];
        let set = ask(&path, &Request::Set { settings }).expect("an answer");
        assert_eq!(set, Asked::Reply(Reply::Set));
        let purged = ask(&path, &Request::Purge).expect("an answer");
        let reply = Reply::Purged { freed_bytes: 4096, left_bytes: 0 };
        assert_eq!(purged, Asked::Reply(reply));
        let listed = ask(&path, &Request::List).expect("an answer");
        assert_eq!(listed, Asked::Reply(Reply::List { devices: vec![Listed::default()] }));
        drop(server);
        assert!(!path.exists());
        assert_eq!(ask(&path, &Request::Stat).expect("nobody"), Asked::Nobody);
    }

    /// A server that is abandoned ends during a request; an idle one is waited for.
    #[test]
    fn a_server_that_is_abandoned_leaves_its_request_and_removes_its_socket() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (idle, path) = server(dir.path());
        idle.abandon();
        assert!(!path.exists());
        let (begun, has_begun) = channel();
        let (end, ends) = channel::<()>();
        let ends = Mutex::new(ends);
        let answer = move |request, _: BorrowedFd<'_>| {
            if request == Request::Stat {
                return Reply::failed("stat");
            }
            begun.send(()).expect("the test waits");
            let _ = ends.lock().recv();
            Reply::Set
        };
        let server = ControlServer::start(std::slice::from_ref(&path), answer).expect("it listens");
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| ask(&path, &Request::Purge));
            has_begun.recv().expect("the request is under way");
            let stat = ask(&path, &Request::Stat).expect("an answer beside it");
            assert_eq!(stat, Asked::Reply(Reply::failed("stat")));
            server.abandon();
            assert!(!path.exists(), "while the request is under way");
            drop(end);
            let reply = asked.join().expect("no panic").expect("an answer");
            assert_eq!(reply, Asked::Reply(Reply::Set));
        });
    }

    /// Sends `request` without waiting for the reply.
    fn send(path: &Path, request: &Request) -> UnixStream {
        let mut client = UnixStream::connect(path).expect("connected");
        let mut line = serde_json::to_vec(request).expect("text");
        line.push(b'\n');
        client.write_all(&line).expect("sent");
        client
    }

    fn setting(value: &str) -> Request {
        Request::Set { settings: vec![("mode".into(), value.into())] }
    }

    /// Settings change beside another long request, in the order of the requests, without the
    /// requests of clients that have left.
    #[test]
    fn settings_change_in_order_without_those_of_clients_that_left() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("control");
        let (begun, has_begun) = channel();
        let (end, ends) = channel::<()>();
        let ends = Mutex::new(ends);
        let answer = move |request, _: BorrowedFd<'_>| {
            let waits = request == Request::Purge || request == setting("first");
            begun.send(request).expect("the test waits");
            if waits {
                let _ = ends.lock().recv();
            }
            Reply::Set
        };
        let server = ControlServer::start(std::slice::from_ref(&path), answer).expect("it listens");
        let _purge = send(&path, &Request::Purge);
        assert_eq!(has_begun.recv(), Ok(Request::Purge));
        let set = ask(&path, &setting("beside")).expect("an answer beside the purge");
        assert_eq!((set, has_begun.recv()), (Asked::Reply(Reply::Set), Ok(setting("beside"))));
        end.send(()).expect("the purge waits");

        let _first = send(&path, &setting("first"));
        assert_eq!(has_begun.recv(), Ok(setting("first")));
        drop(send(&path, &setting("given up")));
        let _last = send(&path, &setting("last"));
        // The accepting thread has queued them when it answers the next client.
        ask(&path, &Request::Stat).expect("an answer");
        assert_eq!(has_begun.recv(), Ok(Request::Stat));
        end.send(()).expect("the first one waits");
        assert_eq!(has_begun.recv(), Ok(setting("last")));
        drop(server);
        assert!(has_begun.recv().is_err(), "the one that was given up is not carried out");
    }

    #[test]
    fn a_socket_of_packets_is_another_kind_of_server() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("packets");
        let other = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("socket");
        bind(&other, &SocketAddrUnix::new(&path).expect("address")).expect("bound");
        listen(&other, 1).expect("listens");
        assert_eq!(ask(&path, &Request::Stat).expect("other"), Asked::Other);
    }

    #[test]
    fn a_long_request_is_refused_and_the_next_one_answered() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (_server, path) = server(dir.path());
        let mut client = UnixStream::connect(&path).expect("connected");
        client.write_all(&vec![b'['; 16 * REQUEST_BYTES_MAX]).expect("the server takes everything");
        client.shutdown(std::net::Shutdown::Write).expect("ended");
        let mut reply = String::new();
        client.read_to_string(&mut reply).expect("a reply");
        assert!(reply.contains("more than 65536 bytes"), "{reply}");
        // One that connects and leaves.
        drop(UnixStream::connect(&path).expect("connected"));
        let stat = ask(&path, &Request::Stat).expect("an answer");
        assert_eq!(stat, Asked::Reply(Reply::failed("stat")));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Any bytes are parsed or refused, and a parsed request survives another round.
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(request) = parse(&bytes) {
                let again = serde_json::to_vec(&request).expect("it is text");
                prop_assert_eq!(parse(&again), Ok(request));
            }
        }

        #[test]
        fn requests_with_a_byte_changed_never_panic(
            keys in prop::collection::vec(("\\PC{0,8}", "\\PC{0,8}"), 0..4), at: prop::sample::Index, byte: u8,
        ) {
            let mut line = serde_json::to_vec(&Request::Set { settings: keys }).expect("text");
            let at = at.index(line.len());
            line[at] = byte;
            drop(parse(&line));
        }

        /// Deep nesting ends in an error and not in an overflow of the stack.
        #[test]
        fn deep_nesting_is_refused(depth in 1_usize..REQUEST_BYTES_MAX) {
            prop_assert!(parse(&vec![b'['; depth]).is_err());
        }
    }

    /// Each client with a malformed request gets a reply, and the server still serves.
    #[test]
    fn hostile_clients_are_answered_and_harm_nobody() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (_server, path) = server(dir.path());
        let lines: [&[u8]; 7] = [
            b"\n",
            b"null\n",
            b"{\"request\":\"stat\"",
            b"{\"request\":\"stat\",\"more\":1}\n",
            b"{\"request\":\"set\",\"settings\":{}}\n",
            b"\xff\xfe\n",
            b"{\"request\":\"set\",\"settings\":[]}\n",
        ];
        for line in lines {
            let mut client = UnixStream::connect(&path).expect("connected");
            client.write_all(line).expect("written");
            client.shutdown(std::net::Shutdown::Write).expect("ended");
            let mut reply = Vec::new();
            client.read_to_end(&mut reply).expect("a reply");
            let reply: Reply = serde_json::from_slice(&reply).expect("JSON");
            assert!(matches!(reply, Reply::Failed { .. }), "{line:?}: {reply:?}");
        }
        let stat = ask(&path, &Request::Stat).expect("an answer");
        assert_eq!(stat, Asked::Reply(Reply::failed("stat")));
    }
}
