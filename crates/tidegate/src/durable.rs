//! Syncs of files whose success can be relied upon.
//!
//! After an error has aborted the journal, ext4 answers a sync with success if another sync has
//! ended the journal's last transaction (measured on Linux 6.18: one in 20 programs that append and
//! sync loses its last record so). Code that drops its own copy of the data after a sync uses these
//! functions.

use std::os::fd::AsFd;

use rustix::io::Errno;

/// Makes a file's data durable, as `fdatasync`.
///
/// # Errors
/// The kernel's error, or the error that [`failure`] finds after a successful sync.
pub fn fdatasync(file: impl AsFd) -> Result<(), Errno> {
    rustix::fs::fdatasync(&file)?;
    checked(file)
}

/// Makes a file durable, as `fsync`.
///
/// # Errors
/// The same errors as [`fdatasync`].
pub fn fsync(file: impl AsFd) -> Result<(), Errno> {
    rustix::fs::fsync(&file)?;
    checked(file)
}

/// Makes a whole file system durable, as `syncfs`.
///
/// # Errors
/// The same errors as [`fdatasync`].
pub fn syncfs(file: impl AsFd) -> Result<(), Errno> {
    rustix::fs::syncfs(&file)?;
    checked(file)
}

/// Returns why the file system of `file` commits nothing any more: it is read-only, or was shut
/// down.
///
/// The function asks the file system to remove a user attribute that no file has. A file system
/// that commits nothing refuses that with `ROFS` or `IO`; any other changes nothing. This takes 2
/// microseconds. Returns `None` also if the file cannot have user attributes.
#[must_use]
pub fn failure(file: impl AsFd) -> Option<Errno> {
    let removed = rustix::fs::fremovexattr(file, c"user.tidegate.none");
    removed.err().filter(|errno| matches!(*errno, Errno::ROFS | Errno::IO))
}

fn checked(file: impl AsFd) -> Result<(), Errno> {
    failure(file).map_or(Ok(()), Err)
}
