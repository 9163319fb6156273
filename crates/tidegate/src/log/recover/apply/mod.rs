//! From a plan to files: what is missing on the file system is done, in an order that a crash may break anywhere.
//!
//! Invariants:
//! 1. A file is what its identity says, never what its path says: before its bytes are touched, the open file is asked.
//! 2. A path is overwritten or removed only where the log took the file that is there from it, and only if that file is
//!    dead or can be found elsewhere by the next recovery. Everything else is left and reported.
//! 3. A file that is made again is whole and durable under a temporary name, and its identity is in the log, before it gets
//!    its own name: the next recovery finds it wherever a crash leaves it.
//! 4. A file that moves is linked under a temporary name first. So names can be swapped or go in circles, and at every
//!    moment each file has at least one name that the next recovery looks at.
//! 5. What a former, interrupted run did is synced again: that it is visible does not say that it is durable.
//! 6. One file's failure keeps no other file back, except from the name that it holds.
//!
//! Entry point: [`apply`]. Phases, in this order: `survey` (who is where), `data` (bytes, sizes and new files; in
//! parallel), the caller's note of new identities, `names`, then the directories are synced.

mod data;
mod names;
mod survey;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use uuid::Uuid;

use super::parallel;
use super::plan::{Fate, FilePlan, Finding, Findings, Plan, TEMP_PREFIX};
use super::source::LogData;
use data::Restored;
use survey::{Place, Survey};

/// The file system, as recovery sees it. No method follows a symbolic link in the last component of a path.
pub trait FileSystem: Sync {
    /// An open file.
    type File: Sync;

    /// Who is at `path`; none, where nothing is.
    ///
    /// # Errors
    /// It cannot be told.
    fn look(&self, path: &Path) -> io::Result<Option<Found>>;

    /// Paths of all that is in a directory.
    ///
    /// # Errors
    /// As of the system.
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>>;

    /// Opens the file at `path` for writing.
    ///
    /// # Errors
    /// As of the system.
    fn open(&self, path: &Path) -> io::Result<Self::File>;

    /// Makes an empty file that only its owner may use, where nothing is.
    ///
    /// # Errors
    /// As of the system.
    fn create(&self, path: &Path) -> io::Result<Self::File>;

    /// What an open file is.
    ///
    /// # Errors
    /// As of the system.
    fn examine(&self, file: &Self::File) -> io::Result<Found>;

    /// Sets the size; new bytes are zero.
    ///
    /// # Errors
    /// As of the system.
    fn set_size(&self, file: &Self::File, size_bytes: u64) -> io::Result<()>;

    /// Writes all of `data`.
    ///
    /// # Errors
    /// As of the system.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Has the disk begin to take bytes that were written: ahead of [`sync`](Self::sync), which alone says whether it has.
    fn start_sync(&self, file: &Self::File, offset: u64, len: u64);

    /// Makes bytes zero that are inside the file.
    ///
    /// # Errors
    /// As of the system.
    fn zero(&self, file: &Self::File, offset: u64, len: u64) -> io::Result<()>;

    /// Sets owner and permissions.
    ///
    /// # Errors
    /// As of the system; the permissions may be set then.
    fn set_owner(&self, file: &Self::File, mode: u32, uid: u32, gid: u32) -> io::Result<()>;

    /// Makes bytes, size and owner durable.
    ///
    /// # Errors
    /// As of the system.
    fn sync(&self, file: &Self::File) -> io::Result<()>;

    /// Gives the file at `from` one more name.
    ///
    /// # Errors
    /// As of the system.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Renames, over what is at `to`.
    ///
    /// # Errors
    /// As of the system.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a name.
    ///
    /// # Errors
    /// As of the system.
    fn unlink(&self, path: &Path) -> io::Result<()>;

    /// Makes a directory that only its owner, if possible `uid`, may use.
    ///
    /// # Errors
    /// As of the system.
    fn make_directory(&self, path: &Path, uid: u32, gid: u32) -> io::Result<()>;

    /// Makes the names in a directory durable.
    ///
    /// # Errors
    /// As of the system.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;
}

/// What is at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// What tells it from all others; 0 where it has nothing of the kind.
    pub identity: u64,
    /// Its kind.
    pub kind: FoundKind,
    /// Names that it has.
    pub links: u64,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// Kinds of things with names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FoundKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// Something else.
    Other,
}

/// How to apply a plan.
#[derive(Debug, Clone, Copy)]
pub struct ApplyOptions {
    /// The pool: part of the names of temporary files.
    pub pool: Uuid,
    /// Threads that restore files at once.
    pub workers: usize,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes copied to files.
    pub done_bytes: u64,
    /// Bytes that are to be copied.
    pub total_bytes: u64,
}

