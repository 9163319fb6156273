//! Requests of this process to the supervisor, and the answers.
//!
//! Invariant: no connection and no descriptor outlives the call that made it.
//!
//! A message of the supervisor's socket is one JSON object in a packet. The few messages here have
//! at most one answer each, and are written by hand, without memory from the heap.

use std::ffi::CStr;
use std::fmt::Write;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use tidegate::log::cover::Cause;

use crate::covered;
use crate::state::process;
use crate::sys::signals::SignalsBlocked;
use crate::sys::{path, query};

/// Length of the longest message in bytes, and of the part of an answer that is read.
const MESSAGE_BYTES: usize = 128;
/// Interval of looks at a supervisor that does not answer.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// Enough for the part of `/proc/PID/stat` that has the state.
const STAT_BYTES: usize = 128;
/// Timeout for retiring the log if the supervisor cannot be reached.
const CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(60);

/// A message on the stack.
struct Message {
    bytes: [u8; MESSAGE_BYTES],
    len: usize,
}

impl Message {
    /// Returns a request, without the fields that are `None` or empty.
    fn new(request: &str, process: Option<u32>, cause: Option<Cause>, program: &str) -> Self {
        let mut message = Self { bytes: [0; MESSAGE_BYTES], len: 0 };
        // The longest request fits.
        let _ = write!(message, "{{\"request\":\"{request}\"");
        if let Some(process) = process {
            let _ = write!(message, ",\"process\":{process}");
        }
        if let Some(cause) = cause {
            let _ = write!(message, ",\"cause\":\"{}\"", cause.word());
        }
        if !program.is_empty() {
            let _ = write!(message, ",\"program\":\"{program}\"");
        }
        let _ = message.write_str("}");
        message
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Write for Message {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let space = self.bytes.get_mut(self.len..self.len + text.len()).ok_or(std::fmt::Error)?;
        space.copy_from_slice(text.as_bytes());
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

/// Announces this process to the supervisor, by a connection with the process's credentials. If
/// that fails, since the process has become another user or has no descriptor left, notes in the
/// log that the supervisor has to look for processes.
pub(crate) fn announce() {
    if connect().is_none()
        && let Some(log) = process::log()
    {
        log.processes().note_unannounced();
    }
}

/// Reports that this process syncs plain files, and the cause. Does not wait for an answer. The
/// report is lost if the supervisor cannot be reached.
pub(crate) fn tell_plain(cause: Cause) {
    let mut name = program_name();
    let len = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
    tell(&Message::new("plain", None, Some(cause), shown(&mut name[..len])));
}

/// Returns this program's name in the kernel, padded with zeros; all zeros if it is not known.
pub(crate) fn program_name() -> [u8; NAME_BYTES] {
    let mut name = [0; NAME_BYTES];
    if rustix::thread::gettid() == rustix::process::getpid() {
        // The main thread has the program's name.
        query::thread_name(&mut name);
        return name;
    }
    let file = path::Opened::open(libc::AT_FDCWD, c"/proc/self/comm", libc::O_RDONLY);
    let len = file.ok().and_then(|file| query::read(file.number(), &mut name).ok()).unwrap_or(0);
    // Without the end of the line.
    name[len.saturating_sub(1)..].fill(0);
    name
}

/// Reports, without waiting, the start of a program that is not watched since the user trusts it.
pub(crate) fn tell_trusted(program: &CStr) {
    tell(&Message::new(
        "plain",
        None,
        Some(Cause::Trusted),
        name_of(program, &mut [0; NAME_BYTES]),
    ));
}

/// Returns the name of a program's file, cut to the length of names in the kernel.
fn name_of<'n>(program: &CStr, name: &'n mut [u8; NAME_BYTES]) -> &'n str {
    let file = program.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let len = file.len().min(NAME_BYTES - 1);
    name[..len].copy_from_slice(&file[..len]);
    shown(&mut name[..len])
}

fn tell(message: &Message) {
    if let Some(socket) = connect() {
        let _ = rustix::net::send(&socket, message.as_bytes(), SendFlags::NOSIGNAL);
    }
}

/// Length in bytes of a program's name in the kernel, including the end of its line.
const NAME_BYTES: usize = tidegate::log::PROGRAM_BYTES;

/// Replaces characters that need an escape in JSON by `?`, and returns the name.
fn shown(name: &mut [u8]) -> &str {
    for byte in name.iter_mut() {
        if !matches!(byte, b' '..=b'~') || [b'"', b'\\'].contains(byte) {
            *byte = b'?';
        }
    }
    str::from_utf8(name).unwrap_or_default()
}

/// Makes all files leave the log, and keeps them plain until `process` and its descendants have
/// ended; or for good, if the supervisor is stopped. Returns when all files have left. The
/// supervisor reports the cause to the user with the name of `program`, or with that of the process
/// if the path is empty.
pub(crate) fn suspend(process: u32, cause: Option<Cause>, program: &CStr) {
    let mut name = [0; NAME_BYTES];
    let message = Message::new("suspend", Some(process), cause, name_of(program, &mut name));
    if ask(&message, b"\"suspended\"") {
        return;
    }
    // The supervisor cannot be reached, or is stopped, so that it cannot resume logging.
    if let Some(log) = process::log() {
        log.processes().suspend_for_good();
        covered::retire_all(log, CHECKPOINT_TIMEOUT);
    }
}

/// Makes all files leave the log, as [`suspend`] does, until the session ends.
pub(crate) fn suspend_session(cause: Cause) {
    const SESSION: u32 = 0;
    let _signals = SignalsBlocked::new();
    suspend(SESSION, Some(cause), c"");
}

/// Ends one [`suspend`] of `process`.
pub(crate) fn resume(process: u32) {
    // Without an answer, files stay plain.
    ask(&Message::new("resume", Some(process), None, ""), b"\"resumed\"");
}

/// Asks the supervisor to retire all records and to close its descriptors of their files. Returns
/// when the supervisor has done so or failed.
pub(crate) fn flush() {
    let Some(_holding) = process::Holding::new() else { return };
    ask(&Message::new("flush", None, None, ""), b"\"flushed\"");
}

/// Sends a message and waits for the answer, unless the supervisor is stopped. Returns whether the
/// answer contains `wanted`.
fn ask(message: &Message, wanted: &[u8]) -> bool {
    let Some(socket) = connect() else { return false };
    if sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(LOOK_INTERVAL)).is_err()
        || rustix::net::send(&socket, message.as_bytes(), SendFlags::NOSIGNAL).is_err()
    {
        return false;
    }
    let mut answer = [0_u8; MESSAGE_BYTES];
    loop {
        match rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            // The supervisor may wait for a disk, and goes on after that.
            Err(rustix::io::Errno::AGAIN) if !is_stopped(&socket) => {}
            Ok((_, 0)) | Err(_) => return false,
            Ok((len, _)) => {
                let answer = &answer[..len.min(MESSAGE_BYTES)];
                return answer.windows(wanted.len()).any(|part| part == wanted);
            }
        }
    }
}

