//! Saves and restores the attributes of a local file that a write changes or that prevent writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{
    IFlags, Mode, Timespec, Timestamps, XattrFlags, fchmod, fgetxattr, fsetxattr, futimens,
    ioctl_getflags, ioctl_setflags,
};
use rustix::io::Errno;

use super::saved::Saved;
use crate::log::pool::names::Timestamp;

const CAPABILITY: &str = "security.capability";
/// More than the longest version of the attribute.
const CAPABILITY_BYTES_MAX: usize = 64;
/// Flags of an inode that prevent even root from writing to it.
const LOCKS: IFlags = IFlags::IMMUTABLE.union(IFlags::APPEND);
/// Bits of a mode that recovery sets to write, or that a write clears.
const CHANGED_MODE: u32 = 0o6200;
const MODE: u32 = 0o7777;

/// Returns the attributes of the file that recovery may change.
pub(super) fn saved(file: &File) -> io::Result<Saved> {
    let found = file.metadata()?;
    let time = |s, ns: i64| Timestamp { s, ns: u32::try_from(ns).unwrap_or(0) };
    let mut capability = [0; CAPABILITY_BYTES_MAX];
    let len = match fgetxattr(file, CAPABILITY, &mut capability[..]) {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => 0,
        found => found?,
    };
    let flags = ioctl_getflags(file).unwrap_or(IFlags::empty()) & LOCKS;
    Ok(Saved {
        mode: found.mode() & MODE,
        flags: flags.bits(),
        accessed: time(found.atime(), found.atime_nsec()),
        modified: time(found.mtime(), found.mtime_nsec()),
        capability: capability[..len].to_vec(),
    })
}

/// Makes the file writable, until [`restore`].
pub(super) fn unlock(file: &File, saved: &Saved) -> io::Result<()> {
    if saved.flags != 0 {
        ioctl_setflags(file, ioctl_getflags(file)? - LOCKS)?;
    } else {
        fchmod(file, Mode::from_raw_mode((saved.mode & MODE) | 0o200))?;
    }
    Ok(())
}

/// Restores the file's attributes. A file that `is_made` keeps mode and capability from the log.
pub(super) fn restore(file: &File, saved: &Saved, is_made: bool) -> io::Result<()> {
    if !is_made {
        restore_rights(file, saved)?;
    }
    restore_times(file, saved)?;
    // The flags come last: an immutable or append-only file does not accept times.
    if saved.flags != 0 {
        ioctl_setflags(file, ioctl_getflags(file)? | IFlags::from_bits_retain(saved.flags))?;
    }
    Ok(())
}

fn restore_rights(file: &File, saved: &Saved) -> io::Result<()> {
    let found = file.metadata()?.mode() & MODE;
    // Recovery leaves no other mode, so another process has set it: it stays.
    let is_ours = (found ^ saved.mode) & MODE & !CHANGED_MODE == 0;
    if is_ours && found != saved.mode {
        fchmod(file, Mode::from_raw_mode(saved.mode))?;
    }
    let found = || fgetxattr(file, CAPABILITY, &mut [0_u8; CAPABILITY_BYTES_MAX][..]);
    if !saved.capability.is_empty() && found() == Err(Errno::NODATA) {
        fsetxattr(file, CAPABILITY, &saved.capability, XattrFlags::empty())?;
    }
    Ok(())
}

fn restore_times(file: &File, saved: &Saved) -> io::Result<()> {
    let timespec = |time: Timestamp| Timespec { tv_sec: time.s, tv_nsec: time.ns.into() };
    let (last_access, last_modification) = (timespec(saved.accessed), timespec(saved.modified));
    match futimens(file, &Timestamps { last_access, last_modification }) {
        // A user with write access to another user's file may not set its times.
        Err(Errno::PERM) => Ok(()),
        set => Ok(set?),
    }
}
