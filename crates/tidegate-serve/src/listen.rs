//! Addresses, and the sockets that listen at them.
//!
//! Invariants:
//! 1. Only its owner can connect to a unix socket (mode 0600), from its first moment on.
//! 2. A server replaces the socket file of a dead server only, and removes only its own.
//! 3. A server locks a file beside its socket before it checks whether another server listens
//!    there, and until it listens itself. Of servers that start together, one gets the path.

use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs, UdpSocket};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tidegate::device::nbd::NbdAddress;
use tidegate::locking::{LockMode, lock};
use tidegate::opening::is_one_file;

use crate::ServeError;

/// Waiting connections that the system keeps for a listener.
const BACKLOG: i32 = 128;

/// Where a server listens: `unix:PATH`, `tcp:HOST:PORT` or `systemd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    /// A unix socket at a path.
    Unix(PathBuf),
    /// A TCP port; the system chooses one for port 0. IPv6 addresses stand in brackets.
    Tcp {
        /// Name or address to listen on.
        host: String,
        /// Port.
        port: u16,
    },
    /// The sockets that the process was started with (`LISTEN_FDS`), unix and TCP.
    Inherited,
}

impl FromStr for ListenAddress {
    type Err = ServeError;

    fn from_str(text: &str) -> Result<Self, ServeError> {
        let bad = || {
            ServeError::Address(format!(
                "cannot listen at {text:?}: expected unix:PATH or tcp:HOST:PORT, such as tcp:127.0.0.1:10809, or systemd"
            ))
        };
        if text == "systemd" {
            return Ok(Self::Inherited);
        }
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return SocketAddr::from_pathname(path).map(|_| Self::Unix(path.into())).map_err(|_| {
                ServeError::Address(format!(
                    "cannot listen at {text:?}: a path of at most 107 bytes without NUL is expected"
                ))
            });
        }
        let (host, port) =
            text.strip_prefix("tcp:").and_then(|rest| rest.rsplit_once(':')).ok_or_else(bad)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        // An address with colons needs its brackets: without them its last group would be taken for
        // the port.
        if bare.is_empty() || (bare.contains(':') && bare.len() == host.len()) {
            return Err(bad());
        }
        Ok(Self::Tcp { host: bare.to_owned(), port: port.parse().map_err(|_| bad())? })
    }
}

impl ListenAddress {
    /// Returns whether no server can listen at both addresses. Compares names of hosts as texts.
    pub fn collides_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Unix(one), Self::Unix(other)) => is_one_file(one, other),
            (Self::Tcp { host, port }, Self::Tcp { host: other_host, port: other_port }) => {
                // The system chooses another port each time.
                *port != 0 && port == other_port && share_an_ip(host, other_host)
            }
            _ => self == other,
        }
    }

    /// Returns whether clients of `server` reach this address. Compares names of hosts as texts.
    pub fn is_reached_at(&self, server: &NbdAddress) -> bool {
        match (self, server) {
            (Self::Unix(path), NbdAddress::Unix(server)) => is_one_file(path, server),
            (Self::Tcp { host, port }, NbdAddress::Tcp { host: server, port: server_port }) => {
                port == server_port && is_host_reached_at(host, server)
            }
            _ => false,
        }
    }
}

/// Returns whether a connection to `server` reaches a listener at `host` of this machine.
fn is_host_reached_at(host: &str, server: &str) -> bool {
    if host.eq_ignore_ascii_case(server) {
        return true;
    }
    let (Some(host), Some(server)) = (ip_of(host), ip_of(server)) else { return false };
    // A connection to the unspecified address goes to this machine.
    let takes = host.is_unspecified() && (host.is_ipv6() || server.is_ipv4());
    host == server
        || (takes && is_own_ip(server))
        || (server.is_unspecified() && (host.is_loopback() || host.is_unspecified()))
}

