//! Makes files durable on their disks.
//!
//! A file is opened by one of the names that the log knows, and used only if it is the file that the log means. What cannot be
//! opened (another has its name, its owner took the rights away) is synced with all of its file system. A file that is found
//! under none of its names may be gone for good; then there is nothing to sync, and the other way does no harm. Any other
//! reason not to open it is a failure: a file system that is dead refuses that too.
//!
//! Invariants:
//! 1. A sync that returns no failures made durable all that the kernel had for the files and directories when it was called.
//! 2. Descriptors stay open from a failure to the next success: the kernel tells each of a failure that came after it was
//!    opened, once, and takes for clean what it could not write.

use std::collections::{HashMap, HashSet};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use rustix::fs::{OFlags, StatVfsMountFlags, major, minor};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tidegate::log::recover::{finish_writing, start_writing};
use tidegate::log::{AppendError, LockError};

use super::backlog::{Known, as_path};
use super::pace::Part;
use super::place::unescaped;

/// With more files than this on one file system, one sync of all of it costs less.
const FILES_ONE_BY_ONE: usize = 64;
/// Descriptors that stay open between the start of writing and the sync: so few that others are left, whatever the limit.
static OPEN_MOST: LazyLock<usize> = LazyLock::new(|| {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 4).unwrap_or(usize::MAX).min(512)
});

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
        if self.open.len() >= *OPEN_MOST && !self.open.contains_key(&file.id) {
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
        finished.map_err(|error| failure(file, of_disk(error)))
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
            if self.sync_files(*device, files, directories, &mut synced) {
                whole.insert(*device);
            }
        }
        sync_directories(directories, &whole, &mut synced);
        self.learn(&synced.failures);
        synced
    }

    /// Notes how a sync went. What says nothing of the disk changes nothing: nobody was told of a failure that has to be kept in mind.
    fn learn(&mut self, failures: &[Failure]) {
        let is_passing = failures.iter().all(Failure::is_passing);
        self.doubtful = !is_passing || (self.doubtful && !failures.is_empty());
        if !self.doubtful {
            // What stays open keeps the space of a removed file and its file system busy.
            self.open.clear();
        }
    }

    /// Syncs the files of one file system; whether all of it was synced.
    fn sync_files(
        &mut self,
        device: u64,
        files: &[&Known],
        directories: &HashSet<PathBuf>,
        synced: &mut Synced,
    ) -> bool {
        if files.len() > FILES_ONE_BY_ONE
            && self.sync_device(device, files, directories, synced).is_ok()
        {
            return true;
        }
        let mut missing = Vec::new();
        for file in files {
            let outcome = self.opened(file).map(File::sync_data);
            match outcome {
                Err(error) if is_out_of_reach(&error) => {
                    missing.push(*file);
                    continue;
                }
                Err(error) => synced.failures.push(failure(file, error)),
                Ok(outcome) => {
                    synced.calls += 1;
                    let failed = outcome.err().map(|error| failure(file, of_disk(error)));
                    synced.failures.extend(failed);
                }
            }
            if self.open.len() > *OPEN_MOST {
                self.open.remove(&file.id);
            }
        }
        let Some(first) = missing.first() else { return false };
        let outcome = self.sync_device(device, files, directories, synced);
        synced.failures.extend(outcome.err().map(|error| failure(first, error)));
        true
    }

    /// Syncs the file system `device`, which is found by what is above the names of `files`, by `directories` that are to be synced
    /// too, or by files that are open. Where a sync failed before, one that is not found is doubtful.
    fn sync_device(
        &self,
        device: u64,
        files: &[&Known],
        directories: &HashSet<PathBuf>,
        synced: &mut Synced,
    ) -> io::Result<()> {
        synced.calls += 1;
        let names = files.iter().flat_map(|file| &file.names);
        let above = names.flat_map(|name| name.ancestors().skip(1));
        // Those that have lost their names, as all do that are removed, are known by what that changed.
        let above = above.chain(directories.iter().flat_map(|path| path.ancestors()));
        let found = match directory_on(device, above) {
            Ok(None) => directory_on(device, mount_points(device).iter().map(PathBuf::as_path)),
            found => found,
        };
        let kept = files.iter().find_map(|file| self.open.get(&file.id));
        match (found, kept) {
            (Ok(Some(directory)), _) => sync_all_of(&directory),
            (Err(error), _) if !is_out_of_reach(&error) => Err(error),
            (_, Some(kept)) => sync_all_of(kept),
            (Err(error), None) => Err(error),
            (Ok(None), None) => {
                // Mounted where we cannot see it: the one call that reaches it says nothing of errors, and waits for all others.
                rustix::fs::sync();
                let gone = || io::Error::other("its file system is not there any more");
                if self.doubtful { Err(gone()) } else { Ok(()) }
            }
        }
    }
}

/// What a sync told of the disk. Its number is that of a write that failed, out of memory for one, and is told once: it never passes
/// for one that says nothing of the disk.
fn of_disk(error: io::Error) -> io::Error {
    io::Error::other(error)
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
            Ok(opened) if is(file, &opened.metadata()?) => return Ok(opened),
            Err(error) if is_out_of_reach(&last) && !is_of_another(file, name) => last = error,
            _ => {}
        }
    }
    Err(last)
}

