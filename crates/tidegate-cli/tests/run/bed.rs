//! Where a workload runs: files on a disk, the pool on tmpfs, with `tidegate run` or without.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use crate::process_tree;
pub(crate) use crate::support::small::{Small, open_to_all};
use crate::support::{directory_in, preload_library, scratch, succeed, tool, user};
use crate::tree;

/// Seconds after which a workload counts as hanging and is killed.
pub(crate) const TIMEOUT_S: u64 = if cfg!(feature = "soak") { 1800 } else { 240 };

/// A directory on a disk for the files of a workload. Not below the checkout: other users must
/// reach it.
pub(crate) fn on_disk() -> TempDir {
    let dir = directory_in("/var/tmp".into());
    open_to_all(dir.path());
    dir
}

/// How programs are started.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Runner<'a> {
    /// As they are.
    Plain,
    /// Under `tidegate run` with this pool.
    Run(&'a Path),
}

impl Runner<'_> {
    /// `program` started this way, in `dir`; killed with all that it started when it hangs.
    pub(crate) fn command(self, program: impl AsRef<OsStr>, dir: &Path) -> Command {
        let mut command = timed(dir);
        self.add(&mut command, Path::new(env!("CARGO_BIN_EXE_tidegate")), program.as_ref());
        command
    }

    /// `program` started this way by another user, in `dir`; killed as that of
    /// [`command`](Self::command) is.
    pub(crate) fn command_as(
        self,
        user: &OtherUser,
        program: impl AsRef<OsStr>,
        dir: &Path,
    ) -> Command {
        let mut command = timed(dir);
        let tidegate = user.become_by(&mut command);
        self.add(&mut command, &tidegate, program.as_ref());
        command
    }

    fn add(self, command: &mut Command, tidegate: &Path, program: &OsStr) {
        if let Self::Run(pool) = self {
            preload_library();
            // Else the files that short workloads sync once or twice stay plain.
            command
                .env("TIDEGATE_COVER_AFTER", "1")
                .arg(tidegate)
                .args(["run", "--size=64M", "--pool"])
                .arg(pool)
                .arg("--");
        }
        command.arg(program);
    }

    /// Runs a shell script in `dir`; hands back all that it printed and its status.
    pub(crate) fn script(self, script: &str, dir: &Path) -> String {
        let mut command = self.command("/bin/sh", dir);
        transcript(command.args(["-c", &format!("exec 2>&1\n{script}")]))
    }
}

/// A command to come, killed with all that it started when it hangs.
fn timed(dir: &Path) -> Command {
    let mut command = tool("timeout", "coreutils");
    command.arg("--signal=KILL").arg(TIMEOUT_S.to_string()).current_dir(dir).stdin(Stdio::null());
    command
}

/// Another user of this machine, with a copy of Tidegate that it can reach wherever the checkout
/// is.
pub(crate) struct OtherUser {
    pub(crate) ids: (u32, u32),
    installed: TempDir,
}

impl OtherUser {
    pub(crate) fn new(name: &str) -> Self {
        let installed = on_disk();
        for file in [Path::new(env!("CARGO_BIN_EXE_tidegate")), preload_library()] {
            // By another process: a child that some test starts just then has no descriptor to
            // write it by.
            succeed(tool("cp", "coreutils").arg(file).arg(installed.path()));
        }
        Self { ids: user(name), installed }
    }

    /// Adds to `command` what makes the rest of it run as this user; hands back its Tidegate.
    fn become_by(&self, command: &mut Command) -> PathBuf {
        let (uid, gid) = self.ids;
        command.args(["setpriv", "--clear-groups"]);
        command.args([format!("--reuid={uid}"), format!("--regid={gid}")]);
        self.installed.path().join("tidegate")
    }

    /// Gives it a directory.
    pub(crate) fn own(&self, dir: &Path) {
        open_to_all(dir);
        std::os::unix::fs::chown(dir, Some(self.ids.0), Some(self.ids.1)).expect("root may");
    }
}

