//! The interpreter as a process: receives lines and sends reports.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{has_ended, succeed};

/// The sources, with their names.
const SOURCES: [(&str, &str); 5] = [
    ("interpreter.c", include_str!("../../programs/interpreter.c")),
    ("calls.h", include_str!("../../programs/calls.h")),
    ("calls.c", include_str!("../../programs/calls.c")),
    ("own.c", include_str!("../../programs/own.c")),
    ("idle.c", include_str!("../../programs/idle.c")),
];
/// The objects that the interpreter loads for some [`Way`](crate::sequence::Way)s, with their
/// source.
const OBJECTS: [(&str, &str); 2] = [("calls.so", "calls.c"), ("own.so", "own.c")];
/// Timeout of a step.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a process's end.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// The compiled interpreter.
#[derive(Debug)]
pub struct Interpreter {
    /// Linked against the shared C library, so that a library can be preloaded.
    pub dynamic: PathBuf,
    /// Linked statically.
    pub linked: PathBuf,
    /// A small program that waits until it is killed.
    pub idle: PathBuf,
}

impl Interpreter {
    /// Returns the interpreter that was compiled in `dir`.
    pub fn in_dir(dir: &Path) -> Self {
        Self {
            dynamic: dir.join("interpreter"),
            linked: dir.join("interpreter-static"),
            idle: dir.join("idle"),
        }
    }

    /// Compiles the interpreter in `dir`. Processes that execute an earlier one continue.
    ///
    /// # Errors
    /// There is no C compiler, or no static C library.
    pub fn compile(dir: &Path) -> Result<Self> {
        for (name, text) in SOURCES {
            std::fs::write(dir.join(name), text)?;
        }
        let this = Self::in_dir(dir);
        let sources = ["interpreter.c", "calls.c"];
        compile_as(&this.dynamic, &sources, &[])?;
        compile_as(&this.linked, &sources, &["-static", "-DSTATIC"])?;
        compile_as(&this.idle, &["idle.c"], &["-static", "-nostdlib", "-ffreestanding"])?;
        for (object, source) in OBJECTS {
            compile_as(&dir.join(object), &[source], &["-shared", "-fPIC"])?;
        }
        Ok(this)
    }
}

/// Compiles source files that are beside `program`, and replaces `program` by the result.
fn compile_as(program: &Path, sources: &[&str], options: &[&str]) -> Result<()> {
    let new = program.with_extension("new");
    let sources = sources.iter().map(|source| program.with_file_name(source));
    succeed(Command::new("cc").arg("-O1").args(options).arg("-o").arg(&new).args(sources))?;
    Ok(std::fs::rename(new, program)?)
}

/// A process that answers lines.
#[derive(Debug)]
pub struct Dialogue {
    child: Child,
    /// `None` only while the process ends.
    input: Option<ChildStdin>,
    output: ChildStdout,
    received: Vec<u8>,
}

impl Dialogue {
    /// Starts `command` by `spawn`.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(
        command: &mut Command,
        spawn: impl FnOnce(&mut Command) -> Result<Child>,
    ) -> Result<Self> {
        let mut child = spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let input = Some(child.stdin.take().context("the input is piped")?);
        let output = child.stdout.take().context("the output is piped")?;
        Ok(Self { child, input, output, received: Vec::new() })
    }

    /// Sends a line.
    ///
    /// # Errors
    /// The process does not read any more.
    pub fn send(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("the input is open")?;
        writeln!(input, "{line}").context("it does not read any more")
    }

    /// Receives a line.
    ///
    /// # Errors
    /// The process ended, or sends nothing for `timeout`.
    pub fn receive(&mut self, timeout: Duration) -> Result<String> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let mut events = [PollFd::new(&self.output, PollFlags::IN)];
            if left.is_zero() || poll(&mut events, Some(&Timespec::try_from(left)?))? == 0 {
                bail!("it sends nothing for {timeout:?}");
            }
            let mut bytes = [0; 4096];
            let count = self.output.read(&mut bytes)?;
            if count == 0 {
                bail!("it ended");
            }
            self.received.extend_from_slice(&bytes[..count]);
        }
    }
}

impl Drop for Dialogue {
    /// Closes the input, after which the process should end by itself. Kills it after a timeout.
    fn drop(&mut self) {
        self.input = None;
        if !has_ended(&self.child, END_TIMEOUT).unwrap_or(false) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// A running interpreter.
#[derive(Debug)]
pub struct Program(Dialogue);

impl Program {
    /// Starts `command` by `spawn`; the command must become an interpreter.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(
        command: &mut Command,
        spawn: impl FnOnce(&mut Command) -> Result<Child>,
    ) -> Result<Self> {
        Ok(Self(Dialogue::start(command, spawn)?))
    }

    /// Kills the process that was started, but not the processes that it has started.
    ///
    /// # Errors
    /// The process does not end.
    pub fn kill_child(&mut self) -> Result<()> {
        self.0.child.kill()?;
        if !has_ended(&self.0.child, END_TIMEOUT)? {
            bail!("a killed process does not end");
        }
        Ok(())
    }

    /// Executes step `number`. Returns the program's report if the step fails.
    ///
    /// # Errors
    /// The program ended, or does not answer.
    pub fn execute(&mut self, number: u64, line: &str) -> Result<Option<String>> {
        let answer =
            self.0.send(&format!("{number} {line}")).and_then(|()| self.0.receive(TIMEOUT));
        let answer = answer.with_context(|| format!("the program, told \"{line}\""))?;
        match answer.split_once(' ') {
            Some((_, "ok")) => Ok(None),
            _ => Ok(Some(answer)),
        }
    }
}
