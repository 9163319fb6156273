//! Makes files durable on their disks.
//!
//! A file is opened by one of the names that the log knows, and used only if it is the file that the log means. What cannot be
//! opened (another has its name, its owner took the rights away) is synced with all of its file system. A file that is found
//! under none of its names may be gone for good; then there is nothing to sync, and the other way does no harm.
//!
//! Invariants:
//! 1. A sync that returns no failures made durable all that the kernel had for the files and directories when it was called.
//! 2. Descriptors stay open from a failure to the next success: the kernel tells each of a failure that came after it was
//!    opened, once, and takes for clean what it could not write.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, StatVfsMountFlags};
use rustix::io::Errno;
use tidegate::log::recover::{finish_writing, start_writing};
use tidegate::log::{AppendError, LockError};

use super::backlog::Known;
use super::pace::Part;

/// With more files than this on one file system, one sync of all of it costs less.
const FILES_ONE_BY_ONE: usize = 64;
/// Descriptors that stay open between the start of writing and the sync.
const OPEN_MOST: usize = 512;

/// What could not be made durable.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Id of the file, if it is one.
    pub(crate) file: Option<u64>,
    /// Its name, or the file system's.
    pub(crate) name: PathBuf,
    /// Why.
    pub(crate) error: io::Error,
}

