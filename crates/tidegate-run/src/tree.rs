//! The processes that use a pool.
//!
//! A process is known from its announcement until its end, which its pidfd reports. So a later
//! process is never mistaken for another one with its number. The tree is alive while it has
//! processes, or open connections.
//!
//! Pidfds take at most half of the supervisor's descriptors. The caller polls the members beyond
//! that, so often that their numbers do not come again meanwhile.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};
use tidegate::glob::matches_any;

/// How long the kernel may take to show a process's mappings.
const TIMEOUT: Duration = Duration::from_secs(1);
/// The most searches for new processes in a row, on a machine that starts some all the time.
const SEARCHES_MAX: u32 = 100;

/// The processes of a tree.
#[derive(Debug)]
pub(crate) struct Tree {
    /// Members, each with its pidfd.
    members: HashMap<Pid, OwnedFd>,
    /// Members for which no descriptor was left.
    polled: HashSet<Pid>,
    pidfds_max: usize,
}

/// Result of an announcement.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Announced {
    /// A new member.
    New,
    /// A process that has announced itself before, as a process does that has replaced its program.
    Known,
    /// A new member without a pidfd: the caller polls it.
    Polled,
    /// A process that has ended since.
    Gone,
}

impl Tree {
    /// Makes a tree for a process that may have this many descriptors; `None`: any number.
    pub(crate) fn new(descriptors_max: Option<u64>) -> Self {
        let half = descriptors_max.and_then(|it| usize::try_from(it / 2).ok());
        let pidfds_max = half.unwrap_or(usize::MAX);
        Self { members: HashMap::new(), polled: HashSet::new(), pidfds_max }
    }

    /// Notes that `pid` uses the pool. A member of this number that has ended was
    /// [forgotten](Self::remove_if_ended) before.
    ///
    /// # Errors
    /// Fails if the kernel has no pidfds, or no memory.
    pub(crate) fn announce(&mut self, pid: Pid) -> io::Result<Announced> {
        if self.contains(pid) {
            return Ok(Announced::Known);
        }
        match self.open(pid) {
            Ok(()) => Ok(Announced::New),
            Err(Errno::SRCH) => Ok(Announced::Gone),
            Err(Errno::MFILE | Errno::NFILE) => {
                self.polled.insert(pid);
                Ok(Announced::Polled)
            }
            Err(errno) => Err(errno.into()),
        }
    }

    fn open(&mut self, pid: Pid) -> Result<(), Errno> {
        if self.members.len() >= self.pidfds_max {
            return Err(Errno::MFILE);
        }
        self.members.insert(pid, pidfd_open(pid, PidfdFlags::empty())?);
        Ok(())
    }

    /// Opens the pidfds of polled members for which descriptors are left by now. Returns these
    /// members.
    pub(crate) fn open_polled(&mut self) -> Vec<Pid> {
        let polled = self.polled.clone().into_iter();
        let opened: Vec<_> = polled.filter(|pid| self.open(*pid).is_ok()).collect();
        self.polled.retain(|pid| !opened.contains(pid));
        opened
    }

    /// Returns whether members have to be polled.
    pub(crate) fn has_polled(&self) -> bool {
        !self.polled.is_empty()
    }

    /// Returns whether `pid` is a member.
    pub(crate) fn contains(&self, pid: Pid) -> bool {
        self.members.contains_key(&pid) || self.polled.contains(&pid)
    }

    /// Returns the pidfd of member `pid`.
    pub(crate) fn handle(&self, pid: Pid) -> Option<BorrowedFd<'_>> {
        self.members.get(&pid).map(AsFd::as_fd)
    }

    /// Forgets member `pid` if it has ended, since the kernel may have given its number to another
    /// process. Returns whether it did.
    pub(crate) fn remove_if_ended(&mut self, pid: Pid) -> bool {
        let has_ended = match self.members.get(&pid) {
            Some(handle) => has_ended(handle),
            None => self.polled.contains(&pid) && is_gone(pid),
        };
        if has_ended {
            self.remove(pid);
        }
        has_ended
    }

    /// Forgets the members that have ended, and returns them.
    pub(crate) fn remove_ended(&mut self) -> Vec<Pid> {
        let ended = self.members.extract_if(|_, handle| has_ended(handle)).map(|(pid, _)| pid);
        ended.chain(self.polled.extract_if(|pid| is_gone(*pid))).collect()
    }

    /// Forgets member `pid`.
    pub(crate) fn remove(&mut self, pid: Pid) {
        self.members.remove(&pid);
        self.polled.remove(&pid);
    }

    /// Returns the number of members.
    pub(crate) fn len(&self) -> usize {
        self.members.len() + self.polled.len()
    }
}

