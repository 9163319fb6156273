//! Finds a file that the log defines, on the file system that it is on now.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;
use tidegate::log::recover::{LocalFiles, identity_of};

use super::backlog::Known;

/// What became of a file.
#[derive(Debug)]
pub(crate) enum Located {
    /// It is open for reading.
    Open(File),
    /// It was removed: nothing of it has to be durable.
    Removed,
    /// Where it is cannot be told: this user may not ask, or its file system is not mounted.
    Unknown,
}

/// Opens the file for reading, by its path or else by its handle.
///
/// # Errors
/// Its path leads to it or to something that cannot be looked at, and it cannot be opened.
pub(crate) fn open(known: &Known) -> io::Result<Located> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut options = File::options();
    options.read(true).custom_flags(flags.bits().cast_signed());
    match options.open(&known.path) {
        Ok(file) if is_same(known, &file) => Ok(Located::Open(file)),
        Err(error) if !is_out_of_reach(&error) => Err(error),
        _ => Ok(by_handle(known)),
    }
}

fn by_handle(known: &Known) -> Located {
    let file_system = (&known.file_system, known.device);
    let found = LocalFiles::new().and_then(|files| {
        files.find_on(file_system, &known.handle, OFlags::RDONLY | OFlags::NONBLOCK)
    });
    match found {
        Ok(Some(file)) => Located::Open(file),
        Ok(None) => Located::Removed,
        Err(_) => Located::Unknown,
    }
}

/// Opens the file of `kept`, which is open for reading, for writing.
///
/// # Errors
/// This process may not write to it.
pub(crate) fn open_for_writing(kept: &File) -> io::Result<File> {
    use std::os::fd::AsRawFd;
    File::options().write(true).open(format!("/proc/self/fd/{}", kept.as_raw_fd()))
}

fn is_same(known: &Known, file: &File) -> bool {
    let numbers = file.metadata().map(|found| (found.dev(), found.ino()));
    numbers.is_ok_and(|numbers| numbers == (known.device, known.inode))
        && identity_of(file).is_ok_and(|found| found == known.identity)
}

/// Paths, rights or a lease are in the way, which says nothing of the disk.
pub(crate) fn is_out_of_reach(error: &io::Error) -> bool {
    let kinds = [
        io::ErrorKind::NotFound,
        io::ErrorKind::NotADirectory,
        io::ErrorKind::PermissionDenied,
        io::ErrorKind::WouldBlock,
    ];
    kinds.contains(&error.kind())
        || matches!(Errno::from_io_error(error), Some(Errno::LOOP | Errno::NXIO))
}

/// A directory above `path` that is on `device`.
pub(crate) fn directory_on(device: u64, path: &Path) -> Option<File> {
    let flags = (OFlags::DIRECTORY | OFlags::NONBLOCK).bits().cast_signed();
    path.ancestors().skip(1).find_map(|path| {
        // Before it is opened, for which a directory elsewhere need not give the right.
        path.metadata().ok().filter(|found| found.dev() == device)?;
        let directory = File::options().read(true).custom_flags(flags).open(path).ok()?;
        (directory.metadata().ok()?.dev() == device).then_some(directory)
    })
}