fn is(file: &Known, found: &Metadata) -> bool {
    (found.dev(), found.ino()) == (file.device, file.inode)
}

/// Nothing has the name, or something else.
fn is_of_another(file: &Known, name: &Path) -> bool {
    match name.symlink_metadata() {
        Ok(found) => !is(file, &found),
        Err(error) => is_absent(&error),
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        || Errno::from_io_error(error) == Some(Errno::LOOP)
}

/// Names, rights or a lease are in the way, which says nothing of the disk.
fn is_out_of_reach(error: &io::Error) -> bool {
    let kinds = [io::ErrorKind::PermissionDenied, io::ErrorKind::WouldBlock];
    is_absent(error) || kinds.contains(&error.kind())
}

/// Syncs the file system of `directory`.
///
/// # Errors
/// It failed. Also where the file system is read-only: of one that turned so after an error the kernel says that there is nothing to
/// sync. (Asked for a single file it says the truth.)
fn sync_all_of(directory: &File) -> io::Result<()> {
    rustix::fs::syncfs(directory).map_err(|errno| of_disk(errno.into()))?;
    if rustix::fs::fstatvfs(directory)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err(io::ErrorKind::ReadOnlyFilesystem.into());
    }
    Ok(())
}

/// The first of `paths` that is on `device` and can be opened; none, where all are gone or elsewhere.
///
/// # Errors
/// One cannot be looked at, or none that is there may be opened.
fn directory_on<'a>(
    device: u64,
    paths: impl Iterator<Item = &'a Path>,
) -> io::Result<Option<File>> {
    let mut asked = HashSet::new();
    let mut outcome = Ok(None);
    for path in paths {
        if !asked.insert(path) {
            continue;
        }
        match on_device(device, path) {
            Ok(directory) => return Ok(Some(directory)),
            Err(error) if is_absent(&error) => {}
            Err(error) if is_out_of_reach(&error) => outcome = Err(error),
            Err(error) => return Err(error),
        }
    }
    outcome
}

/// Where the file system `device` is mounted, as far as this process sees. None of one that gives its files other numbers, as btrfs.
fn mount_points(device: u64) -> Vec<PathBuf> {
    let number = format!("{}:{}", major(device), minor(device)).into_bytes();
    let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let point = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let is_of_it = fields.next()? == number;
        let point = fields.nth(1).filter(|_| is_of_it)?;
        Some(as_path(&unescaped(point)).to_path_buf())
    };
    mounts.split(|byte| *byte == b'\n').filter_map(point).collect()
}

