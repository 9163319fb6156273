//! `tidegate top` in a real terminal: tmux.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::nbd::Client;
use crate::support::{Server, ok, run, scratch, succeed, tidegate, tool};

/// A terminal of 120 columns and 24 rows, with a shell in it; ended when dropped.
struct Terminal {
    dir: TempDir,
}

impl Terminal {
    fn new() -> Self {
        let this = Self { dir: scratch() };
        succeed(this.tmux().args([
            "new-session",
            "-d",
            "-x",
            "120",
            "-y",
            "24",
            "env PS1=shell: sh",
        ]));
        this
    }

    fn tmux(&self) -> Command {
        let mut tmux = tool("tmux", "tmux");
        tmux.arg("-S").arg(self.dir.path().join("tmux")).args(["-f", "/dev/null"]);
        tmux
    }

    fn keys(&self, keys: &str) {
        succeed(self.tmux().args(["send-keys", "-l", keys]));
    }

    fn command(&self, line: &str) {
        self.keys(line);
        succeed(self.tmux().args(["send-keys", "Enter"]));
    }

    fn screen(&self) -> String {
        succeed(self.tmux().args(["capture-pane", "-p"]))
    }

    /// The screen, once `is_it` is true of it.
    fn wait(&self, what: &str, is_it: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let screen = self.screen();
            if is_it(&screen) {
                return screen;
            }
            assert!(Instant::now() < deadline, "{what} does not come:\n{screen}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn make_narrow(&self) {
        succeed(self.tmux().args(["resize-window", "-x", "80", "-y", "24"]));
    }

    /// What the shell prints as settings of the terminal.
    fn settings(&self) -> String {
        let path = self.dir.path().join("settings");
        let _ = std::fs::remove_file(&path);
        self.command(&format!("stty -g >{0}.new; mv {0}.new {0}", path.display()));
        self.wait("stty", |_| path.exists());
        std::fs::read_to_string(path).unwrap()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux().arg("kill-server").output();
    }
}

fn start(dir: &TempDir, args: &[&str]) -> Server {
    let pool = dir.path().join("pool");
    ok(["create", pool.to_str().unwrap(), "--engine=log", "--size=32M"]);
    Server::start(&pool, &dir.path().join("socket"), args)
}

/// Sets what it holds when it is dropped, also where the test fails.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writes all the time until `stop` is set.
fn write(socket: &Path, stop: &AtomicBool) {
    let mut client = Client::connect(socket).unwrap();
    while !stop.load(Ordering::Relaxed) {
        client.send_write(1, 0, &[5; 4096]).unwrap();
        assert_eq!(client.receive().unwrap(), (1, 0));
    }
}

#[test]
fn a_server_is_watched_and_the_terminal_is_left_as_it_was() {
    let dir = scratch();
    let server = start(&dir, &["--backing=null:64M", "--dram=transit-no-bypass:1M"]);
    let terminal = Terminal::new();
    let found = terminal.settings();
    let top =
        format!("{} top {}", tidegate().get_program().display(), dir.path().join("pool").display());
    let (stop, socket) = (AtomicBool::new(false), dir.path().join("socket"));
    std::thread::scope(|scope| {
        scope.spawn(|| write(&socket, &stop));
        let _stops = Stops(&stop);
        terminal.command(&top);
        let writes = |screen: &str| {
            screen.contains("clients    1 open")
                && !screen.contains(" 0 writes/s")
                && screen.contains("writes/s")
        };
        let screen = terminal.wait("load", writes);
        let lines: Vec<&str> = screen.lines().collect();
        assert!(lines.len() <= 24 && lines[0].starts_with("tidegate top  "), "{screen}");
        // In a terminal that has more columns nothing is cut.
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{screen}");
        for part in [
            "errors     0 in all",
            "dirty ",
            "in dram transit-no-bypass, ",
            "log        ",
            "latency, µs",
            "pmem log",
        ] {
            assert!(screen.contains(part), "{part} is missing in\n{screen}");
        }
        ok(["stat", dir.path().join("pool").to_str().unwrap(), "--reset"]);
        terminal.wait("the reset", |screen| screen.contains("clients    1 open, 0 taken"));
        terminal.wait("load again", writes);
        terminal.keys("p");
        terminal.wait("pause", |screen| screen.contains("PAUSED"));
        terminal.keys("ps");
        terminal.wait("sorting", |screen| screen.contains("s in the order of tiers"));
        terminal.make_narrow();
        terminal.keys("s");
        let screen = terminal.wait("80 columns", |screen| screen.contains("s slowest first"));
        let ends_whole = |line: &str| line.starts_with("latency, µs") && line.ends_with(" max");
        assert!(screen.lines().any(ends_whole), "{screen}");
    });
    terminal.keys("q");
    terminal.wait("the shell", |screen| screen.contains("shell:") && !screen.contains("errors"));
    assert_eq!(terminal.settings(), found, "after q");

    terminal.command(&top);
    terminal.wait("top", |screen| screen.contains("q quit"));
    succeed(tool("pkill", "procps").args(["-TERM", "-f", &format!("^{top}$")]));
    terminal.wait("the shell", |screen| screen.contains("shell:") && !screen.contains("errors"));
    assert_eq!(terminal.settings(), found, "after SIGTERM");

    // A server that ends is told of, on the screen of the shell.
    terminal.command(&top);
    terminal.wait("top", |screen| screen.contains("q quit"));
    assert!(server.stop(Signal::TERM).0.success());
    terminal.wait("the error", |screen| screen.contains("is not served"));
    assert_eq!(terminal.settings(), found, "after the server's end");
}

#[test]
fn without_a_terminal_it_names_stat() {
    let dir = scratch();
    let server = start(&dir, &["--backing=null:64M"]);
    let pool = dir.path().join("pool");
    let output = run(["top", pool.to_str().unwrap()]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains("needs a terminal; `tidegate stat --json`"), "{error}");
    assert!(server.stop(Signal::TERM).0.success());
    let output = run(["top", pool.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("is not served"));
}
