//! Syncs of files whose success can be relied upon.
//!
//! ext4 whose journal was aborted after an error answers a sync with success where another sync has
//! ended the journal's last transaction (measured on Linux 6.18: of programs that append and sync,
//! one in 20 loses its last record so). What forgets its own copy of the data after a sync asks
//! here.

use std::os::fd::AsFd;

use rustix::io::Errno;

/// Makes a file's data durable, as `fdatasync`.
///
/// # Errors
/// That of the kernel; that of [`failure`] after it.
pub fn fdatasync(file: impl AsFd) -> Result<(), Errno> {
    rustix::fs::fdatasync(&file)?;
    checked(file)
}

/// Makes a file durable, as `fsync`.
///
/// # Errors
/// As [`fdatasync`].
pub fn fsync(file: impl AsFd) -> Result<(), Errno> {
    rustix::fs::fsync(&file)?;
    checked(file)
}

/// Makes a whole file system durable, as `syncfs`.
///
/// # Errors
/// As [`fdatasync`].
pub fn syncfs(file: impl AsFd) -> Result<(), Errno> {
    rustix::fs::syncfs(&file)?;
    checked(file)
}

/// Why the file system of `file` commits nothing any more: it is read-only, or was shut down.
///
/// It is asked to remove a user attribute that no file has: one that commits nothing more refuses
/// that, and any other changes nothing. This takes 2 microseconds. Where a file may not have such
/// attributes, the answer is none.
#[must_use]
pub fn failure(file: impl AsFd) -> Option<Errno> {
    let removed = rustix::fs::fremovexattr(file, c"user.tidegate.none");
    removed.err().filter(|errno| matches!(*errno, Errno::ROFS | Errno::IO))
}

fn checked(file: impl AsFd) -> Result<(), Errno> {
    failure(file).map_or(Ok(()), Err)
}