fn on_device(device: u64, path: &Path) -> io::Result<File> {
    // Before it is opened, which takes rights that who is elsewhere need not give.
    if path.metadata()?.dev() == device {
        let directory = open_directory(path)?;
        if directory.metadata()?.dev() == device {
            return Ok(directory);
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

fn open_directory(path: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NONBLOCK;
    File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

/// What has the entries of a directory, or of one that is gone.
struct Entries<'a> {
    path: &'a Path,
    device: u64,
    /// What is below it cannot be seen: it only stands for the file system.
    is_hidden: bool,
}

impl<'a> Entries<'a> {
    /// What has those of the directory at `path`. One that is gone took them along; where it went is known to a directory above it.
    ///
    /// # Errors
    /// That cannot be looked at.
    fn of(path: &'a Path) -> io::Result<Self> {
        let mut is_hidden = false;
        for path in path.ancestors() {
            match path.metadata() {
                Ok(found) if found.is_dir() => {
                    return Ok(Self { path, device: found.dev(), is_hidden });
                }
                Err(error) if !is_out_of_reach(&error) => return Err(error),
                Err(error) if !is_absent(&error) => is_hidden = true,
                _ => {}
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// Makes them durable.
    ///
    /// # Errors
    /// They are not, or only all of the file system can be synced.
    fn sync(&self) -> io::Result<()> {
        if self.is_hidden {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        match open_directory(self.path)?.sync_all() {
            // A file system without directories that can be synced keeps them by other means.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            outcome => outcome.map_err(of_disk),
        }
    }
}

/// Makes the entries of `directories` durable, but for those on file systems that were synced as a `whole`.
fn sync_directories(directories: &HashSet<PathBuf>, whole: &HashSet<u64>, synced: &mut Synced) {
    let mut devices: HashMap<u64, Vec<Entries<'_>>> = HashMap::new();
    for path in directories {
        match Entries::of(path) {
            Ok(entries) if whole.contains(&entries.device) => {}
            Ok(entries) => devices.entry(entries.device).or_default().push(entries),
            Err(error) => synced.failures.push(failure_of(path, error)),
        }
    }
    for (device, directories) in devices {
        sync_entries(device, directories, synced);
    }
}

fn sync_entries(device: u64, mut directories: Vec<Entries<'_>>, synced: &mut Synced) {
    let all = |directories: &[Entries<'_>], synced: &mut Synced| {
        synced.calls += 1;
        let above = directories.iter().flat_map(|entries| entries.path.ancestors());
        let directory = directory_on(device, above)?;
        sync_all_of(&directory.ok_or(io::ErrorKind::NotFound)?)
    };
    if directories.len() > FILES_ONE_BY_ONE && all(&directories, synced).is_ok() {
        return;
    }
    directories.retain(|entries| match entries.sync() {
        Err(error) if is_out_of_reach(&error) => true,
        outcome => {
            synced.calls += 1;
            synced.failures.extend(outcome.err().map(|error| failure_of(entries.path, error)));
            false
        }
    });
    let Some(first) = directories.first() else { return };
    let outcome = all(&directories, synced);
    synced.failures.extend(outcome.err().map(|error| failure_of(first.path, error)));
}

fn failure_of(directory: &Path, error: io::Error) -> Failure {
    Failure { file: None, name: directory.to_path_buf(), error }
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

    /// What no file system has: it is refused for a reason that is none of absence or rights.
    fn refused(dir: &Path) -> PathBuf {
        dir.join("x".repeat(300))
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_not_taken_for_one_that_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = known(7, dir.path());
        file.names = vec![refused(dir.path()), dir.path().join("gone")];
        let synced = sync(std::slice::from_ref(&file), &[]);
        assert_eq!(synced.failures.len(), 1, "{synced:?}");
        assert_eq!(synced.failures[0].file, Some(7));
        // One more name of another file says nothing.
        std::fs::write(dir.path().join("another"), "").unwrap();
        file.names = vec![dir.path().join("another"), dir.path().join("gone")];
        assert!(sync(&[file], &[]).failures.is_empty());
    }

    #[test]
    fn a_file_system_is_gone_only_where_all_that_led_to_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let found = |path: &Path| directory_on(u64::MAX, path.ancestors());
        assert!(found(&dir.path().join("gone/too")).unwrap().is_none());
        found(&refused(dir.path())).unwrap_err();
    }

    /// Else all file systems would be synced, and a dead one of them waited for.
    #[test]
    fn the_file_system_of_removed_files_is_found_without_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let mut removed = known(7, dir.path());
        removed.names.clear();
        let sync = |removed: &Known, directories: &[&Path]| {
            let mut writeback = Writeback { doubtful: true, ..Writeback::default() };
            let directories = directories.iter().map(|path| path.to_path_buf()).collect();
            writeback.sync(&[removed], &directories).failures.len()
        };
        assert_eq!(sync(&removed, &[dir.path()]), 0, "by a directory");
        removed.device = Path::new("/proc").metadata().unwrap().dev();
        assert_eq!(sync(&removed, &[]), 0, "where it is mounted");
        removed.device = u64::MAX;
        assert_eq!(sync(&removed, &[]), 1, "nowhere");
    }

    #[test]
    fn a_directory_that_cannot_be_opened_is_not_taken_for_one_that_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let synced = sync(&[], &[&refused(dir.path())]);
        assert_eq!(synced.failures.len(), 1, "{synced:?}");
    }

    /// Calls `of` without the rights of root, which may open everything.
    fn without_rights<T: Send>(of: impl FnOnce() -> T + Send) -> T {
        let call = || {
            if rustix::process::geteuid().is_root() {
                let nobody = rustix::process::Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            }
            of()
        };
        std::thread::scope(|scope| scope.spawn(call).join().unwrap())
    }

    fn set_mode(path: &Path, mode: u32) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_that_may_not_be_opened_is_synced_with_its_file_system() {
        let dir = tempfile::tempdir().unwrap();
        let (closed, inner) = (dir.path().join("closed"), dir.path().join("closed/inner"));
        std::fs::create_dir_all(&inner).unwrap();
        set_mode(dir.path(), 0o755);
        let device = dir.path().metadata().unwrap().dev();
        for (mode, path) in [(0o311, &closed), (0o000, &inner)] {
            set_mode(&closed, mode);
            without_rights(|| {
                let entries = || vec![Entries::of(path).unwrap()];
                let error = entries()[0].sync().unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
                let mut synced = Synced::default();
                sync_entries(device, entries(), &mut synced);
                assert!(synced.failures.is_empty(), "{synced:?}");
                sync_entries(u64::MAX, entries(), &mut synced);
                assert_eq!(synced.failures.len(), 1, "nothing of that file system can be opened");
            });
        }
        set_mode(&closed, 0o755);
    }

    #[test]
    fn what_a_sync_tells_is_never_taken_for_something_that_passes() {
        let failed = |error| failure_of(Path::new("/"), error);
        let refused = [failed(Errno::NOMEM.into())];
        let not_written = [failed(of_disk(Errno::NOMEM.into()))];
        assert_eq!(refused[0].error.to_string(), not_written[0].error.to_string());
        let mut writeback = Writeback::default();
        for (failures, is_doubtful) in
            [(&refused[..], false), (&not_written, true), (&refused, true), (&[], false)]
        {
            writeback.learn(failures);
            assert_eq!(writeback.doubtful, is_doubtful, "after {failures:?}");
        }
    }
}
