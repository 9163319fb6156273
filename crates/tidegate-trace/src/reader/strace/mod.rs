//! Raw output of `strace -ttt`, of one process or of several: `-f` (the number of the process in
//! front) or `-ff` (a file a process).
//!
//! A call that another process interrupts in the output has two lines, which are joined. Calls that
//! failed did nothing. What the trace does not show is not guessed: bytes that go through a
//! descriptor that no call made, or from a position that is not known, are bad lines; `-y` helps,
//! since it shows the path behind each descriptor. Stores to mapped files and requests of
//! `io_uring` are no system calls, and never shown.

mod call;
mod effect;
mod entry;
mod path;
mod processes;

use std::collections::HashMap;

use super::Reader;
use crate::bad::{Bad, Result};
use crate::lines::MAX_LINE_BYTES;
use crate::out::Out;
use call::Call;
use effect::State;
use entry::{What, entry};

/// How many calls may be under way at a time.
const MAX_UNFINISHED: usize = 1 << 12;

pub(super) struct Strace {
    state: State,
    /// Beginnings of calls, by process.
    unfinished: HashMap<u32, Vec<u8>>,
}

/// Checks the form of a line.
pub(super) fn parse(line: &[u8]) -> Result<()> {
    match entry(line)?.what {
        What::Call(text) => Call::parse(text).map(drop),
        What::Unfinished(text) if !text.contains(&b'(') => Err(Bad::Shape),
        _ => Ok(()),
    }
}

impl Strace {
    pub(super) fn new() -> Self {
        Self { state: State::new(), unfinished: HashMap::new() }
    }

    /// A process that runs before its parent's `fork` has returned: if only one can be the parent,
    /// it is.
    fn adopt(&mut self, pid: u32, out: &mut Out) -> Result<()> {
        let is_fork = |text: &[u8]| {
            [&b"clone"[..], b"fork", b"vfork"].iter().any(|name| text.starts_with(name))
        };
        let mut parents = self.unfinished.iter().filter(|(_, text)| is_fork(text));
        match (parents.next(), parents.next()) {
            (Some((parent, text)), None) => {
                let is_thread = memchr::memmem::find(text, b"CLONE_FILES").is_some();
                self.state.fork((*parent, pid), is_thread, out)
            }
            _ => Ok(()),
        }
    }

    fn begin(&mut self, pid: u32, text: &[u8]) -> Result<()> {
        if self.unfinished.len() >= MAX_UNFINISHED {
            return Err(Bad::Tables);
        }
        self.unfinished.insert(pid, text.to_vec());
        Ok(())
    }

    fn resume(&mut self, pid: u32, rest: &[u8], out: &mut Out) -> Result<()> {
        let mut whole = self.unfinished.remove(&pid).ok_or(Bad::Resumed)?;
        if whole.len() + rest.len() > 2 * MAX_LINE_BYTES {
            return Err(Bad::Line);
        }
        whole.extend_from_slice(rest);
        self.state.apply(pid, &Call::parse(&whole)?, out)
    }
}

impl Reader for Strace {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<()> {
        let entry = entry(line)?;
        let pid = entry.pid.unwrap_or(0);
        if !self.unfinished.is_empty() && !self.state.knows(pid) {
            self.adopt(pid, out)?;
        }
        out.at(entry.time_us, pid);
        match entry.what {
            What::Call(text) => self.state.apply(pid, &Call::parse(text)?, out),
            What::Unfinished(text) => self.begin(pid, text),
            What::Resumed(rest) => self.resume(pid, rest, out),
            What::Exit => {
                self.unfinished.remove(&pid);
                self.state.exit(pid, out);
                Ok(())
            }
            What::Notice => Ok(()),
        }
    }
}
