//! The files of this machine, found by their handles.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use uuid::Uuid;

use super::apply::{Access, FileState, FileSystem};
use super::carry_out::NameSystem;
use super::failure::{Copies, Failure};
use super::handle::{data_ranges, file_system_id, identity_of, open_by_handle, written_ranges};
use super::plan::FilePlan;
use super::protection;
use super::ranges::Ranges;
use super::saved::Saved;
use super::writing::start_writing;
use crate::log::{FileHandle, FileSystemId};

/// Piece size of zeroes that are written where the file system cannot punch holes.
const ZEROES_BYTES: u64 = 1 << 20;
/// Types of file systems whose UUIDs and handles of files outlive a reboot, as mounts name them.
const WITH_HANDLES: [&[u8]; 4] = [b"ext2", b"ext3", b"ext4", b"xfs"];

/// A mount of a file system whose files can be found by their handles.
#[derive(Debug)]
struct Mounted {
    id: FileSystemId,
    device: u64,
    is_writable: bool,
    point: PathBuf,
    root: File,
}

/// The files of this machine.
#[derive(Debug)]
pub struct LocalFiles {
    mounts: Vec<Mounted>,
}

impl LocalFiles {
    /// Opens the mounts of all file systems that are mounted now.
    ///
    /// # Errors
    /// The list of mounts cannot be read.
    pub fn new() -> io::Result<Self> {
        let list = std::fs::read("/proc/self/mountinfo")?;
        let mounts = list.split(|byte| *byte == b'\n').filter_map(mounted);
        Ok(Self { mounts: mounts.collect() })
    }

    /// Opens the file with this handle on the file system `id`. Returns `None` if it was removed.
    ///
    /// # Errors
    /// `NotFound`: no file system with this UUID is mounted for writing. [`Copies`]: several have
    /// this UUID. Otherwise the error of [`open_by_handle`].
    pub fn find(
        &self,
        id: &FileSystemId,
        handle: &FileHandle,
        flags: OFlags,
    ) -> io::Result<Option<File>> {
        match self.mount_of(id).map_err(io::Error::other)? {
            Some(mount) if mount.is_writable => found(&mount.root, handle, flags),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Opens the file with this handle on the mounted file system with this UUID and `device`
    /// number, even if other file systems have its UUID. Returns `None` if the file was removed.
    ///
    /// # Errors
    /// `NotFound`: the file system is not mounted. Otherwise the error of [`open_by_handle`].
    pub fn find_on(
        &self,
        (id, device): (&FileSystemId, u64),
        handle: &FileHandle,
        flags: OFlags,
    ) -> io::Result<Option<File>> {
        let mount = self.mounts.iter().find(|mount| mount.id == *id && mount.device == device);
        found(&mount.ok_or(io::ErrorKind::NotFound)?.root, handle, flags)
    }

    /// Returns a mount of the file system with this UUID, preferably a writable one. The device
    /// number does not help: after a restart a copy may have the number that the volume had.
    fn mount_of(&self, id: &FileSystemId) -> Result<Option<&Mounted>, Copies> {
        let mounts = || self.mounts.iter().filter(|mount| mount.id == *id);
        let first = mounts().find(|mount| mount.is_writable).or_else(|| mounts().next());
        let mut others = mounts().filter(|mount| first.is_some_and(|it| it.device != mount.device));
        if others.next().is_none() {
            return Ok(first);
        }
        let mut devices = BTreeMap::new();
        for mount in mounts() {
            devices.entry(mount.device).or_insert(mount);
        }
        let mounts: Vec<_> = devices.into_values().map(ToString::to_string).collect();
        Err(Copies { uuid: Uuid::from_bytes(*id), mounts: mounts.join(" and ") })
    }
}

/// The UUIDs of mounted file systems, for repeated lookups. Each mount is opened only once and
/// briefly, since it cannot be unmounted while it is open.
#[derive(Debug, Default)]
pub struct MountedIds {
    /// UUID and device of each line of the kernel's list. `None` if its files have no handles.
    known: HashMap<Vec<u8>, Option<(FileSystemId, u64)>>,
}

impl MountedIds {
    /// Returns the UUIDs that several mounted file systems have.
    ///
    /// # Errors
    /// The list of mounts cannot be read.
    pub fn copied(&mut self) -> io::Result<BTreeSet<FileSystemId>> {
        let list = std::fs::read("/proc/self/mountinfo")?;
        let mut former = std::mem::take(&mut self.known);
        for line in list.split(|byte| *byte == b'\n') {
            let known = former.remove(line);
            let look = || mounted(line).map(|mount| (mount.id, mount.device));
            self.known.insert(line.to_vec(), known.unwrap_or_else(look));
        }
        let mounts: BTreeSet<_> = self.known.values().flatten().collect();
        let mut ids = BTreeSet::new();
        Ok(mounts.into_iter().map(|(id, _)| *id).filter(|id| !ids.insert(*id)).collect())
    }
}

impl fmt::Display for Mounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = (libc::major(self.device), libc::minor(self.device));
        write!(f, "{} (device {major}:{minor})", self.point.display())
    }
}

