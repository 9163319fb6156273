//! The processes of a `tidegate run`: found by the pool that they map and by a mark in their
//! environment, killed all at once.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::support::abandoned::{Found, find_processes};

const MARK: &str = "TIDEGATE_TEST_TREE";
/// In no environment.
const NO_MARK: &str = "no such mark anywhere\u{1}";

/// Processes that belong together.
pub(crate) struct ProcessTree {
    pool: PathBuf,
    mark: String,
    killed: HashMap<i32, OwnedFd>,
    /// Process groups of those that were found.
    groups: HashSet<Pid>,
}

impl ProcessTree {
    /// Of `command`, not started yet, which is to use `pool`.
    pub(crate) fn of(command: &mut Command, pool: &Path) -> Self {
        let mark = pool.display().to_string();
        command.env(MARK, &mark);
        let (killed, groups) = (HashMap::new(), HashSet::new());
        Self { pool: pool.to_owned(), mark: format!("{MARK}={mark}"), killed, groups }
    }

    /// kill -9 for each process, in no order, until there is none that was not killed. One that
    /// waits for a disk goes later, but runs no more.
    pub(crate) fn kill(&mut self) {
        while self.kill_found(|_| true) {}
    }

    /// kill -9 for each of its Python programs: nothing of Tidegate is killed.
    pub(crate) fn kill_programs(&mut self) {
        while self.kill_found(is_python) {}
    }

    fn kill_found(&mut self, is_victim: fn(i32) -> bool) -> bool {
        let mut found = false;
        for pid in self.members().into_iter().filter(|pid| is_victim(*pid)) {
            let handle =
                Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
            if let Some(handle) = handle {
                found |= pidfd_send_signal(&handle, Signal::KILL).is_ok();
                self.killed.insert(pid, handle);
            }
        }
        found
    }

    /// Those that were not killed. One that waits for a disk with its mappings locked is known by
    /// its group alone.
    fn members(&mut self) -> Vec<i32> {
        let Found { shown, stuck } =
            look_for_members(&self.pool, &self.mark, |pid| !self.killed.contains_key(&pid));
        self.groups.extend(shown.iter().filter_map(|pid| group(*pid)));
        let is_ours = |pid: &i32| group(*pid).is_some_and(|group| self.groups.contains(&group));
        let stuck: Vec<_> = stuck.into_iter().filter(is_ours).collect();
        [shown, stuck].concat()
    }

    /// Waits until all that were killed are gone.
    pub(crate) fn wait(self) {
        for handle in self.killed.values() {
            let mut events = [PollFd::new(handle, PollFlags::IN)];
            retry_on_intr(|| poll(&mut events, None)).expect("a process can be waited for");
        }
    }
}

/// Processes that map `pool`, are about to supervise it, or have `mark` in their environment.
fn members(pool: &Path, mark: &str) -> Vec<i32> {
    look_for_members(pool, mark, |_| true).shown
}

fn look_for_members(pool: &Path, mark: &str, is_asked: impl Fn(i32) -> bool) -> Found {
    let pool = pool.as_os_str().as_encoded_bytes();
    let starting = [b"\0supervise\0--\0", pool].concat();
    let shown = [("environ", mark.as_bytes()), ("maps", pool), ("cmdline", &starting[..])];
    find_processes(&shown, is_asked)
}

fn group(pid: i32) -> Option<Pid> {
    rustix::process::getpgid(Pid::from_raw(pid)).ok()
}

fn is_python(pid: i32) -> bool {
    std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with(b"python"))
}

/// Nobody maps `pool`, and no descriptor is open on it: the supervisor has gone with its tree.
pub(crate) fn assert_nobody_uses(pool: &Path) {
    let users = members(pool, NO_MARK);
    assert!(users.is_empty(), "processes {users:?} still use {}", pool.display());
}

/// Waits for the last process of a tree whose launcher is gone: no process uses `pool` then.
pub(crate) fn await_nobody_uses(pool: &Path) {
    for pid in members(pool, NO_MARK) {
        let handle = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        let timeout = Timespec { tv_sec: 60, tv_nsec: 0 };
        if let Some(handle) = handle {
            let mut events = [PollFd::new(&handle, PollFlags::IN)];
            retry_on_intr(|| poll(&mut events, Some(&timeout))).expect("it can be waited for");
        }
    }
    assert_nobody_uses(pool);
}

/// The supervisor of `pool`: the `tidegate` process that maps it and is not the launcher or below
/// it.
pub(crate) fn supervisor_of(pool: &Path, launcher: Pid) -> Pid {
    let mut found = supervisors_of(pool);
    found.retain(|&pid| pid != launcher);
    assert_eq!(found.len(), 1, "supervisors of {}: {found:?}", pool.display());
    found[0]
}

/// The supervisors of `pool`, of which one may be dying and another one starting.
pub(crate) fn supervisors_of(pool: &Path) -> Vec<Pid> {
    let is_tidegate = |pid: &i32| {
        let exe = std::fs::read_link(format!("/proc/{pid}/exe"));
        exe.is_ok_and(|exe| exe == Path::new(env!("CARGO_BIN_EXE_tidegate")))
    };
    let users = members(pool, NO_MARK).into_iter();
    users.filter(is_tidegate).filter(|&pid| session_leader(pid)).filter_map(Pid::from_raw).collect()
}

/// Kills the launchers that use `pool`, so that nobody replaces a supervisor that dies; their
/// programs live on.
pub(crate) fn kill_launchers(pool: &Path) {
    let words = [b"\0run\0--size=64M\0--pool\0", pool.as_os_str().as_encoded_bytes()].concat();
    for entry in std::fs::read_dir("/proc").expect("/proc is mounted").flatten() {
        let cmdline = std::fs::read(entry.path().join("cmdline")).unwrap_or_default(); // gone
        let is_launcher = cmdline.starts_with(env!("CARGO_BIN_EXE_tidegate").as_bytes())
            && cmdline.windows(words.len()).any(|window| window == words);
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(pid) = number.and_then(Pid::from_raw).filter(|_| is_launcher) {
            // It may have ended by itself meanwhile.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

/// Whether the process has a session of its own.
fn session_leader(pid: i32) -> bool {
    let pid = Pid::from_raw(pid).expect("a process has a number");
    rustix::process::getsid(Some(pid)).is_ok_and(|session| session == pid)
}

/// CPU time that a process has used, user and system, in ticks.
pub(crate) fn cpu_ticks(pid: Pid) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))
        .expect("it is alive");
    let (_, fields) = stat.rsplit_once(") ").expect("the name is in parentheses");
    fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
}
