//! Makes ranges of files durable on their disks.
//!
//! A file is written in two steps: the disk takes its dirty ranges, then one sync commits what the
//! file system needs to find them and empties the disk's cache. Files that were made a moment ago,
//! and names, are made durable with their whole file system, after all others.
//!
//! Invariant: where no failure is returned, all that the kernel had of the due ranges and sizes
//! when the sync was called is durable, and each failed write-back since the file is kept was told
//! here.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use tidegate::durable;
use tidegate::log::recover::{finish_writing, start_writing};
use tidegate::log::{AppendError, FileSystemId, LockError, Log};

use super::backlog::{Backlog, Due, Known};
use super::held::HeldFileSystems;
use super::kept::KeptFiles;
use super::locate::{self, Located};
use super::ranges::Ranges;

/// What could not be made durable.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Id of the file, if it is one.
    pub(crate) file: Option<u64>,
    /// Its path, or the file system's.
    pub(crate) path: PathBuf,
    /// Why.
    pub(crate) error: io::Error,
}

impl Failure {
    /// It says nothing of the disk: another process holds what is needed, or this one has no more
    /// of something. The next attempt may do it, and no program has to hear of it.
    pub(crate) fn is_transient(&self) -> bool {
        const TRANSIENT: [Errno; 5] =
            [Errno::AGAIN, Errno::INTR, Errno::MFILE, Errno::NFILE, Errno::NOMEM];
        let inner = self.error.get_ref();
        inner.is_some_and(|error| error.is::<LockError>() || error.is::<AppendError>())
            || Errno::from_io_error(&self.error).is_some_and(|errno| TRANSIENT.contains(&errno))
    }
}

/// How a sync went.
#[derive(Debug, Default)]
pub(crate) struct Synced {
    /// Calls that wait for the disk.
    pub(crate) calls: u64,
    /// What failed.
    pub(crate) failures: Vec<Failure>,
}

/// The files that are synced.
pub(crate) struct Writeback<'a> {
    /// The log that they are in.
    pub(crate) log: &'a Log,
    /// Those with a descriptor.
    pub(crate) kept: &'a KeptFiles,
    /// File systems with a descriptor.
    pub(crate) held: &'a HeldFileSystems,
    /// All that the log defines.
    pub(crate) backlog: &'a Backlog,
}

impl Writeback<'_> {
    /// Starts to write what is due, and does not wait for it.
    pub(crate) fn start(&self, due: &Due) {
        for (id, ranges) in &due.files {
            if let Some(kept) = self.kept.get(*id) {
                for (offset, len) in ranges.iter() {
                    // The sync does it again, and reports what goes wrong.
                    let _ = start_writing(&kept.file, offset, len);
                }
            }
        }
    }

    /// Makes what is due durable.
    pub(crate) fn sync(&self, due: &Due) -> Synced {
        let mut synced = Synced::default();
        // All of it is on its way before the first one is waited for.
        self.start(due);
        let mut file_systems = due.file_systems.clone();
        for (id, ranges) in &due.files {
            let known = self.backlog.file(*id);
            let outcome = match (self.kept.get(*id), known) {
                (Some(kept), _) => sync_ranges(&kept.file, ranges),
                (None, Some(known)) if self.is_synced_whole(known, &due.file_systems) => {
                    file_systems.insert(known.file_system);
                    continue;
                }
                (None, Some(known)) => sync_not_kept(known),
                (None, None) => sync_everything(),
            };
            synced.calls += 1;
            if let Err(error) = outcome {
                let path = self.kept.path(*id).map(PathBuf::from);
                let path = path.or_else(|| Some(known?.path.clone())).unwrap_or_default();
                synced.failures.push(Failure { file: Some(*id), path, error });
            }
        }
        for file_system in &file_systems {
            synced.calls += 1;
            if let Err(error) = self.sync_whole(file_system) {
                synced.failures.extend(self.failures_of(file_system, &error));
            }
        }
        synced
    }

    /// The file, which is not kept, is made durable with its file system.
    fn is_synced_whole(&self, known: &Known, due: &HashSet<FileSystemId>) -> bool {
        self.held.holds(&known.file_system) || due.contains(&known.file_system)
    }

    /// Makes a whole file system durable, through the descriptor that hears of all its failures; or
    /// through a new one, as after the death of another supervisor.
    fn sync_whole(&self, file_system: &FileSystemId) -> io::Result<()> {
        if let Some(synced) = self.held.sync(self.log, file_system) {
            return synced.map_err(of_disk);
        }
        let mut known = self.backlog.files_on(file_system);
        let directory =
            known.find_map(|(_, known)| locate::directory_on(known.device, &known.path));
        match directory {
            Some(directory) => durable::syncfs(&directory).map_err(of_disk),
            None => sync_everything(),
        }
    }

    /// The failure of a whole file system concerns all files of it that are not kept.
    fn failures_of(&self, file_system: &FileSystemId, error: &io::Error) -> Vec<Failure> {
        let failure = |file, path: &Path| {
            let error = of_disk(io::Error::new(error.kind(), error.to_string()));
            Failure { file, path: path.to_path_buf(), error }
        };
        let files = self.backlog.files_on(file_system);
        let files = files.filter(|(id, _)| self.kept.get(*id).is_none());
        let files: Vec<_> = files.map(|(id, known)| failure(Some(id), &known.path)).collect();
        if files.is_empty() { vec![failure(None, Path::new("a file system"))] } else { files }
    }
}