/// A file was made again: to be noted in the log as one more definition, durably, before the file gets its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewIdentity<'a> {
    /// Id of the file in the log.
    pub file: u64,
    /// What it is found by from now on.
    pub identity: u64,
    /// The name that it will get.
    pub path: &'a [u8],
    /// Permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Something that could not be done. The records that tell of it must stay in the log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The file is at none of its paths, and the log has not all of it.
    #[error("{path}: the file is not there, and it was not made under Tidegate (file {file})")]
    Missing {
        /// Id of the file.
        file: u64,
        /// Its path.
        path: String,
    },
    /// The system refused.
    #[error("{path}: cannot {doing}")]
    Io {
        /// The path.
        path: String,
        /// What was tried.
        doing: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Where a file belongs there is something that the log does not know.
    #[error("{path}: something else is there by now; move it away and recover again (file {file})")]
    Occupied {
        /// Id of the file.
        file: u64,
        /// The path.
        path: String,
    },
    /// Where a file belongs there is the only name of another one that has to move first, and cannot.
    #[error("{path}: another file that could not be recovered has this name (file {file})")]
    Blocked {
        /// Id of the file.
        file: u64,
        /// The path.
        path: String,
    },
    /// Records are about files that no record defines.
    #[error("{records} records are about files that are not defined: a part of the log is lost")]
    Undefined {
        /// How many.
        records: u64,
    },
}

/// What became of a plan.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Files whose bytes or size were set.
    pub files_written: u64,
    /// Of them, those that were made again.
    pub files_created: u64,
    /// Names that were given.
    pub names_placed: u64,
    /// Names that were removed.
    pub names_removed: u64,
    /// Bytes that were copied.
    pub written_bytes: u64,
    /// What could not be done.
    pub failures: Vec<Failure>,
    /// What was odd.
    pub findings: Findings,
}

impl Outcome {
    /// All of the plan is on the disk: its records may go.
    pub fn is_complete(&self) -> bool {
        self.failures.is_empty()
    }
}

/// What all phases use.
struct Context<'a, F> {
    plan: &'a Plan,
    data: &'a dyn LogData,
    files: &'a F,
    options: ApplyOptions,
    meter: Meter<'a>,
}

/// Counts copied bytes and tells the caller.
struct Meter<'a> {
    done_bytes: Mutex<u64>,
    total_bytes: u64,
    tell: &'a (dyn Fn(Progress) + Sync),
}

impl Meter<'_> {
    fn add(&self, bytes: u64) {
        let mut done = self.done_bytes.lock();
        *done += bytes;
        // Under the lock, so that the caller never sees it go back.
        (self.tell)(Progress { done_bytes: *done, total_bytes: self.total_bytes });
    }
}

