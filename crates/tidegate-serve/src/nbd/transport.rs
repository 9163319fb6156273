//! A connected socket, plain or inside TLS, without blocking.
//!
//! Invariant: every call returns at once, with [`ErrorKind::WouldBlock`] if it would have to wait.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use rustls::ServerConnection;

/// The byte stream to one client.
pub(super) struct Transport {
    socket: Socket,
    tls: Option<Box<ServerConnection>>,
}

impl Transport {
    /// Creates a plain connection over a nonblocking socket.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket: Socket(socket), tls: None }
    }

    /// Asks the system to hold about `bytes` to send at most. A refusal is harmless.
    pub(super) fn limit_send_buffer(&self, bytes: usize) {
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&self.socket.0, bytes);
    }

    /// Sends and receives through `tls` from now on, which holds back at most `buffer_bytes`.
    pub(super) fn start_tls(&mut self, mut tls: ServerConnection, buffer_bytes: usize) {
        tls.set_buffer_limit(Some(buffer_bytes));
        self.tls = Some(Box::new(tls));
    }

    /// Receives into `first`, then `second`, not both empty. Returns 0 if the client has closed.
    pub(super) fn receive(&mut self, first: &mut [u8], second: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            None if first.is_empty() => self.socket.read(second),
            None => {
                let mut parts = [IoSliceMut::new(first), IoSliceMut::new(second)];
                Ok(rustix::io::readv(&self.socket.0, &mut parts)?)
            }
            Some(tls) if first.is_empty() => receive_tls(tls, &mut self.socket, second),
            Some(tls) => receive_tls(tls, &mut self.socket, first),
        }
    }

    /// Sends the pieces in order. Returns the number of bytes taken.
    pub(super) fn send(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        match (&mut self.tls, pieces) {
            (None, [piece]) => self.socket.write(piece),
            (None, pieces) => {
                let mut control = SendAncillaryBuffer::default();
                let flags = SendFlags::NOSIGNAL;
                Ok(rustix::net::sendmsg(&self.socket.0, pieces, &mut control, flags)?)
            }
            (Some(tls), pieces) => send_tls(tls, &mut self.socket, pieces),
        }
    }

    /// Sends the bytes that TLS holds back. Returns true when none are left.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        match &mut self.tls {
            None => Ok(true),
            Some(tls) => flush_tls(tls, &mut self.socket),
        }
    }

    /// Tells a client in TLS that no more data comes.
    pub(super) fn say_goodbye(&mut self) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
            flush_tls(tls, &mut self.socket)?;
        }
        Ok(())
    }
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.0.as_fd()
    }
}

/// A nonblocking socket.
struct Socket(OwnedFd);

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let (received, _) = rustix::net::recv(&self.0, buf, RecvFlags::empty())?;
        Ok(received)
    }
}

impl Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.0, buf, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn receive_tls(
    tls: &mut ServerConnection,
    socket: &mut Socket,
    buf: &mut [u8],
) -> io::Result<usize> {
    loop {
        match tls.reader().read(buf) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // The end of the client's stream without TLS's own goodbye is an end, too.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
            other => return other,
        }
        if tls.read_tls(socket)? == 0 && tls.is_handshaking() {
            return Ok(0);
        }
        let processed = tls.process_new_packets();
        // The answer may be an alert that tells the client the error: it goes out first.
        let flushed = flush_tls(tls, socket);
        processed.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        flushed?;
    }
}

fn send_tls(
    tls: &mut ServerConnection,
    socket: &mut Socket,
    pieces: &[IoSlice<'_>],
) -> io::Result<usize> {
    let mut sent = 0;
    for piece in pieces {
        let taken = tls.writer().write(piece)?;
        sent += taken;
        if taken < piece.len() {
            break;
        }
    }
    flush_tls(tls, socket)?;
    if sent == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(sent) }
}

fn flush_tls(tls: &mut ServerConnection, socket: &mut Socket) -> io::Result<bool> {
    while tls.wants_write() {
        match tls.write_tls(socket) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            other => other?,
        };
    }
    Ok(true)
}
