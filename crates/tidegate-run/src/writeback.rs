//! Makes ranges of files durable on their disks.
//!
//! A file is written in two steps: the disk takes its dirty ranges, then one sync commits the
//! metadata that locates them and empties the disk's cache. Names, and files that were just made,
//! become durable with their whole file system, after all other files.
//!
//! A sync of a file writes all its dirty pages, even pages that are not due, and so delays a writer
//! of a full log. So if a commit of the journal empties the disk's cache (ext4 with a journal,
//! XFS), one commit is the second step for all files that were only overwritten. Their blocks are
//! written and allocated, so the disk lacks only their due ranges. A file that has grown may need
//! other pages too, such as zeroes before a hole, and is synced.
//!
//! Invariant: if no failure is returned, the kernel's content of the due ranges and sizes at the
//! time of the call is durable. Each failed write-back of these ranges since the file is kept was
//! reported here.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use tidegate::durable;
use tidegate::log::recover::{finish_writing, start_writing};
use tidegate::log::{AppendError, FileSystemId, FileSystemRef, LockError, Log};

use super::backlog::{Backlog, Due, Known};
use super::held::HeldFileSystems;
use super::journal;
use super::kept::KeptFiles;
use super::locate::{self, Located};
use super::ranges::Ranges;

/// A file or file system that could not be made durable.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Id of the file; `None` for a file system.
    pub(crate) file: Option<u64>,
    /// Path of the file, or a name for the file system.
    pub(crate) path: PathBuf,
    /// Why.
    pub(crate) error: io::Error,
}

impl Failure {
    /// Returns whether the failure says nothing about the disk: another process holds a lock, or
    /// this process lacks a resource. The next attempt may succeed, and no program must get an
    /// error.
    pub(crate) fn is_transient(&self) -> bool {
        const TRANSIENT: [Errno; 5] =
            [Errno::AGAIN, Errno::INTR, Errno::MFILE, Errno::NFILE, Errno::NOMEM];
        let inner = self.error.get_ref();
        inner.is_some_and(|error| error.is::<LockError>() || error.is::<AppendError>())
            || Errno::from_io_error(&self.error).is_some_and(|errno| TRANSIENT.contains(&errno))
    }
}

/// Outcome of a sync.
#[derive(Debug, Default)]
pub(crate) struct Synced {
    /// Calls that wait for the disk.
    pub(crate) calls: u64,
    /// The failures.
    pub(crate) failures: Vec<Failure>,
}

/// The log, and the descriptors for its files.
pub(crate) struct Writeback<'a> {
    /// The log of the files.
    pub(crate) log: &'a Log,
    /// Files with a descriptor.
    pub(crate) kept: &'a KeptFiles,
    /// File systems with a descriptor.
    pub(crate) held: &'a HeldFileSystems,
    /// All files that the log defines.
    pub(crate) backlog: &'a Backlog,
}