/// Returns the IP address in `host`, or of the name `localhost`.
fn ip_of(host: &str) -> Option<IpAddr> {
    if host.eq_ignore_ascii_case("localhost") {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    Some(host.parse::<IpAddr>().ok()?.to_canonical())
}

/// Returns whether `ip` is an address of this machine: the system binds sockets to those only.
fn is_own_ip(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

/// Returns whether listeners at both hosts would get connections to one IP address.
fn share_an_ip(one: &str, other: &str) -> bool {
    let (Some(one_ip), Some(other_ip)) = (ip_of(one), ip_of(other)) else {
        return one.eq_ignore_ascii_case(other);
    };
    // `::` takes connections to IPv4 addresses, too.
    let takes = |all: IpAddr, ip: IpAddr| all.is_unspecified() && (all.is_ipv6() || ip.is_ipv4());
    one_ip == other_ip || takes(one_ip, other_ip) || takes(other_ip, one_ip)
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Inherited => f.write_str("systemd"),
        }
    }
}

/// A listening socket.
pub(crate) struct Listener {
    socket: OwnedFd,
    address: ListenAddress,
    /// The device and inode of the file of the server's own unix socket.
    file: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `address`.
    ///
    /// # Errors
    /// [`ServeError::InUse`], [`ServeError::Io`], or [`ServeError::Address`] if the address does
    /// not stand for exactly one socket.
    pub(crate) fn bind(address: &ListenAddress) -> Result<Self, ServeError> {
        let mut listeners = Self::bind_all(std::slice::from_ref(address))?;
        match (listeners.pop(), listeners.len()) {
            (Some(one), 0) => Ok(one),
            (_, more) => Err(ServeError::Address(format!(
                "cannot listen at systemd: {} sockets were passed, 1 is expected",
                more + 1
            ))),
        }
    }

    /// Listens at all of `addresses`.
    ///
    /// # Errors
    /// [`ServeError::InUse`], [`ServeError::Io`], or [`ServeError::Address`] without passed
    /// sockets.
    pub(crate) fn bind_all(addresses: &[ListenAddress]) -> Result<Vec<Self>, ServeError> {
        let mut listeners = Vec::new();
        for address in addresses {
            match address {
                ListenAddress::Unix(path) => listeners.push(Self::bind_unix(path)?),
                ListenAddress::Tcp { host, port } => listeners.push(Self::bind_tcp(host, *port)?),
                ListenAddress::Inherited => listeners.extend(inherited()?),
            }
        }
        Ok(listeners)
    }

    fn bind_unix(path: &Path) -> Result<Self, ServeError> {
        let failed = |error: Errno| {
            ServeError::io(&format!("cannot listen at unix:{}", path.display()), error)
        };
        let _claim = Claim::of(path)?;
        remove_dead_socket(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(failed)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).map_err(failed)?).map_err(failed)?;
        // No client can connect before `listen`, and by then the mode is set.
        rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        let file = file_at(path).ok();
        rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
        let address = ListenAddress::Unix(path.to_owned());
        Ok(Self { socket, address, file })
    }

    fn bind_tcp(host: &str, port: u16) -> Result<Self, ServeError> {
        let what = format!("cannot listen at tcp:{host}:{port}");
        let failed = |error| ServeError::io(&what, error);
        let found: Vec<_> = (host, port).to_socket_addrs().map_err(failed)?.collect();
        let socket = TcpListener::bind(&found[..]).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let port = socket.local_addr().map_err(failed)?.port();
        let address = ListenAddress::Tcp { host: host.to_owned(), port };
        Ok(Self { socket: socket.into(), address, file: None })
    }

    /// Returns the address, with the port that the system chose.
    pub(crate) fn address(&self) -> &ListenAddress {
        &self.address
    }

    /// Returns the address with the IP address of the socket in the place of a name.
    pub(crate) fn numeric_address(&self) -> ListenAddress {
        let numeric = |local: std::net::SocketAddr| ListenAddress::Tcp {
            host: local.ip().to_string(),
            port: local.port(),
        };
        self.ip_address().map_or_else(|| self.address.clone(), numeric)
    }

    /// Returns whether other machines may reach the socket: its IP address is no loopback address.
    pub(crate) fn is_open_to_network(&self) -> bool {
        self.ip_address().is_some_and(|local| !local.ip().to_canonical().is_loopback())
    }

    /// Returns the IP address and port of a TCP socket.
    fn ip_address(&self) -> Option<std::net::SocketAddr> {
        rustix::net::getsockname(&self.socket).ok()?.try_into().ok()
    }

    /// Accepts a waiting connection, makes it nonblocking, and returns it with the client's name.
    pub(crate) fn accept(&self) -> rustix::io::Result<(OwnedFd, String)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, peer) = rustix::net::acceptfrom_with(&self.socket, flags)?;
        let ListenAddress::Tcp { .. } = self.address else { return Ok((socket, "unix".into())) };
        rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
        let peer = peer.and_then(|peer| std::net::SocketAddr::try_from(peer).ok());
        Ok((socket, peer.map_or_else(|| "tcp".into(), |peer| format!("tcp:{peer}"))))
    }

    /// Removes the file of the unix socket, so that no client connects any more. Leaves the file if
    /// another server has replaced it.
    pub(crate) fn remove_file(&self) {
        if let (ListenAddress::Unix(path), Some(ours)) = (&self.address, self.file)
            && file_at(path).is_ok_and(|found| found == ours)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.remove_file();
    }
}

