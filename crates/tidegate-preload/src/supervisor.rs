//! What this process says to the supervisor, and hears from it.
//!
//! Invariant: no connection outlives the call that made it, and no descriptor of it is left in the program.
//!
//! Messages are those of the supervisor's socket: one JSON object in a packet. There are three here, and two answers, so they
//! are written by hand, without memory from the heap.
#![allow(unsafe_code)] // lends the program's descriptors

use std::ffi::c_int;
use std::fmt::Write;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use tidegate::log::FileRef;

use crate::process;
use crate::raw::Errno;

/// Bytes of the longest message that is sent, and of what is looked at of an answer.
const MESSAGE_BYTES: usize = 96;

/// A message on the stack.
struct Message {
    bytes: [u8; MESSAGE_BYTES],
    len: usize,
}

impl Message {
    fn about(request: &str, file: FileRef) -> Self {
        let mut message = Self { bytes: [0; MESSAGE_BYTES], len: 0 };
        let word = file.to_word();
        // It fits: the longest request and the longest number have less than that.
        let _ = write!(message, "{{\"request\":\"{request}\",\"file\":{word}}}");
        message
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Write for Message {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = self.bytes.get_mut(self.len..self.len + text.len()).ok_or(std::fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}

fn connect() -> Option<OwnedFd> {
    let address = SocketAddrUnix::new(process::socket()?).ok()?;
    let (family, kind, flags) = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(family, kind, flags, None).ok()?;
    rustix::net::connect(&socket, &address).ok()?;
    Some(socket)
}

/// Tells that there is this process: a connection, whose credentials say who it is, and nothing more. A supervisor that is
/// not there is missed by the next append that needs it; one that cannot be reached, since this process has become another user
/// or has no descriptor left, is told to look.
pub(crate) fn announce() {
    if connect().is_none()
        && let Some(log) = process::log()
    {
        log.note_unannounced();
    }
}

/// Asks for a write lease on the open file of `fd`.
pub(crate) fn lease(file: FileRef, fd: c_int) -> Answer {
    ask(&Message::about("absorb", file), Some(fd), b"\"absorbed\"")
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    /// It cannot be done now, for this reason.
    Refused(Errno),
    /// Nobody has answered.
    None,
}

/// Has the kernel told of all absorbed writes to the file. `own` is a descriptor of its leased description, if this process has
/// that: a new supervisor may not.
pub(crate) fn settle(file: FileRef, own: Option<c_int>) -> Answer {
    ask(&Message::about("settle", file), own, b"\"settled\"")
}

/// The file is not used by this process any more: the kernel may be told when there is time.
pub(crate) fn closed(file: FileRef) {
    let Some(socket) = connect() else { return };
    let message = Message::about("closed", file);
    let _ = rustix::net::send(&socket, message.as_bytes(), SendFlags::NOSIGNAL);
}

/// Sends a message, with a descriptor if there is one, and waits: it is done if the answer has `wanted` in it.
fn ask(message: &Message, fd: Option<c_int>, wanted: &[u8]) -> Answer {
    let Some(socket) = connect() else { return Answer::None };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    // SAFETY: the program's own descriptor, for the time of this call.
    let lent = fd.map(|fd| [unsafe { BorrowedFd::borrow_raw(fd) }]);
    if let Some(lent) = &lent
        && !ancillary.push(SendAncillaryMessage::ScmRights(lent))
    {
        return Answer::None;
    }
    let parts = [IoSlice::new(message.as_bytes())];
    if rustix::net::sendmsg(&socket, &parts, &mut ancillary, SendFlags::NOSIGNAL).is_err() {
        return Answer::None;
    }
    let mut answer = [0_u8; MESSAGE_BYTES];
    loop {
        match rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            Ok((_, 0)) | Err(_) => return Answer::None,
            Ok((_, len)) => return judge(&answer[..len.min(MESSAGE_BYTES)], wanted),
        }
    }
}

fn judge(answer: &[u8], wanted: &[u8]) -> Answer {
    let has = |text: &[u8]| answer.windows(text.len()).any(|part| part == text);
    if has(wanted) {
        return Answer::Done;
    }
    // What a program may get from a sync.
    let known = [(&b"(os error 28)"[..], libc::ENOSPC), (b"(os error 122)", libc::EDQUOT)];
    let known = known.into_iter().chain([(&b"(os error 30)"[..], libc::EROFS)]);
    let found = known.into_iter().find(|(text, _)| has(text));
    Answer::Refused(found.map_or(libc::EIO, |(_, errno)| errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_message_fits() {
        let message = Message::about("absorb", FileRef::from_word(u64::MAX));
        let expected = format!("{{\"request\":\"absorb\",\"file\":{}}}", u64::MAX);
        assert_eq!(message.as_bytes(), expected.as_bytes());
    }
}