impl Writeback<'_> {
    /// Starts to write the due ranges, and does not wait.
    pub(crate) fn start(&self, due: &Due) {
        for (id, ranges) in &due.files {
            if let Some(kept) = self.kept.get(*id) {
                for (offset, len) in ranges.iter() {
                    // The sync writes them again, and reports failures.
                    let _ = start_writing(&kept.file, offset, len);
                }
            }
        }
    }

    /// Makes all due data durable.
    pub(crate) fn sync(&self, due: &Due) -> Synced {
        let mut synced = Synced::default();
        // The disk gets all ranges before this thread waits for the first.
        self.start(due);
        let mut file_systems = due.file_systems.clone();
        let mut uncommitted: HashMap<FileSystemRef, Vec<u64>> = HashMap::new();
        for (id, ranges) in &due.files {
            let known = self.backlog.file(*id);
            let outcome = match (self.kept.get(*id), known) {
                (Some(kept), _) => match self.journal_of(*id, known, due) {
                    Some(file_system) => {
                        uncommitted.entry(file_system).or_default().push(*id);
                        write_ranges(&kept.file, ranges)
                    }
                    None => sync_ranges(&kept.file, ranges),
                },
                (None, Some(known)) if self.is_synced_whole(known, &due.file_systems) => {
                    file_systems.insert(known.file_system);
                    continue;
                }
                (None, Some(known)) => sync_not_kept(known),
                (None, None) => self.sync_known(),
            };
            synced.calls += 1;
            synced.failures.extend(outcome.err().map(|error| self.failure_of(*id, error)));
        }
        for (file_system, files) in uncommitted {
            synced.calls += 1;
            synced.failures.extend(self.commit(file_system, &files));
        }
        for file_system in &file_systems {
            synced.calls += 1;
            if let Err(error) = self.sync_whole(file_system) {
                synced.failures.extend(self.failures_of(file_system, &error));
            }
        }
        synced
    }

    /// Returns the file system whose journal makes the file's ranges durable. Returns `None` if
    /// more than the ranges is due, or if one commit is not known to be enough.
    fn journal_of(&self, id: u64, known: Option<&Known>, due: &Due) -> Option<FileSystemRef> {
        let known = known.filter(|_| !due.grown.contains(&id))?;
        self.log.file_systems().with_journal(&known.file_system)
    }

    /// Commits the journal of a file system, or else makes these files durable one by one.
    fn commit(&self, file_system: FileSystemRef, files: &[u64]) -> Vec<Failure> {
        let known = files.iter().find_map(|id| self.backlog.file(*id));
        if known.is_some_and(|known| journal::commit(self.log, file_system, known).is_ok()) {
            return Vec::new();
        }
        let kept = files.iter().filter_map(|id| Some((*id, self.kept.get(*id)?)));
        let failed = kept.filter_map(|(id, kept)| {
            let error = durable::fdatasync(&kept.file).map_err(of_disk).err()?;
            Some(self.failure_of(id, error))
        });
        failed.collect()
    }

    fn failure_of(&self, id: u64, error: io::Error) -> Failure {
        let path = self.kept.path(id).map(PathBuf::from);
        let path = path.or_else(|| Some(self.backlog.file(id)?.path.clone())).unwrap_or_default();
        Failure { file: Some(id), path, error }
    }

    /// Returns whether a file that is not kept is made durable with its file system.
    fn is_synced_whole(&self, known: &Known, due: &HashSet<FileSystemId>) -> bool {
        self.held.holds(&known.file_system) || due.contains(&known.file_system)
    }

    /// Makes a whole file system durable, by the held descriptor that gets all its errors. Without
    /// one, as after the death of another supervisor, uses a new descriptor.
    fn sync_whole(&self, file_system: &FileSystemId) -> io::Result<()> {
        if let Some(synced) = self.held.sync(self.log, file_system) {
            return synced.map_err(of_disk);
        }
        let mut known = self.backlog.files_on(file_system);
        match known.next() {
            Some((_, known)) => {
                locate::sync_file_system(known.device, &known.path).map_err(of_disk)
            }
            None => self.sync_known(),
        }
    }

    /// Syncs each file system with files in the log, for a record whose file system is unknown.
    pub(crate) fn sync_known(&self) -> io::Result<()> {
        let sync = |device| locate::sync_file_system(device, Path::new("")).map_err(of_disk);
        let devices: BTreeSet<u64> = self.log.devices().collect();
        devices.into_iter().try_for_each(sync)
    }

    /// Returns the failures of all files on a file system that are not kept, after a sync of the
    /// whole file system failed.
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

fn write_ranges(file: &File, ranges: &Ranges) -> io::Result<()> {
    ranges.iter().try_for_each(|(offset, len)| finish_writing(file, offset, len).map_err(of_disk))
}

fn sync_ranges(file: &File, ranges: &Ranges) -> io::Result<()> {
    write_ranges(file, ranges)?;
    durable::fdatasync(file).map_err(of_disk)
}

/// Syncs a file that is not kept, as after the death of another supervisor: by a new descriptor, or
/// with its whole file system.
fn sync_not_kept(known: &Known) -> io::Result<()> {
    match locate::open(known)? {
        Located::Open(file) => durable::fdatasync(&file).map_err(of_disk),
        Located::Removed => Ok(()),
        Located::Unknown => locate::sync_file_system(known.device, &known.path).map_err(of_disk),
    }
}

/// Wraps an error of a sync, so that it never counts as transient. It may be that of a failed
/// write, out of memory for example, and the kernel reports it once.
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
    fn one_commit_of_the_journal_is_for_all_files_that_were_only_overwritten() {
        const FILE_SYSTEM: FileSystemId = [1; 16];
        let trial = Trial::new();
        let files = ["one", "two", "grown"].map(|name| (name, trial.file(name, b"content")));
        let mut kept = KeptFiles::default();
        for (name, file) in &files {
            trial.begin_story(file, name);
            trial.log.want_kept(trial.lock(file).file());
        }
        kept.keep_wanted(&trial.log);
        let held = HeldFileSystems::default();
        let sync = |backlog: &Backlog| {
            let (log, kept, held) = (&trial.log, &kept, &held);
            Writeback { log, kept, held, backlog }.sync(&backlog.due())
        };
        let id = tidegate::log::identity(&FILE_SYSTEM, 0, b"");
        let write = |(name, file): &(&str, File)| trial.write(file, name, 0, b"x");
        files[..2].iter().for_each(write);
        assert_eq!(sync(&trial.backlog()).calls, 2, "what the journal commits is not known");
        let reference = trial.log.file_systems().find_or_add(id, true).unwrap();
        let synced = sync(&trial.backlog());
        assert_eq!((synced.calls, synced.failures.len()), (3, 0), "two files and the journal");
        assert!(!trial.log.file_systems().is_pending(reference), "it was committed");
        trial.log.file_systems().note_change(reference);
        let (name, file) = &files[2];
        trial.record(file, name, |ticket| {
            ticket.write(7, &[std::io::IoSlice::new(b"x")], true).unwrap();
        });
        let grown_only = trial.backlog().due().grown.len();
        let synced = sync(&trial.backlog());
        assert_eq!((grown_only, synced.calls), (1, 4), "the grown one is synced by itself");
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
