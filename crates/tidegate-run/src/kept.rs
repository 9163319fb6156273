//! Descriptors of the files that are in the log, held by the supervisor.
//!
//! The kernel reports a failed write-back once to each open description that was open before the
//! failure. A program that syncs nothing gets no report, and a process outside must not be the only
//! one that gets it. So the supervisor opens a file before it is covered, and makes all the file's
//! syncs by that descriptor.
//!
//! Invariants:
//! 1. A file is noted as kept only while its descriptor is open. The descriptor is closed after the
//!    file's story has ended, under the file's lock, and only while the log has no live change of
//!    the file.
//! 2. Descriptors are open for reading: a file that is open for writing cannot be executed.
//! 3. While the log is idle and empty no descriptor is held: its file systems can be unmounted.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tidegate::log::{Definition, FileRef, LockError, Log};

use super::backlog::{Backlog, Known};
use super::copies;
use super::locate::{self, Located};
use super::registry::{Claim, Registry};

/// How long to wait for the lock of a file that is to stay plain.
const KEEP_OUT_TIMEOUT: Duration = Duration::from_millis(10);
/// The most files that are kept at once.
const FILES_MAX: usize = 1000;

/// A file that the supervisor has open.
#[derive(Debug)]
pub(crate) struct Kept {
    /// The file's entry in the log's table.
    pub(crate) entry: FileRef,
    /// Open for reading.
    pub(crate) file: File,
    /// A path of the file, for messages.
    pub(crate) path: PathBuf,
    /// Keeps the file out of other pools' logs.
    _claim: Claim,
}

impl Kept {
    fn open(registry: &Registry, entry: FileRef, known: &Known) -> io::Result<Self> {
        match locate::open(known)? {
            Located::Open(file) => {
                let claim = registry.claim(&file)?;
                Ok(Self { entry, file, path: known.path.clone(), _claim: claim })
            }
            Located::Removed | Located::Unknown => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

/// The kept files, by their ids in the log.
#[derive(Debug)]
pub(crate) struct KeptFiles {
    files: HashMap<u64, Kept>,
    files_max: usize,
    registry: Registry,
}

impl Default for KeptFiles {
    /// Creates an empty set for a quarter of the limit of descriptors, [`FILES_MAX`] at most.
    fn default() -> Self {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let files_max = usize::try_from(limit / 4).unwrap_or(usize::MAX).min(FILES_MAX);
        Self { files: HashMap::new(), files_max, registry: Registry::default() }
    }
}

impl KeptFiles {
    /// Returns the file with this id, if it is kept.
    pub(crate) fn get(&self, id: u64) -> Option<&Kept> {
        self.files.get(&id)
    }

    /// Opens the files that programs want kept. A file that cannot be opened stays plain.
    pub(crate) fn keep_wanted(&mut self, log: &Log) {
        if self.files.len() >= self.files_max {
            self.release(log, |_| true);
        }
        let opened = self.open_wanted(log);
        self.files.extend(opened);
    }

    /// Opens the files that programs want kept, for [`insert`](Self::insert). Another thread may
    /// sync kept files meanwhile.
    pub(crate) fn open_wanted(&self, log: &Log) -> Vec<(u64, Kept)> {
        let wanted = log.take_wanted_kept().into_iter();
        let wanted = wanted.take(self.files_max.saturating_sub(self.files.len()));
        // If this fails, the program waits only briefly, and makes a real sync.
        let keep = |entry| match self.keep(log, entry) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                keep_out(log, entry);
                None
            }
            kept => kept.ok().flatten(),
        };
        wanted.filter_map(keep).collect()
    }

    /// Adds files that were [opened](Self::open_wanted).
    pub(crate) fn insert(&mut self, opened: Vec<(u64, Kept)>) {
        self.files.extend(opened);
    }

    /// Opens the file of an entry, and notes it as kept. Returns `None` if it is open already.
    fn keep(&self, log: &Log, entry: FileRef) -> io::Result<Option<(u64, Kept)>> {
        let id = log.id_of(entry);
        let mut opened = None;
        if !self.files.get(&id).is_some_and(|kept| kept.entry == entry) {
            let payload = log.definition_of(entry).ok_or(io::ErrorKind::NotFound)?;
            let definition = Definition::decode(&payload).ok_or(io::ErrorKind::InvalidData)?;
            if copies::has_copies(log, &definition.file_system) {
                return Err(io::ErrorKind::NotFound.into());
            }
            let known = Known::of(&definition, 0);
            opened = Some((id, Kept::open(&self.registry, entry, &known)?));
        }
        log.note_kept(entry, true);
        Ok(opened)
    }

    /// Keeps a file that the log knows, if it is not kept.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub(crate) fn adopt(&mut self, log: &Log, entry: FileRef, known: &Known) -> io::Result<()> {
        let id = log.id_of(entry);
        if let Entry::Vacant(free) = self.files.entry(id) {
            free.insert(Kept::open(&self.registry, entry, known)?);
            log.note_kept(entry, true);
        }
        Ok(())
    }

    /// Keeps the files that a dead supervisor kept. Ends the stories of files that `backlog` does
    /// not know, or that cannot be opened.
    pub(crate) fn take_over(&mut self, log: &Log, backlog: &Backlog) {
        for entry in log.kept_files() {
            let known = backlog.file(log.id_of(entry));
            let is_kept = known.is_some_and(|known| self.adopt(log, entry, known).is_ok());
            let Ok(guard) = log.lock(entry) else { continue };
            if !is_kept && !guard.has_live_changes() && guard.end_story().is_ok() {
                log.note_kept(entry, false);
            }
        }
    }

