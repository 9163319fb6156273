//! Connects to a server: a connected socket and the handshake, within a time limit.

#![expect(
    clippy::disallowed_methods,
    reason = "a server that does not answer shows by the clock only"
)]

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::time::Timespec;

use super::error::NbdError;
use super::export::NbdExport;
use super::handshake::{Handshake, Step};
use super::protocol::{Cursor, Request, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC, cmd};
use super::watched::Part;

/// Time limit of a connection and its handshake.
pub(super) const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// More than the largest message of a handshake.
const INPUT_BYTES: usize = 16 << 10;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdAddress {
    /// A unix socket at a path.
    Unix(PathBuf),
    /// A TCP port.
    Tcp {
        /// Name or address; an IPv6 address without brackets.
        host: String,
        /// Port.
        port: u16,
    },
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// The sockets of an address. The host's name is looked up once, because a lookup has no time
/// limit.
pub(super) enum Endpoints {
    Unix(PathBuf),
    Tcp(Vec<SocketAddr>),
}

impl Endpoints {
    /// Looks up `address`.
    ///
    /// # Errors
    /// Fails if the host has no address.
    pub(super) fn of(address: &NbdAddress) -> Result<Self, NbdError> {
        let (host, port) = match address {
            NbdAddress::Unix(path) => return Ok(Self::Unix(path.clone())),
            NbdAddress::Tcp { host, port } => (host, port),
        };
        let failed = |source| NbdError::Io { action: "look up the host", source };
        let found: Vec<_> = (host.as_str(), *port).to_socket_addrs().map_err(failed)?.collect();
        if found.is_empty() {
            return Err(failed(io::ErrorKind::NotFound.into()));
        }
        Ok(Self::Tcp(found))
    }

    /// Connects to the first socket that answers, and opens the export called `name`, within
    /// [`DIAL_TIMEOUT`] and not after `until`. TCP gives up an unanswered connection after
    /// `give_up_after`. Returns the socket, and the export as the server describes it.
    ///
    /// # Errors
    /// Fails with the error of the last socket, if none can be connected or the handshake fails.
    pub(super) fn dial(
        &self,
        name: &str,
        until: Option<Instant>,
        give_up_after: Duration,
    ) -> Result<(OwnedFd, NbdExport), NbdError> {
        let limit = Instant::now() + DIAL_TIMEOUT;
        let until = until.map_or(limit, |until| until.min(limit));
        let socket = match self {
            Self::Unix(path) => connect_unix(path)?,
            Self::Tcp(addresses) => connect_first(addresses, until, give_up_after)?,
        };
        let export = shake_hands(&socket, name, until)?;
        Ok((socket, export))
    }
}

fn connect_unix(path: &std::path::Path) -> Result<OwnedFd, NbdError> {
    let failed = NbdError::os("connect to the unix socket");
    let address = SocketAddrUnix::new(path).map_err(&failed)?;
    let socket = new_socket(AddressFamily::UNIX)?;
    rustix::net::connect(&socket, &address).map_err(&failed)?;
    Ok(socket)
}

fn connect_first(
    addresses: &[SocketAddr],
    until: Instant,
    give_up_after: Duration,
) -> Result<OwnedFd, NbdError> {
    let mut failure = NbdError::Silent(DIAL_TIMEOUT);
    for address in addresses {
        match connect_tcp(*address, until, give_up_after) {
            Ok(socket) => return Ok(socket),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn connect_tcp(
    address: SocketAddr,
    until: Instant,
    give_up_after: Duration,
) -> Result<OwnedFd, NbdError> {
    let failed = NbdError::os("connect by TCP");
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = new_socket(family)?;
    match rustix::net::connect(&socket, &address) {
        Err(Errno::INPROGRESS) => {
            wait(&socket, PollFlags::OUT, until)?;
            sockopt::socket_error(&socket).map_err(&failed)?.map_err(&failed)?;
        }
        connected => connected.map_err(&failed)?,
    }
    sockopt::set_tcp_nodelay(&socket, true).map_err(&failed)?;
    sockopt::set_socket_keepalive(&socket, true).map_err(&failed)?;
    let limit_ms = u32::try_from(give_up_after.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(&socket, limit_ms).map_err(&failed)?;
    Ok(socket)
}

fn new_socket(family: AddressFamily) -> Result<OwnedFd, NbdError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
        .map_err(NbdError::os("make a socket"))
}

fn shake_hands(socket: &OwnedFd, name: &str, until: Instant) -> Result<NbdExport, NbdError> {
    let mut handshake = Handshake::new(name);
    let (mut input, mut output) = (Vec::new(), Vec::new());
    loop {
        let (used, step) = handshake.advance(&input, &mut output)?;
        input.drain(..used);
        send_all(socket, &mut output, until)?;
        match step {
            Step::Again => {}
            Step::NeedInput => receive_more(socket, &mut input, until)?,
            Step::Done if input.is_empty() => return Ok(handshake.into_export()),
            Step::Done => {
                let message = "bytes that answer no request".into();
                return Err(NbdError::Protocol(message));
            }
        }
    }
}

/// Reads `ranges` of the export over a new connection, each by requests of at most
/// `request_bytes_max` bytes, within [`DIAL_TIMEOUT`] and not after `until`.
///
/// # Errors
/// Fails if the server does not answer in time, answers with an error, or breaks the protocol.
pub(super) fn read_ranges(
    socket: &OwnedFd,
    ranges: Vec<Range<u64>>,
    request_bytes_max: u32,
    until: Option<Instant>,
) -> Result<Vec<Part>, NbdError> {
    let limit = Instant::now() + DIAL_TIMEOUT;
    let until = until.map_or(limit, |until| until.min(limit));
    let mut cookie = 0;
    let mut read = |range: Range<u64>| {
        let mut bytes = Vec::new();
        let (start, mut offset) = (range.start, range.start);
        while offset < range.end {
            let left = u32::try_from(range.end - offset).unwrap_or(u32::MAX);
            let len = left.min(request_bytes_max);
            cookie += 1;
            let request = Request { flags: 0, command: cmd::READ, cookie, offset, len };
            bytes.append(&mut read_one(socket, &request, until)?);
            offset += u64::from(len);
        }
        Ok((start, bytes))
    };
    ranges.into_iter().map(&mut read).collect()
}

/// Sends the read `request`, while no other is under way, and returns its bytes.
fn read_one(socket: &OwnedFd, request: &Request, until: Instant) -> Result<Vec<u8>, NbdError> {
    send_all(socket, &mut request.encode().to_vec(), until)?;
    let (mut input, len) = (Vec::new(), request.len as usize);
    while input.len() < SIMPLE_REPLY_BYTES {
        receive_more(socket, &mut input, until)?;
    }
    let mut cursor = Cursor(&input);
    let (magic, error, cookie) = (cursor.u32(), cursor.u32(), cursor.u64());
    if (magic, cookie) != (Some(SIMPLE_REPLY_MAGIC), Some(request.cookie)) {
        return Err(NbdError::Protocol("a reply that answers no request".into()));
    }
    if error != Some(0) {
        let offset = request.offset;
        return Err(NbdError::Unfit(format!(
            "the server cannot read the {len} bytes at offset {offset}, by which the export is \
             told from others"
        )));
    }
    while input.len() < SIMPLE_REPLY_BYTES + len {
        receive_more(socket, &mut input, until)?;
    }
    if input.len() > SIMPLE_REPLY_BYTES + len {
        return Err(NbdError::Protocol("bytes that answer no request".into()));
    }
    Ok(input.split_off(SIMPLE_REPLY_BYTES))
}

fn send_all(socket: &OwnedFd, output: &mut Vec<u8>, until: Instant) -> Result<(), NbdError> {
    while !output.is_empty() {
        match rustix::net::send(socket, output, SendFlags::NOSIGNAL) {
            Ok(sent) => drop(output.drain(..sent)),
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, until)?,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(NbdError::os("send to the server")(errno)),
        }
    }
    Ok(())
}

fn receive_more(socket: &OwnedFd, input: &mut Vec<u8>, until: Instant) -> Result<(), NbdError> {
    let mut bytes = [0; INPUT_BYTES];
    loop {
        match rustix::net::recv(socket, &mut bytes[..], RecvFlags::empty()) {
            Ok((0, _)) => return Err(NbdError::Closed),
            Ok((received, _)) => {
                input.extend_from_slice(&bytes[..received]);
                return Ok(());
            }
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN, until)?,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(NbdError::os("receive from the server")(errno)),
        }
    }
}

/// Waits for `events` of the socket, until `until` at the latest.
fn wait(socket: &OwnedFd, events: PollFlags, until: Instant) -> Result<(), NbdError> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(NbdError::Silent(DIAL_TIMEOUT));
    }
    let left = Timespec::try_from(left).ok();
    match poll(&mut [PollFd::new(socket, events)], left.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(NbdError::os("wait for the server")(errno)),
    }
}