/// Opens the file with this handle on the file system of `root`. Returns `None` if it was removed.
fn found(root: &File, handle: &FileHandle, flags: OFlags) -> io::Result<Option<File>> {
    match open_by_handle(root, handle, flags) {
        Err(error) if is_gone(&error) => Ok(None),
        opened => opened.map(Some),
    }
}

/// Opens the mount in a line of the kernel's list, if its files can be found by handles.
fn mounted(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let point = unescaped(fields.nth(4)?);
    let is_writable = fields.next()?.split(|byte| *byte == b',').any(|option| option == b"rw");
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    if !WITH_HANDLES.contains(&kind) {
        return None;
    }
    // Another mount may hide this one, so its UUID and device come from the opened directory.
    let root = opened_root(&point).ok()?;
    let (id, device) = (file_system_id(&root).ok()?, root.metadata().ok()?.dev());
    Some(Mounted { id, device, is_writable, point, root })
}

/// Opens a mount point that is a directory or a regular file. An open of a bind-mounted FIFO would
/// wait for its other end, and an open of a device may change it. The second open goes through the
/// first descriptor, so that it reaches the checked file.
///
/// # Errors
/// The mount point is of another kind, or the system's error.
fn opened_root(point: &Path) -> io::Result<File> {
    let named = File::from(rustix::fs::open(point, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    let kind = named.metadata()?.file_type();
    if !kind.is_dir() && !kind.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let checked = format!("/proc/self/fd/{}", named.as_raw_fd());
    Ok(rustix::fs::open(checked, flags, Mode::empty())?.into())
}

/// Decodes a path in the kernel's list of mounts, which has blanks and the like as octal digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, behind)) = rest.split_first() {
        let octal = behind.get(..3).filter(|_| first == b'\\');
        let byte =
            octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        path.push(byte.unwrap_or(first));
        rest = if byte.is_some() { &behind[3..] } else { behind };
    }
    std::ffi::OsString::from_vec(path).into()
}

impl FileSystem for LocalFiles {
    type File = File;