/// Returns whether the process at the other end of `socket` is stopped, by a signal or a debugger.
/// Its answer may never come.
fn is_stopped(socket: &OwnedFd) -> bool {
    let Ok(peer) = sockopt::socket_peercred(socket) else { return false };
    let (mut link, mut stat) = ([0; path::LINK_BYTES], [0; STAT_BYTES]);
    let path = path::proc_stat(peer.pid.as_raw_pid(), &mut link);
    let file = path::Opened::open(libc::AT_FDCWD, path, libc::O_RDONLY);
    let len = file.ok().and_then(|file| query::read(file.number(), &mut stat).ok()).unwrap_or(0);
    state_of(&stat[..len]).is_some_and(|state| b"Tt".contains(&state))
}

/// Returns the letter of a process's state in its `/proc/PID/stat`, behind its name in parentheses.
fn state_of(stat: &[u8]) -> Option<u8> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end + 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_process_is_behind_its_name() {
        assert_eq!(state_of(b"17 (a) b) T 4 17 17"), Some(b'T'));
        assert_eq!(state_of(b"17 (a"), None);
        assert_eq!(state_of(b"17 (a)"), None);
    }

    #[test]
    fn a_process_that_runs_is_not_stopped() {
        let (one, _other) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        assert!(!is_stopped(&one));
    }

    #[test]
    fn the_longest_message_fits() {
        let name = "123456789012345";
        let message = Message::new("suspend", Some(u32::MAX), Some(Cause::PrivilegedProgram), name);
        let expected = format!(
            "{{\"request\":\"suspend\",\"process\":{},\"cause\":\"privileged_program\",\"program\":\"{name}\"}}",
            u32::MAX
        );
        assert_eq!(message.as_bytes(), expected.as_bytes());
        let message = Message::new("plain", None, Some(Cause::Synchronous), "");
        assert_eq!(message.as_bytes(), b"{\"request\":\"plain\",\"cause\":\"synchronous\"}");
    }

    #[test]
    fn a_program_is_named_by_its_file() {
        let name = |path| name_of(path, &mut [0; NAME_BYTES]).to_owned();
        assert_eq!(name(c"/usr/bin/a-name-of-18-bytes"), "a-name-of-18-by");
        assert_eq!([name(c"./x"), name(c"x"), name(c"")], ["x", "x", ""]);
    }

    #[test]
    fn names_are_shown_in_characters_that_mean_nothing_in_json() {
        let mut name = *b"a \"b\\\xff\nc";
        assert_eq!(shown(&mut name), "a ?b???c");
    }
}
