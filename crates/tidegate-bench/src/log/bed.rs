//! Where programs run: files on a disk, pools in persistent memory, and the ways to start a
//! program.
//!
//! Invariants:
//! 1. Files and pools lie in directories of their own, which are removed with the bed.
//! 2. Before each run that counts, all earlier writes are on the disk: [`Bed::sync_disk`].

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use tempfile::TempDir;

use super::LogArgs;
use super::disk::{DISK_BYTES, Disk, Place, open_to_all};
pub(super) use super::disk::{set_mode, write_in_order};
use crate::block::scratch;
use crate::error::{BenchError, Result};
use crate::nbd::this_server;
use crate::policy::by_name;

/// Policies of programs, plain and under `tidegate run`, with their syncs and without.
pub(super) const PLAIN: &str = "plain";
pub(super) const RUN: &str = "run";
pub(super) const PLAIN_NO_SYNC: &str = "plain-nosync";
pub(super) const RUN_NO_SYNC: &str = "run-nosync";

/// How a program is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runner {
    /// Directly.
    Plain,
    /// Under `tidegate run`.
    Run,
}

impl Runner {
    /// All runners, in the order of their turns.
    pub(super) const ALL: [Self; 2] = [Self::Plain, Self::Run];

    /// Returns the policy of the runner's rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => PLAIN,
            Self::Run => RUN,
        }
    }
}

impl FromStr for Runner {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        by_name("policy", &Self::ALL, Self::name, text)
    }
}

/// How a program is started, and whether it syncs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) runner: Runner,
    pub(super) syncs: bool,
}

impl Way {
    /// Returns the ways of `runners`: each with syncs; plain without syncs, and under `run` without
    /// syncs if `off_under_run`.
    pub(super) fn all(runners: &[Runner], off_under_run: bool) -> Vec<Self> {
        let off = |runner: &Runner| *runner == Runner::Plain || off_under_run;
        let without =
            runners.iter().copied().filter(off).map(|runner| Self { runner, syncs: false });
        let with = runners.iter().copied().map(|runner| Self { runner, syncs: true });
        // Ways that are compared run next to each other.
        without.chain(with).collect()
    }

    /// Returns the policy of the way's rows.
    pub(super) fn policy(self) -> &'static str {
        match (self.runner, self.syncs) {
            (runner, true) => runner.name(),
            (Runner::Plain, false) => PLAIN_NO_SYNC,
            (Runner::Run, false) => RUN_NO_SYNC,
        }
    }
}

/// A pool: one for each requested size, kept from run to run as a user's pool would be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pool {
    pub(super) name: &'static str,
    pub(super) bytes: u64,
}

/// Directories for files and pools.
pub(super) struct Bed {
    disk: Disk,
    pools: TempDir,
    /// The program under test.
    pub(super) tidegate: PathBuf,
}

impl Bed {
    pub(super) fn new(args: &LogArgs) -> Result<Self> {
        let place = Place::of(args.files.as_deref())?;
        let disk = Disk::new(&place, args.scaled(DISK_BYTES, 2 << 30))?;
        let (pools, tidegate) = (scratch(&args.dir)?, this_server()?);
        open_to_all(pools.path())?;
        Ok(Self { disk, pools, tidegate })
    }

    /// Returns the directory of the files.
    pub(super) fn files(&self) -> &Path {
        self.disk.path()
    }