fn sync_ranges(file: &File, ranges: &Ranges) -> io::Result<()> {
    for (offset, len) in ranges.iter() {
        finish_writing(file, offset, len).map_err(of_disk)?;
    }
    durable::fdatasync(file).map_err(of_disk)
}

/// Syncs a file that is not kept, as after the death of another supervisor: through a descriptor of
/// its own, or with its whole file system.
fn sync_not_kept(known: &Known) -> io::Result<()> {
    match locate::open(known)? {
        Located::Open(file) => durable::fdatasync(&file).map_err(of_disk),
        Located::Removed => Ok(()),
        Located::Unknown => match locate::directory_on(known.device, &known.path) {
            Some(directory) => durable::syncfs(&directory).map_err(of_disk),
            None => sync_everything(),
        },
    }
}

/// Syncs all file systems: that of the file cannot be found, or is not mounted any more.
#[expect(clippy::unnecessary_wraps, reason = "one of several ways to sync a file")]
fn sync_everything() -> io::Result<()> {
    rustix::fs::sync();
    Ok(())
}

/// What a sync told of the disk. Its number is that of a write that failed, out of memory for one,
/// and is told once: it never passes for one that says nothing of the disk.
fn of_disk(error: impl Into<io::Error>) -> io::Error {
    io::Error::other(error.into())
}

#[cfg(test)]
mod tests {
    use super::super::trial::Trial;
    use super::*;

    #[test]
    fn files_are_synced_whether_they_are_kept_or_not() {
        let trial = Trial::new();
        let (one, two) = (trial.file("one", b""), trial.file("two", b""));
        trial.write(&one, "one", 0, b"x");
        trial.write(&two, "two", 5000, b"x");
        let mut kept = KeptFiles::default();
        trial.log.want_kept(trial.lock(&one).file());
        kept.keep_wanted(&trial.log);
        std::fs::remove_file(trial.path("two")).unwrap();
        let backlog = trial.backlog();
        let held = HeldFileSystems::default();
        let writeback = Writeback { log: &trial.log, kept: &kept, held: &held, backlog: &backlog };
        let synced = writeback.sync(&backlog.due());
        assert!(synced.failures.is_empty(), "{synced:?}");
        assert_eq!(synced.calls, 2);
    }

    #[test]
    fn what_says_nothing_of_the_disk_is_told_apart() {
        let failure = |error| Failure { file: None, path: PathBuf::new(), error };
        assert!(failure(Errno::MFILE.into()).is_transient());
        assert!(failure(io::Error::other(LockError::Stale)).is_transient());
        assert!(!failure(of_disk(Errno::NOMEM)).is_transient());
        assert!(!failure(Errno::IO.into()).is_transient());
    }
}
