//! Which file a descriptor is, and whether that file is for the log.
//!
//! Invariants:
//! 1. A file is for the log if it is regular, on a file system that outlives a power cut and that no other machine changes, has a
//!    handle to be found by again, and the user's globs admit it. The answer is noted with the descriptor.
//! 2. A file that is not for the log keeps the kernel's durability: no sync of it is skipped.
//!
//! Entry points: [`of`], and [`note`] for who has just opened it; [`key_of`] for files that are not open in the program; [`path_of`].
#![allow(unsafe_code)] // a system call that no crate has

use std::ffi::{CStr, c_int};
use std::os::fd::BorrowedFd;

use rustix::fs::StatVfsMountFlags;
use tidegate::log::{self, Definition, FileKey, Log};

use crate::descriptors::{self, Kind, Known};
use crate::file_systems::{self, FileSystem, Handles};
use crate::logged::Open;
use crate::path::{self, PathBuffer};
use crate::raw::{self, Errno};
use crate::{absorb, process, unseen};

/// What `fd` is: as noted, or found out now.
#[inline]
pub(crate) fn of(fd: c_int) -> Known {
    let known = descriptors::get(fd);
    if known.kind == Kind::Unknown { find_out(fd, 0) } else { known }
}

/// The same, and what the kernel has said of it if it was asked now.
pub(crate) fn look(fd: c_int) -> (Known, Option<Seen>) {
    let known = descriptors::get(fd);
    if known.kind != Kind::Unknown || !is_looked_at() {
        return (known, None);
    }
    let seen = Seen::of(fd).ok();
    (seen.map_or(known, |seen| note(fd, &seen, || raw::status_flags(fd), 0)), seen)
}

/// What the kernel says of an open file, all of it by one call.
#[derive(Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) stat: libc::stat,
    /// The mount that it was opened through, 0 where the kernel has no number for it.
    pub(crate) mount: u64,
}

impl Seen {
    pub(crate) fn of(fd: c_int) -> Result<Self, Errno> {
        let (stat, mount) = raw::fstat_with_mount(fd)?;
        Ok(Self { stat, mount })
    }

    /// What the log is told of the file.
    pub(crate) fn definition<'p>(
        &self,
        key: FileKey,
        born: bool,
        path: &'p PathBuffer,
    ) -> Definition<'p> {
        let FileKey { device, inode, identity } = key;
        let libc::stat { st_mode: mode, st_uid: uid, st_gid: gid, .. } = self.stat;
        Definition { identity, device, inode, mode, uid, gid, born, path: path.as_bytes() }
    }
}

/// Asks the kernel what `fd` is, and notes it with `flags` in addition.
#[cold]
pub(crate) fn find_out(fd: c_int, flags: u32) -> Known {
    if !is_looked_at() {
        return Known::IGNORED;
    }
    // A descriptor that cannot be examined is not noted: the next call will fail as this one.
    Seen::of(fd).map_or(Known::IGNORED, |seen| note(fd, &seen, || raw::status_flags(fd), flags))
}

/// There is a log, and the kernel may be asked: a strict thread dies of it.
fn is_looked_at() -> bool {
    process::log().is_some() && !process::is_strict()
}

/// Notes what `fd` is, with `flags` in addition; `status` are its status flags.
pub(crate) fn note(
    fd: c_int,
    seen: &Seen,
    status: impl FnOnce() -> Result<c_int, Errno>,
    flags: u32,
) -> Known {
    let Some(log) = process::log().filter(|_| is_looked_at()) else { return Known::IGNORED };
    let Ok(known) = examine(log, fd, seen, status) else { return Known::IGNORED };
    let known = absorb::noted(fd, known.with(flags));
    let Some(file) = known.file() else { return known };
    let direct = known.has(descriptors::DIRECT) && !known.has(descriptors::READ_ONLY);
    if unseen::is_to_be_marked(fd, known) || direct {
        return Open { log, fd, known, file }.hide();
    }
    known
}

