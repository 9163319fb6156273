//! The file of a descriptor, and its facts for the log.
//!
//! Invariants:
//! 1. Changes of a regular file on a file system whose files can be covered go by the thread's lane
//!    or by the file's entry in the log's table. The user's globs, which let *this* process cover
//!    the file or not, matter only to its admission.
//! 2. All other descriptors are ignored: their calls go to the kernel.
//!
//! Entry points: [`examine`] for a descriptor; [`entry`] and [`identify`] for the log.
#![allow(unsafe_code)] // a system call that no crate has

use std::ffi::{CStr, c_int};

use tidegate::log::{self, Definition, FileHandle, FileKey, Log};

use crate::state::descriptors::{self, Entry, Kind, Known};
use crate::state::file_systems::{self, Disk, Identity};
use crate::state::process::{self, Holding};
use crate::sys::path::{self, PathBuffer};
pub(crate) use crate::sys::query::Seen;
use crate::sys::raw::{self, Errno};
use crate::sys::{own_stack, query};

/// How far the clock of file times may be behind another clock.
const TICK_NS: u64 = 20_000_000;

fn timestamp_ns(seconds: i64, rest: i64) -> u64 {
    let seconds = u64::try_from(seconds).unwrap_or(0);
    seconds.saturating_mul(raw::NS_PER_S).saturating_add(rest.unsigned_abs())
}

impl Seen {
    pub(crate) fn of(fd: c_int) -> Result<Self, Errno> {
        query::statx(fd)
    }

    pub(crate) fn is_file(&self) -> bool {
        self.stat.st_mode & libc::S_IFMT == libc::S_IFREG
    }

    /// Returns whether the file's time of modification is in the future.
    pub(crate) fn is_of_the_future(&self) -> bool {
        let modified_ns = timestamp_ns(self.stat.st_mtime, self.stat.st_mtime_nsec);
        modified_ns > raw::wall_clock_ns().saturating_add(TICK_NS)
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.stat.st_mode & libc::S_IFMT == libc::S_IFDIR
    }

    pub(crate) fn size(&self) -> u64 {
        u64::try_from(self.stat.st_size).unwrap_or(0)
    }

    /// Returns the file's ctime, in nanoseconds since 1970; 0 before that.
    pub(crate) fn changed_ns(&self) -> u64 {
        let [s, ns] = [self.stat.st_ctime, self.stat.st_ctime_nsec];
        let [s, ns] = [s, ns].map(|part| u64::try_from(part).unwrap_or(0));
        s * raw::NS_PER_S + ns
    }
}

/// Returns the facts about a descriptor of the file that was `seen`; `status` returns its status
/// flags.
pub(crate) fn examine(
    fd: c_int,
    seen: &Seen,
    status: impl FnOnce() -> Result<c_int, Errno>,
) -> Result<Known, Errno> {
    let (device, inode) = (seen.stat.st_dev, seen.stat.st_ino);
    if seen.is_directory() {
        return Ok(Known::of_uncovered(Kind::Directory, device, inode));
    }
    if !seen.is_file() {
        return Ok(Known::IGNORED);
    }
    match file_systems::disk_of(fd, seen.mount)? {
        Disk::Covered => {}
        Disk::Other => return Ok(Known::of_uncovered(Kind::Elsewhere, device, inode)),
        Disk::Memory => return Ok(Known::IGNORED),
    }
    let status = status()?;
    if status & libc::O_PATH != 0 {
        return Ok(Known::IGNORED);
    }
    Ok(Known::of_file(device, inode, flags_of(status)))
}

fn flags_of(status: c_int) -> u32 {
    let mut flags = 0;
    match status & libc::O_ACCMODE {
        libc::O_RDONLY => flags |= descriptors::READ_ONLY,
        libc::O_WRONLY => flags |= descriptors::WRITE_ONLY,
        _ => {}
    }
    if status & libc::O_APPEND != 0 {
        flags |= descriptors::APPEND;
    }
    if status & libc::O_DIRECT != 0 {
        flags |= descriptors::DIRECT;
    }
    // `O_SYNC` includes this bit.
    if status & libc::O_DSYNC != 0 {
        flags |= descriptors::SYNCHRONOUS;
    }
    if status & libc::O_SYNC == libc::O_SYNC {
        flags |= descriptors::FULLY_SYNCHRONOUS;
    }
    flags
}

/// Returns whether the open file was created less than `age_ns` ago.
pub(crate) fn is_younger_than(fd: c_int, age_ns: u64) -> bool {
    let created_ns = query::created_ns(fd);
    created_ns.is_ok_and(|created_ns| raw::wall_clock_ns().saturating_sub(created_ns) < age_ns)
}

/// Returns whether the user wants the open file in the log.
pub(crate) fn is_wanted(fd: c_int) -> bool {
    let filter = process::filter();
    if filter.admits_all() {
        return true;
    }
    // No system call if the log was given up meanwhile: a system call filter may kill the process.
    let Some(_holding) = Holding::new() else { return true };
    let mut path = PathBuffer::new();
    path::of_descriptor(fd, &mut path).is_ok() && filter.admits(path.as_bytes())
}

