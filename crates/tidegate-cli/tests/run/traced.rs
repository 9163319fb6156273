//! A process that is stopped, or killed, in the middle of its next `pwrite`: programs/stopped.c
//! traces it.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::programs::compiled;

/// A tracer at work; it is killed when dropped, and lets its process go on then.
pub(crate) struct Traced {
    tracer: Child,
    stdout: BufReader<ChildStdout>,
}

impl Traced {
    /// Traces the process `pid`; returns when its next `pwrite` will be seen.
    pub(crate) fn start(how: &[&str], pid: &str) -> Self {
        let mut command = Command::new(compiled("stopped", &[]));
        command.arg(pid).args(how).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut tracer = command.spawn().expect("the tracer starts");
        let stdout = BufReader::new(tracer.stdout.take().expect("it is piped"));
        let mut this = Self { tracer, stdout };
        this.wait_for("traced");
        this
    }

    /// Waits until the tracer says that it has come so far.
    pub(crate) fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("it prints text");
        assert_eq!(line.trim_end(), word, "the tracer has ended");
    }

    /// Lets the process go on.
    pub(crate) fn release(&mut self) {
        drop(self.tracer.stdin.take());
        assert!(self.tracer.wait().expect("it can be waited for").success());
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ = self.tracer.kill();
        let _ = self.tracer.wait();
    }
}
