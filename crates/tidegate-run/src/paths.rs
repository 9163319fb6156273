//! Paths of the pools of `tidegate run`, and of the files that supervisors share with programs.
//!
//! Invariant: every file and directory that this module returns belongs to the effective user and
//! is closed to all other users. Files of another user are refused, never used. Replaying a log
//! changes files, so a pool that another user may write to would be a way to change ours.
//!
//! Map: [`default_pool`] (if none is given) · [`prepare_pool`] (make or check the file) ·
//! [`existing_log`] (check it) · [`PoolPaths`] (control memory, socket and lock of a pool's
//! supervisor).

use std::fs::{DirBuilder, File, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{Access, FlockOperation};
use rustix::process::{Resource, getrlimit};

use tidegate::log::CODE;
use tidegate::opening::{self, Expected};
use tidegate::pool::{Content, Glance, glance};
use tidegate::size::Size;
use tidegate::stack::REGISTRY;

use crate::mount::{Mount, unescaped};

/// Directory for the files that processes share and that need no disk.
const SHARED_MEMORY: &str = "/dev/shm";
/// Bits of a mode that give rights to users other than the owner.
const OTHERS: u32 = 0o077;

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the pool of a user that names none: on a DAX file system that the user may write to.
///
/// # Errors
/// Fails if there is no such file system, or the directory cannot be made or is not the user's own.
pub fn default_pool() -> Result<PathBuf> {
    let writable = |mount: &PathBuf| rustix::fs::access(mount, Access::WRITE_OK).is_ok();
    let dax = dax_mounts().into_iter().find(writable);
    let Some(mount) = dax else {
        bail!(
            "there is no persistent memory here that user {} may write to (a DAX file system); without it \
             `tidegate run --volatile -- CMD` answers syncs at once: kill -9 loses nothing then, a power cut loses \
             what programs synced; or name a pool by --pool",
            user()
        );
    };
    let directory = mount.join(format!(".tidegate-{}", user()));
    own_directory(&directory)?;
    Ok(directory.join("default.pool"))
}

fn shared_directory() -> PathBuf {
    Path::new(SHARED_MEMORY).join(format!("tidegate-{}", user()))
}

/// Returns the mount points of DAX file systems.
#[must_use]
pub fn dax_mounts() -> Vec<PathBuf> {
    dax_mounts_in(&std::fs::read("/proc/mounts").unwrap_or_default())
}

/// Returns the mount points of DAX file systems in the text of `/proc/mounts`.
fn dax_mounts_in(mounts: &[u8]) -> Vec<PathBuf> {
    mounts.split(|byte| *byte == b'\n').filter_map(dax_mount).collect()
}

fn dax_mount(line: &[u8]) -> Option<PathBuf> {
    let mut fields = line.split(|byte| *byte == b' ').skip(1);
    let (mount, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
    let is_dax = |option: &[u8]| option == b"dax" || option == b"dax=always";
    let is_mapped = [&b"ext4"[..], b"xfs"].contains(&kind);
    let found = is_mapped && options.split(|byte| *byte == b',').any(is_dax);
    found.then(|| PathBuf::from(std::ffi::OsString::from_vec(unescaped(mount))))
}

/// Makes `directory` for this user alone. Checks owner and mode if it exists.
fn own_directory(directory: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("cannot make {}", directory.display()));
        }
        _ => {}
    }
    let metadata = inspect(directory)?;
    let found = match metadata.uid() {
        _ if !metadata.is_dir() => "is no directory".to_owned(),
        owner if owner != user() => format!("belongs to user {owner}"),
        _ => return expect_own(directory, &metadata),
    };
    bail!(
        "{} {found} and is not used; expected a directory that tidegate makes for user {}: have its owner or root remove it",
        directory.display(),
        user()
    )
}

fn inspect(path: &Path) -> Result<Metadata> {
    path.symlink_metadata().with_context(|| format!("cannot inspect {}", path.display()))
}

/// Refuses a file that belongs to another user or gives rights to other users.
fn expect_own(path: &Path, metadata: &Metadata) -> Result<()> {
    let (owner, user, mode) = (metadata.uid(), user(), metadata.mode() & 0o7777);
    if owner != user {
        bail!("{} belongs to user {owner}, not to user {user}: it is not used", path.display());
    }
    if mode & OTHERS != 0 {
        bail!(
            "{} has mode {mode:03o}, so that others may reach the pool; expected no rights but the owner's: chmod go= {0}",
            path.display()
        );
    }
    Ok(())
}

