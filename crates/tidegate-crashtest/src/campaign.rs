//! Runs many tests on several machines at once, and reports the results.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::file_system::FileSystem;
use crate::machine::abandoned;
use crate::machine::program::{Dialogue, Interpreter};
use crate::machine::{Cuts, Fault, PREFIX, Runner};
use crate::model::TimeRule;
use crate::sequence::Sequence;

/// Timeout of a machine for one test, or for its creation.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Number of directories made so far: each has a name of its own.
static MADE: AtomicU64 = AtomicU64::new(0);

/// The settings of all tests of a campaign.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The harness: this program.
    pub harness: PathBuf,
    /// The directory of the compiled interpreter; `None` compiles it for this campaign.
    pub programs: Option<PathBuf>,
    /// The file system.
    pub file_system: FileSystem,
    /// How the program runs.
    pub runner: Runner,
    /// The planted mistake, if any.
    pub fault: Option<Fault>,
    /// How times of files are compared, if they are.
    pub time_rule: Option<TimeRule>,
    /// One more option of the mounts, such as `data=journal`.
    pub mount_option: Option<String>,
    /// Number of machines.
    pub workers: usize,
}

/// A sequence to be tested.
#[derive(Debug, Clone)]
pub struct Test {
    /// The sequence.
    pub sequence: Sequence,
    /// The steps after which the power is cut.
    pub cuts: Cuts,
}

/// The results of a campaign.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Number of tests that ran to their end.
    pub tests: u64,
    /// Number of tests by operation.
    pub operations: BTreeMap<String, u64>,
    /// Sequences that left a forbidden state, with a description of the state.
    pub violations: Vec<(Sequence, String)>,
    /// Sequences that could not be tested, with the reason.
    pub errors: Vec<(Sequence, String)>,
    /// The time that the campaign took.
    pub elapsed: Duration,
}

impl Report {
    fn add(&mut self, test: &Test, result: Result<Vec<String>>) {
        match result {
            Ok(found) => {
                self.tests += 1;
                for step in &test.sequence.steps {
                    if let Some(name) = step.name() {
                        *self.operations.entry(name).or_default() += 1;
                    }
                }
                self.violations.extend(found.into_iter().map(|what| (test.sequence.clone(), what)));
            }
            Err(error) => self.errors.push((test.sequence.clone(), format!("{error:#}"))),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in &self.operations {
            writeln!(out, "{count:8} {name}")?;
        }
        let rate =
            f64::from(u32::try_from(self.tests).unwrap_or(u32::MAX)) / self.elapsed.as_secs_f64();
        write!(
            out,
            "{} sequences in {:.0} s, {rate:.1} a second: {} violations, {} could not be tested",
            self.tests,
            self.elapsed.as_secs_f64(),
            self.violations.len(),
            self.errors.len()
        )
    }
}

impl Setup {
    /// Returns the harness's arguments for these settings, without the number of machines.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> =
            vec!["--file-system".into(), self.file_system.name().into()];
        if let Runner::Tidegate { binary, options, covers_at_once, pool_size } = &self.runner {
            arguments.extend(["--tidegate".into(), binary.into()]);
            arguments.push(format!("--pool-size={pool_size}").into());
            arguments.extend(options.iter().map(|option| format!("--run-option={option}").into()));
            arguments.extend((!covers_at_once).then(|| "--default-admission".into()));
        }
        let faults = Fault::ALL.iter().filter(|(fault, _)| self.fault == Some(*fault));
        arguments.extend(faults.flat_map(|(_, name)| ["--fault".into(), (*name).into()]));
        arguments.extend(self.time_rule.map(|rule| format!("--times={}", rule.name()).into()));
        arguments.extend(self.mount_option.iter().map(|it| format!("--mount-option={it}").into()));
        arguments
    }

    /// Runs all tests, and calls `on_test` after each with the violations.
    ///
    /// # Errors
    /// The kernel does not have the file system, or no machine can be made.
    pub fn run(
        &self,
        tests: Vec<Test>,
        on_test: impl Fn(&Test, &[String]) + Sync,
    ) -> Result<Report> {
        self.file_system.check_kernel()?;
        abandoned::remove(&std::env::temp_dir());
        let (start, workers) = (Instant::now(), self.workers.min(tests.len()));
        let (tests, report) = (Mutex::new(tests.into_iter()), Mutex::new(Report::default()));
        let own = Directory::new()?;
        let programs = self.programs.as_deref().unwrap_or(&own.0);
        if self.programs.is_none() {
            Interpreter::compile(programs)?;
        }
        let next = || tests.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || -> Result<()> {
            let mut machine = Remote::start(self, programs)?;
            while let Some(test) = next() {
                let mut result = machine.test(&test);
                if result.is_err() {
                    // A failed machine is discarded, and only a second failure is reported.
                    drop(machine);
                    machine = Remote::start(self, programs)?;
                    result = machine.test(&test);
                }
                on_test(&test, result.as_deref().unwrap_or_default());
                report.lock().unwrap_or_else(PoisonError::into_inner).add(&test, result);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(_) => bail!("a thread of the campaign panicked"),
            })
        })?;
        let mut report = report.into_inner().unwrap_or_else(PoisonError::into_inner);
        report.elapsed = start.elapsed();
        Ok(report)
    }
}

/// A directory of this process, removed when dropped.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Result<Self> {
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}.{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // The next campaign removes a directory that is left.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A machine in another process.
struct Remote {
    worker: Dialogue,
    /// Mounts in the directory are in the worker's namespace.
    _dir: Directory,
}

impl Remote {
    fn start(setup: &Setup, programs: &Path) -> Result<Self> {
        let dir = Directory::new()?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "--"]).arg(&setup.harness);
        command.arg("worker").arg(&dir.0).arg(programs).args(setup.arguments());
        let start = |command: &mut Command| command.spawn().context("cannot execute unshare");
        let mut this = Self { worker: Dialogue::start(&mut command, start)?, _dir: dir };
        match this.worker.receive(TIMEOUT).context("the machine")?.as_str() {
            "ready" => Ok(this),
            other => bail!("{other}"),
        }
    }

    fn test(&mut self, test: &Test) -> Result<Vec<String>> {
        let cuts = if test.cuts == Cuts::All { "all" } else { "last" };
        self.worker.send(&format!("{cuts} {}", test.sequence.one_line()))?;
        let mut violations = Vec::new();
        loop {
            let line = self.worker.receive(TIMEOUT).context("the machine")?;
            match line.split_once(' ') {
                Some(("violation", what)) => violations.push(format!("behind step {what}")),
                Some(("error", what)) => bail!("{what}"),
                _ => return Ok(violations),
            }
        }
    }
}
