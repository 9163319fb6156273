//! The machine under test: a disk, a pool, and a program, whose power is cut.
//!
//! A [`Machine`] has a mount namespace of its own (`unshare --mount`, see [`crate::worker`]) and
//! mounts there what a boot makes anew: `/dev/shm`, and the boot's identity. So nothing that it
//! mounts outlives it, even if it is killed.

pub mod abandoned;
pub mod disk;
pub mod group;
pub mod image;
pub mod program;

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::mount::{MountFlags, mount, mount_bind};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use self::disk::{Disk, OUTSIDE};
use self::group::Group;
use self::image::Image;
use self::program::{Interpreter, Program};
use crate::file_system::FileSystem;
use crate::model::{Model, State, Verdict};
use crate::promise::Promises;
use crate::sequence::{Outside, Sequence, Step, Sync};

const SHARED_MEMORY: &str = "/dev/shm";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Names of directories, groups and loop devices of this harness begin with this, then have the
/// process.
pub const PREFIX: &str = "tidegate-crashtest.";
/// After this time the kernel may write back by itself.
const QUIET: Duration = Duration::from_secs(20);
/// How long a recovery may take.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// What `tidegate recover` says of a log that is clean.
const NOTHING: &str = "nothing to recover";

/// How the program runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Runner {
    /// As it is.
    Plain,
    /// Under `tidegate run` by this binary.
    Tidegate {
        /// The binary; the preload library is beside it.
        binary: PathBuf,
        /// Options of `run`.
        options: Vec<String>,
        /// Files are covered at a descriptor's first sync: sequences are short.
        covers_at_once: bool,
    },
}

/// A mistake that is planted to show that it is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The program does not make its syncs.
    DroppedSyncs,
    /// The pool loses what was appended since the run began.
    LostRecords,
    /// `run` sees no rename: what stands in front of it is taken out.
    MissedRenames,
    /// `run` sees no directory that is made: syncs are answered while that is pending.
    MissedDirectories,
    /// `run` retires records before their files are synced: the supervisor's syncs succeed, and
    /// none is made.
    EarlyRetire,
    /// `run` records the names of plain files: it takes them for synced, and they are not.
    PlainNames,
}

impl Fault {
    /// Every fault, with its name on the command line.
    pub const ALL: [(Self, &str); 6] = [
        (Self::DroppedSyncs, "dropped-syncs"),
        (Self::LostRecords, "lost-records"),
        (Self::MissedRenames, "missed-renames"),
        (Self::MissedDirectories, "missed-directories"),
        (Self::EarlyRetire, "early-retire"),
        (Self::PlainNames, "plain-names"),
    ];

    /// What tells the program to make the mistake, or to lead `run` into it: a variable of its
    /// environment.
    fn variable(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::DroppedSyncs | Self::LostRecords | Self::EarlyRetire => None,
            Self::MissedRenames => Some(("CRASHTEST_MISSED", "rename")),
            Self::MissedDirectories => Some(("CRASHTEST_MISSED", "mkdir")),
            Self::PlainNames => Some(("CRASHTEST_CLAIMED", "1")),
        }
    }
}

/// Behind which steps the power is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cuts {
    /// Behind the last one.
    Last,
    /// Behind each.
    All,
}

/// A state that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Number of the last step before the cut.
    pub step: usize,
    /// What is wrong.
    pub what: Verdict,
}

/// The disk and the pool at a moment.
struct Cut {
    step: usize,
    disk: Image,
    pool: Image,
}

impl Cut {
    /// Whether nothing reached the disk or the pool between two cuts.
    fn is_same(&self, other: &Self) -> bool {
        (&self.disk, &self.pool) == (&other.disk, &other.pool)
    }
}

/// What a recovery leaves behind, or how it failed.
type Left = Result<State, String>;

/// A machine, in whose namespace the caller is.
#[derive(Debug)]
pub struct Machine {
    file_system: FileSystem,
    runner: Runner,
    fault: Option<Fault>,
    dir: PathBuf,
    disk: Disk,
    group: Group,
    interpreter: Interpreter,
    /// Acts from outside the tree.
    agent: Program,
    /// An unused pool.
    pool: Image,
    boots: u64,
    /// Locked while the program runs.
    turn: File,
}