/// A pool's file.
#[derive(Debug)]
pub struct PoolFile {
    /// Its absolute path.
    pub path: PathBuf,
    origin: Origin,
}

/// How this process got a pool's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// It existed.
    Found,
    /// It existed, and was empty.
    Lengthened,
    Made,
}

impl PoolFile {
    /// Removes or empties the file again if this process made or lengthened it. Called for a pool
    /// that could not be used, so that the next try may choose another size.
    pub fn undo(&self, paths: &PoolPaths) {
        if self.origin == Origin::Found {
            return;
        }
        // Best effort: the caller already returns the error that matters.
        if let Ok(lock) = paths.lock()
            && !paths.is_in_use()
        {
            let _ = match self.origin {
                Origin::Lengthened => set_len(&self.path, 0),
                _ => std::fs::remove_file(&self.path),
            };
            drop(lock);
        }
    }
}

/// Makes the pool's file with `size`, without space, or checks the existing file.
///
/// # Errors
/// Fails if the file cannot be made, is not the user's own, or holds something else.
pub fn prepare_pool(path: &Path, size: Size) -> Result<PoolFile> {
    match new_pool(path, size) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => {
            made.with_context(|| format!("cannot make the pool {}", path.display()))?;
            return Ok(PoolFile { path: existing_pool(path)?, origin: Origin::Made });
        }
    }
    if is_blank(path)? {
        expect_closed_blank(path)?;
    }
    let path = existing_pool(path)?;
    let is_longer = lengthen_empty(&path, size)
        .with_context(|| format!("cannot make a pool of {}", path.display()))?;
    let origin = if is_longer { Origin::Lengthened } else { Origin::Found };
    Ok(PoolFile { path, origin })
}

/// Sets the size of the file at `path` if it is empty. Returns whether it was.
fn lengthen_empty(path: &Path, size: Size) -> Result<bool> {
    if !is_empty(path) {
        return Ok(false);
    }
    // Another launcher may be about to set another size.
    let _lock = PoolPaths::of_pool(path)?.lock()?;
    let is_empty = is_empty(path);
    if is_empty {
        set_len(path, size.bytes)?;
    }
    Ok(is_empty)
}

/// Returns whether an empty file is at `path`.
pub fn is_empty(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.is_file() && found.len() == 0)
}

fn set_len(path: &Path, bytes: u64) -> io::Result<()> {
    expect_allowed(bytes)?;
    let file = opening::open(path, Expected::Pool, File::options().write(true))?;
    file.set_len(bytes)?;
    file.sync_all()
}

/// Returns whether the file at `path` is blank, so that it may become a log pool. Takes no lock,
/// which would be in the way of a process that opens the pool now.
///
/// # Errors
/// Fails if the file does not exist, or holds something else than a log pool.
fn is_blank(path: &Path) -> Result<bool> {
    let shown = path.display();
    if !inspect_pool(path)?.is_file() {
        // Opening it reports the error.
        return Ok(false);
    }
    let file = open_pool_file(path)?;
    match glance(&file).with_context(|| format!("cannot read {shown}"))? {
        Glance::Unknown(Content::Zeroes) => Ok(true),
        // If the pool is damaged, opening it reports how.
        Glance::Tidegate(Some(CODE) | None) => Ok(false),
        found => bail!("{shown} holds {}, no log pool", REGISTRY.words(found)),
    }
}

/// Refuses a blank file that other users may reach: its rights are not ours to change.
fn expect_closed_blank(path: &Path) -> Result<()> {
    let (shown, metadata) = (path.display(), path.metadata());
    let mode = metadata.with_context(|| format!("cannot inspect {shown}"))?.mode() & 0o7777;
    if mode & OTHERS != 0 {
        bail!(
            "{shown} is a blank file of mode {mode:03o}, so that others could reach a pool in it; \
             name a file that is not there yet: it is made for its owner alone"
        );
    }
    Ok(())
}

