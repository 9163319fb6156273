//! Syncs of files whose success can be relied upon.
//!
//! After an error has aborted the journal, ext4 answers a sync with success if another sync has
//! ended the journal's last transaction (measured on Linux 6.18: one in 20 programs that append and
//! sync loses its last record so). Code that drops its own copy of the data after a sync uses these
//! functions.
//!
//! A filter of system calls may answer syncs before the kernel sees them. [`reaches_kernel`] finds
//! that out. A preloaded library that answers syncs does not matter: these functions make system
//! calls without the C library.

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;

/// Why a process may not rely on its syncs.
const ANSWERED: &str = "a filter of system calls answers the syncs of this process before the kernel gets them, so that \
     synced data would be lost (`tidegate run --volatile`, `systemd-nspawn --suppress-sync` and `mkosi` install such a \
     filter): run this command outside of it";

/// Checks that the kernel gets the syncs of this process.
///
/// The kernel refuses to sync a pipe. A filter does not know what a descriptor is open on, and
/// answers that sync as any other.
///
/// # Errors
/// Fails if a filter of system calls answers syncs, or if no descriptors are left.
pub fn reaches_kernel() -> io::Result<()> {
    let (pipe, _other_end) = rustix::pipe::pipe()?;
    let is_answered = rustix::fs::fsync(&pipe).is_ok() || rustix::fs::fdatasync(&pipe).is_ok();
    if is_answered { Err(io::Error::other(ANSWERED)) } else { Ok(()) }
}

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
