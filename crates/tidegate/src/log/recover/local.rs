//! The files of this machine, found by their handles.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::apply::{FileState, FileSystem};
use super::carry_out::NameSystem;
use super::failure::Failure;
use super::handle::{data_ranges, file_system_id, identity_of, open_by_handle, written_ranges};
use super::plan::FilePlan;
use super::ranges::Ranges;
use super::writing::start_writing;
use crate::log::{FileHandle, FileSystemId};

/// Zeroes are written in pieces of this size where they cannot be made otherwise.
const ZEROES_BYTES: u64 = 1 << 20;
/// File systems whose files have handles and UUIDs that outlive a reboot, as mounts name them.
const WITH_HANDLES: [&[u8]; 4] = [b"ext2", b"ext3", b"ext4", b"xfs"];

/// A mount of a file system whose files can be found by their handles.
#[derive(Debug)]
struct Mounted {
    id: FileSystemId,
    device: u64,
    root: File,
}

/// The files of this machine.
#[derive(Debug)]
pub struct LocalFiles {
    mounts: Vec<Mounted>,
}

impl LocalFiles {
    /// The files on all file systems that are mounted now.
    ///
    /// # Errors
    /// The list of mounts cannot be read.
    pub fn new() -> io::Result<Self> {
        let list = std::fs::read("/proc/self/mountinfo")?;
        let mounts = list.split(|byte| *byte == b'\n').filter_map(mounted);
        Ok(Self { mounts: mounts.collect() })
    }

    /// Opens the file with this handle on the file system `id`, which had the number `device`;
    /// none, where it was removed.
    ///
    /// # Errors
    /// `NotFound`: one file system of this UUID, and no other, is not mounted. Others as for
    /// [`open_by_handle`].
    pub fn find(
        &self,
        (id, device): (&FileSystemId, u64),
        handle: &FileHandle,
        flags: OFlags,
    ) -> io::Result<Option<File>> {
        let [mount] = self.mounts_of(id, device)[..] else {
            return Err(io::ErrorKind::NotFound.into());
        };
        match open_by_handle(&mount.root, handle, flags) {
            Err(error) if is_gone(&error) => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// The file systems with this UUID, each by one of its mounts. Where several have it, as copies
    /// of a disk do, the one that has the device number, too.
    fn mounts_of(&self, id: &FileSystemId, device: u64) -> Vec<&Mounted> {
        let mut found: Vec<&Mounted> = Vec::new();
        for mount in self.mounts.iter().filter(|mount| mount.id == *id) {
            if found.iter().all(|known| known.device != mount.device) {
                found.push(mount);
            }
        }
        let is_former = |mount: &&Mounted| mount.device == device;
        match found.iter().copied().find(is_former) {
            Some(former) => vec![former],
            None => found,
        }
    }
}

/// The mount that a line of the kernel's list tells of, if files can be found by handles there.
fn mounted(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let point = unescaped(fields.nth(4)?);
    let is_writable = fields.next()?.split(|byte| *byte == b',').any(|option| option == b"rw");
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    if !is_writable || !WITH_HANDLES.contains(&kind) {
        return None;
    }
    // Another mount may lie over it: what is found there says itself what it is.
    let root = File::open(point).ok()?;
    let (id, device) = (file_system_id(&root).ok()?, root.metadata().ok()?.dev());
    Some(Mounted { id, device, root })
}

/// A path of the kernel's list of mounts, where blanks and the like are three octal digits.
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

    fn open(&self, file: &FilePlan) -> Result<Option<File>, Failure> {
        let mounts = self.mounts_of(&file.file_system, file.device);
        match mounts[..] {
            [mount] => match open_by_handle(&mount.root, &file.handle, OFlags::RDWR) {
                Ok(opened) => return Ok(Some(opened)),
                Err(error) if is_gone(&error) => return Ok(None),
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
                Err(error) => return Err(Failure::io(file, "open the file", error)),
            },
            [] => {}
            _ => return Err(Failure::Ambiguous { path: file.name() }),
        }
        match open_by_paths(file)? {
            Some(opened) => Ok(Some(opened)),
            None if mounts.is_empty() => {
                let file_system = uuid::Uuid::from_bytes(file.file_system);
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
        // Where it cannot be done, the sync does it.
        let _ = start_writing(file, offset, len);
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        Ok(crate::durable::fsync(file)?)
    }

    fn names(&self) -> Option<&dyn NameSystem<File>> {
        Some(self)
    }
}

/// The kernel says that no file has the handle any more.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESTALE | libc::ENOENT))
}

/// Opens the file by one of its paths; none, where it is at none of them.
fn open_by_paths(file: &FilePlan) -> Result<Option<File>, Failure> {
    let flags =
        OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for path in file.paths.iter().rev().filter(|path| !path.is_empty()) {
        let path = Path::new(OsStr::from_bytes(path));
        let opened = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(opened) => File::from(opened),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ISDIR | Errno::NXIO) => {
                continue;
            }
            Err(errno) => return Err(Failure::io(file, "open the file", errno.into())),
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
    fn lines_that_name_no_usable_mount_are_passed_over() {
        for line in [
            &b""[..],
            b"22 1 0:21 / /proc rw - proc proc rw",
            b"22 1 0:21 / /nowhere rw shared:1 - ext4 /dev/x rw",
            b"22 1 0:21 / / ro shared:1 - ext4 /dev/x ro",
            b"22 1 0:21 / / rw",
        ] {
            assert!(mounted(line).is_none(), "{}", line.escape_ascii());
        }
    }
}
