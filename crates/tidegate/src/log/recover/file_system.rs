//! The file system of this machine.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::apply::{FileSystem, Found, FoundKind};
use super::handle::identity_of;
use super::writing::start_writing;

/// Zeroes are written in pieces of this size where they cannot be made otherwise.
const ZEROES_BYTES: u64 = 1 << 20;

/// The files of this machine, by their paths.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalFiles;

impl FileSystem for LocalFiles {
    type File = File;

    fn look(&self, path: &Path) -> io::Result<Option<Found>> {
        match open(path, OFlags::PATH) {
            Ok(file) => self.examine(&file).map(Some),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        std::fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect()
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        match open(path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY) {
            Err(Errno::ACCESS) => Ok(open_read_only_file(path)?),
            opened => Ok(opened?),
        }
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        Ok(open(path, flags)?)
    }

    fn examine(&self, file: &File) -> io::Result<Found> {
        let stat = rustix::fs::fstat(file)?;
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => FoundKind::File,
            FileType::Directory => FoundKind::Directory,
            _ => FoundKind::Other,
        };
        let size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        // Some file systems have no handles for what is no file; nothing in the log is the same as such a thing.
        let identity = match identity_of(file) {
            Err(_) if kind != FoundKind::File => 0,
            identity => identity?,
        };
        #[allow(clippy::useless_conversion, reason = "a number of another size on other machines")]
        let links = stat.st_nlink.into();
        Ok(Found { identity, kind, links, size_bytes })
    }

    fn set_size(&self, file: &File, size_bytes: u64) -> io::Result<()> {
        Ok(rustix::fs::ftruncate(file, size_bytes)?)
    }

    fn write(&self, file: &File, offset: u64, data: &[u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(file, data, offset)
    }

    fn start_sync(&self, file: &File, offset: u64, len: u64) {
        // Where it cannot be done, the sync does it.
        let _ = start_writing(file, offset, len);
    }

    fn zero(&self, file: &File, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(file, flags, offset, len) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_zeroes(*self, file, offset, len),
            punched => Ok(punched?),
        }
    }

    fn set_owner(&self, file: &File, mode: u32, uid: u32, gid: u32) -> io::Result<()> {
        let owned = match (valid(uid), valid(gid)) {
            (Some(uid), Some(gid)) => {
                let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
                rustix::fs::fchown(file, Some(uid), Some(gid))
            }
            _ => Err(Errno::INVAL),
        };
        // Who may not give the file away must not leave a program with another owner's rights.
        let mode = if owned.is_ok() { mode } else { mode & 0o777 };
        rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?;
        Ok(owned?)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        Ok(rustix::fs::fsync(file)?)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(rustix::fs::linkat(CWD, from, CWD, to, AtFlags::empty())?)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(rustix::fs::rename(from, to)?)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        Ok(rustix::fs::unlink(path)?)
    }

    fn make_directory(&self, path: &Path, uid: u32, gid: u32) -> io::Result<()> {
        rustix::fs::mkdir(path, Mode::RWXU)?;
        if let (Some(uid), Some(gid)) = (valid(uid), valid(gid)) {
            // Only root may; others get a directory of their own.
            let _ = rustix::fs::chownat(
                CWD,
                path,
                Some(Uid::from_raw(uid)),
                Some(Gid::from_raw(gid)),
                AtFlags::SYMLINK_NOFOLLOW,
            );
        }
        Ok(())
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty())?;
        match rustix::fs::fsync(&directory) {
            // A file system that has nothing to sync there.
            Err(Errno::INVAL) => Ok(()),
            synced => Ok(synced?),
        }
    }
}

/// All ones would mean "leave it".
fn valid(id: u32) -> Option<u32> {
    (id != u32::MAX).then_some(id)
}

fn open(path: &Path, flags: OFlags) -> Result<File, Errno> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map(File::from)
}

/// Opens a file of ours that may not be written, as a program could that made it so after it had opened it.
fn open_read_only_file(path: &Path) -> Result<File, Errno> {
    let pinned = open(path, OFlags::PATH)?;
    let stat = rustix::fs::fstat(&pinned)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Errno::ACCESS);
    }
    let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
    let path = descriptor_path(pinned.as_fd());
    rustix::fs::chmod(&path, mode | Mode::RUSR | Mode::WUSR).map_err(|_| Errno::ACCESS)?;
    let opened = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    rustix::fs::chmod(&path, mode)?;
    opened.map(File::from)
}

fn descriptor_path(file: BorrowedFd<'_>) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn write_zeroes(files: LocalFiles, file: &File, offset: u64, len: u64) -> io::Result<()> {
    let zeroes = vec![0; usize::try_from(len.min(ZEROES_BYTES)).unwrap_or(0)];
    let mut done = 0;
    while done < len {
        let step = (len - done).min(ZEROES_BYTES);
        files.write(file, offset + done, &zeroes[..usize::try_from(step).unwrap_or(0)])?;
        done += step;
    }
    Ok(())
}