/// Returns the number of this process's PID namespace; `None` without `/proc`.
pub(crate) fn pid_namespace() -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    Some(std::fs::metadata("/proc/self/ns/pid").ok()?.ino())
}

/// Returns whether no process has this number. One that has ended has it until its parent reaps it.
fn is_gone(pid: Pid) -> bool {
    test_kill_process(pid) == Err(Errno::SRCH)
}

fn has_ended(handle: &OwnedFd) -> bool {
    let mut handles = [PollFd::new(handle, PollFlags::IN)];
    poll(&mut handles, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Returns the processes that map the file at `path`, as far as this user may know, and those that
/// the kernel cannot show: they wait for a disk in the middle of a change of their mappings.
pub fn processes_that_map(path: &Path) -> Vec<Pid> {
    of_those_that_may_map(path, all_processes().collect())
}

/// Returns the processes that the kernel lists.
fn all_processes() -> impl Iterator<Item = Pid> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    entries.filter_map(number).filter_map(Pid::from_raw)
}

/// Returns the processes that were started under the pool with this control memory, by their
/// environment, but do not map it, as far as this user may know. Leaves out programs that the user
/// trusts.
///
/// A process may start another one and end before the search reaches it. So the search repeats
/// until the kernel lists no new process.
pub(crate) fn processes_beside(control: &Path) -> Vec<Pid> {
    let mut entry = b"TIDEGATE_CONTROL=".to_vec();
    entry.extend_from_slice(control.as_os_str().as_bytes());
    let is_beside = |pid: &Pid| {
        let Some(environment) = environment_of(*pid) else { return true };
        let mut variables = environment.split(|byte| *byte == 0);
        variables.clone().any(|variable| variable == entry)
            && !variables.any(|variable| {
                let globs = variable.strip_prefix(b"TIDEGATE_TRUST=");
                globs.is_some_and(|globs| runs_one_of(*pid, globs))
            })
    };
    let (mut seen, mut beside) = (HashSet::new(), Vec::new());
    for _ in 0..SEARCHES_MAX {
        let new: Vec<_> = all_processes().filter(|pid| seen.insert(*pid)).collect();
        if new.is_empty() {
            break;
        }
        let new = new.into_iter().filter(is_beside).filter(|pid| !maps(*pid, control));
        beside.extend(new);
    }
    beside
}

/// Returns the environment of a process at its start; empty if this user may not know it. Returns
/// `None` if the kernel does not show it in time.
fn environment_of(process: Pid) -> Option<Vec<u8>> {
    let shown = |what: &str| std::fs::read(format!("/proc/{process}/{what}")).unwrap_or_default();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let environment = shown("environ");
        // In the middle of an `execve` the kernel shows a program without arguments and
        // environment. A process that has ended has no program, and neither has a kernel thread.
        let is_replaced = environment.is_empty()
            && shown("cmdline").is_empty()
            && std::fs::read_link(format!("/proc/{process}/exe")).is_ok();
        if !is_replaced {
            return Some(environment);
        }
        if Instant::now() > deadline {
            return None;
        }
        std::thread::yield_now();
    }
}

/// Returns whether the program of a process matches one of the globs, one a line.
fn runs_one_of(process: Pid, globs: &[u8]) -> bool {
    let program = std::fs::read_link(format!("/proc/{process}/exe"));
    program.is_ok_and(|program| matches_any(globs, program.as_os_str().as_bytes()))
}

/// Returns the parent of a process.
pub(crate) fn parent_of(process: Pid) -> Option<Pid> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // State and parent follow the name, which may contain any characters.
    let parent = stat.rsplit(')').next()?.split_whitespace().nth(1)?;
    Pid::from_raw(parent.parse().ok()?)
}

/// Returns the name of a process's program, for messages.
pub(crate) fn name_of(process: Pid) -> String {
    let name = std::fs::read_to_string(format!("/proc/{process}/comm"));
    name.map_or_else(|_| process.to_string(), |name| name.trim_end().to_owned())
}

/// Returns whether `process` lives and maps the file at `path`. A process that the kernel cannot
/// show counts as mapping it.
pub(crate) fn maps(process: Pid, path: &Path) -> bool {
    !of_those_that_may_map(path, VecDeque::from([process])).is_empty()
}

