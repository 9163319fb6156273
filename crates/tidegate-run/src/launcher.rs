//! The launcher: runs one program from its start to its end.
//!
//! Invariants:
//! 1. The program starts only when the pool is open and the supervisor holds it.
//! 2. The program's own process has the terminal, process group, signals and descriptors that it
//!    would have without the launcher; signals that were ignored when the launcher started stay
//!    ignored.
//! 3. Signals that a terminal sends to the whole group (SIGINT, SIGQUIT, SIGTSTP, SIGTTIN) are not
//!    sent twice. All others, and SIGINT and SIGQUIT to the launcher alone, are passed on to this
//!    program, and never to another one that took over its number. The launcher stops only because
//!    the program has stopped, or after its end.
//! 4. A launcher that adopts becomes the parent of processes whose parents have ended, and reaps
//!    them.
//!
//! Map: [`Launch::start`] · [`Launch::wait`] · [`Launch::left`] · [`Launch::forward`], for the
//! thread that catches signals.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, getpid, kill_process, pidfd_open,
    pidfd_send_signal, set_child_subreaper,
};
use signal_hook::consts::{
    SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN, SIGUSR1, SIGUSR2, SIGWINCH,
};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::{WithOrigin, origin::Origin};
use signal_hook::low_level::siginfo::Cause;

use super::filter::Filter;
use super::inherited;
use super::program::Program;

/// Signals for the program that may be sent to the launcher alone.
const FORWARDED: [i32; 5] = [SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGWINCH];
/// Signals that a terminal sends to program and launcher.
const SHARED: [i32; 4] = [SIGINT, SIGQUIT, SIGTSTP, SIGTTIN];
/// Signals that stop the program. If they stopped the launcher at once, it would see the program's
/// stop only after both were continued, and stop again.
const STOPPING: [i32; 2] = [SIGTSTP, SIGTTIN];
/// The number that a shell adds to the signal that ended a program.
pub const SIGNAL_STATUS: i32 = 128;

/// A program to start.
#[derive(Debug)]
pub struct Plan<'a> {
    /// The file to execute.
    pub program: &'a Program,
    /// The program's name as it was typed, and its arguments.
    pub command: &'a [OsString],
    /// Variables to set, or to remove.
    pub environment: Vec<(&'static str, Option<OsString>)>,
    /// The filter of system calls that the program starts with.
    pub filter: Option<Filter>,
    /// Whether the launcher adopts processes that the program leaves behind.
    pub adopts: bool,
}

/// A program that was started.
#[derive(Debug)]
pub struct Launch {
    child: Child,
    handle: Arc<OwnedFd>,
    adopts: bool,
    /// How often the launcher has stopped because the program had.
    stops: Arc<AtomicU32>,
}

impl Launch {
    /// Starts the program and the thread that passes signals on to it.
    ///
    /// # Errors
    /// Fails if the program cannot be executed.
    pub fn start(plan: Plan<'_>) -> io::Result<Self> {
        // Signals are caught first: the program never runs without a thread that passes them on.
        let signals = SignalsInfo::<WithOrigin>::new(wanted_signals(ignored_signals()))?;
        let adopts = plan.adopts;
        if adopts {
            set_child_subreaper(Some(getpid()))?;
        }
        let child = command(plan).spawn()?;
        let handle = Arc::new(pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?);
        let launch = Self { child, handle, adopts, stops: Arc::default() };
        launch.forward(signals)?;
        Ok(launch)
    }