/// The lasting identity of a file.
#[derive(Clone, Copy)]
pub(crate) struct Identified {
    pub(crate) key: FileKey,
    pub(crate) file_system: Identity,
    handle: FileHandle,
}

impl Identified {
    /// Returns the identity of the file with this handle and the numbers of `stat`.
    pub(crate) fn new(file_system: Identity, handle: FileHandle, stat: &libc::stat) -> Self {
        let identity = log::identity(&file_system.id, handle.kind(), handle.bytes());
        let key = FileKey { device: stat.st_dev, inode: stat.st_ino, identity };
        Self { key, file_system, handle }
    }

    /// Returns the file's definition for the log. `path` may be empty.
    pub(crate) fn definition<'p>(&self, path: &'p PathBuffer) -> Definition<'p> {
        let FileKey { device, inode, identity } = self.key;
        Definition {
            identity,
            file_system: self.file_system.id,
            handle: self.handle,
            covered: false,
            starts: false,
            size_bytes: 0,
            device,
            inode,
            path: log::checked_path(path.as_bytes()).unwrap_or_default(),
        }
    }
}

/// Returns the identity of the open file, or `None` if its file system has no UUID or no handles,
/// or if the log knows too many file systems.
pub(crate) fn identify(log: &Log, fd: c_int) -> Option<Identified> {
    identify_seen(log, fd, &Seen::of(fd).ok()?)
}

/// Returns the identity of the open file, as [`identify`] does, for a file that was `seen`.
pub(crate) fn identify_seen(log: &Log, fd: c_int, seen: &Seen) -> Option<Identified> {
    let file_system = file_systems::identity(log, fd, seen.mount, seen.stat.st_dev)?;
    Some(Identified::new(file_system, handle_of(fd)?, &seen.stat))
}

/// Length of the longest handle in bytes.
const HANDLE_BYTES: u8 = 128;

/// `struct file_handle`.
#[repr(C)]
struct Handle {
    len_bytes: u32,
    kind: i32,
    bytes: [u8; HANDLE_BYTES as usize],
}

fn handle_of(fd: c_int) -> Option<FileHandle> {
    handle_at(fd, c"", libc::AT_EMPTY_PATH)
}

/// Returns the handle of a path in a directory; `flags` are those of `name_to_handle_at`.
pub(crate) fn handle_at(directory: c_int, path: &CStr, flags: c_int) -> Option<FileHandle> {
    let mut handle =
        Handle { len_bytes: u32::from(HANDLE_BYTES), kind: 0, bytes: [0; HANDLE_BYTES as usize] };
    let mut mount = 0_i32;
    let (at, mount) = (&raw mut handle, &raw mut mount);
    let arguments = raw::words![directory, path.as_ptr(), at, mount, flags];
    // SAFETY: `path` is terminated; `handle` has `len_bytes` bytes, and `mount` is a number.
    unsafe { query::call(libc::SYS_name_to_handle_at, arguments) }.ok()?;
    let len = usize::try_from(handle.len_bytes).ok()?;
    FileHandle::new(handle.kind, handle.bytes.get(..len)?)
}

/// Returns the open file's entry in the log's table, creating it if there is none, and notes it
/// with the descriptor. Returns `None` if the file can have none.
#[cold]
pub(crate) fn entry(log: &Log, fd: c_int, known: Known) -> Option<Entry> {
    let _holding = Holding::new()?;
    own_stack::run(|| entry_of(log, fd, known, &identify(log, fd)?))
}

/// Returns the entry of an open file that was identified, as [`entry`] does.
pub(crate) fn entry_of(
    log: &Log,
    fd: c_int,
    known: Known,
    identified: &Identified,
) -> Option<Entry> {
    let _holding = Holding::new()?;
    let file = log.entry_for(&identified.key).ok()?;
    let entry = Entry { file, file_system: identified.file_system.reference };
    descriptors::set_entry(fd, known, entry);
    Some(entry)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::testing::World;

    #[test]
    fn recovery_finds_a_file_by_the_same_identity() {
        let world = World::new();
        let file = std::fs::File::create(world.path("file")).unwrap();
        let found = identify(world.log, file.as_raw_fd()).unwrap().key.identity;
        // Some machines have file systems without a UUID.
        if log::recover::file_system_id(&file).is_ok() {
            assert_eq!(found, log::recover::identity_of(&file).unwrap());
        }
    }

    #[test]
    fn flags_of_a_descriptor_are_those_that_change_how_it_writes() {
        let (read_only, append) = (descriptors::READ_ONLY, descriptors::APPEND);
        assert_eq!(flags_of(libc::O_RDONLY | libc::O_NONBLOCK), read_only);
        assert_eq!(flags_of(libc::O_WRONLY | libc::O_APPEND), descriptors::WRITE_ONLY | append);
        assert_eq!(flags_of(libc::O_RDWR | libc::O_DIRECT), descriptors::DIRECT);
        let (data, all) = (descriptors::SYNCHRONOUS, descriptors::FULLY_SYNCHRONOUS);
        assert_eq!(flags_of(libc::O_RDWR | libc::O_DSYNC), data);
        assert_eq!(flags_of(libc::O_RDWR | libc::O_SYNC), data | all);
    }
}
