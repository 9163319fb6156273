//! What the end-to-end tests share: the real binary, a pool on tmpfs, the real tools.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part of this module")]

pub mod abandoned;
pub mod built;
pub mod file_system;
pub mod image;
pub mod once;
pub mod random;
pub mod small;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// A directory on tmpfs, which stands in for persistent memory; removed when dropped.
pub fn scratch() -> TempDir {
    let shm = Path::new("/dev/shm");
    directory_in(if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() })
}

/// A directory for the test in `parent`; removed when dropped, or when tests run there again.
pub fn directory_in(parent: PathBuf) -> TempDir {
    static CLEARED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let mut cleared = CLEARED.lock().unwrap_or_else(PoisonError::into_inner);
    if !cleared.contains(&parent) {
        abandoned::remove(&parent);
        cleared.push(parent.clone());
    }
    tempfile::Builder::new()
        .prefix(&abandoned::prefix())
        .tempdir_in(parent)
        .expect("a directory for the test")
}

/// The `tidegate` binary of this build, ready for arguments.
pub fn tidegate() -> Command {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
}

/// The library that `run` preloads, beside the binary: built if it is not there or not of these
/// sources.
pub fn preload_library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        once::once_per_run("preload", built::build_tidegate);
        Path::new(env!("CARGO_BIN_EXE_tidegate")).with_file_name("libtidegate_preload.so")
    })
}

/// Runs `tidegate ARGS` and hands back what it printed, whatever its status. What should end but
/// does not is killed after a minute.
pub fn run<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Output {
    let mut command = assert_cmd::Command::from_std(tidegate());
    command.args(args).timeout(Duration::from_secs(60)).output().expect("the tidegate binary runs")
}

/// Runs `tidegate ARGS`, which must succeed, and hands back its standard output.
pub fn ok<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> String {
    stdout_of_success("tidegate", &run(args))
}

/// A Debian tool, ready for arguments; the test fails where its package is missing.
pub fn tool(name: &str, package: &str) -> Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let found = std::env::split_paths(&path)
        .chain(sbin)
        .map(|dir| dir.join(name))
        .find(|file| file.exists());
    Command::new(
        found.unwrap_or_else(|| panic!("no `{name}` here: install the Debian package {package}")),
    )
}

/// Runs `command`, which must succeed, and hands back its standard output.
pub fn succeed(command: &mut Command) -> String {
    let output = command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    stdout_of_success(&format!("{command:?}"), &output)
}

fn stdout_of_success(what: &str, output: &Output) -> String {
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {}\n{stdout}{stderr}", output.status);
    stdout
}

/// Number and group of a user of this machine.
pub fn user(name: &str) -> (u32, u32) {
    let numbers = ["-u", "-g"].map(|which| {
        let number = succeed(tool("id", "coreutils").args([which, name]));
        number.trim().parse().expect("id prints a number")
    });
    (numbers[0], numbers[1])
}

/// A number from the environment: the long versions of tests set it.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}: a number is expected"))
    })
}

/// Returns what a server has written to its standard error, the file `stderr`, once `is_there` is
/// true of it; until then it has `work` done. A thread of the server writes the lines, so a line
/// may come later than the answer to the request that it is about.
pub fn await_said(
    stderr: &Path,
    is_there: impl Fn(&str) -> bool,
    mut work: impl FnMut(),
) -> String {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let said = std::fs::read_to_string(stderr).expect("standard error is a file with text");
        if is_there(&said) {
            return said;
        }
        assert!(Instant::now() < deadline, "the server has not said what is expected: {said}");
        work();
    }
}

/// A running `tidegate serve`; killed when dropped.
pub struct Server {
    child: Child,
    stdout: BufReader<ChildStdout>,
    /// The lines printed at start.
    pub banner: Vec<String>,
}

impl Server {
    /// Starts `tidegate serve POOL --nbd unix:SOCKET ARGS` and waits until it is ready.
    pub fn start(pool: &Path, socket: &Path, args: &[&str]) -> Self {
        let mut command = tidegate();
        command
            .arg("serve")
            .arg(pool)
            .arg("--nbd")
            .arg(format!("unix:{}", socket.display()))
            .args(args);
        Self::spawn(&mut command)
    }

    /// Starts the server that `command` describes and waits until it is ready.
    pub fn spawn(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the server starts");
        let stdout = BufReader::new(child.stdout.take().expect("its output is piped"));
        let mut server = Self { child, stdout, banner: Vec::new() };
        while let Some(line) = server.next_line() {
            if line == "ready" {
                return server;
            }
            server.banner.push(line);
        }
        panic!("the server ended before it was ready, after printing {:#?}", server.banner);
    }

    fn next_line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.stdout.read_line(&mut line).expect("the server prints text");
        (read > 0).then(|| line.trim_end().to_owned())
    }

    /// Its standard error, which the command is to pipe.
    pub fn stderr(&mut self) -> BufReader<ChildStderr> {
        BufReader::new(self.child.stderr.take().expect("its standard error is piped"))
    }

    /// Process of the server.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends `signal`, waits for the end, and hands back the status and what was printed after
    /// `ready`.
    pub fn stop(self, signal: Signal) -> (ExitStatus, String) {
        kill_process(self.pid(), signal).expect("the server is alive");
        self.wait()
    }

    /// Waits for the end, and hands back the status and what was printed after `ready`.
    pub fn wait(mut self) -> (ExitStatus, String) {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).expect("the server prints text");
        (self.child.wait().expect("the server can be waited for"), rest)
    }

    /// Waits for a server that was killed with SIGKILL.
    pub fn wait_killed(mut self) {
        let status = self.child.wait().expect("the server can be waited for");
        assert_eq!(status.signal(), Some(9), "the server was to die by SIGKILL, but: {status}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