    /// Waits until the program has ended, and returns its exit status. Stops the launcher whenever
    /// the program is stopped.
    ///
    /// # Errors
    /// Fails if another thread waited for the program.
    pub fn wait(&self) -> io::Result<i32> {
        let pid = Pid::from_child(&self.child);
        // A launcher that adopts reaps all children: the program, and those that it left behind.
        let wanted = (!self.adopts).then_some(pid);
        loop {
            match rustix::process::waitpid(wanted, WaitOptions::UNTRACED) {
                Ok(Some((changed, _))) if changed != pid => {}
                Ok(Some((_, status))) if status.stopped() => self.stop_too()?,
                Ok(Some((_, status))) => return Ok(exit_status(status)),
                Ok(None) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Returns the adopted processes that are left, by name and number.
    #[must_use]
    pub fn left(&self) -> Vec<String> {
        while self.adopts && matches!(rustix::process::wait(WaitOptions::NOHANG), Ok(Some(_))) {}
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let stats = entries.filter_map(|entry| std::fs::read(entry.path().join("stat")).ok());
        let stats: Vec<_> = stats.collect();
        let own = getpid().as_raw_pid();
        stats.iter().filter(|_| self.adopts).filter_map(|stat| child_of(own, stat)).collect()
    }

    /// Stops the launcher too, so that the shell sees a stopped job.
    fn stop_too(&self) -> io::Result<()> {
        self.stops.fetch_add(1, Ordering::SeqCst);
        kill_process(getpid(), Signal::STOP)?;
        // The launcher was continued. If the signal was sent to the launcher alone, the program
        // must get it too. The program may have ended.
        let _ = pidfd_send_signal(&self.handle, Signal::CONT);
        Ok(())
    }

    fn forward(&self, mut signals: SignalsInfo<WithOrigin>) -> io::Result<()> {
        let (handle, stops) = (Arc::clone(&self.handle), Arc::clone(&self.stops));
        let pass_on_all = move || {
            let mut stopping = 0;
            for origin in &mut signals {
                if !STOPPING.contains(&origin.signal) {
                    pass_on(&origin, &handle);
                    continue;
                }
                stopping += 1;
                // This thread may be late: the launcher has stopped for an earlier signal already.
                if has_ended(&handle) && stopping > stops.load(Ordering::SeqCst) {
                    // If this fails, the launcher goes on.
                    let _ = kill_process(getpid(), Signal::STOP);
                }
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(pass_on_all)?;
        Ok(())
    }
}

/// Passes a signal on to the program, unless the terminal has sent it there too. Signals that stop
/// are never passed on: the program may have one already, and would get the second one after it was
/// continued.
fn pass_on(origin: &Origin, program: &OwnedFd) {
    let number = origin.signal;
    let has_it = SHARED.contains(&number) && origin.cause == Cause::Kernel;
    if let Some(signal) = Signal::from_named_raw(number).filter(|_| !has_it) {
        // A program that has ended needs no signals.
        let _ = pidfd_send_signal(program, signal);
    }
}

/// Returns whether the process has ended.
fn has_ended(process: &OwnedFd) -> bool {
    let mut events = [PollFd::new(process, PollFlags::IN)];
    poll(&mut events, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

fn command(plan: Plan<'_>) -> Command {
    let Plan { program, command: words, environment, filter, adopts: _ } = plan;
    let mut command = Command::new(&program.file);
    if let (true, Some(name)) = (program.before.is_empty(), words.first()) {
        command.arg0(name);
    }
    command.args(&program.before).args(words.iter().skip(1));
    inherited::give_environment(&mut command, environment);
    inherited::hand_on(&mut command);
    if let Some(filter) = filter {
        filter.before(&mut command);
    }
    command
}

/// Returns name and number of the process with this `/proc/PID/stat`, if `parent` is its parent.
fn child_of(parent: i32, stat: &[u8]) -> Option<String> {
    let stat = String::from_utf8_lossy(stat);
    let (number, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let of: i32 = rest.split(' ').nth(1)?.parse().ok()?;
    (of == parent).then(|| format!("{name} ({number})"))
}

/// Returns the signals to catch. An ignored signal stays ignored, by the program too.
fn wanted_signals(ignored: u64) -> Vec<i32> {
    without_ignored(FORWARDED.into_iter().chain(SHARED), ignored)
}

fn without_ignored(signals: impl Iterator<Item = i32>, ignored: u64) -> Vec<i32> {
    signals.filter(|signal| ignored >> (signal - 1) & 1 == 0).collect()
}

/// Returns those of `signals` that this process does not ignore.
#[must_use]
pub fn caught_of(signals: &[i32]) -> Vec<i32> {
    without_ignored(signals.iter().copied(), ignored_signals())
}

/// Returns a bit for each signal that this process ignores, the lowest for SIGHUP.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn exit_status(status: WaitStatus) -> i32 {
    let signal = status.terminating_signal().map(|signal| SIGNAL_STATUS + signal);
    status.exit_status().or(signal).unwrap_or(SIGNAL_STATUS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str) -> Launch {
        let program = Program { file: "/bin/sh".into(), before: Vec::new(), unwatched: None };
        let command = ["sh", "-c", script].map(OsString::from);
        let environment = vec![("TIDEGATE_TRIAL", Some("yes".into()))];
        let (filter, adopts) = (None, false);
        let plan = Plan { program: &program, command: &command, environment, filter, adopts };
        Launch::start(plan).unwrap()
    }

    #[test]
    fn the_children_of_a_process_are_told_by_their_parent() {
        let stat = b"17 (a b) c) S 4 17 17 0 -1 4194560";
        assert_eq!(child_of(4, stat).unwrap(), "a b) c (17)");
        assert_eq!(child_of(5, stat), None);
        assert_eq!(child_of(4, b"17"), None);
    }

    #[test]
    fn the_status_is_the_program_s() {
        assert_eq!(start("exit 7").wait().unwrap(), 7);
        assert_eq!(start("test $TIDEGATE_TRIAL = yes").wait().unwrap(), 0);
        assert_eq!(start("kill -9 $$").wait().unwrap(), 137);
    }

    #[test]
    fn ignored_signals_are_not_caught() {
        assert_eq!(wanted_signals(0).len(), 9);
        assert!(!wanted_signals(1 << (SIGINT - 1)).contains(&SIGINT));
        assert!(wanted_signals(1 << (SIGINT - 1)).contains(&SIGTERM));
    }
}