fn examine(
    log: &Log,
    fd: c_int,
    seen: &Seen,
    status: impl FnOnce() -> Result<c_int, Errno>,
) -> Result<Known, Errno> {
    let kind = seen.stat.st_mode & libc::S_IFMT;
    if !matches!(kind, libc::S_IFREG | libc::S_IFDIR) {
        return Ok(Known::IGNORED);
    }
    let status = status()?;
    if status & libc::O_PATH != 0 || !file_systems::of(fd, seen.mount)?.is_for_log {
        return Ok(Known::IGNORED);
    }
    if kind == libc::S_IFDIR {
        return Ok(Known::of_kind(Kind::Directory));
    }
    let Ok(key) = key_of_open(fd, seen) else { return Ok(Known::IGNORED) };
    let admitted = is_admitted(fd);
    // What is not admitted here may be in the log through another command: then it must be seen to.
    let file = if admitted { log.entry_for(&key).ok() } else { log.find(&key).ok().flatten() };
    let Some(file) = file else { return Ok(Known::IGNORED) };
    let excluded = if admitted { 0 } else { descriptors::DIRECT };
    let known = Known::of_file(file, flags_of(status) | excluded);
    if seen.stat.st_nlink == 0 {
        log.lock(file).iter().for_each(tidegate::log::FileGuard::mark_nameless);
    }
    Ok(known)
}

/// Whether the user wants the open file in the log.
fn is_admitted(fd: c_int) -> bool {
    let filter = process::filter();
    if filter.admits_all() {
        return path::are_known();
    }
    let mut path = PathBuffer::new();
    path::of_descriptor(fd, &mut path).is_ok() && filter.admits(path.as_bytes())
}

fn flags_of(status: c_int) -> u32 {
    let mut flags = 0;
    if status & libc::O_ACCMODE == libc::O_RDONLY {
        flags |= descriptors::READ_ONLY;
    }
    if status & libc::O_ACCMODE == libc::O_WRONLY {
        flags |= descriptors::WRITE_ONLY;
    }
    if status & libc::O_APPEND != 0 {
        flags |= descriptors::APPEND;
    }
    if status & libc::O_DIRECT != 0 {
        flags |= descriptors::DIRECT;
    }
    flags
}

/// Bytes of the largest handle.
const HANDLE_BYTES: u8 = 128;

/// `struct file_handle`.
#[repr(C)]
struct Handle {
    len_bytes: u32,
    kind: i32,
    bytes: [u8; HANDLE_BYTES as usize],
}

/// As [`key_of`], for a descriptor that is open for reading or writing: where the handle is known to be made of the inode's number
/// and generation, those are asked for, which takes a fourth of the time.
///
/// Why that is the same: what one file of this mount has shown holds for all of them, since ext4 has one way to make handles, the
/// kernel's own for numbers of 32 bits.
fn key_of_open(fd: c_int, seen: &Seen) -> Result<FileKey, Errno> {
    let handles = file_systems::handles(seen.mount);
    if handles == Handles::Opaque {
        return key_of(fd, seen);
    }
    let file_system = file_systems::of(fd, seen.mount)?;
    let identity = generation(fd).and_then(|it| identity_by(file_system, seen.stat.st_ino, it));
    let key = |identity| FileKey { device: seen.stat.st_dev, inode: seen.stat.st_ino, identity };
    if let (Some(identity), Handles::Generations) = (identity, handles) {
        return Ok(key(identity));
    }
    let asked = key_of(fd, seen)?;
    if let Some(identity) = identity {
        let same = asked == key(identity);
        let shown = if same { Handles::Generations } else { Handles::Opaque };
        file_systems::note_handles(seen.mount, shown);
    }
    Ok(asked)
}

/// The generation of the open file's inode, where the file system tells it.
fn generation(fd: c_int) -> Option<u32> {
    let mut room = [0_u32; 2];
    let arguments = raw::words![fd, libc::FS_IOC_GETVERSION, room.as_mut_ptr()];
    // SAFETY: room for the answer, twice as much as any file system gives.
    raw::checked(unsafe { raw::call(libc::SYS_ioctl, arguments) }).ok()?;
    Some(room[0])
}

/// The identity by the handle that the kernel makes of number and generation; none for larger numbers.
fn identity_by(file_system: FileSystem, inode: u64, generation: u32) -> Option<u64> {
    /// `FILEID_INO32_GEN`.
    const KIND: i32 = 1;
    let handle = u64::from(u32::try_from(inode).ok()?) | u64::from(generation) << 32;
    Some(log::identity(file_system.id, KIND, &handle.to_le_bytes()))
}

/// What tells the open file from all others of all times.
pub(crate) fn key_of(fd: c_int, seen: &Seen) -> Result<FileKey, Errno> {
    let file_system = file_systems::of(fd, seen.mount)?;
    key_by(fd, c"", libc::AT_EMPTY_PATH, &seen.stat, file_system)
}