impl Failure {
    /// It says nothing of the disk: somebody holds what is needed, or this process has no more of something. The next attempt
    /// may do it, and no program has to hear of it.
    pub(crate) fn is_passing(&self) -> bool {
        const PASSING: [Errno; 5] =
            [Errno::AGAIN, Errno::INTR, Errno::MFILE, Errno::NFILE, Errno::NOMEM];
        let inner = self.error.get_ref();
        inner.is_some_and(|error| error.is::<LockError>() || error.is::<AppendError>())
            || Errno::from_io_error(&self.error).is_some_and(|errno| PASSING.contains(&errno))
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

/// Files on their way to the disk.
#[derive(Debug, Default)]
pub(crate) struct Writeback {
    open: HashMap<u64, File>,
    /// The last sync failed.
    doubtful: bool,
}

impl Writeback {
    /// Starts to write a part of `file`, and does not wait for it.
    pub(super) fn start(&mut self, file: &Known, part: Part) {
        if self.open.len() >= OPEN_MOST && !self.open.contains_key(&file.id) {
            return;
        }
        if let Ok(opened) = self.opened(file) {
            // Only ahead of its time: the sync does it again, and reports what goes wrong.
            let _ = start_writing(opened, part.start, part.end - part.start);
        }
    }

    /// Has the disk take a part of `file`, and waits for that.
    ///
    /// # Errors
    /// A write failed.
    pub(super) fn finish(&mut self, file: &Known, part: Part) -> Result<(), Failure> {
        // One that cannot be opened is left to the sync, which has other means.
        let Ok(opened) = self.opened(file) else { return Ok(()) };
        let finished = finish_writing(opened, part.start, part.end - part.start);
        finished.map_err(|error| failure(file, error))
    }

    /// Has `file` synced through this descriptor the next time, instead of one of its own.
    pub(crate) fn adopt(&mut self, id: u64, file: &File) {
        if let Ok(copy) = file.try_clone() {
            self.open.insert(id, copy);
        }
    }

    /// Lets go of what was [adopted](Self::adopt).
    pub(crate) fn let_go(&mut self, id: u64) {
        self.open.remove(&id);
    }

    /// Opens the file, so that the next sync hears of all that goes wrong from now on: of a failure that another descriptor was
    /// told of, one that is opened later hears nothing.
    pub(crate) fn keep_open(&mut self, file: &Known) {
        // Where it cannot be opened, its whole file system is synced.
        let _ = self.opened(file);
    }

    fn opened(&mut self, file: &Known) -> io::Result<&File> {
        use std::collections::hash_map::Entry;
        match self.open.entry(file.id) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => Ok(entry.insert(open(file)?)),
        }
    }

    /// Makes `files` and the entries of `directories` durable.
    pub(crate) fn sync(&mut self, files: &[&Known], directories: &HashSet<PathBuf>) -> Synced {
        let mut synced = Synced::default();
        let mut devices: HashMap<u64, Vec<&Known>> = HashMap::new();
        for &file in files {
            devices.entry(file.device).or_default().push(file);
        }
        let mut whole = HashSet::new();
        for (device, files) in &devices {
            if self.sync_files(*device, files, &mut synced) {
                whole.insert(*device);
            }
        }
        sync_directories(directories, &whole, &mut synced);
        self.doubtful = !synced.failures.is_empty();
        if !self.doubtful {
            // What stays open keeps the space of a removed file and its file system busy.
            self.open.clear();
        }
        synced
    }

    /// Syncs the files of one file system; whether all of it was synced.
    fn sync_files(&mut self, device: u64, files: &[&Known], synced: &mut Synced) -> bool {
        let names = || files.iter().flat_map(|file| file.names.iter().map(PathBuf::as_path));
        let doubtful = self.doubtful;
        let all = |synced: &mut Synced| sync_device(device, names(), doubtful, synced);
        if files.len() > FILES_ONE_BY_ONE && all(synced).is_ok() {
            return true;
        }
        let mut missing = Vec::new();
        for file in files {
            let Ok(opened) = self.opened(file) else {
                missing.push(*file);
                continue;
            };
            synced.calls += 1;
            if let Err(error) = opened.sync_data() {
                synced.failures.push(failure(file, error));
            }
            if self.open.len() > OPEN_MOST {
                self.open.remove(&file.id);
            }
        }
        if missing.is_empty() {
            return false;
        }
        let outcome = all(synced);
        if let (Err(error), Some(file)) = (outcome, missing.first()) {
            synced.failures.push(failure(file, error));
        }
        true
    }
}

fn failure(file: &Known, error: io::Error) -> Failure {
    let name = file.names.first().cloned().unwrap_or_default();
    Failure { file: Some(file.id), name, error }
}

/// Opens `file` by one of its names, for reading.
///
/// # Errors
/// None of them is the file's.
pub(crate) fn open(file: &Known) -> io::Result<File> {
    open_with(file, File::options().read(true))
}

/// The same with other rights.
///
/// # Errors
/// None of its names is the file's, or the rights are not given.
pub(crate) fn open_with(file: &Known, options: &std::fs::OpenOptions) -> io::Result<File> {
    let mut options = options.clone();
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    options.custom_flags(flags.bits().cast_signed());
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for name in &file.names {
        match options.open(name) {
            Ok(opened) => {
                let found = opened.metadata()?;
                if (found.dev(), found.ino()) == (file.device, file.inode) {
                    return Ok(opened);
                }
            }
            Err(error) if is_absent(&error) => {}
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Syncs the file system `device`, which is found by what is above `names`. Where a sync failed before, one that is not found is
/// `doubtful`.
fn sync_device<'a>(
    device: u64,
    names: impl Iterator<Item = &'a Path>,
    doubtful: bool,
    synced: &mut Synced,
) -> io::Result<()> {
    synced.calls += 1;
    let mut asked = HashSet::new();
    for above in names.flat_map(|name| name.ancestors().skip(1)) {
        if !asked.insert(above) {
            continue;
        }
        if let Some(directory) = on_device(device, above) {
            return sync_all_of(&directory);
        }
    }
    // Mounted where we cannot see it: the one call that reaches it says nothing of errors.
    rustix::fs::sync();
    if doubtful { Err(io::Error::other("its file system is not there any more")) } else { Ok(()) }
}

/// Syncs the file system of `directory`.
///
/// # Errors
/// It failed. Also where the file system is read-only: of one that turned so after an error the kernel says that there is nothing to
/// sync. (Asked for a single file it says the truth.)
fn sync_all_of(directory: &File) -> io::Result<()> {
    rustix::fs::syncfs(directory)?;
    if rustix::fs::fstatvfs(directory)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err(io::ErrorKind::ReadOnlyFilesystem.into());
    }
    Ok(())
}

fn on_device(device: u64, path: &Path) -> Option<File> {
    let directory = open_directory(path).ok()?;
    (directory.metadata().ok()?.dev() == device).then_some(directory)
}

fn open_directory(path: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NONBLOCK;
    File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

/// Makes the entries of `directories` durable, but for those on file systems that were synced as a `whole`.
fn sync_directories(directories: &HashSet<PathBuf>, whole: &HashSet<u64>, synced: &mut Synced) {
    let mut devices: HashMap<u64, Vec<(&Path, File)>> = HashMap::new();
    for path in directories {
        let mut above = path.ancestors();
        // One that is gone took its entries along; where it went is known to a directory above it.
        let opened = above.find_map(|path| Some((path, open_directory(path).ok()?)));
        let Some((path, directory)) = opened else { continue };
        let Ok(metadata) = directory.metadata() else { continue };
        if !whole.contains(&metadata.dev()) {
            devices.entry(metadata.dev()).or_default().push((path, directory));
        }
    }
    for directories in devices.into_values() {
        sync_entries(&directories, synced);
    }
}

fn sync_entries(directories: &[(&Path, File)], synced: &mut Synced) {
    if let (true, Some((_, first))) = (directories.len() > FILES_ONE_BY_ONE, directories.first()) {
        synced.calls += 1;
        if sync_all_of(first).is_ok() {
            return;
        }
    }
    for (path, directory) in directories {
        synced.calls += 1;
        match directory.sync_all() {
            // A file system without directories that can be synced keeps them by other means.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
            Err(error) => {
                synced.failures.push(Failure { file: None, name: path.to_path_buf(), error });
            }
            Ok(()) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(id: u64, path: &Path) -> Known {
        let metadata = path.metadata().unwrap();
        Known::at(id, (metadata.dev(), metadata.ino(), 0), vec![path.to_path_buf()])
    }

    fn sync(files: &[Known], directories: &[&Path]) -> Synced {
        let directories = directories.iter().map(|path| path.to_path_buf()).collect();
        let files: Vec<_> = files.iter().collect();
        Writeback::default().sync(&files, &directories)
    }

    #[test]
    fn files_and_directories_are_synced_one_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["one", "two"].map(|name| dir.path().join(name));
        let files = paths.each_ref().map(|path| {
            std::fs::write(path, "data").unwrap();
            known(1, path)
        });
        let synced = sync(&files, &[dir.path()]);
        assert!(synced.failures.is_empty(), "{synced:?}");
        assert_eq!(synced.calls, 3);
    }

    #[test]
    fn many_files_are_synced_with_their_file_system() {
        let dir = tempfile::tempdir().unwrap();
        let files: Vec<_> = (0..100)
            .map(|number: u64| {
                let path = dir.path().join(number.to_string());
                std::fs::write(&path, "data").unwrap();
                known(number, &path)
            })
            .collect();
        let synced = sync(&files, &[dir.path()]);
        assert!(synced.failures.is_empty(), "{synced:?}");
        assert_eq!(synced.calls, 1);
    }

    #[test]
    fn a_file_that_is_not_where_it_was_is_synced_with_its_file_system() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "data").unwrap();
        let moved = known(1, &path);
        std::fs::rename(&path, dir.path().join("elsewhere")).unwrap();
        std::fs::write(&path, "another").unwrap();
        assert!(open(&moved).is_err());
        let synced = sync(&[moved], &[&dir.path().join("gone/too")]);
        assert!(synced.failures.is_empty(), "{synced:?}");
        assert_eq!(synced.calls, 1, "the directory above is of the same file system");
    }

    #[test]
    fn links_are_not_followed_and_pipes_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&path, "data").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let mut file = known(1, &path);
        file.names = vec![link];
        assert!(open(&file).is_err());
        let pipe = dir.path().join("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
        file.names = vec![pipe];
        assert!(open(&file).is_err());
    }
}