    fn open(&self, file: &FilePlan, access: Access) -> Result<Option<File>, Failure> {
        let mount = self.mount_of(&file.file_system);
        let mount = mount.map_err(|copies| Failure::Ambiguous { path: file.name(), copies })?;
        // Without NONBLOCK the open waits until the kernel has broken a lease.
        let flags = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::RDWR,
        };
        if let Some(mount) = mount {
            match found(&mount.root, &file.handle, flags) {
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
                opened => {
                    return opened.map_err(|error| Failure::io(file, access.doing(), error));
                }
            }
        }
        match open_by_paths(file, access, flags)? {
            Some(opened) => Ok(Some(opened)),
            None if mount.is_none() => {
                let file_system = Uuid::from_bytes(file.file_system);
                Err(Failure::NotMounted { path: file.name(), file_system })
            }
            None => Err(Failure::Unprivileged { path: file.name() }),
        }
    }

    fn state(&self, file: &File) -> io::Result<FileState> {
        let metadata = file.metadata()?;
        let changed_ns =
            i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
        let modified_ns =
            i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
        let block_bytes = rustix::fs::fstatvfs(file)?.f_frsize;
        Ok(FileState { size_bytes: metadata.size(), block_bytes, changed_ns, modified_ns })
    }

    fn written(&self, file: &File, size_bytes: u64) -> io::Result<Ranges> {
        written_ranges(file).or_else(|_| data_ranges(file, size_bytes))
    }

    fn saved(&self, file: &File) -> io::Result<Saved> {
        protection::saved(file)
    }

    fn unlock(&self, file: &File, saved: &Saved) -> io::Result<()> {
        protection::unlock(file, saved)
    }

    fn restore(&self, file: &File, saved: &Saved, is_made: bool) -> io::Result<()> {
        protection::restore(file, saved, is_made)
    }

    fn let_go(&self, file: &File) {
        // If this fails, reads return the kernel's cached pages.
        let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    }

    fn read(&self, file: &File, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        file.read_exact_at(buf, offset)
    }

    fn set_size(&self, file: &File, size_bytes: u64) -> io::Result<()> {
        Ok(rustix::fs::ftruncate(file, size_bytes)?)
    }

    fn write(&self, file: &File, offset: u64, data: &[u8]) -> io::Result<()> {
        file.write_all_at(data, offset)
    }

    fn zero(&self, file: &File, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(file, flags, offset, len) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_zeroes(file, offset, len),
            punched => Ok(punched?),
        }
    }

    fn start_sync(&self, file: &File, offset: u64, len: u64) {
        // If this fails, the sync writes the pages back.
        let _ = start_writing(file, offset, len);
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        Ok(crate::durable::fsync(file)?)
    }

    fn names(&self) -> Option<&dyn NameSystem<File>> {
        Some(self)
    }
}

/// Returns whether the error means that no file has the handle any more.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESTALE | libc::ENOENT))
}

/// Opens the file at one of its paths. Returns `None` if none leads to it.
fn open_by_paths(file: &FilePlan, access: Access, flags: OFlags) -> Result<Option<File>, Failure> {
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for path in file.paths.iter().rev().filter(|path| !path.is_empty()) {
        let path = Path::new(OsStr::from_bytes(path));
        let opened = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(opened) => File::from(opened),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ISDIR | Errno::NXIO) => {
                continue;
            }
            Err(errno) => return Err(Failure::io(file, access.doing(), errno.into())),
        };
        if identity_of(&opened).is_ok_and(|identity| identity == file.identity) {
            return Ok(Some(opened));
        }
    }
    Ok(None)
}

fn write_zeroes(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let zeroes = vec![0; usize::try_from(len.min(ZEROES_BYTES)).unwrap_or(0)];
    let mut done = 0;
    while done < len {
        let step = (len - done).min(ZEROES_BYTES);
        file.write_all_at(&zeroes[..usize::try_from(step).unwrap_or(0)], offset + done)?;
        done += step;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_with_blanks_are_read() {
        assert_eq!(unescaped(b"/a\\040b\\134c"), Path::new("/a b\\c"));
        assert_eq!(unescaped(b"/a\\04"), Path::new("/a\\04"));
    }

    #[test]
    fn a_mount_point_that_is_a_fifo_or_a_device_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let [fifo, file] = ["fifo", "file"].map(|name| folder.path().join(name));
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, 0o600.into(), 0).unwrap();
        std::fs::write(&file, "precious").unwrap();
        for point in [&fifo, Path::new("/dev/null")] {
            assert_eq!(opened_root(point).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        for point in [&file, folder.path()] {
            assert!(opened_root(point).is_ok());
        }
    }

    #[test]
    fn lines_that_name_no_usable_mount_are_passed_over() {
        for line in [
            &b""[..],
            b"22 1 0:21 / /proc rw - proc proc rw",
            b"22 1 0:21 / /nowhere rw shared:1 - ext4 /dev/x rw",
            b"22 1 0:21 / / rw",
        ] {
            assert!(mounted(line).is_none(), "{}", line.escape_ascii());
        }
    }
}
