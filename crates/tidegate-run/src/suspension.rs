//! Processes that cannot be watched: while one lives, nothing is logged.
//!
//! Invariants:
//! 1. The log is suspended once for each process here.
//! 2. A process leaves when it has ended. First its unwatchable descendants join: processes that
//!    have its environment and do not map the control memory. The changes of names that it made
//!    were not counted, so all file systems count as having pending changes then.
//! 3. The log notes the processes here, so that the next supervisor goes on with them if this one
//!    is killed. A process that maps the control memory may be here too, such as one that starts a
//!    program at present: the environments alone would not tell the next supervisor.

use std::collections::HashSet;
use std::path::Path;

use rustix::process::Pid;
use tidegate::log::Log;

use super::tree::{parent_of, processes_beside};

/// The processes that suspend logging.
#[derive(Debug, Default)]
pub(crate) struct Suspensions {
    processes: HashSet<Pid>,
    /// Members that did not ask to suspend. Such a member leaves once it can be watched.
    found: HashSet<Pid>,
}

impl Suspensions {
    /// Goes on with the suspensions of a supervisor that was killed, and with all unwatchable
    /// processes that it left. Returns the processes, so that the caller watches for their end.
    pub(crate) fn take_over(&mut self, log: &Log, control: &Path) -> Vec<Pid> {
        let former = log.processes().take_over_suspensions();
        self.processes.extend(former.into_iter().filter_map(|it| Pid::from_raw(it.cast_signed())));
        self.add_found(log, control);
        // This process has the number of one that has ended.
        self.remove(log, rustix::process::getpid());
        self.processes.iter().copied().collect()
    }

    /// Suspends logging while `process` lives.
    pub(crate) fn add(&mut self, log: &Log, process: Pid) {
        self.found.remove(&process);
        if self.processes.insert(process) {
            log.processes().suspend_for(number_of(process));
        }
    }

    /// Returns whether logging is suspended for `process`.
    pub(crate) fn contains(&self, process: Pid) -> bool {
        self.processes.contains(&process)
    }

    /// Takes the suspension for `process` back, if there is one.
    pub(crate) fn remove(&mut self, log: &Log, process: Pid) {
        self.found.remove(&process);
        if self.processes.remove(&process) {
            log.processes().resume_for(number_of(process));
        }
    }

    /// Replaces a process that has ended by the unwatchable processes that it left. Returns those,
    /// so that the caller watches for their end.
    pub(crate) fn ended(&mut self, log: &Log, process: Pid, control: &Path) -> Vec<Pid> {
        if !self.processes.contains(&process) {
            return Vec::new();
        }
        let started = self.add_found(log, control);
        self.remove(log, process);
        started
    }

    /// Suspends logging for all unwatchable processes that are not here. Returns those, so that the
    /// caller watches for their end.
    pub(crate) fn add_found(&mut self, log: &Log, control: &Path) -> Vec<Pid> {
        let mut found = processes_beside(control);
        found.retain(|it| !self.processes.contains(it));
        for it in &found {
            self.add(log, *it);
            self.found.insert(*it);
        }
        found
    }

    /// Ends the suspension for a member that was found, and can be watched since it has announced
    /// itself.
    pub(crate) fn announced(&mut self, log: &Log, process: Pid) {
        if self.found.contains(&process) {
            self.remove(log, process);
        }
    }
}

fn number_of(process: Pid) -> u32 {
    process.as_raw_pid().unsigned_abs()
}

/// Returns the process that `sender` names by this number: itself or a child. A child of `vfork`
/// names itself by its parent's number. Returns `None` for a child that was reaped: its number is
/// free, or another process has it.
pub(crate) fn named_by(sender: Pid, number: i32) -> Option<Pid> {
    let named = Pid::from_raw(number.max(0))?;
    if parent_of(named) == Some(sender) {
        return Some(named);
    }
    (named == sender || parent_of(sender) == Some(named)).then_some(sender)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::super::trial::Trial;
    use super::*;

    #[test]
    fn logging_is_suspended_until_the_last_process_has_ended() {
        let trial = Trial::new();
        let log = &trial.log;
        let fs = log.file_systems().find_or_add(7, true).unwrap();
        let mut suspensions = Suspensions::default();
        let (one, two) = (Pid::from_raw(1_000_001).unwrap(), Pid::from_raw(1_000_002).unwrap());
        suspensions.add(log, one);
        suspensions.add(log, one);
        suspensions.add(log, two);
        assert!(suspensions.ended(log, one, Path::new("/no/control")).is_empty());
        assert!(log.processes().is_suspended());
        suspensions.remove(log, two);
        suspensions.remove(log, two);
        assert!(!log.processes().is_suspended() && log.file_systems().is_pending(fs));
    }

    /// Starts a process under this control memory, without the library. It ends with its input.
    fn started_beside(control: &Path, trust: Option<&str>) -> Child {
        let mut command = Command::new("cat");
        command.env("TIDEGATE_CONTROL", control).stdin(Stdio::piped());
        command.envs(trust.map(|globs| ("TIDEGATE_TRUST", globs)));
        command.spawn().unwrap()
    }

    #[test]
    fn a_process_that_outlives_the_one_that_started_it_stands_for_it() {
        let trial = Trial::new();
        let control = trial.path("control");
        let mut child = started_beside(&control, None);
        let (dead, heir) = (Pid::from_raw(1_000_001).unwrap(), Pid::from_child(&child));
        let mut suspensions = Suspensions::default();
        suspensions.add(&trial.log, dead);
        assert_eq!(suspensions.ended(&trial.log, dead, &control), [heir]);
        assert!(trial.log.processes().is_suspended());
        suspensions.announced(&trial.log, heir);
        assert!(!trial.log.processes().is_suspended());
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn a_trusted_process_stands_for_no_other() {
        let trial = Trial::new();
        let control = trial.path("control");
        let mut child = started_beside(&control, Some("/no/such\n*/cat"));
        let dead = Pid::from_raw(1_000_001).unwrap();
        let mut suspensions = Suspensions::default();
        suspensions.add(&trial.log, dead);
        assert!(suspensions.ended(&trial.log, dead, &control).is_empty());
        assert!(!trial.log.processes().is_suspended());
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn the_next_supervisor_goes_on_with_the_suspensions_of_one_that_was_killed() {
        let trial = Trial::new();
        let (log, control) = (&trial.log, trial.path("control"));
        let mut child = started_beside(&control, None);
        let (former, left) = (Pid::from_raw(1_000_001).unwrap(), Pid::from_child(&child));
        let mut killed = Suspensions::default();
        killed.add(log, former);
        killed.add(log, rustix::process::getpid());
        let mut next = Suspensions::default();
        let found: HashSet<_> = next.take_over(log, &control).into_iter().collect();
        assert_eq!(found, HashSet::from([former, left]));
        next.announced(log, left);
        assert!(log.processes().is_suspended());
        next.remove(log, former);
        assert!(!log.processes().is_suspended());
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn a_sender_names_itself_or_a_child() {
        let own = rustix::process::getpid();
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert_eq!(named_by(own, pid.as_raw_pid()), Some(pid));
        assert_eq!(named_by(own, own.as_raw_pid()), Some(own));
        assert_eq!(named_by(pid, own.as_raw_pid()), Some(pid), "a child of vfork");
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(named_by(own, pid.as_raw_pid()), None, "it was reaped");
        assert_eq!(named_by(own, Pid::INIT.as_raw_pid()), None, "the number of another process");
        assert_eq!([named_by(own, 0), named_by(own, -1)], [None, None]);
    }
}
