//! Other programs of a measurement: looked up before, ended with the measurement, always reaped.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::error::{BenchError, Result};

/// Longest time until a program serves.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A running program; dropping it kills and reaps it. If this process dies first, the kernel kills
/// the program.
pub(crate) struct Child {
    program: String,
    process: std::process::Child,
    lines: Receiver<String>,
}

impl Child {
    /// Starts `program`, a path, with `args`.
    pub(crate) fn start<W: AsRef<OsStr>>(
        program: &Path,
        args: impl IntoIterator<Item = W>,
    ) -> Result<Self> {
        let guard = find_program("setpriv", "util-linux")?;
        let mut command = Command::new(guard);
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(BenchError::os("start", program))?;
        let stdout = process.stdout.take().expect("stdout is piped");
        let (sender, lines) = channel();
        // The thread ends with the program's output; it reads on after the receiver is gone, so
        // that the program does not block.
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(std::result::Result::ok) {
                let _ = sender.send(line);
            }
        });
        Ok(Self { program: program.display().to_string(), process, lines })
    }

    /// Waits for a line with `word`, and returns it.
    pub(crate) fn wait_for_line(&self, word: &str) -> Result<String> {
        self.wait_for_line_of(word, Duration::ZERO)
    }

    /// Waits for a line with `word`, and returns it. The program has `work` to do before.
    pub(crate) fn wait_for_line_of(&self, word: &str, work: Duration) -> Result<String> {
        let limit = START_LIMIT + work;
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line.contains(word) => return Ok(line),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    let limit_s = limit.as_secs();
                    return self.failed(format!("printed no line with \"{word}\" in {limit_s} s"));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return self.failed(format!("ended before it printed a line with \"{word}\""));
                }
            }
        }
    }

    /// Waits until a connection to `socket` is accepted. Polls, since the program does not report
    /// this.
    pub(crate) fn wait_for_socket(&mut self, socket: &Path) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        while std::os::unix::net::UnixStream::connect(socket).is_err() {
            let ended =
                self.process.try_wait().map_err(BenchError::os("wait for", &self.program))?;
            let socket = socket.display();
            if let Some(status) = ended {
                return self.failed(format!("ended with {status} before it listened on {socket}"));
            }
            if Instant::now() > deadline {
                return self.failed(format!("does not listen on {socket} after {START_LIMIT:?}"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Waits until the program has ended by itself.
    pub(crate) fn end(mut self) -> Result<()> {
        let status = self.process.wait().map_err(BenchError::os("wait for", &self.program))?;
        if status.success() {
            return Ok(());
        }
        self.failed(format!("ended with {status}"))
    }

    fn failed<T>(&self, found: String) -> Result<T> {
        Err(BenchError::program(&self.program, found))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail only if the program has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs `command` to its end and returns its standard output.
pub(crate) fn output_of(mut command: Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output =
        command.stdin(Stdio::null()).output().map_err(BenchError::os("start", &program))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or("it said nothing");
        return Err(BenchError::program(&program, format!("ended with {}: {last}", output.status)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `command` to its end and returns the seconds that it took.
pub(crate) fn seconds_of(command: Command) -> Result<f64> {
    let begun = Instant::now();
    output_of(command)?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Returns the path of the running program.
pub(crate) fn this_program() -> Result<PathBuf> {
    std::env::current_exe().map_err(BenchError::os("find", "/proc/self/exe"))
}

/// Returns the path of `name`, as the shell would find it.
pub(crate) fn find_program(name: &str, package: &'static str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| BenchError::Missing { what: format!("program {name}"), package })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Child {
        let args = ["-c".to_owned(), script.to_owned()];
        Child::start(Path::new("/bin/sh"), &args).unwrap()
    }

    #[test]
    fn the_ready_line_is_waited_for() {
        let child = shell("echo starting; echo 'ready on x'; exec cat /dev/zero >/dev/null");
        assert_eq!(child.wait_for_line("ready").unwrap(), "ready on x");
    }

    #[test]
    fn a_program_that_ends_first_is_told() {
        let error = shell("echo no").wait_for_line("ready").unwrap_err().to_string();
        assert!(error.contains("ended before"), "{error}");
        let error =
            shell("exit 3").wait_for_socket(Path::new("/nonexistent/s")).unwrap_err().to_string();
        assert!(error.contains("exit status: 3"), "{error}");
    }

    #[test]
    fn a_dropped_child_is_gone() {
        let child = shell("echo ready; exec cat /dev/zero >/dev/null");
        child.wait_for_line("ready").unwrap();
        let proc = PathBuf::from(format!("/proc/{}", child.process.id()));
        assert!(proc.exists());
        drop(child);
        assert!(!proc.exists(), "killed and reaped");
    }

    #[test]
    fn missing_programs_name_their_package() {
        let error = find_program("no-such-program", "a-package").unwrap_err().to_string();
        assert!(error.contains("no-such-program") && error.contains("a-package"), "{error}");
    }
}
