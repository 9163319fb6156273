//! Directories and names of this machine.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{
    AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags, fchmod, fchown, flistxattr,
    fremovexattr, fsetxattr, futimens, linkat, openat, renameat, unlinkat,
};
use rustix::io::Errno;

use super::carry_out::NameSystem;
use super::handle::{file_system_id, handle_of};
use super::local::LocalFiles;
use super::named::{MadeFile, NamedFile, Place};
use crate::log::identity;
use crate::log::pool::names::{Extended, Timestamp};

/// The kernel's longest list of extended attributes, in bytes: `XATTR_LIST_MAX`.
const LIST_BYTES_MAX: usize = 64 << 10;

impl NameSystem<File> for LocalFiles {
    fn directory(&self, place: &Place) -> io::Result<Option<File>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        self.find(&place.file_system, &place.parent, flags)
    }

    fn file(&self, file: &NamedFile) -> io::Result<Option<File>> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        self.find(&file.file_system, &file.handle, flags)
    }

    fn identity_at(&self, directory: &File, name: &[u8]) -> io::Result<Option<u64>> {
        let found = match self.open_at(directory, name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            found => found?,
        };
        let handle = handle_of(&found)?;
        Ok(Some(identity(&file_system_id(directory)?, handle.kind(), handle.bytes())))
    }

    fn links(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.nlink())
    }

    fn changed(&self, file: &File) -> io::Result<Timestamp> {
        let metadata = file.metadata()?;
        let ns = u32::try_from(metadata.ctime_nsec()).unwrap_or(0);
        Ok(Timestamp { s: metadata.ctime(), ns })
    }

    fn modified(&self, file: &File) -> io::Result<Timestamp> {
        let metadata = file.metadata()?;
        let ns = u32::try_from(metadata.mtime_nsec()).unwrap_or(0);
        Ok(Timestamp { s: metadata.mtime(), ns })
    }

    fn make(&self, directory: &File) -> io::Result<File> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        Ok(openat(directory, c".", flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    fn set_attributes(&self, file: &File, made: &MadeFile, with_times: bool) -> io::Result<()> {
        // The owner comes first, since its change clears capabilities and set-user-ID.
        fchown(file, Some(Uid::from_raw(made.owner)), Some(Gid::from_raw(made.group)))?;
        set_extended(file, &made.extended)?;
        fchmod(file, Mode::from_raw_mode(made.mode))?;
        if with_times {
            let timespec = |time: Timestamp| Timespec { tv_sec: time.s, tv_nsec: time.ns.into() };
            let (last_access, last_modification) = (timespec(made.times.0), timespec(made.times.1));
            futimens(file, &Timestamps { last_access, last_modification })?;
        }
        Ok(())
    }

    fn link(&self, file: &File, directory: &File, name: &[u8]) -> io::Result<()> {
        let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
        let name = OsStr::from_bytes(name);
        Ok(linkat(rustix::fs::CWD, opened, directory, name, AtFlags::SYMLINK_FOLLOW)?)
    }

    fn rename(&self, directory: &File, from: &[u8], to: &[u8]) -> io::Result<()> {
        Ok(renameat(directory, OsStr::from_bytes(from), directory, OsStr::from_bytes(to))?)
    }

    fn open_at(&self, directory: &File, name: &[u8]) -> io::Result<File> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(directory, OsStr::from_bytes(name), flags, Mode::empty())?.into())
    }

    fn unlink(&self, directory: &File, name: &[u8]) -> io::Result<()> {
        Ok(unlinkat(directory, OsStr::from_bytes(name), AtFlags::empty())?)
    }

    fn commit(&self, file: &File) -> io::Result<()> {
        Ok(crate::durable::syncfs(file)?)
    }
}

/// Sets these extended attributes on the file, and removes others that programs can set.
fn set_extended(file: &File, extended: &[u8]) -> io::Result<()> {
    let wanted = || Extended(extended).flatten();
    let mut list = vec![0; LIST_BYTES_MAX];
    let listed = match flistxattr(file, &mut list[..]) {
        Err(Errno::OPNOTSUPP) => 0,
        listed => listed?,
    };
    for name in list[..listed].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let is_settable = name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_");
        if is_settable && !wanted().any(|(other, _)| other == name) {
            fremovexattr(file, OsStr::from_bytes(name))?;
        }
    }
    for (name, value) in wanted() {
        fsetxattr(file, OsStr::from_bytes(name), value, XattrFlags::empty())?;
    }
    Ok(())
}