/// Checks the log pool at `path`, which must exist. Returns its absolute path.
///
/// # Errors
/// Fails if the file does not exist, is no log pool, or is not the user's own.
pub fn existing_log(path: &Path) -> Result<PathBuf> {
    if is_blank(path)? {
        bail!("{} holds only zeroes, no log pool", path.display());
    }
    existing_pool(path)
}

/// Fails if this process may not make a file of so many bytes. The kernel would end the process.
fn expect_allowed(bytes: u64) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < bytes => {
            let (limit, size) = (Size { bytes: limit }, Size { bytes });
            Err(io::Error::other(format!("files may have {limit} here (`ulimit -f`), not {size}")))
        }
        _ => Ok(()),
    }
}

fn new_pool(path: &Path, size: Size) -> io::Result<()> {
    if path.exists() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    expect_allowed(size.bytes)?;
    // It gets another name first, so that no process finds a pool without its size.
    let mut temporary = path.as_os_str().to_os_string();
    temporary.push(format!(".{}", std::process::id()));
    let mut open = File::options();
    let file = open.read(true).write(true).create_new(true).mode(0o600).open(&temporary)?;
    let made = file.set_len(size.bytes).and_then(|()| file.sync_all());
    let made = made.and_then(|()| std::fs::hard_link(&temporary, path));
    // Best effort: the caller already returns the error that matters.
    let _ = std::fs::remove_file(&temporary);
    made?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// Opens the pool's file or device at `path` for inspection, without a lock.
///
/// # Errors
/// Fails if it does not exist, is neither a file nor a devdax device, or this user may not read it.
pub fn open_pool_file(path: &Path) -> Result<File> {
    let opened = opening::open(path, Expected::Pool, File::options().read(true));
    opened.map_err(|error| not_reached(path, error))
}

/// Returns the metadata of the pool at `path`.
///
/// # Errors
/// Fails if it does not exist, or this user may not reach it.
pub fn inspect_pool(path: &Path) -> Result<Metadata> {
    std::fs::metadata(path).map_err(|error| not_reached(path, error))
}

/// Returns the error for a pool that cannot be opened or inspected. The message says that there is
/// no pool only if that is the cause.
fn not_reached(path: &Path, error: io::Error) -> anyhow::Error {
    let shown = path.display();
    let context = match error.kind() {
        io::ErrorKind::NotFound => format!("there is no pool {shown}"),
        io::ErrorKind::PermissionDenied => {
            format!("user {} may not open {shown}, run this as the pool's owner", user())
        }
        _ => format!("cannot open {shown}"),
    };
    anyhow::Error::new(error).context(context)
}

/// Checks the pool's file at `path`, which must exist. Returns its absolute path.
///
/// # Errors
/// Fails if it does not exist, is no file or device, or is not the user's own.
pub(crate) fn existing_pool(path: &Path) -> Result<PathBuf> {
    let path = std::fs::canonicalize(path).map_err(|error| not_reached(path, error))?;
    let metadata = inspect(&path)?;
    Expected::Pool.check(&metadata).map_err(|error| not_reached(&path, error))?;
    // The administrator sets the rights on devices.
    if metadata.is_file() {
        expect_own(&path, &metadata)?;
    }
    Ok(path)
}

/// Returns two numbers that tell a pool from all others of this machine.
#[must_use]
pub fn pool_identity(pool: &Metadata) -> (u64, u64) {
    let is_device = pool.file_type().is_char_device();
    if is_device { (pool.rdev(), 0) } else { (pool.dev(), pool.ino()) }
}

/// Returns whether the process has the pool at `path` open. Only root can tell for processes of all
/// users.
#[must_use]
pub fn has_open(process: rustix::process::Pid, path: &Path) -> bool {
    let Ok(pool) = path.metadata() else { return false };
    let opened = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut opened = opened.filter_map(|entry| entry.path().metadata().ok());
    opened.any(|found| {
        pool_identity(&found) == pool_identity(&pool) && found.file_type() == pool.file_type()
    })
}

/// Returns whether any process of this machine has locked the pool at `path`. Takes no lock.
#[must_use]
pub fn is_locked(path: &Path) -> bool {
    let Some((pool, device)) = path.canonicalize().ok().and_then(|path| {
        // On btrfs each subvolume has a number of its own, which the kernel's list does not show.
        Some((path.metadata().ok()?, Mount::of(&path)?.device_numbers()?))
    }) else {
        return false;
    };
    let place = format!(" {:02x}:{:02x}:{} ", device.0, device.1, pool.ino());
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    locks.lines().any(|line| line.contains("FLOCK") && line.contains(&place))
}

/// Returns whether `directory` is the shared directory of the user in its name, and closed to all
/// others.
fn is_of_its_user(directory: &Path) -> bool {
    let name = directory.file_name().and_then(|name| name.to_str());
    let user = name.and_then(|name| name.strip_prefix("tidegate-")?.parse().ok());
    directory.symlink_metadata().is_ok_and(|found| {
        found.is_dir() && Some(found.uid()) == user && found.mode() & OTHERS == 0
    })
}

/// Returns the directory of this user for the sockets of servers.
///
/// # Errors
/// Fails if the directory cannot be made or is not the user's own.
pub fn socket_directory() -> Result<PathBuf> {
    let directory = shared_directory();
    own_directory(&directory)?;
    Ok(directory)
}

/// Returns the directories of all users for the sockets of servers. Only root can use those of
/// other users.
#[must_use]
pub fn socket_directories() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(SHARED_MEMORY).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| is_of_its_user(path)).collect()
}