/// Runs `command` to its end; its standard output and status are the transcript, what `tidegate`
/// says goes to standard error and is shown by a failing test only.
pub(crate) fn transcript(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let Output { status, stdout, stderr } = output;
    eprint!("{}", String::from_utf8_lossy(&stderr));
    format!("{}{status}\n", String::from_utf8_lossy(&stdout))
}

/// A file system for files and a directory for a pool. The file system is an ext4 with a journal
/// and a UUID: on others nothing is covered.
pub(crate) struct Bed {
    // Unmounted when it is dropped.
    _small: Small,
    disk: PathBuf,
    pool_dir: TempDir,
}

impl Bed {
    pub(crate) fn new() -> Self {
        let small = Small::new("2G");
        let disk = small.mount_point().join("disk");
        std::fs::create_dir(&disk).expect("the name is free");
        small.open_to_all();
        open_to_all(&disk);
        Self { _small: small, disk, pool_dir: scratch() }
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.pool_dir.path().join("pool")
    }

    pub(crate) fn pool_dir(&self) -> &Path {
        self.pool_dir.path()
    }

    pub(crate) fn disk(&self) -> &Path {
        &self.disk
    }

    /// Does `workload` plain and under `run`, each in a fresh directory of the same name: what it
    /// returns and the files it leaves must be the same, also after what is in the log was replayed
    /// once more. Returns the transcript.
    pub(crate) fn same(&self, workload: impl Fn(Runner<'_>, &Path) -> String) -> String {
        self.same_with(workload, || replay(&self.pool(), None))
    }

    /// As [`same`](Self::same), with a workload that runs as another user.
    pub(crate) fn same_as(
        &self,
        user: &OtherUser,
        workload: impl Fn(Runner<'_>, &Path) -> String,
    ) -> String {
        self.same_with(workload, || replay(&self.pool(), Some(user)))
    }

    fn same_with(
        &self,
        workload: impl Fn(Runner<'_>, &Path) -> String,
        replay: impl FnOnce(),
    ) -> String {
        let (plain, plain_files) = self.perform(Runner::Plain, &workload);
        let pool = self.pool();
        let (run, run_files) = self.perform(Runner::Run(&pool), &workload);
        assert_same("transcript", &plain, &run);
        assert_same("files", &plain_files, &run_files);
        process_tree::await_nobody_uses(&pool);
        replay();
        let replayed = tree::listing(&self.disk().join("work"));
        assert_same("files after a replay", &run_files, &replayed);
        plain
    }

    fn perform(
        &self,
        runner: Runner<'_>,
        workload: impl Fn(Runner<'_>, &Path) -> String,
    ) -> (String, String) {
        let dir = self.disk().join("work");
        if dir.exists() {
            std::fs::rename(&dir, self.disk().join("plain")).expect("it was not renamed before");
        }
        std::fs::create_dir(&dir).expect("the name is free");
        let printed = workload(runner, &dir);
        (printed, tree::listing(&dir))
    }
}

/// Replays the whole log of `pool`, as its owner.
pub(crate) fn replay(pool: &Path, owner: Option<&OtherUser>) {
    let mut command = timed(Path::new("/"));
    let tidegate = match owner {
        Some(user) => user.become_by(&mut command),
        None => PathBuf::from(env!("CARGO_BIN_EXE_tidegate")),
    };
    print!("{}", succeed(command.arg(tidegate).args(["recover", "--replay"]).arg(pool)));
}

/// Shows the first line that differs, and what is around it.
pub(crate) fn assert_same(what: &str, plain: &str, run: &str) {
    if plain == run {
        return;
    }
    let (plain, run): (Vec<_>, Vec<_>) = (plain.lines().collect(), run.lines().collect());
    let at = plain.iter().zip(&run).take_while(|(plain, run)| plain == run).count();
    let around = |lines: &[&str]| {
        lines[at.saturating_sub(3).min(lines.len())..(at + 5).min(lines.len())].join("\n  ")
    };
    panic!(
        "{what}: differs in line {}\nplain:\n  {}\nunder run:\n  {}",
        at + 1,
        around(&plain),
        around(&run)
    );
}
