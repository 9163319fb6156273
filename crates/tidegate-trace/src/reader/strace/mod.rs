//! Output of `strace -ttt`, of one process or of several: `-f` (the process's number in front of
//! each line) or `-ff` (one file for each process).
//!
//! A call that another process interrupts in the output has two lines, which are joined. Failed
//! calls have no effect. The reader does not guess facts that the trace does not show: a transfer
//! through a descriptor that no call opened, or from an unknown position, is a bad line. `-y`
//! helps, because it shows the path behind each descriptor. strace never shows stores to mapped
//! files and requests of `io_uring`, which are no system calls.

mod call;
mod effect;
mod entry;
mod path;
mod processes;

use std::collections::HashMap;

use super::Reader;
use crate::bad::MAX_LINE_BYTES;
use crate::bad::{Bad, Result};
use crate::descriptors::Descriptors;
use crate::out::Out;
use call::Call;
use effect::Effect;
use entry::{What, entry};
use processes::Processes;

/// Maximum number of unfinished calls at a time.
const MAX_UNFINISHED: usize = 1 << 12;

pub(super) struct Strace {
    processes: Processes,
    /// The descriptors of all processes.
    descriptors: Descriptors,
    /// The first parts of unfinished calls, by process.
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
        let descriptors = Descriptors::new(b'/');
        Self { processes: Processes::default(), descriptors, unfinished: HashMap::new() }
    }

    /// Finds the parent of a process that runs before its parent's `fork` has returned, if only one
    /// process can be the parent.
    fn adopt(&mut self, pid: u32, out: &mut Out) -> Result<()> {
        let is_fork = |text: &[u8]| {
            [&b"clone"[..], b"fork", b"vfork"].iter().any(|name| text.starts_with(name))
        };
        let mut parents = self.unfinished.iter().filter(|(_, text)| is_fork(text));
        match (parents.next(), parents.next()) {
            (Some((parent, text)), None) => {
                let is_thread = memchr::memmem::find(text, b"CLONE_FILES").is_some();
                self.processes.fork((*parent, pid), is_thread, &mut self.descriptors, out)
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
        self.apply(pid, &whole, out)
    }

    /// Applies the call in `text` of process `pid`.
    fn apply(&mut self, pid: u32, text: &[u8], out: &mut Out) -> Result<()> {
        let call = Call::parse(text)?;
        let Self { processes, descriptors, .. } = self;
        let table = processes.get(pid)?.table;
        let Some(result) = call.result() else { return Ok(()) };
        Effect { pid, table, call: &call, result, processes, descriptors, out }.apply()
    }
}

impl Reader for Strace {
    fn line(&mut self, line: &[u8], out: &mut Out) -> Result<()> {
        let entry = entry(line)?;
        let pid = entry.pid.unwrap_or(0);
        if !self.unfinished.is_empty() && !self.processes.knows(pid) {
            self.adopt(pid, out)?;
        }
        out.at(entry.time_us, pid);
        match entry.what {
            What::Call(text) => self.apply(pid, text, out),
            What::Unfinished(text) => self.begin(pid, text),
            What::Resumed(rest) => self.resume(pid, rest, out),
            What::Exit => {
                self.unfinished.remove(&pid);
                self.processes.exit(pid, &mut self.descriptors, out);
                Ok(())
            }
            What::Notice => Ok(()),
        }
    }
}
