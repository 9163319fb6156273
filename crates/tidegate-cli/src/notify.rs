//! Tells the service manager the state of a server, by the protocol of `sd_notify(3)`.
//!
//! The server feeds no watchdog: a server that waits for a slow backing must not be killed, and a
//! restart cures no other state.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use crate::log::{Level, say};

/// Longest wait for a service manager that takes no messages.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Sends `state`, assignments a line each, if a service manager listens at `NOTIFY_SOCKET`. A
/// failure is logged, and the server goes on.
pub(crate) fn notify(state: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|it| !it.is_empty()) else {
        return;
    };
    if let Err(error) = send(&socket, state) {
        say(Level::Warning, format_args!("the service manager cannot be told {state:?}: {error}"));
    }
}

fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(TIMEOUT))?;
    socket.send_to_addr(state.as_bytes(), &address)?;
    Ok(())
}
