//! The machine under test: a disk, a pool, and a program, whose power is cut.
//!
//! A [`Machine`] has a mount namespace of its own (`unshare --mount`, see [`crate::worker`]), and
//! mounts there the objects that are new after each boot: `/dev/shm`, and the boot's identity. So
//! none of its mounts outlives it, even if it is killed.

pub mod abandoned;
pub mod disk;
pub mod group;
pub mod image;
pub mod program;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
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
use crate::model::crowd;
use crate::model::{Kind, Model, State, TimeRule, Times, Verdict};
use crate::operation::Operation;
use crate::promise::Promises;
use crate::sequence::{Lost, Other, Outside, Sequence, Step, Sync};

const SHARED_MEMORY: &str = "/dev/shm";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Prefix of this harness's directories, groups and loop devices, before the process number.
pub const PREFIX: &str = "tidegate-crashtest.";
/// After this time the kernel may write back by itself.
const QUIET: Duration = Duration::from_secs(20);
/// Timeout of a recovery.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// The exit status of a recovery that refuses files and names them.
const REFUSED: i32 = 1;
/// The message of `tidegate recover` about a clean log.
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
        /// Files are covered at a descriptor's first sync, since sequences are short.
        covers_at_once: bool,
        /// The size of the pool, as `tidegate create` takes it.
        pool_size: String,
    },
}

/// A mistake that is planted to show that the tests find it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The program does not make its syncs.
    DroppedSyncs,
    /// The pool loses the records that were appended since the run began.
    LostRecords,
    /// `run` sees no rename, since its hook is taken out.
    MissedRenames,
    /// `run` sees no new directory, and answers syncs while the creation is pending.
    MissedDirectories,
    /// `run` retires records before their files are synced: the supervisor's syncs falsely succeed.
    EarlyRetire,
    /// `run` records the names of plain files: it takes them for synced, although they are not.
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

    /// Returns the variable that makes the program make the mistake, or lead `run` into it.
    fn variable(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::DroppedSyncs | Self::LostRecords | Self::EarlyRetire => None,
            Self::MissedRenames => Some(("CRASHTEST_MISSED", "rename")),
            Self::MissedDirectories => Some(("CRASHTEST_MISSED", "mkdir")),
            Self::PlainNames => Some(("CRASHTEST_CLAIMED", "1")),
        }
    }
}

/// The steps after which the power is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cuts {
    /// After the last step.
    Last,
    /// After each step.
    All,
}

/// A state that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Number of the last step before the cut.
    pub step: usize,
    /// The reason.
    pub what: Verdict,
}

/// A pool, and its contents while it is unused.
#[derive(Debug)]
struct Pool {
    path: PathBuf,
    unused: Image,
}

/// The disk and the pools at a moment.
struct Cut {
    step: usize,
    disk: Image,
    pools: Vec<Image>,
}

impl Cut {
    /// Returns whether no write reached the disk or the pools between two cuts.
    fn is_same(&self, other: &Self) -> bool {
        (&self.disk, &self.pools) == (&other.disk, &other.pools)
    }
}

/// The result of a recovery.
struct Left {
    /// The state before the recovery; `None` if it is not compared.
    before: Option<State>,
    after: State,
    /// The message for each pool, or the failure.
    said: Vec<Result<String, Failure>>,
}

/// A failed recovery.
struct Failure {
    status: ExitStatus,
    said: String,
}

/// The programs of a sequence.
struct Programs {
    own: Program,
    /// The whole run was killed: no launcher and no supervisor is left to kill.
    is_without_run: bool,
    /// The programs outside the tree that the sequence has steps for.
    others: Vec<(Other, Program)>,
}