/// The same for a path, without a descriptor of the file; `flags` as for `fstatat`.
pub(crate) fn key_at(
    directory: c_int,
    path: &CStr,
    flags: c_int,
    stat: &libc::stat,
) -> Result<FileKey, Errno> {
    let follows = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    let file_system = match directory {
        libc::AT_FDCWD => raw::statfs(path)?,
        // A file that is mounted by itself has another one, and is not found in the log.
        directory => raw::fstatfs(directory)?,
    };
    let flags = if follows { libc::AT_SYMLINK_FOLLOW } else { 0 };
    key_by(directory, path, flags, stat, file_systems::of_stat(&file_system))
}

/// `flags` as for `name_to_handle_at`.
fn key_by(
    directory: c_int,
    path: &CStr,
    flags: c_int,
    stat: &libc::stat,
    file_system: FileSystem,
) -> Result<FileKey, Errno> {
    let mut handle =
        Handle { len_bytes: u32::from(HANDLE_BYTES), kind: 0, bytes: [0; HANDLE_BYTES as usize] };
    let mut mount = 0_i32;
    let (at, mount) = (&raw mut handle, &raw mut mount);
    let arguments = raw::words![directory, path.as_ptr(), at, mount, flags];
    // SAFETY: a terminated path, and room for a handle of the size that is given and for a number.
    raw::checked(unsafe { raw::call(libc::SYS_name_to_handle_at, arguments) })?;
    let len = usize::try_from(handle.len_bytes).unwrap_or(0).min(handle.bytes.len());
    let identity = log::identity(file_system.id, handle.kind, &handle.bytes[..len]);
    Ok(FileKey { device: stat.st_dev, inode: stat.st_ino, identity })
}

/// Nothing can be written to the file system of an open descriptor.
pub(crate) fn is_read_only(fd: c_int) -> bool {
    // SAFETY: open for the time of this call.
    let found = rustix::fs::fstatvfs(unsafe { BorrowedFd::borrow_raw(fd) });
    found.is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// The path by which the kernel knows the open file, if it still leads there.
pub(crate) fn path_of(fd: c_int, stat: &libc::stat, path: &mut PathBuffer) -> Result<(), Errno> {
    path::of_descriptor(fd, path)?;
    leads_to(path, stat)
}

/// Whether the file stands under the path.
pub(crate) fn leads_to(path: &PathBuffer, stat: &libc::stat) -> Result<(), Errno> {
    let found = raw::fstatat(libc::AT_FDCWD, path.as_c_str(), libc::AT_SYMLINK_NOFOLLOW)?;
    let same = (found.st_dev, found.st_ino) == (stat.st_dev, stat.st_ino);
    if same { Ok(()) } else { Err(libc::ENOENT) }
}

/// The name that the open file was opened by was removed.
pub(crate) fn has_lost_its_name(fd: c_int) -> bool {
    let mut path = PathBuffer::new();
    path::of_descriptor(fd, &mut path).is_ok() && path.as_bytes().ends_with(b" (deleted)")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn number_and_generation_make_the_handle_that_the_kernel_gives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut shown = Handles::Opaque;
        // Most of them get the number of the one before, which has another generation.
        for _ in 0..100 {
            let file = std::fs::File::create(&path).unwrap();
            let (fd, seen) = (file.as_raw_fd(), Seen::of(file.as_raw_fd()).unwrap());
            file_systems::of(fd, seen.mount).unwrap();
            assert_eq!(key_of_open(fd, &seen), key_of(fd, &seen));
            shown = file_systems::handles(seen.mount);
            std::fs::remove_file(&path).unwrap();
        }
        assert_ne!(shown, Handles::Unseen);
    }

    #[test]
    fn larger_numbers_make_no_handle_that_is_known() {
        let system = FileSystem { id: 1, is_for_log: true };
        assert_eq!(identity_by(system, 1 << 32, 0), None);
        assert_ne!(identity_by(system, 5, 0), identity_by(system, 5, 1));
    }

    #[test]
    fn recovery_finds_a_file_by_the_same_identity() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        let wanted = log::recover::identity_of(&file).unwrap();
        let seen = Seen::of(file.as_raw_fd()).unwrap();
        assert_eq!(key_of(file.as_raw_fd(), &seen).unwrap().identity, wanted);
        let name = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
        let flags = libc::AT_SYMLINK_NOFOLLOW;
        assert_eq!(key_at(libc::AT_FDCWD, &name, flags, &seen.stat).unwrap().identity, wanted);
    }
}