    /// Returns the path of a file.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.files().join(name)
    }

    /// Returns the directory of the pools.
    pub(super) fn pools(&self) -> &Path {
        self.pools.path()
    }

    /// Returns the path of a pool.
    pub(super) fn pool(&self, pool: Pool) -> PathBuf {
        self.pools.path().join(pool.name)
    }

    /// Makes the load driver's command, without options, for `runner` with the log in `pool`.
    pub(super) fn driver(&self, runner: Runner, pool: Pool) -> Command {
        let mut command = self.command(runner, pool, &self.tidegate);
        command.args(["bench", "io"]);
        command
    }

    /// Makes the command of `program`, without arguments, for `runner` with the log in `pool`.
    pub(super) fn command(
        &self,
        runner: Runner,
        pool: Pool,
        program: impl AsRef<OsStr>,
    ) -> Command {
        let mut words = under(&self.tidegate, runner, &self.pool(pool), pool.bytes);
        words.push(program.as_ref().to_owned());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        self.place(&mut command);
        command
    }

    /// Makes a program and its children run on the disk of the files. `run` covers a file there
    /// from its second sync on, however young the file is: each case creates new files, and takes
    /// only a second.
    pub(super) fn place(&self, command: &mut Command) {
        command.current_dir(self.files()).env("TIDEGATE_COVER_AFTER", "2");
    }

    /// Makes an empty directory for a run, once all writes are on the disk. The directory is
    /// removed when the result is dropped.
    pub(super) fn empty_directory(&self) -> Result<TempDir> {
        // A short name: the directory holds sockets, whose paths have at most 107 bytes.
        let directory = tempfile::Builder::new().prefix("d").tempdir_in(self.files());
        let directory = directory.map_err(BenchError::os("create a directory in", self.files()))?;
        open_to_all(directory.path())?;
        self.sync_disk()?;
        Ok(directory)
    }

    /// Creates a file of `bytes` random bytes, on the disk. The file is written page by page, as
    /// databases do, so that the page cache holds it in pages. Larger writes make larger folios,
    /// where the kernel takes longer to write a page.
    pub(super) fn random_file(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        let path = self.file(name);
        let file = File::create(&path).map_err(BenchError::os("create", &path))?;
        write_in_order(&file, bytes, PAGE_BYTES).map_err(BenchError::os("write", &path))?;
        file.sync_all().map_err(BenchError::os("sync", &path))?;
        Ok(path)
    }

    /// Syncs the file system of the files, so that all earlier writes are on the disk.
    pub(super) fn sync_disk(&self) -> Result<()> {
        let dir = self.files();
        let opened = File::open(dir).map_err(BenchError::os("open", dir))?;
        let synced = rustix::fs::syncfs(&opened).map_err(std::io::Error::from);
        synced.map_err(BenchError::os("sync the file system of", dir))
    }
}

/// Returns the words that start a program under `tidegate`; none for [`Runner::Plain`].
pub(super) fn under(
    tidegate: &Path,
    runner: Runner,
    pool: &Path,
    pool_bytes: u64,
) -> Vec<OsString> {
    if runner == Runner::Plain {
        return Vec::new();
    }
    let mut words: Vec<OsString> = vec![tidegate.into(), "run".into(), "--pool".into()];
    words.extend([pool.into(), format!("--size={pool_bytes}").into()]);
    // The driver is one of these programs, whose own system calls concern other files.
    words.extend(["--trust=*/tidegate".into(), "--trust=*/tidegate-bench".into()]);
    words.push("--".into());
    words
}

/// Returns the number of bytes written so far to the disk that `dir` is on.
pub(super) fn disk_bytes(dir: &Path) -> Result<u64> {
    let found = std::fs::metadata(dir).map_err(BenchError::os("inspect", dir))?.dev();
    let (major, minor) = (rustix::fs::major(found), rustix::fs::minor(found));
    let path = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/stat"));
    let text = std::fs::read_to_string(&path).map_err(BenchError::os("read", &path))?;
    let sectors = text.split_whitespace().nth(6).and_then(|word| word.parse::<u64>().ok());
    let found = || BenchError::program(&path.display().to_string(), "has no seventh number");
    sectors.map(|sectors| sectors * 512).ok_or_else(found)
}

/// Size of a page.
const PAGE_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_runner_has_a_name_that_parses() {
        for runner in Runner::ALL {
            assert_eq!(runner.name().parse(), Ok(runner));
        }
        assert!("fast".parse::<Runner>().unwrap_err().contains("known are plain, run"));
    }

    #[test]
    fn ways_without_syncs_come_before_those_with() {
        let runners = [Runner::Plain, Runner::Run];
        let names = |off_under_run| {
            let ways = Way::all(&runners, off_under_run).into_iter();
            ways.map(Way::policy).collect::<Vec<_>>()
        };
        assert_eq!(names(true), ["plain-nosync", "run-nosync", "plain", "run"]);
        assert_eq!(names(false), ["plain-nosync", "plain", "run"]);
    }

    #[test]
    fn only_a_program_under_tidegate_has_words_before_it() {
        let words = |runner| under(Path::new("/t"), runner, Path::new("/p"), 4096);
        assert!(words(Runner::Plain).is_empty());
        let run = words(Runner::Run);
        assert_eq!(run[..5], ["/t", "run", "--pool", "/p", "--size=4096"]);
        assert_eq!(run[5..], ["--trust=*/tidegate", "--trust=*/tidegate-bench", "--"]);
    }

    #[test]
    fn files_are_as_long_as_asked() {
        let file = tempfile::tempfile().unwrap();
        write_in_order(&file, (1 << 20) + 5, 1 << 16).unwrap();
        assert_eq!(file.metadata().unwrap().len(), (1 << 20) + 5);
    }
}