/// The paths of the files that the processes of one pool share: equal for every path to the pool.
#[derive(Debug, Clone)]
pub struct PoolPaths {
    stem: PathBuf,
}

impl PoolPaths {
    /// Returns the paths for the pool at `path`, which must exist.
    ///
    /// # Errors
    /// Fails if the pool cannot be inspected, or the directory for the paths cannot be made or is
    /// not the user's own.
    pub fn of_pool(path: &Path) -> Result<Self> {
        let (device, inode) = pool_identity(&inspect_pool(path)?);
        let stem = socket_directory()?.join(format!("{device:x}-{inode:x}"));
        Ok(Self { stem })
    }

    /// Returns the paths for the pool at `path` that processes of other users have. Only root can
    /// use them. The owner of the directory made all files there, maybe for another purpose.
    ///
    /// # Errors
    /// Fails if the pool cannot be inspected.
    pub fn of_others(path: &Path) -> Result<Vec<Self>> {
        let (device, inode) = pool_identity(&inspect_pool(path)?);
        let others = socket_directories().into_iter();
        let others = others.filter(|directory| *directory != shared_directory());
        let stems = others.map(|directory| directory.join(format!("{device:x}-{inode:x}")));
        Ok(stems.map(|stem| Self { stem }).collect())
    }

    /// Returns the path of the control memory.
    pub fn control(&self) -> PathBuf {
        self.named(".control")
    }

    /// Returns the path of the supervisor's socket.
    pub fn socket(&self) -> PathBuf {
        self.named(".control.socket")
    }

    /// Waits until no other process finds, starts or ends this pool's supervisor, and keeps them
    /// out.
    ///
    /// # Errors
    /// Fails if the lock file cannot be made.
    pub fn lock(&self) -> Result<Lock> {
        loop {
            let file = self.lock_file()?;
            rustix::fs::flock(&file, FlockOperation::LockExclusive)
                .with_context(|| format!("cannot lock {}", self.named(".lock").display()))?;
            if self.is_lock_file(&file) {
                return Ok(Lock { _file: file, paths: self.clone() });
            }
        }
    }

    /// Takes the lock of [`lock`](Self::lock) without waiting; `None` if another process has it.
    ///
    /// # Errors
    /// Fails if the lock file cannot be made.
    pub fn try_lock(&self) -> Result<Option<Lock>> {
        let file = self.lock_file()?;
        let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        let locked = locked.is_ok() && self.is_lock_file(&file);
        Ok(locked.then(|| Lock { _file: file, paths: self.clone() }))
    }

    /// Returns whether a supervisor uses the pool, or has died.
    fn is_in_use(&self) -> bool {
        self.socket().exists() || self.control().exists()
    }

    /// Returns whether the file has its name still. A lock on an unlinked file keeps none out.
    fn is_lock_file(&self, file: &File) -> bool {
        let number = |found: &Metadata| (found.dev(), found.ino());
        let (Ok(opened), Ok(named)) = (file.metadata(), self.named(".lock").symlink_metadata())
        else {
            return false;
        };
        number(&opened) == number(&named)
    }