impl Machine {
    /// Makes a machine; its files are in memory of this namespace, mounted over `dir`.
    ///
    /// # Errors
    /// The caller is not root, or something is missing.
    pub fn new(
        dir: &Path,
        interpreter: Interpreter,
        file_system: FileSystem,
        runner: Runner,
        fault: Option<Fault>,
    ) -> Result<Self> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "crash tests mount file systems: run them as root"
        );
        let turn = dir.with_file_name(format!("{PREFIX}lock"));
        let turn = File::options().create(true).append(true).open(turn)?;
        let none = MountFlags::empty();
        mount("crashtest", dir, "tmpfs", none, None).context("cannot mount a tmpfs")?;
        mount("crashtest", SHARED_MEMORY, "tmpfs", none, None).context("cannot mount a tmpfs")?;
        let (hierarchy, boot_id) = (dir.join("cgroup"), dir.join("boot_id"));
        fs::create_dir(&hierarchy)?;
        mount("crashtest", &hierarchy, "cgroup2", none, None).context("cannot mount cgroup2")?;
        fs::write(&boot_id, "")?;
        mount_bind(&boot_id, BOOT_ID).context("cannot replace the boot's identity")?;
        abandoned::remove_groups(&hierarchy);
        let group = Group::new(&hierarchy, &format!("{PREFIX}{}", std::process::id()))?;
        let disk = Disk::new(dir, file_system)?;
        let agent = Program::start(&mut Command::new(&interpreter.linked), |command| {
            command.spawn().context("cannot start the agent")
        })?;
        let (dir, pool) = (dir.to_owned(), Image::default());
        let mut this = Self {
            file_system,
            runner,
            fault,
            dir,
            disk,
            group,
            interpreter,
            agent,
            pool,
            boots: 0,
            turn,
        };
        this.boot()?;
        this.make_pool()?;
        Ok(this)
    }

    fn pool_path(&self) -> PathBuf {
        self.dir.join("pool")
    }

    fn make_pool(&mut self) -> Result<()> {
        if let Runner::Tidegate { binary, .. } = &self.runner {
            let mut create = Command::new(binary);
            create.arg("create").arg(self.pool_path()).args(["--engine=log", "--size=1M"]);
            succeed(&mut create)?;
            self.pool = Image::read(&File::open(self.pool_path())?)?;
        }
        Ok(())
    }

    /// Gives the machine a new boot: nothing is in shared memory, and the kernel has a new
    /// identity.
    fn boot(&mut self) -> Result<()> {
        self.boots += 1;
        let identity = format!("00000000-0000-4000-8000-{:012x}\n", self.boots);
        fs::write(self.dir.join("boot_id"), identity)?;
        for entry in fs::read_dir(SHARED_MEMORY)? {
            let path = entry?.path();
            if path.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
        }
        Ok(())
    }

    /// Puts a copy of the pool where it was. It is another inode, as after a boot.
    fn put_pool(&self, image: &Image) -> Result<()> {
        if self.runner == Runner::Plain {
            return Ok(());
        }
        let path = self.pool_path();
        fs::remove_file(&path)?;
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        image.write(&options.open(&path)?)
    }

    /// Runs a sequence, cuts the power, recovers, and judges what is left. Empty if all is allowed.
    ///
    /// # Errors
    /// The harness itself fails, or the sequence is not valid.
    pub fn test(&mut self, sequence: &Sequence, cuts: Cuts) -> Result<Vec<Violation>> {
        Promises::behind(sequence).context("the sequence is not valid")?;
        let name = self.file_system.name();
        ensure!(self.file_system.can_execute(sequence), "{name} does not have its operations");
        let mut found = self.test_once(sequence, cuts)?;
        let is_weak = |violation: &Violation| matches!(violation.what, Verdict::Misordered(_));
        if found.iter().any(is_weak) {
            // A sync of some other process explains it as well: that does not come again.
            let again = self.test_once(sequence, cuts)?;
            let is_back = |one: &Violation| again.iter().any(|other| other.step == one.step);
            found.retain(|violation| !is_weak(violation) || is_back(violation));
        }
        Ok(found)
    }

    fn test_once(&mut self, sequence: &Sequence, cuts: Cuts) -> Result<Vec<Violation>> {
        let (cuts, mut violations) = self.run(sequence, cuts)?;
        let mut last = None;
        for cut in cuts {
            // What leaves disk and pool as they were has one recovery with the step before.
            let same = last.take().filter(|(before, _): &(Cut, _)| before.is_same(&cut));
            let state = same.map_or_else(|| self.recover(&cut), |(_, state)| Ok(state))?;
            violations.extend(self.judge(sequence, cut.step, &state)?);
            last = Some((cut, state));
        }
        Ok(violations)
    }

    fn run(&mut self, sequence: &Sequence, cuts: Cuts) -> Result<(Vec<Cut>, Vec<Violation>)> {
        self.boot()?;
        self.disk.reset()?;
        self.put_pool(&self.pool)?;
        self.disk.mount()?;
        // ext4 takes an inode that it loads while a transaction runs for changed by that: a commit
        // ends what mounting began, then all are loaded.
        self.act_from_outside(&Step::Outside(Outside::Commit))?;
        self.disk.read()?;
        let start = Instant::now();
        let first = self.start_supervisor()?;
        let mut command = self.command(sequence.hold)?;
        let mut program = Program::start(&mut command, |command| self.group.spawn(command))?;
        let done = self.execute_in_turn(&mut program, sequence, cuts);
        let killed = self.group.kill();
        drop((program, first));
        self.disk.unmount()?;
        killed?;
        // What syncs promise does not depend on it.
        ensure!(
            self.file_system.kind().is_none() || start.elapsed() < QUIET,
            "it took {:?}: the kernel may have written back",
            start.elapsed()
        );
        done
    }

    /// For a supervisor that makes no syncs, before a program that does: another program that has
    /// it started, and does nothing.
    fn start_supervisor(&self) -> Result<Option<Program>> {
        if self.fault != Some(Fault::EarlyRetire) || self.runner == Runner::Plain {
            return Ok(None);
        }
        let mut command = self.program(true);
        command.stderr(Stdio::null());
        let mut first = Program::start(&mut command, |command| self.group.spawn(command))?;
        // Whatever it answers: it runs, so the supervisor is there.
        first.execute(0, "nothing").context("the program that starts a supervisor")?;
        Ok(Some(first))
    }

    /// The program, started as the runner says, with all that it starts: their syncs are not made
    /// if `is_unsynced`.
    fn program(&self, is_unsynced: bool) -> Command {
        let mut words: Vec<OsString> = Vec::new();
        if is_unsynced {
            words.extend([self.interpreter.linked.clone().into(), "unsynced".into()]);
        }
        if let Runner::Tidegate { binary, options, .. } = &self.runner {
            words.extend([binary.into(), "run".into(), "--pool".into(), self.pool_path().into()]);
            words.extend(options.iter().map(OsString::from));
            words.push("--".into());
        }
        words.push(self.interpreter.dynamic.clone().into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(&self.interpreter.linked);
        command
    }

    fn command(&self, hold: bool) -> Result<Command> {
        let mut command = self.program(self.fault == Some(Fault::PlainNames));
        command.args(hold.then_some("hold"));
        if let Runner::Tidegate { covers_at_once: true, .. } = self.runner {
            command.env("TIDEGATE_COVER_AFTER", "1");
        }
        command.envs(self.fault.and_then(Fault::variable));
        command.current_dir(self.disk.mount_point()).stderr(File::create(self.dir.join("stderr"))?);
        Ok(command)
    }

    /// As [`execute`](Self::execute). `sync` is about all file systems: from the first step of a
    /// program that calls it to the last cut no program of another machine takes a step. What
    /// comes before and behind does not depend on syncs of others: the file system is clean, or
    /// not looked at any more.
    fn execute_in_turn(
        &mut self,
        program: &mut Program,
        sequence: &Sequence,
        cuts: Cuts,
    ) -> Result<(Vec<Cut>, Vec<Violation>)> {
        let syncs_all = sequence.steps.contains(&Step::Sync(Sync::All));
        let how =
            if syncs_all { FlockOperation::LockExclusive } else { FlockOperation::LockShared };
        // A program that is there takes no time of the others to start.
        program.execute(0, "nothing").with_context(|| self.stderr())?;
        flock(&self.turn, how)?;
        let done = self.execute(program, sequence, cuts);
        flock(&self.turn, FlockOperation::Unlock)?;
        done
    }

    /// Executes the steps; the cuts that were made, and what was wrong before any.
    fn execute(
        &mut self,
        program: &mut Program,
        sequence: &Sequence,
        cuts: Cuts,
    ) -> Result<(Vec<Cut>, Vec<Violation>)> {
        let mut made = Vec::new();
        for (number, step) in (1..).zip(&sequence.steps) {
            let failed = match step {
                Step::Outside(Outside::Retire) => self.retire()?,
                Step::Outside(_) => self.act_from_outside(step)?,
                Step::Sync(_) if self.fault == Some(Fault::DroppedSyncs) => None,
                _ => program.execute(number, &step.to_string()).with_context(|| self.stderr())?,
            };
            let step = usize::try_from(number)?;
            if let Some(failed) = failed {
                let what = Verdict::Forbidden(format!("step {failed}"));
                return Ok((made, vec![Violation { step, what }]));
            }
            if cuts == Cuts::All || step == sequence.steps.len() {
                made.push(self.cut(step)?);
            }
        }
        let present = Promises::behind(sequence)?.judge_present(&self.disk.read()?);
        let what = Verdict::Forbidden(format!("before the cut: {}", present.join("; ")));
        let violation = Violation { step: sequence.steps.len(), what };
        Ok((made, (!present.is_empty()).then_some(violation).into_iter().collect()))
    }

    fn act_from_outside(&mut self, step: &Step) -> Result<Option<String>> {
        let text = step.to_string();
        let root = self.disk.mount_point().display().to_string();
        let line = match text.strip_prefix("outside writeback ") {
            Some(path) => format!("writeback {root}/{path}"),
            None => format!("commit {root}/{OUTSIDE}"),
        };
        self.agent.execute(0, &line)
    }

    /// Has the log retired, if there is one.
    fn retire(&self) -> Result<Option<String>> {
        if let Runner::Tidegate { binary, .. } = &self.runner {
            succeed(Command::new(binary).arg("flush").arg(self.pool_path()))?;
        }
        Ok(None)
    }

    fn cut(&mut self, step: usize) -> Result<Cut> {
        self.group.freeze()?;
        let disk = self.disk.cut()?;
        let pool = match self.runner {
            Runner::Plain => Image::default(),
            Runner::Tidegate { .. } if self.fault == Some(Fault::LostRecords) => self.pool.clone(),
            Runner::Tidegate { .. } => {
                Image::read_since(&File::open(self.pool_path())?, &self.pool)?
            }
        };
        self.group.thaw()?;
        Ok(Cut { step, disk, pool })
    }

    fn judge(&self, sequence: &Sequence, step: usize, left: &Left) -> Result<Option<Violation>> {
        let steps = sequence.steps[..step].to_vec();
        let before = Sequence { hold: sequence.hold, steps };
        let what = match left {
            Ok(state) => self.judge_state(&before, state)?,
            Err(failure) => Verdict::Forbidden(failure.clone()),
        };
        Ok((!what.is_allowed()).then_some(Violation { step, what }))
    }

    fn judge_state(&self, before: &Sequence, state: &State) -> Result<Verdict> {
        let Some(kind) = self.file_system.kind() else {
            return Ok(Promises::behind(before)?.judge(state));
        };
        let is_plain = self.runner == Runner::Plain;
        let model = Model::new(kind);
        let model = if is_plain { model } else { model.under_run() };
        Ok(model.after(before)?.judge(state, !is_plain))
    }

    /// The state behind a cut, or how the recovery failed.
    fn recover(&mut self, cut: &Cut) -> Result<Left> {
        self.boot()?;
        self.disk.restore(&cut.disk)?;
        self.put_pool(&cut.pool)?;
        self.disk.mount()?;
        let is_logged = self.file_system.kind().is_some();
        let before = if is_logged { None } else { Some(self.disk.read()?) };
        let recovered = self.recover_pool()?;
        let after = self.disk.read()?;
        self.disk.unmount()?;
        Ok(recovered.and_then(|said| match (said, before) {
            (Some(said), Some(before)) => unlogged(&said, &before, after),
            _ => Ok(after),
        }))
    }

    /// What the recovery said, or how it failed; none without a pool.
    fn recover_pool(&self) -> Result<Result<Option<String>, String>> {
        let Runner::Tidegate { binary, .. } = &self.runner else { return Ok(Ok(None)) };
        let mut command = Command::new(&self.interpreter.linked);
        command.arg("boot").arg(binary).arg("recover");
        command.arg(self.pool_path()).stdin(Stdio::null()).stdout(Stdio::piped());
        let child = self.group.spawn(command.stderr(Stdio::piped()))?;
        if !has_ended(&child, RECOVERY_TIMEOUT)? {
            self.group.kill()?;
        }
        let output = child.wait_with_output()?;
        // A supervisor may outlive the command.
        self.group.kill()?;
        if output.status.success() {
            return Ok(Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned())));
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Ok(Err(format!("recover: {}: {}", output.status, said.trim())))
    }

    /// What the program said on standard error.
    fn stderr(&self) -> String {
        fs::read_to_string(self.dir.join("stderr")).unwrap_or_default()
    }
}

/// The state behind a recovery where nothing is logged, or what it did: it must do nothing.
fn unlogged(said: &str, before: &State, after: State) -> Left {
    if *before != after {
        return Err("recovery changed files of a file system that is not logged".into());
    }
    if !said.contains(NOTHING) {
        return Err(format!("the log had records on a file system that is not logged: {said}"));
    }
    Ok(after)
}

/// Waits until a process has ended: whether it did so in time.
fn has_ended(child: &Child, timeout: Duration) -> Result<bool> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let mut events = [PollFd::new(&process, PollFlags::IN)];
    Ok(poll(&mut events, Some(&Timespec::try_from(timeout)?))? > 0)
}

/// Runs a command, which must succeed, and hands back what it printed.
pub(crate) fn succeed(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let output =
        output.with_context(|| format!("cannot start {}", command.get_program().display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?}: {}: {}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
