//! A server in the background: it leaves the session of the process that started it, and then that
//! process's output.

use std::fs::File;
use std::io;

use rustix::process::setsid;
use rustix::stdio::{dup2_stderr, dup2_stdout};

use crate::log::{Level, say};

/// The kernel's log, which is there from the boot on.
const LOG: &str = "/dev/kmsg";

/// Leaves the session: no signal of its terminal reaches the server.
pub(crate) fn leave_session() {
    // This fails only for the leader of a group, which a started program is not.
    let _ = setsid();
}

/// Leaves the output that the server was started with, whose reader may wait for its end. The log
/// goes on in the kernel's.
pub(crate) fn leave_output() {
    let left = write_to("/dev/null").and_then(|nothing| {
        dup2_stdout(&nothing)?;
        Ok(dup2_stderr(write_to(LOG).unwrap_or(nothing))?)
    });
    if let Err(error) = left {
        say(Level::Warning, format_args!("the server cannot leave its output: {error}"));
    }
}

fn write_to(path: &str) -> io::Result<File> {
    File::options().write(true).open(path)
}