/// Returns the sockets that the process was started with. Their files belong to another process.
///
/// # Errors
/// No socket was passed, or one is neither a unix nor a TCP socket that can listen.
fn inherited() -> Result<Vec<Listener>, ServeError> {
    let mut passed = listenfd::ListenFd::from_env();
    if passed.len() == 0 {
        return Err(ServeError::Address(
            "cannot listen at systemd: no sockets were passed (LISTEN_FDS); start the server by \
             its .socket unit, or listen at unix:PATH"
                .into(),
        ));
    }
    let what = "cannot listen at a socket that was passed";
    let failed = |error: std::io::Error| ServeError::io(what, error);
    (0..passed.len()).map(|at| inherit(&mut passed, at).map_err(failed)).collect()
}

fn inherit(passed: &mut listenfd::ListenFd, at: usize) -> std::io::Result<Listener> {
    let taken = || std::io::Error::other("it was taken before");
    if let Ok(unix) = passed.take_unix_listener(at) {
        let unix = listening(unix.ok_or_else(taken)?)?;
        unix.set_nonblocking(true)?;
        let path = unix.local_addr()?.as_pathname().map(Path::to_path_buf);
        let address = path.map_or(ListenAddress::Inherited, ListenAddress::Unix);
        return Ok(Listener { socket: unix.into(), address, file: None });
    }
    let tcp = listening(passed.take_tcp_listener(at)?.ok_or_else(taken)?)?;
    tcp.set_nonblocking(true)?;
    let local = tcp.local_addr()?;
    let address = ListenAddress::Tcp { host: local.ip().to_string(), port: local.port() };
    Ok(Listener { socket: tcp.into(), address, file: None })
}

/// Refuses a socket that accepts no connections. `LISTEN_FDS` may count more descriptors than were
/// passed: their numbers are sockets of this process then, which stay open.
fn listening<S: AsFd + IntoRawFd>(socket: S) -> std::io::Result<S> {
    if rustix::net::sockopt::socket_acceptconn(&socket).is_ok_and(|accepts| accepts) {
        return Ok(socket);
    }
    let fd = socket.into_raw_fd();
    Err(std::io::Error::other(format!(
        "descriptor {fd} accepts no connections; LISTEN_FDS may count more than was passed"
    )))
}

/// The right to begin to listen at a path: the lock of a file beside it, which exists only
/// meanwhile, and is always empty.
struct Claim {
    path: PathBuf,
    _locked: File,
}