/// Makes `files` match `plan`, whose bytes are in `data`. `note` has to make each new identity durable in the log.
///
/// May be called again after any crash or failure, with the plan of the same records and of those that `note` has added.
/// Only if the outcome is complete may the log's tail move over them.
pub fn apply<F: FileSystem>(
    plan: &Plan,
    data: &dyn LogData,
    files: &F,
    options: ApplyOptions,
    progress: &(dyn Fn(Progress) + Sync),
    note: &mut dyn FnMut(NewIdentity<'_>) -> io::Result<()>,
) -> Outcome {
    let total_bytes = plan.data_bytes();
    let meter = Meter { done_bytes: Mutex::new(0), total_bytes, tell: progress };
    let context = Context { plan, data, files, options, meter };
    let mut outcome = Outcome { findings: plan.findings.clone(), ..Outcome::default() };
    if plan.undefined_records > 0 {
        outcome.failures.push(Failure::Undefined { records: plan.undefined_records });
    }
    let mut survey = Survey::take(&context);
    let ready = context.restore_all(&mut survey, &mut outcome, note);
    names::arrange(&context, &mut survey, &ready, &mut outcome);
    context.sync_directories(&mut outcome);
    outcome.written_bytes = *context.meter.done_bytes.lock();
    outcome
}

impl<F: FileSystem> Context<'_, F> {
    /// Restores the bytes of all files; which of them are ready for their names.
    fn restore_all(
        &self,
        survey: &mut Survey,
        outcome: &mut Outcome,
        note: &mut dyn FnMut(NewIdentity<'_>) -> io::Result<()>,
    ) -> Vec<bool> {
        let indices: Vec<_> = (0..self.plan.files.len()).collect();
        let restored = parallel::map(self.options.workers, &indices, |&index| {
            data::restore(self, survey, index)
        });
        let mut ready = Vec::with_capacity(restored.len());
        for (index, restored) in restored.into_iter().enumerate() {
            let accepted =
                restored.and_then(|restored| self.accept(index, restored, survey, outcome, note));
            ready.push(accepted.is_ok());
            outcome.failures.extend(accepted.err());
        }
        ready
    }

    fn accept(
        &self,
        index: usize,
        restored: Restored,
        survey: &mut Survey,
        outcome: &mut Outcome,
        note: &mut dyn FnMut(NewIdentity<'_>) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let file = &self.plan.files[index];
        match restored {
            Restored::Untouched => {}
            Restored::Written => {
                outcome.files_written += 1;
                if let Some(found) = survey.places[index].strays.first() {
                    let (path, found) = (self.text(last_path(file)), found.display().to_string());
                    outcome.findings.add(Finding::Elsewhere { path, found });
                }
            }
            Restored::Vanished => {
                let path = self.text(last_path(file));
                outcome.findings.add(Finding::Vanished { file: file.id, path });
            }
            Restored::Created(created) => {
                let path = &self.plan.paths[created.path].path;
                let FilePlan { id, mode, uid, gid, .. } = *file;
                let identity = created.identity;
                note(NewIdentity { file: id, identity, path, mode, uid, gid }).map_err(
                    |error| self.failed(created.path, "note the new file in the log", error),
                )?;
                if !created.owner_set {
                    outcome.findings.add(Finding::Owner { path: self.text(created.path) });
                }
                survey.note_created(index, created.identity, created.temp);
                outcome.files_created += 1;
                outcome.files_written += 1;
            }
        }
        Ok(())
    }

    /// Makes all names durable that the plan has an opinion of, whether this run or a former one changed them.
    fn sync_directories(&self, outcome: &mut Outcome) {
        let (parents, ancestors) = self.directories();
        let directories: Vec<_> = parents.iter().chain(ancestors.difference(&parents)).collect();
        let synced = parallel::map(self.options.workers, &directories, |directory| {
            self.files.sync_directory(directory)
        });
        for (directory, synced) in directories.into_iter().zip(synced) {
            let Err(source) = synced else { continue };
            let denied = source.kind() == io::ErrorKind::PermissionDenied;
            let harmless = match source.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => true,
                // A directory that recovery made is not one that it may not read.
                _ => denied && !parents.contains(directory),
            };
            if !harmless {
                let path = directory.display().to_string();
                outcome.failures.push(Failure::Io { path, doing: "sync the directory", source });
            }
        }
    }

    /// The directories of all names that were made or taken, and what those of made ones lie in.
    fn directories(&self) -> (BTreeSet<PathBuf>, BTreeSet<PathBuf>) {
        let (mut parents, mut ancestors) = (BTreeSet::new(), BTreeSet::new());
        for file in self.plan.files.iter().filter(|file| file.has_made_names()) {
            for name in file.names.iter().filter(|name| name.made) {
                let parent = self.parent(name.path);
                if !parents.contains(parent) {
                    ancestors.extend(parent.ancestors().skip(1).map(Path::to_path_buf));
                    parents.insert(parent.to_path_buf());
                }
            }
        }
        let taken =
            (0..self.plan.paths.len()).filter(|path| !self.plan.paths[*path].taken.is_empty());
        parents.extend(taken.map(|path| self.parent(path).to_path_buf()));
        (parents, ancestors)
    }

    fn path(&self, path: usize) -> &Path {
        Path::new(OsStr::from_bytes(&self.plan.paths[path].path))
    }

    fn parent(&self, path: usize) -> &Path {
        self.path(path).parent().unwrap_or(Path::new("/"))
    }

    fn text(&self, path: usize) -> String {
        self.path(path).display().to_string()
    }

    /// The temporary name of a file in the directory of `path`.
    fn temp(&self, file: usize, path: usize) -> PathBuf {
        let (pool, id) = (self.options.pool, self.plan.files[file].id);
        self.parent(path).join(format!("{TEMP_PREFIX}{pool}-{id}"))
    }

    /// A path that leads to a file.
    fn way_to(&self, place: &Place) -> Option<PathBuf> {
        let known = place.at.first().map(|path| self.path(*path).to_path_buf());
        known.or_else(|| place.temps.iter().chain(&place.strays).next().cloned())
    }

    fn failed(&self, path: usize, doing: &'static str, source: io::Error) -> Failure {
        Failure::Io { path: self.text(path), doing, source }
    }

    /// Makes the directory of `path`, and those that it lies in, where they are missing.
    fn make_parents(&self, path: usize, file: &FilePlan) -> io::Result<()> {
        let parent = self.parent(path);
        if self.files.look(parent)?.is_some() {
            return Ok(());
        }
        let mut missing = Vec::new();
        for directory in parent.ancestors() {
            if self.files.look(directory)?.is_some() {
                break;
            }
            missing.push(directory);
        }
        for directory in missing.into_iter().rev() {
            match self.files.make_directory(directory, file.uid, file.gid) {
                // Another worker was faster.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made?,
            }
        }
        Ok(())
    }
}

/// The path to name a file by in messages.
fn last_path(file: &FilePlan) -> usize {
    let name = file.names.first().map(|name| name.path);
    name.or(file.known_paths.last().copied()).unwrap_or(0)
}