fn of_those_that_may_map(path: &Path, mut processes: VecDeque<Pid>) -> Vec<Pid> {
    let mut found = Vec::new();
    while !processes.is_empty() {
        let answers = shown_by_each(path.to_path_buf(), processes.clone());
        loop {
            let answer = answers.recv_timeout(TIMEOUT);
            let Some(process) = processes.pop_front() else { break };
            if answer != Ok(false) {
                found.push(process);
            }
            if answer.is_err() {
                break;
            }
        }
    }
    found
}

/// Sends for each process whether the kernel shows that it maps the file at `path`. A thread asks,
/// since the kernel may never answer.
fn shown_by_each(path: PathBuf, processes: VecDeque<Pid>) -> Receiver<bool> {
    let (answer, answers) = channel();
    let is_shown = move |process: Pid| {
        match std::fs::read(format!("/proc/{process}/maps")) {
            Ok(maps) => maps
                .split(|byte| *byte == b'\n')
                .any(|line| line.ends_with(path.as_os_str().as_bytes())),
            // It cannot be known.
            Err(error) => is_out_of_descriptors(&error),
        }
    };
    std::thread::spawn(move || processes.into_iter().all(|pid| answer.send(is_shown(pid)).is_ok()));
    answers
}

/// Returns whether an error is due to the number of open descriptors.
pub(crate) fn is_out_of_descriptors(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| [Errno::MFILE, Errno::NFILE].contains(&errno))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn members_are_known_until_they_end() {
        let mut tree = Tree::new(None);
        let mut child = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert_eq!(tree.announce(pid).unwrap(), Announced::New);
        assert_eq!(tree.announce(pid).unwrap(), Announced::Known);
        assert_eq!((tree.remove_ended(), tree.len()), (Vec::new(), 1));
        assert!(!tree.remove_if_ended(pid));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!((tree.remove_ended(), tree.len()), (vec![pid], 0));
        assert_eq!(tree.announce(pid).unwrap(), Announced::Gone);
    }

    #[test]
    fn environments_are_those_that_processes_were_started_with() {
        let mut cat = Command::new("cat");
        cat.stdin(std::process::Stdio::piped()).env_clear();
        let (mut without, mut with) = (cat.spawn().unwrap(), cat.env("A", "b").spawn().unwrap());
        assert_eq!(environment_of(Pid::from_child(&without)), Some(Vec::new()));
        assert_eq!(environment_of(Pid::from_child(&with)), Some(b"A=b\0".to_vec()));
        without.kill().unwrap();
        let with_pid = Pid::from_child(&with);
        with.kill().unwrap();
        without.wait().unwrap();
        with.wait().unwrap();
        assert_eq!(environment_of(with_pid), Some(Vec::new()), "it has ended");
    }

    #[test]
    fn a_member_whose_number_comes_again_is_handed_back_first() {
        let mut tree = Tree::new(None);
        let mut child = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        tree.announce(pid).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(tree.remove_if_ended(pid), "what it left is to be repaired");
        assert!(!tree.remove_if_ended(pid));
        assert_eq!((tree.announce(pid).unwrap(), tree.len()), (Announced::Gone, 0));
    }

    #[test]
    fn a_process_maps_its_program() {
        let program = std::env::current_exe().unwrap();
        let own = rustix::process::getpid();
        assert!(maps(own, &program) && processes_that_map(&program).contains(&own));
        assert!(!maps(own, Path::new("/no/such/file")));
    }

    #[test]
    fn members_beyond_the_descriptors_are_polled() {
        let mut tree = Tree::new(Some(2));
        let mut cat = Command::new("cat");
        cat.stdin(std::process::Stdio::piped());
        let mut children = [0; 3].map(|_| cat.spawn().unwrap());
        let [first, second, third] = children.each_ref().map(Pid::from_child);
        assert_eq!(tree.announce(first).unwrap(), Announced::New);
        assert_eq!(tree.announce(second).unwrap(), Announced::Polled);
        assert_eq!(tree.announce(third).unwrap(), Announced::Polled);
        assert_eq!(tree.announce(second).unwrap(), Announced::Known);
        assert_eq!((tree.remove_ended(), tree.open_polled()), (Vec::new(), Vec::new()));
        let mut end = |number: usize| {
            drop(children[number].stdin.take());
            children[number].wait().unwrap();
        };
        end(1);
        assert_eq!((tree.remove_ended(), tree.len()), (vec![second], 2));
        end(0);
        assert_eq!(tree.remove_ended(), [first]);
        assert_eq!((tree.open_polled(), tree.has_polled()), (vec![third], false));
        end(2);
        assert!(tree.handle(third).is_some() && tree.remove_if_ended(third));
    }
}