/// A machine. The caller is in its mount namespace.
#[derive(Debug)]
pub struct Machine {
    file_system: FileSystem,
    runner: Runner,
    fault: Option<Fault>,
    dir: PathBuf,
    disk: Disk,
    /// A second disk, made for the first sequence that uses one.
    copy: Option<Disk>,
    group: Group,
    /// The control group of the programs outside the tree.
    others: Group,
    interpreter: Interpreter,
    /// A program that acts from outside the tree.
    agent: Program,
    /// The pool of the program, and that of a second run; empty without Tidegate.
    pools: Vec<Pool>,
    boots: u64,
    /// How times of files are compared, if they are.
    time_rule: Option<TimeRule>,
    /// Times that the files of the last run showed: at the beginning, and after each step.
    shown: Vec<Times>,
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
        time_rule: Option<TimeRule>,
        mount_option: Option<String>,
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
        let name = format!("{PREFIX}{}", std::process::id());
        let group = Group::new(&hierarchy, &name)?;
        let others = Group::new(&hierarchy, &format!("{name}.others"))?;
        let disk = Disk::new(dir, &interpreter.idle, file_system, mount_option)?;
        let agent = Program::start(&mut Command::new(&interpreter.linked), |command| {
            command.spawn().context("cannot start the agent")
        })?;
        let dir = dir.to_owned();
        let mut this = Self {
            file_system,
            runner,
            fault,
            dir,
            disk,
            copy: None,
            group,
            others,
            interpreter,
            agent,
            pools: Vec::new(),
            boots: 0,
            time_rule,
            shown: Vec::new(),
            turn,
        };
        this.boot()?;
        this.make_pools()?;
        Ok(this)
    }

    fn make_pools(&mut self) -> Result<()> {
        let Runner::Tidegate { binary, pool_size, .. } = &self.runner else { return Ok(()) };
        for name in ["pool", "second-pool"] {
            let path = self.dir.join(name);
            let mut create = Command::new(binary);
            create.arg("create").arg(&path).args(["--engine=log", &format!("--size={pool_size}")]);
            succeed(&mut create)?;
            self.pools.push(Pool { unused: Image::read(&File::open(&path)?)?, path });
        }
        Ok(())
    }

    /// Returns the pools that a sequence uses.
    fn pools_of(&self, sequence: &Sequence) -> &[Pool] {
        let is_second = |step: &Step| matches!(step, Step::Other(Other::Second, _));
        let count = 1 + usize::from(sequence.steps.iter().any(is_second));
        &self.pools[..count.min(self.pools.len())]
    }

    /// Gives the machine a new boot: shared memory is empty, and the boot has a new identity.
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

    /// Runs a sequence, cuts the power, recovers, and returns the states that are not allowed.
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
            // A sync of another process explains the state as well, but does not happen twice.
            let again = self.test_once(sequence, cuts)?;
            let is_back = |one: &Violation| again.iter().any(|other| other.step == one.step);
            found.retain(|violation| !is_weak(violation) || is_back(violation));
        }
        Ok(found)
    }

    fn test_once(&mut self, sequence: &Sequence, cuts: Cuts) -> Result<Vec<Violation>> {
        let (cuts, mut violations) = self.run(sequence, cuts)?;
        let mut last: Option<(Cut, Left)> = None;
        for cut in cuts {
            // A step that leaves disk and pool unchanged shares the recovery of the step before.
            let same = last.take().filter(|(before, _)| before.is_same(&cut));
            let left = same.map_or_else(|| self.recover(sequence, &cut), |(_, left)| Ok(left))?;
            violations.extend(self.judge(sequence, cut.step, &left)?);
            last = Some((cut, left));
        }
        Ok(violations)
    }

    fn run(&mut self, sequence: &Sequence, cuts: Cuts) -> Result<(Vec<Cut>, Vec<Violation>)> {
        self.boot()?;
        self.disk.reset()?;
        fs::write(self.dir.join("stderr"), "")?;
        self.pools_of(sequence).iter().try_for_each(|pool| pool.put(&pool.unused))?;
        self.disk.mount()?;
        // ext4 treats an inode that it loads during a transaction as changed by it. So a commit
        // first ends the transaction of the mount, and then all inodes are loaded.
        self.act_from_outside(&Step::Outside(Outside::Commit))?;
        self.disk.read()?;
        self.mount_copy(sequence)?;
        self.shown.clear();
        self.note_times()?;
        let start = Instant::now();
        let first = self.start_supervisor()?;
        let mut programs = self.start_programs(sequence)?;
        let done = self.execute_in_turn(&mut programs, sequence, cuts);
        let killed = self.group.kill().and(self.others.kill());
        drop((programs, first));
        self.disk.unmount()?;
        self.copy.iter_mut().try_for_each(Disk::unmount)?;
        killed?;
        // Promises of syncs do not depend on the time.
        ensure!(
            self.file_system.kind().is_none() || start.elapsed() < QUIET,
            "it took {:?}: the kernel may have written back",
            start.elapsed()
        );
        done
    }

    /// Copies the disk, and mounts the copy, for a sequence that acts in it.
    fn mount_copy(&mut self, sequence: &Sequence) -> Result<()> {
        if !sequence.steps.iter().any(|step| matches!(step, Step::Clone(_))) {
            return Ok(());
        }
        if self.copy.is_none() {
            self.copy = Some(self.disk.beside()?);
        }
        let image = self.disk.image()?;
        let copy = self.copy.as_mut().context("it was just made")?;
        copy.restore(&image)?;
        copy.mount()
    }

    fn start_programs(&self, sequence: &Sequence) -> Result<Programs> {
        let mut command = self.command(sequence.hold)?;
        let own = Program::start(&mut command, |command| self.group.spawn(command))?;
        let mut others = Vec::new();
        for (other, _) in Other::ALL {
            let is_it = |step: &Step| matches!(step, Step::Other(this, _) if *this == other);
            if sequence.steps.iter().any(is_it) {
                let mut command = self.command_of_other(other)?;
                let start = |command: &mut Command| self.others.spawn(command);
                let mut program = Program::start(&mut command, start)?;
                program.execute(0, "nothing").context("a program outside")?;
                others.push((other, program));
            }
        }
        Ok(Programs { own, is_without_run: false, others })
    }

    /// Starts an idle program first if the supervisor must make no syncs while the program does:
    /// that program starts the supervisor.
    fn start_supervisor(&self) -> Result<Option<Program>> {
        if self.fault != Some(Fault::EarlyRetire) || self.runner == Runner::Plain {
            return Ok(None);
        }
        let mut command = self.program(true);
        command.stderr(Stdio::null());
        let mut first = Program::start(&mut command, |command| self.group.spawn(command))?;
        // Any answer shows that the program runs, and so the supervisor is there.
        first.execute(0, "nothing").context("the program that starts a supervisor")?;
        Ok(Some(first))
    }

    /// Returns the command of the program, started by the runner. If `is_unsynced`, syncs of the
    /// program and of all processes that it starts are not made.
    fn program(&self, is_unsynced: bool) -> Command {
        let mut words: Vec<OsString> = Vec::new();
        if is_unsynced {
            words.extend([self.interpreter.linked.clone().into(), "unsynced".into()]);
        }
        words.extend(self.words_of_run(self.pools.first()));
        words.push(self.interpreter.dynamic.clone().into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(&self.interpreter.linked);
        command
    }

    /// Returns the words before a program that run it with a pool.
    fn words_of_run(&self, pool: Option<&Pool>) -> Vec<OsString> {
        let (Runner::Tidegate { binary, options, .. }, Some(pool)) = (&self.runner, pool) else {
            return Vec::new();
        };
        let mut words =
            vec![binary.into(), "run".into(), "--pool".into(), pool.path.clone().into()];
        words.extend(options.iter().map(OsString::from));
        words.push("--".into());
        words
    }

    fn command(&self, hold: bool) -> Result<Command> {
        let mut command = self.program(self.fault == Some(Fault::PlainNames));
        command.args(hold.then_some("hold"));
        command.envs(self.fault.and_then(Fault::variable));
        self.place(command)
    }

    /// Returns the command of the program that continues after its run was killed.
    fn command_without_run(&self, hold: bool) -> Result<Command> {
        let mut command = Command::new(&self.interpreter.dynamic);
        command.arg(&self.interpreter.linked).args(hold.then_some("hold"));
        self.place(command)
    }

    fn command_of_other(&self, other: Other) -> Result<Command> {
        let mut words = match other {
            Other::Outside => Vec::new(),
            Other::Second => self.words_of_run(self.pools.get(1)),
        };
        words.push(self.interpreter.dynamic.clone().into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(&self.interpreter.linked);
        self.place(command)
    }

    /// Sets a program's working directory, and a file for its standard error.
    fn place(&self, mut command: Command) -> Result<Command> {
        if let Runner::Tidegate { covers_at_once: true, .. } = self.runner {
            command.env("TIDEGATE_COVER_AFTER", "1");
        }
        let stderr = File::options().create(true).append(true).open(self.dir.join("stderr"))?;
        command.current_dir(self.disk.mount_point()).stderr(stderr);
        Ok(command)
    }

    /// Executes the steps with a lock between machines. `sync` is about all file systems: from the
    /// first step of a program that calls it to the last cut, no program of another machine takes a
    /// step. Syncs of other machines before and after do not matter: the file system is clean, or
    /// no longer looked at.
    fn execute_in_turn(
        &mut self,
        programs: &mut Programs,
        sequence: &Sequence,
        cuts: Cuts,
    ) -> Result<(Vec<Cut>, Vec<Violation>)> {
        let is_all = |step: &Step| *step.innermost() == Step::Sync(Sync::All);
        let syncs_all = sequence.steps.iter().any(is_all);
        let how =
            if syncs_all { FlockOperation::LockExclusive } else { FlockOperation::LockShared };
        // The start of a program must not take time from the other machines.
        programs.own.execute(0, "nothing").with_context(|| self.stderr())?;
        flock(&self.turn, how)?;
        let done = self.execute(programs, sequence, cuts);
        flock(&self.turn, FlockOperation::Unlock)?;
        done
    }

    /// Executes the steps. Returns the cuts, and violations before any cut.
    fn execute(
        &mut self,
        programs: &mut Programs,
        sequence: &Sequence,
        cuts: Cuts,
    ) -> Result<(Vec<Cut>, Vec<Violation>)> {
        let mut made = Vec::new();
        for (number, step) in (1..).zip(&sequence.steps) {
            let failed = self.execute_step(programs, number, step, sequence.hold)?;
            let step = usize::try_from(number)?;
            if let Some(failed) = failed {
                let what = Verdict::Forbidden(format!("step {failed}"));
                return Ok((made, vec![Violation { step, what }]));
            }
            self.note_times()?;
            if cuts == Cuts::All || step == sequence.steps.len() {
                made.push(self.cut(sequence, step)?);
            }
        }
        let mut state = self.disk.read()?;
        let mut present = crowd::objections(sequence, &mut state, &BTreeSet::new(), false);
        present.extend(Promises::behind(sequence)?.judge_present(&state));
        let what = Verdict::Forbidden(format!("before the cut: {}", present.join("; ")));
        let violation = Violation { step: sequence.steps.len(), what };
        Ok((made, (!present.is_empty()).then_some(violation).into_iter().collect()))
    }

    fn note_times(&mut self) -> Result<()> {
        if self.time_rule.is_some() {
            self.shown.push(self.disk.times()?);
        }
        Ok(())
    }

    /// Executes one step. Returns the failure, if it fails.
    fn execute_step(
        &mut self,
        programs: &mut Programs,
        number: u64,
        step: &Step,
        hold: bool,
    ) -> Result<Option<String>> {
        match step {
            Step::Outside(Outside::Retire) => self.retire(),
            Step::Outside(_) => self.act_from_outside(step),
            Step::Lost(lost) => self.lose(*lost, programs, hold),
            Step::Other(other, step) => Self::execute_by_other(*other, programs, number, step),
            step if self.fault == Some(Fault::DroppedSyncs)
                && matches!(step.innermost(), Step::Sync(_)) =>
            {
                Ok(None)
            }
            Step::Clone(step) => {
                let root = self.copy.as_ref().context("the copy is mounted")?.mount_point();
                let text = step.to_string();
                let (name, rest) = text.split_once(' ').context("a step in a copy has a path")?;
                programs.own.execute(number, &format!("{name} {}/{rest}", root.display()))
            }
            step => programs.own.execute(number, &step.to_string()),
        }
        .with_context(|| self.stderr())
    }

    fn execute_by_other(
        other: Other,
        programs: &mut Programs,
        number: u64,
        step: &Step,
    ) -> Result<Option<String>> {
        let mut others = programs.others.iter_mut();
        let (_, program) =
            others.find(|(this, _)| *this == other).context("the program was started")?;
        let failed = program.execute(number, &step.to_string())?;
        let follow = match step.innermost() {
            _ if failed.is_some() => return Ok(failed),
            Step::Operation(Operation::Rename { from, to, .. }) => format!("moved {from} {to}"),
            Step::Operation(Operation::Unlink { path }) => format!("gone {path}"),
            _ => return Ok(None),
        };
        programs.own.execute(0, &follow)
    }

    /// Kills processes of the run. If the program is one, it starts again.
    fn lose(&self, lost: Lost, programs: &mut Programs, hold: bool) -> Result<Option<String>> {
        let Programs { own: program, is_without_run, .. } = programs;
        if lost == Lost::Run {
            *is_without_run = true;
            self.group.kill()?;
            let mut command = self.command_without_run(hold)?;
            *program = Program::start(&mut command, |command| self.group.spawn(command))?;
            return program.execute(0, "nothing").map(|_| None);
        }
        let Some(pool) = self.pools.first().filter(|_| !*is_without_run) else { return Ok(None) };
        if lost != Lost::Supervisor {
            program.kill_child()?;
        }
        if lost != Lost::Launcher {
            self.group.kill_member(|words| {
                words.get(1).is_some_and(|word| word == "supervise")
                    && words.last().is_some_and(|word| Path::new(word) == pool.path)
            })?;
        }
        Ok(None)
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

    /// Destages and retires the log, if there is one.
    fn retire(&self) -> Result<Option<String>> {
        if let (Runner::Tidegate { binary, .. }, Some(pool)) = (&self.runner, self.pools.first()) {
            succeed(Command::new(binary).arg("flush").arg(&pool.path))?;
        }
        Ok(None)
    }

    fn cut(&mut self, sequence: &Sequence, step: usize) -> Result<Cut> {
        self.group.freeze()?;
        self.others.freeze()?;
        let disk = self.disk.cut()?;
        let is_lost = self.fault == Some(Fault::LostRecords);
        let image = |pool: &Pool| if is_lost { Ok(pool.unused.clone()) } else { pool.image() };
        let pools = self.pools_of(sequence).iter().map(image).collect::<Result<_>>()?;
        self.others.thaw()?;
        self.group.thaw()?;
        Ok(Cut { step, disk, pools })
    }

    fn judge(&self, sequence: &Sequence, step: usize, left: &Left) -> Result<Option<Violation>> {
        let steps = sequence.steps[..step].to_vec();
        let before = Sequence { hold: sequence.hold, steps };
        let what = self.judge_left(&before, left)?;
        Ok((!what.is_allowed()).then_some(Violation { step, what }))
    }

    fn judge_left(&self, before: &Sequence, left: &Left) -> Result<Verdict> {
        let is_plain = self.runner == Runner::Plain;
        let model = Model::new(self.file_system.kind().unwrap_or(Kind::Ext4));
        let model = if is_plain { model } else { model.under_run() };
        let model =
            if self.disk.has_data_in_journal() { model.with_data_in_journal() } else { model };
        let model = match self.time_rule {
            Some(rule) => model.with_times(rule, self.shown.as_slice().into()),
            None => model,
        };
        let model = model.after(before)?;
        let refused = match refused(&model, self.disk.mount_point(), left) {
            Ok(refused) => refused,
            Err(what) => return Ok(Verdict::Forbidden(what)),
        };
        let mut state = left.after.clone();
        let crowd = crowd::objections(before, &mut state, &refused, !is_plain);
        if !crowd.is_empty() {
            return Ok(Verdict::Forbidden(crowd.join("; ")));
        }
        if self.file_system.kind().is_some() {
            return Ok(model.refusing(refused).judge(&state, !is_plain));
        }
        Ok(match unlogged(left) {
            Some(what) => Verdict::Forbidden(what),
            None => Promises::behind(before)?.judge(&state),
        })
    }

    /// Restores the state of a cut, and returns it as recovery leaves it.
    fn recover(&mut self, sequence: &Sequence, cut: &Cut) -> Result<Left> {
        self.boot()?;
        self.disk.restore(&cut.disk)?;
        let pools = self.pools_of(sequence).iter().zip(&cut.pools);
        pools.clone().try_for_each(|(pool, image)| pool.put(image))?;
        self.disk.mount()?;
        let is_compared = self.file_system.kind().is_none() || sequence.has_others();
        let before = is_compared.then(|| self.disk.read()).transpose()?;
        let running = self.run_patched(sequence)?;
        let said = self.pools_of(sequence).iter().map(|pool| self.recover_pool(pool));
        let said = said.collect::<Result<_>>()?;
        if let Some(mut running) = running {
            running.kill()?;
            running.wait()?;
        }
        let after = self.disk.read()?;
        self.disk.unmount()?;
        Ok(Left { before, after, said })
    }

    /// Starts the patched program from its file, if the sequence patches it.
    fn run_patched(&self, sequence: &Sequence) -> Result<Option<Child>> {
        let is_patched = sequence.steps.contains(&Step::Patch);
        let mut command = Command::new(self.disk.mount_point().join(crowd::PROGRAM));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        is_patched.then(|| self.others.spawn(&mut command)).transpose()
    }

    /// Recovers a pool. Returns the command's message, or its failure.
    fn recover_pool(&self, pool: &Pool) -> Result<Result<String, Failure>> {
        let Runner::Tidegate { binary, .. } = &self.runner else { bail!("there is no pool") };
        let mut command = Command::new(&self.interpreter.linked);
        command.arg("boot").arg(binary).arg("recover");
        command.arg(&pool.path).stdin(Stdio::null()).stdout(Stdio::piped());
        let child = self.group.spawn(command.stderr(Stdio::piped()))?;
        if !has_ended(&child, RECOVERY_TIMEOUT)? {
            self.group.kill()?;
        }
        let output = child.wait_with_output()?;
        // A supervisor may outlive the command.
        self.group.kill()?;
        if output.status.success() {
            return Ok(Ok(String::from_utf8_lossy(&output.stdout).into_owned()));
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Ok(Err(Failure { status: output.status, said }))
    }

    /// Returns the program's standard error.
    fn stderr(&self) -> String {
        fs::read_to_string(self.dir.join("stderr")).unwrap_or_default()
    }
}

/// Objects to a recovery on a file system that is not logged, if it did anything.
fn unlogged(left: &Left) -> Option<String> {
    if left.before.as_ref().is_some_and(|before| *before != left.after) {
        return Some("recovery changed files of a file system that is not logged".into());
    }
    left.said.iter().find_map(|said| match said {
        Ok(said) if !said.contains(NOTHING) => {
            Some(format!("the log had records on a file system that is not logged: {said}"))
        }
        _ => None,
    })
}

/// Returns the files that recoveries refused. Returns an objection if a recovery failed otherwise,
/// changed a refused file, or refused one that no program outside the tree has changed.
fn refused(model: &Model, root: &Path, left: &Left) -> Result<BTreeSet<String>, String> {
    let mut refused = BTreeSet::new();
    for failure in left.said.iter().filter_map(|said| said.as_ref().err()) {
        let is_named = |path: &&String| failure.names(root, path);
        let known = left.before.iter().chain([&left.after]).flat_map(State::keys);
        let named: BTreeSet<String> = known.filter(is_named).cloned().collect();
        let are_of_others = named.is_subset(model.of_others()) && !named.is_empty();
        if failure.status.code() != Some(REFUSED) || !are_of_others {
            return Err(failure.to_string());
        }
        refused.extend(named);
    }
    let before = left.before.as_ref();
    let at = |state: &State, path: &str| state.get(path).cloned();
    let is_changed =
        |path: &&String| before.is_some_and(|before| at(before, path) != at(&left.after, path));
    match refused.iter().find(is_changed) {
        Some(path) => Err(format!("{path}: refused by recovery, and changed")),
        None => Ok(refused),
    }
}

impl Failure {
    /// Returns whether the failure names the file at `path` below `root` itself.
    fn names(&self, root: &Path, path: &str) -> bool {
        self.said.contains(&format!("{}:", root.join(path).display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "recover: {}: {}", self.status, self.said)
    }
}

impl Pool {
    /// Replaces the pool by a copy from `image`. The copy is another inode, as after a boot.
    fn put(&self, image: &Image) -> Result<()> {
        fs::remove_file(&self.path)?;
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        image.write(&options.open(&self.path)?)
    }

    /// Returns the present content of the pool.
    fn image(&self) -> Result<Image> {
        Image::read_since(&File::open(&self.path)?, &self.unused)
    }
}

/// Waits for the end of a process. Returns whether it ended in time.
fn has_ended(child: &Child, timeout: Duration) -> Result<bool> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let mut events = [PollFd::new(&process, PollFlags::IN)];
    Ok(poll(&mut events, Some(&Timespec::try_from(timeout)?))? > 0)
}

/// Runs a command, which must succeed, and returns its output.
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