    fn named(&self, ending: &str) -> PathBuf {
        let mut path = self.stem.clone().into_os_string();
        path.push(ending);
        PathBuf::from(path)
    }

    fn lock_file(&self) -> Result<File> {
        let path = self.named(".lock");
        let mut open = File::options();
        let file = open.create(true).truncate(false).write(true).mode(0o600).open(&path);
        file.with_context(|| format!("cannot make {}", path.display()))
    }
}

/// Keeps other processes out until it is dropped.
#[derive(Debug)]
pub struct Lock {
    /// Closed after `drop` below: until then no other process reaches the check of
    /// [`PoolPaths::is_lock_file`].
    _file: File,
    paths: PoolPaths,
}

impl Drop for Lock {
    fn drop(&mut self) {
        if !self.paths.is_in_use() {
            // No process uses the pool. If the file cannot be removed, the next process uses it.
            let _ = std::fs::remove_file(self.paths.named(".lock"));
        }
    }
}

/// Returns whether `LD_PRELOAD` can hold the path: its entries end at colons and blanks.
pub(crate) fn fits_preload(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|byte| [b':', b' ', b'\t', b'\n'].contains(byte))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn dax_file_systems_are_told_by_their_options() {
        let mounts = b"/dev/vda / ext4 rw,relatime 0 0\n\
            /dev/pmem0 /mnt/a\\040b ext4 rw,relatime,dax=always 0 0\n\
            /dev/pmem1 /mnt/never xfs rw,dax=never,inode64 0 0\n\
            /dev/pmem2 /mnt/old xfs rw,dax 0 0\n\
            host /mnt/share virtiofs rw,dax 0 0\nbroken";
        assert_eq!(dax_mounts_in(mounts), [PathBuf::from("/mnt/a b"), PathBuf::from("/mnt/old")]);
    }

    #[test]
    fn a_pool_is_made_without_space_and_for_its_owner_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let made = prepare_pool(&path, Size { bytes: 1 << 30 }).unwrap();
        let metadata = made.path.metadata().unwrap();
        assert_eq!((metadata.len(), metadata.blocks()), (1 << 30, 0));
        assert_eq!(metadata.mode() & 0o777, 0o600);
        // The size of an existing pool stays.
        let found = prepare_pool(&path, Size { bytes: 1 << 20 }).unwrap();
        assert_eq!(found.path.metadata().unwrap().len(), 1 << 30);
        let paths = PoolPaths::of_pool(&path).unwrap();
        found.undo(&paths);
        assert!(path.exists(), "it was there before");
        made.undo(&paths);
        assert!(!path.exists());
    }

    #[test]
    fn what_others_may_reach_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        std::fs::write(&path, "x").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o660)).unwrap();
        let said = || prepare_pool(&path, Size { bytes: 4096 }).unwrap_err().to_string();
        assert!(
            said().contains("holds text, no log pool") && !said().contains("chmod"),
            "{}",
            said()
        );
        std::fs::write(&path, "").unwrap();
        assert!(said().contains("is a blank file") && !said().contains("chmod"), "{}", said());
        let error = existing_pool(&path).unwrap_err().to_string();
        assert!(error.contains("has mode 660") && error.contains("chmod go="), "{error}");
        let error = own_directory(&path).unwrap_err().to_string();
        assert!(error.contains("is no directory"), "{error}");
    }

    #[test]
    fn all_paths_to_a_pool_lead_to_one_supervisor() {
        let directory = tempfile::tempdir().unwrap();
        let (path, link) = (directory.path().join("pool"), directory.path().join("link"));
        prepare_pool(&path, Size { bytes: 4096 }).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let (one, two) = (PoolPaths::of_pool(&path).unwrap(), PoolPaths::of_pool(&link).unwrap());
        assert_eq!(one.control(), two.control());
        let held = one.lock().unwrap();
        assert!(two.try_lock().unwrap().is_none());
        drop(held);
        assert!(!one.named(".lock").exists(), "no process uses the pool");
        assert!(two.try_lock().unwrap().is_some());
    }
}