impl Claim {
    /// Takes the lock for `socket`.
    ///
    /// # Errors
    /// [`ServeError::InUse`] if another server holds the lock; [`ServeError::Io`].
    fn of(socket: &Path) -> Result<Self, ServeError> {
        let mut name = socket.as_os_str().to_owned();
        name.push(".tidegate-lock");
        let path = PathBuf::from(name);
        let failed = |error: std::io::Error| {
            ServeError::io(&format!("cannot lock {}", path.display()), error)
        };
        loop {
            let mut options = File::options();
            options.write(true).create(true).truncate(false).mode(0o600);
            // A FIFO at the path is refused at once.
            let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let flags = flags.bits().cast_signed();
            let locked = options.custom_flags(flags).open(&path).map_err(failed)?;
            match lock(&locked, LockMode::Exclusive) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(in_use(socket)),
                locked => locked.map_err(failed)?,
            }
            let ours = locked.metadata().map_err(failed)?;
            if ours.len() > 0 {
                let what = std::io::Error::other("a file with content is there");
                return Err(failed(what));
            }
            // The previous holder may have removed the file after this server opened it.
            if file_at(&path).is_ok_and(|there| there == (ours.dev(), ours.ino())) {
                return Ok(Self { path, _locked: locked });
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // The file is still locked: a server that has it open gets the lock and finds it gone.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn in_use(socket: &Path) -> ServeError {
    ServeError::InUse(format!(
        "cannot listen at unix:{}: another server listens there; stop it or choose another path",
        socket.display()
    ))
}

/// Returns the device and inode of the file at `path`.
fn file_at(path: &Path) -> std::io::Result<(u64, u64)> {
    let found = path.symlink_metadata()?;
    Ok((found.dev(), found.ino()))
}

/// Removes the socket at `path` if no process listens at it, or begins to.
///
/// # Errors
/// As for [`Listener::bind`], if a process does.
pub(crate) fn remove_if_dead(path: &Path) -> Result<(), ServeError> {
    // Between its bind and its listen, a server has the claim.
    let _claim = Claim::of(path)?;
    remove_dead_socket(path)
}

/// Removes the file of a socket if no process listens at it.
fn remove_dead_socket(path: &Path) -> Result<(), ServeError> {
    let Ok(found) = std::fs::symlink_metadata(path) else { return Ok(()) };
    let path_name = path.display();
    if !found.file_type().is_socket() {
        return Err(ServeError::InUse(format!(
            "cannot listen at unix:{path_name}: a file that is no socket is there; choose another path"
        )));
    }
    match connect_at_once(path) {
        Err(Errno::CONNREFUSED) => {
            let failed = |error| {
                ServeError::io(&format!("cannot remove the unused socket {path_name}"), error)
            };
            std::fs::remove_file(path).map_err(failed)
        }
        _ => Err(in_use(path)),
    }
}

/// Connects to the socket at `path`. Fails with [`Errno::AGAIN`] if its server accepts too slowly.
fn connect_at_once(path: &Path) -> rustix::io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn clients_of_a_server_reach_its_addresses_and_no_others() {
        let tcp = |host: &str| NbdAddress::Tcp { host: host.into(), port: 9 };
        let unix = |path: &str| NbdAddress::Unix(path.into());
        for (address, server, is_reached) in [
            ("unix:/nowhere/s", unix("/nowhere/s"), true),
            ("unix:/nowhere/s", unix("/nowhere/t"), false),
            ("unix:/nowhere/s", tcp("localhost"), false),
            ("tcp:Storage:9", tcp("storage"), true),
            ("tcp:storage:8", tcp("storage"), false),
            ("tcp:127.0.0.1:9", tcp("localhost"), true),
            ("tcp:127.0.0.1:9", tcp("::ffff:127.0.0.1"), true),
            ("tcp:127.0.0.1:9", tcp("0.0.0.0"), true),
            ("tcp:0.0.0.0:9", tcp("127.0.0.2"), true),
            ("tcp:[::]:9", tcp("127.0.0.2"), true),
            // An address of another machine, though the server listens at all of its own.
            ("tcp:0.0.0.0:9", tcp("192.0.2.1"), false),
            ("tcp:127.0.0.1:9", tcp("192.0.2.1"), false),
        ] {
            let address: ListenAddress = address.parse().expect("an address");
            assert_eq!(address.is_reached_at(&server), is_reached, "{address} {server}");
        }
    }

    #[test]
    fn addresses_are_read_and_written() {
        for text in
            ["unix:/run/a.sock", "unix:relative", "tcp:localhost:10809", "tcp:[::1]:0", "systemd"]
        {
            let address: ListenAddress = text.parse().expect(text);
            assert_eq!(address.to_string(), text);
        }
        for text in
            ["", "unix:", "tcp:", "tcp:host", "tcp::1", "tcp:::1:80", "tcp:h:70000", "/run/a.sock"]
        {
            let error = text.parse::<ListenAddress>().expect_err(text).to_string();
            assert!(error.contains("expected unix:PATH or tcp:HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_refused() {
        let long = format!("unix:/{}", "x".repeat(106));
        assert!(long.parse::<ListenAddress>().is_ok());
        for text in [format!("{long}x"), "unix:a\0b".to_owned()] {
            let error = text.parse::<ListenAddress>().expect_err(&text).to_string();
            assert!(error.contains("at most 107 bytes"), "{error}");
        }
    }

    #[test]
    fn addresses_collide_by_their_meaning() {
        let collides = |one: &str, other: &str| {
            let address = |text: &str| text.parse::<ListenAddress>().expect(text);
            let collides = address(one).collides_with(&address(other));
            assert_eq!(address(other).collides_with(&address(one)), collides, "{one} {other}");
            collides
        };
        for (one, other) in [
            ("tcp:0.0.0.0:1", "tcp:127.0.0.1:1"),
            ("tcp:[::]:1", "tcp:127.0.0.1:1"),
            ("tcp:[::]:1", "tcp:[::1]:1"),
            ("tcp:[::ffff:0.0.0.0]:1", "tcp:10.0.0.1:1"),
            ("tcp:[::ffff:127.0.0.1]:1", "tcp:127.0.0.1:1"),
            ("tcp:[0:0::1]:1", "tcp:[::1]:1"),
            ("tcp:Host:1", "tcp:host:1"),
            ("unix:/nowhere/s", "unix:/nowhere/./s"),
            ("systemd", "systemd"),
        ] {
            assert!(collides(one, other), "{one} {other}");
        }
        for (one, other) in [
            ("tcp:127.0.0.1:0", "tcp:127.0.0.1:0"),
            ("tcp:127.0.0.1:1", "tcp:127.0.0.1:2"),
            ("tcp:127.0.0.1:1", "tcp:127.0.0.2:1"),
            ("tcp:0.0.0.0:1", "tcp:[::1]:1"),
            ("unix:/nowhere/s", "unix:/nowhere/t"),
            ("unix:systemd", "systemd"),
        ] {
            assert!(!collides(one, other), "{one} {other}");
        }
    }

    #[test]
    fn a_socket_is_private_replaced_when_dead_and_removed() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("s");
        let address = ListenAddress::Unix(path.clone());
        drop(std::os::unix::net::UnixListener::bind(&path).expect("dead socket"));
        let live = Listener::bind(&address).expect("replaces the unused one");
        let mode = std::fs::metadata(&path).expect("socket file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let refused = Listener::bind(&address).err().expect("refuses the live one");
        assert!(matches!(&refused, ServeError::InUse(text) if text.contains("another server")));
        drop(live);
        assert!(!path.exists());
        std::fs::write(&path, "precious").expect("write");
        let refused = Listener::bind(&address).err().expect("refuses a file");
        assert!(refused.to_string().contains("no socket"), "{refused}");
    }

    #[test]
    fn of_servers_that_start_at_one_unused_socket_one_wins() {
        const SERVERS: usize = 8;
        let dir = tempfile::tempdir().expect("tempdir");
        for round in 0..50 {
            let path = dir.path().join(round.to_string());
            drop(std::os::unix::net::UnixListener::bind(&path).expect("dead socket"));
            let (address, start) = (ListenAddress::Unix(path.clone()), Barrier::new(SERVERS));
            let bind = || {
                start.wait();
                Listener::bind(&address)
            };
            let bound: Vec<_> = std::thread::scope(|scope| {
                let servers: Vec<_> = (0..SERVERS).map(|_| scope.spawn(bind)).collect();
                servers.into_iter().map(|server| server.join().expect("no panic")).collect()
            });
            let refused = bound.iter().filter(|it| matches!(it, Err(ServeError::InUse(_)))).count();
            assert_eq!(refused, SERVERS - 1);
            UnixStream::connect(&path).expect("the one that won listens");
            drop(bound);
            assert_eq!(std::fs::read_dir(dir.path()).expect("readable").count(), 0);
        }
    }

    #[test]
    fn another_servers_socket_is_left_alone() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("s");
        let first = Listener::bind(&ListenAddress::Unix(path.clone())).expect("bind");
        std::fs::rename(&path, dir.path().join("moved")).expect("rename");
        let _second = Listener::bind(&ListenAddress::Unix(path.clone())).expect("bind");
        drop(first);
        assert!(path.exists());
    }
}