    /// Returns whether no file is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Closes the files whose story has ended, and those that have lost their last name.
    pub(crate) fn release_ended(&mut self, log: &Log) {
        self.release(log, |kept| kept.file.metadata().is_ok_and(|found| found.nlink() == 0));
    }

    /// Closes all files without changes in the log, and ends their stories. A sync admits them
    /// again.
    pub(crate) fn release_all(&mut self, log: &Log) {
        self.release(log, |_| true);
    }

    /// Closes the files whose story has ended. Ends the stories of files that `may_end` accepts,
    /// and closes those too. Leaves out files that are locked or have changes in the log.
    fn release(&mut self, log: &Log, may_end: impl Fn(&Kept) -> bool) {
        self.files.retain(|_, kept| !Self::end(log, kept, &may_end));
    }

    /// Ends the story of the file if possible. Returns whether the file is kept no longer.
    fn end(log: &Log, kept: &Kept, may_end: impl Fn(&Kept) -> bool) -> bool {
        let guard = match log.lock_within(kept.entry, Duration::ZERO) {
            Ok(guard) => guard,
            // The entry belongs to another file.
            Err(LockError::Stale) => return true,
            Err(_) => return false,
        };
        let is_over = !guard.is_logged();
        if guard.has_live_changes() || guard.owner_died() || !(is_over || may_end(kept)) {
            return false;
        }
        if !is_over && guard.end_story().is_err() {
            return false;
        }
        log.note_kept(kept.entry, false);
        true
    }

    /// Returns a path of the file with this id, for messages.
    pub(crate) fn path(&self, id: u64) -> Option<&Path> {
        self.files.get(&id).map(|kept| kept.path.as_path())
    }
}

/// Keeps a file plain as long as this log is in use, since another pool has the file in its log. If
/// the file stays locked, its next sync asks again.
fn keep_out(log: &Log, entry: FileRef) {
    if let Ok(guard) = log.lock_within(entry, KEEP_OUT_TIMEOUT) {
        guard.mark_unlogged(true);
    }
}

#[cfg(test)]
mod tests {
    use super::super::trial::Trial;
    use super::*;

    fn kept(trial: &Trial, files: &mut KeptFiles, file: &File, name: &str) -> FileRef {
        trial.begin_story(file, name);
        let entry = trial.lock(file).file();
        trial.log.want_kept(entry);
        files.keep_wanted(&trial.log);
        entry
    }

    #[test]
    fn a_file_is_kept_until_the_log_has_nothing_of_it() {
        let trial = Trial::new();
        let mut files = KeptFiles::default();
        let file = trial.file("file", b"0123");
        let entry = kept(&trial, &mut files, &file, "file");
        assert!(trial.log.is_kept(entry) && trial.log.wait_for_kept(entry, Duration::ZERO));
        trial.write(&file, "file", 0, b"abc");
        files.release_all(&trial.log);
        assert!(trial.log.is_kept(entry), "it has changes in the log");
        files.release_ended(&trial.log);
        trial.log.ring().retire_to(trial.log.ring().safe_position()).unwrap();
        files.release_ended(&trial.log);
        assert!(trial.log.is_kept(entry), "its story goes on");
        files.release_all(&trial.log);
        assert!(!trial.log.is_kept(entry) && !trial.lock(&file).is_logged());
        assert!(files.files.is_empty());
    }

    #[test]
    fn a_file_without_a_name_or_a_story_is_not_kept() {
        let trial = Trial::new();
        let mut files = KeptFiles::default();
        let (one, two) = (trial.file("one", b""), trial.file("two", b""));
        kept(&trial, &mut files, &one, "one");
        let ended = kept(&trial, &mut files, &two, "two");
        std::fs::remove_file(trial.path("one")).unwrap();
        trial.lock(&two).end_story().unwrap();
        files.release_ended(&trial.log);
        assert!(files.files.is_empty() && !trial.log.is_kept(ended));
    }

    #[test]
    fn a_file_in_the_log_of_another_pool_stays_plain() {
        let trial = Trial::new();
        let (mut files, mut others) = (KeptFiles::default(), KeptFiles::default());
        let file = trial.file("file", b"");
        let entry = kept(&trial, &mut others, &file, "file");
        trial.log.note_kept(entry, false);
        trial.log.want_kept(entry);
        files.keep_wanted(&trial.log);
        assert!(!trial.log.is_kept(entry) && trial.lock(&file).pins() > 0);
        drop(others);
        trial.log.want_kept(entry);
        files.keep_wanted(&trial.log);
        assert!(trial.log.is_kept(entry), "it was given back");
    }

    #[test]
    fn another_file_at_the_path_is_not_taken() {
        let trial = Trial::new();
        let mut files = KeptFiles::default();
        let file = trial.file("file", b"");
        trial.begin_story(&file, "file");
        std::fs::rename(trial.path("file"), trial.path("moved")).unwrap();
        trial.file("file", b"another");
        let entry = trial.lock(&file).file();
        trial.log.want_kept(entry);
        files.keep_wanted(&trial.log);
        assert!(!trial.log.is_kept(entry));
    }
}
