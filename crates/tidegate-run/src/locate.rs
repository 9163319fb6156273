//! Finds a file that the log defines, on the file system where it is now.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use tidegate::durable;
use tidegate::log::recover::{LocalFiles, identity_of};

use super::backlog::Known;
use super::mount::unescaped;

/// Result of a search for a file.
#[derive(Debug)]
pub(crate) enum Located {
    /// The file, open for reading.
    Open(File),
    /// The file was removed: none of its data must be durable.
    Removed,
    /// The search has no answer: this user may not ask, or the file system is not mounted.
    Unknown,
}

/// Opens the file for reading, by its path or else by its handle.
///
/// # Errors
/// Fails if the path cannot be opened, and neither the path, nor rights, nor a lease is the cause.
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

/// Opens the file of `kept`, a descriptor for reading, for writing.
///
/// # Errors
/// Fails if this process may not write to the file.
pub(crate) fn open_for_writing(kept: &File) -> io::Result<File> {
    use std::os::fd::AsRawFd;
    File::options().write(true).open(format!("/proc/self/fd/{}", kept.as_raw_fd()))
}

fn is_same(known: &Known, file: &File) -> bool {
    let numbers = file.metadata().map(|found| (found.dev(), found.ino()));
    numbers.is_ok_and(|numbers| numbers == (known.device, known.inode))
        && identity_of(file).is_ok_and(|found| found == known.identity)
}

/// Returns whether the cause is a path, rights or a lease, and so says nothing about the disk.
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

/// Makes the file system on `device` durable; `path` was one of its files. Syncs no other file
/// system, since that may hang. A file system that is not mounted any more was made durable when it
/// was unmounted.
///
/// # Errors
/// Fails if the disk fails, or no directory of the file system can be opened.
pub(crate) fn sync_file_system(device: u64, path: &Path) -> io::Result<()> {
    match directory_on(device, path) {
        Some(directory) => Ok(durable::syncfs(&directory)?),
        None => sync_mounted(device, &std::fs::read("/proc/self/mountinfo")?),
    }
}

/// Syncs the file system on `device` by its mount points in `mounts`, the text of
/// `/proc/self/mountinfo`.
fn sync_mounted(device: u64, mounts: &[u8]) -> io::Result<()> {
    let mut last = Ok(());
    for mount in mounts.split(|byte| *byte == b'\n').filter_map(|line| mount_of(device, line)) {
        match open_directory(device, &mount) {
            Some(directory) => return Ok(durable::syncfs(&directory)?),
            None => last = Err(io::ErrorKind::PermissionDenied.into()),
        }
    }
    last
}

/// Returns the mount point in a line of `/proc/self/mountinfo`, if the mount is of `device`.
fn mount_of(device: u64, line: &[u8]) -> Option<PathBuf> {
    let mut fields = line.split(|byte| *byte == b' ').skip(2);
    let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let is_it = fields.next()? == numbers.as_bytes();
    let mount = fields.nth(1)?;
    is_it.then(|| PathBuf::from(OsString::from_vec(unescaped(mount))))
}

/// Opens the nearest directory above `path` that is on `device`.
pub(crate) fn directory_on(device: u64, path: &Path) -> Option<File> {
    path.ancestors().skip(1).find_map(|directory| open_directory(device, directory))
}

/// Opens the directory at `path`, if it is on `device`.
fn open_directory(device: u64, path: &Path) -> Option<File> {
    // Checked before it is opened: a directory on another device may refuse the open.
    path.metadata().ok().filter(|found| found.dev() == device)?;
    let flags = (OFlags::DIRECTORY | OFlags::NONBLOCK).bits().cast_signed();
    let directory = File::options().read(true).custom_flags(flags).open(path).ok()?;
    (directory.metadata().ok()?.dev() == device).then_some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_is_found_by_its_number_where_no_path_leads_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let device = directory.path().metadata().unwrap().dev();
        sync_file_system(device, Path::new("")).unwrap();
        let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let mount = directory.path().display();
        let line = format!("36 35 {numbers} /sub {mount} rw,noatime - ext4 /dev/root rw");
        assert_eq!(mount_of(device, line.as_bytes()).unwrap(), directory.path());
        assert_eq!(mount_of(device + 1, line.as_bytes()), None);
        sync_mounted(device, line.as_bytes()).unwrap();
        let elsewhere = line.replace(&mount.to_string(), "/proc");
        assert!(sync_mounted(device, elsewhere.as_bytes()).is_err(), "mounted over");
        sync_mounted(device, b"").expect("it was unmounted, which has made it durable");
    }
}
