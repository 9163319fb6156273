//! A control group: all processes of a run, with their children, are frozen or killed together.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Time that the kernel may take to freeze or to kill.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A control group below the root of a mounted hierarchy; removed when dropped.
#[derive(Debug)]
pub struct Group {
    root: PathBuf,
    path: PathBuf,
}

impl Group {
    /// Makes a group in the hierarchy that is mounted at `root`.
    ///
    /// # Errors
    /// The kernel refuses, or is older than 5.14 and cannot kill groups.
    pub fn new(root: &Path, name: &str) -> Result<Self> {
        let this = Self { root: root.to_owned(), path: root.join(name) };
        fs::create_dir(&this.path)
            .with_context(|| format!("cannot make {}", this.path.display()))?;
        if !this.path.join("cgroup.kill").exists() {
            bail!("{}: no cgroup.kill: Linux 5.14 or newer is needed", this.path.display());
        }
        Ok(this)
    }

    /// Starts a command in the group.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        // The caller is a member for a moment: a child starts in its parent's group.
        enter(&self.path)?;
        let child = command.spawn();
        enter(&self.root)?;
        child.with_context(|| format!("cannot start {command:?}"))
    }

    /// Stops every process of the group between two instructions of its own, none inside a system
    /// call that changes files.
    ///
    /// # Errors
    /// A process does not stop.
    pub fn freeze(&self) -> Result<()> {
        self.command("freeze", "1")?;
        self.await_event("frozen 1")
    }

    /// Resumes the processes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn thaw(&self) -> Result<()> {
        self.command("freeze", "0")
    }

    /// Kills every process of the group and waits for their ends.
    ///
    /// # Errors
    /// A process does not end.
    pub fn kill(&self) -> Result<()> {
        self.command("kill", "1")?;
        self.thaw()?;
        self.await_event("populated 0")
    }

    /// Kills the processes whose command line `is_wanted` accepts, and waits for their ends.
    ///
    /// # Errors
    /// A process does not end.
    pub fn kill_member(&self, is_wanted: impl Fn(&[OsString]) -> bool) -> Result<()> {
        let members = fs::read_to_string(self.path.join("cgroup.procs"))?;
        let wanted = |pid: &i32| is_wanted(&command_line(*pid));
        let pids: Vec<i32> =
            members.lines().filter_map(|line| line.parse().ok()).filter(wanted).collect();
        for pid in pids {
            let pid = Pid::from_raw(pid).context("a process has a number")?;
            let process = pidfd_open(pid, PidfdFlags::empty())?;
            pidfd_send_signal(&process, Signal::KILL)?;
            let mut events = [PollFd::new(&process, PollFlags::IN)];
            let is_gone = poll(&mut events, Some(&Timespec::try_from(TIMEOUT)?))? > 0;
            ensure!(is_gone, "a killed process does not end");
        }
        Ok(())
    }

    fn command(&self, name: &str, value: &str) -> Result<()> {
        let path = self.path.join(format!("cgroup.{name}"));
        fs::write(&path, value).with_context(|| format!("cannot write {}", path.display()))
    }

    fn await_event(&self, wanted: &str) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        let path = self.path.join("cgroup.events");
        let file = fs::File::open(&path)?;
        // Reading re-arms the event, so a change between reading and waiting ends the wait.
        while !read_again(&file)?.lines().any(|line| line == wanted) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("{}: not \"{wanted}\" after {TIMEOUT:?}", path.display());
            }
            let mut events = [PollFd::new(&file, PollFlags::PRI)];
            poll(&mut events, Some(&Timespec::try_from(left)?))?;
        }
        Ok(())
    }
}

/// Returns the command line of a process, empty if the process is gone.
fn command_line(pid: i32) -> Vec<OsString> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = bytes.strip_suffix(&[0]).unwrap_or(&bytes).split(|byte| *byte == 0);
    words.map(|word| OsStr::from_bytes(word).to_owned()).collect()
}

/// Makes this process a member of a group.
fn enter(group: &Path) -> Result<()> {
    let procs = group.join("cgroup.procs");
    fs::write(&procs, "0").with_context(|| format!("cannot write {}", procs.display()))
}

fn read_again(file: &fs::File) -> Result<String> {
    let mut bytes = [0; 256];
    let count = std::os::unix::fs::FileExt::read_at(file, &mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes[..count]).into_owned())
}

impl Drop for Group {
    fn drop(&mut self) {
        // The next campaign removes a group that is left.
        let _ = self.kill();
        let _ = fs::remove_dir(&self.path);
    }
}
