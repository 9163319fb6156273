//! File systems: whether their files can be covered, and the identities of file systems.
//!
//! Invariants:
//! 1. Files can be covered on ext4 and XFS, which keep their UUID and their files' handles over a
//!    reboot. Calls on files of all others go to the kernel.
//! 2. A note is about a mount, by the mount's number: the kernel never assigns it again, and a
//!    mount shows one file system while it exists. Device numbers are reused after an unmount.
//! 3. A note is made once. The identity is added once, when a file is to be covered. If no note is
//!    free, or the mount's number is not known, the kernel is asked each time.
//!
//! Entry points: [`disk_of`], or [`may_be_covered`] before a file is open; [`identity`].
#![allow(unsafe_code)] // a field that the C library hides

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::log::recover::{EXT_MAGIC, XFS_MAGIC, keeps_identities};
use tidegate::log::{self, FileSystemId, FileSystemRef, Log};

use crate::state::process;
use crate::sys::page::Page;
use crate::sys::path::{self, Opened};
use crate::sys::raw::{self, Errno, words};
use crate::sys::signals::SignalsBlocked;
use crate::sys::{own_stack, query};

/// The identity of a file system, and its count of pending changes in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) id: FileSystemId,
    pub(crate) reference: FileSystemRef,
}

/// The medium of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disk {
    /// Memory: syncs do nothing.
    Memory = 0,
    /// A disk; files cannot be covered.
    Other = 1,
    /// A disk; files can be covered.
    Covered = 2,
}

/// A mount and its file system.
struct Note {
    /// The mount's number; 0 if the note is free.
    mount: AtomicU64,
    /// The number of a [`Disk`].
    disk: AtomicU64,
    /// The number of the [`FileSystemRef`] plus 1; 0 before it is known.
    reference: AtomicU64,
    /// The [`FileSystemId`], once the reference is known.
    id: [AtomicU64; 2],
}

/// Instead of the mount's number while the note is being made.
const BUSY: u64 = u64::MAX;
const NOTES: usize = 16;
static NOTED: [Note; NOTES] = [const {
    Note {
        mount: AtomicU64::new(0),
        disk: AtomicU64::new(0),
        reference: AtomicU64::new(0),
        id: [const { AtomicU64::new(0) }; 2],
    }
}; NOTES];

/// Returns the medium of the file system of an open file. `mount` is the mount's number, or 0 if it
/// is not known.
pub(crate) fn disk_of(fd: c_int, mount: u64) -> Result<Disk, Errno> {
    if let Some(note) = find(mount) {
        return Ok(match note.disk.load(Ordering::Relaxed) {
            0 => Disk::Memory,
            1 => Disk::Other,
            _ => Disk::Covered,
        });
    }
    let _signals = SignalsBlocked::deferred();
    let disk = own_stack::run(|| query::fstatfs(fd).map(|stat| find_disk(fd, kind(&stat))))?;
    if mount != 0 && mount != BUSY {
        note(mount, disk);
    }
    Ok(disk)
}

fn find_disk(fd: c_int, kind: i64) -> Disk {
    let is_covered =
        is_allowed(kind) && !has_no_uuid(fd) && (kind != EXT_MAGIC || !journals_data(fd));
    match kind {
        _ if is_covered => Disk::Covered,
        TMPFS | RAMFS => Disk::Memory,
        _ => Disk::Other,
    }
}

/// Returns whether the file system of an open file reports that it has no UUID, so that recovery
/// could not find it. Always `false` in tests, which run on any file system.
fn has_no_uuid(fd: c_int) -> bool {
    let Err(error) = id_of(fd) else { return false };
    !cfg!(test) && matches!(error, libc::ENOTTY | libc::EOPNOTSUPP)
}

/// Returns the UUID of the file system of an open file, or `EOPNOTSUPP` or `ENOTTY` if it has none.
fn id_of(fd: c_int) -> Result<FileSystemId, Errno> {
    let id = || log::recover::file_system_id(raw::borrowed(fd));
    query::asked(|| id().map_err(|error| error.raw_os_error().unwrap_or(libc::EOPNOTSUPP)))
}

/// Returns the identity of the file system of an open file on `device`, or `None` if it has no UUID
/// or the log knows too many file systems.
pub(crate) fn identity(log: &Log, fd: c_int, mount: u64, device: u64) -> Option<Identity> {
    let note = find(mount);
    if let Some(known) = note.and_then(Note::identity) {
        return Some(known);
    }
    let found = find_identity(log, fd, device)?;
    if let Some(note) = note {
        note.set(&found);
    }
    Some(found)
}

/// Returns the file system of a mount, if this process has found out its identity.
pub(crate) fn known(mount: u64) -> Option<FileSystemRef> {
    find(mount)?.identity().map(|identity| identity.reference)
}

fn find_identity(log: &Log, fd: c_int, device: u64) -> Option<Identity> {
    let kind = kind(&query::fstatfs(fd).ok()?);
    let id = id_of(fd);
    // Tests run on any file system.
    let id = if cfg!(test) { id.or(Ok::<_, Errno>([7; 16])).ok()? } else { id.ok()? };
    let journal = match kind {
        XFS_MAGIC => Journal::InOrder,
        EXT_MAGIC => journal_of(device),
        _ => Journal::Unknown,
    };
    let reference =
        log.file_systems().find_or_add(log::identity(&id, 0, b""), journal == Journal::InOrder)?;
    if journal == Journal::Absent {
        log.file_systems().note_commits_alone(reference);
    }
    Some(Identity { id, reference })
}

impl Note {
    fn identity(&self) -> Option<Identity> {
        let number = self.reference.load(Ordering::Acquire).checked_sub(1)?;
        let [low, high] = &self.id;
        let mut id = [0; 16];
        id[..8].copy_from_slice(&low.load(Ordering::Relaxed).to_le_bytes());
        id[8..].copy_from_slice(&high.load(Ordering::Relaxed).to_le_bytes());
        let reference = FileSystemRef::from_number(u32::try_from(number).ok()?);
        Some(Identity { id, reference })
    }

    fn set(&self, found: &Identity) {
        let number = u128::from_le_bytes(found.id);
        let (low, high) = (number & u128::from(u64::MAX), number >> 64);
        for (word, half) in self.id.iter().zip([low, high]) {
            // Another thread may store the same value at the same time.
            word.store(u64::try_from(half).unwrap_or(0), Ordering::Relaxed);
        }
        self.reference.store(u64::from(found.reference.to_number()) + 1, Ordering::Release);
    }
}

fn find(mount: u64) -> Option<&'static Note> {
    NOTED.iter().find(|note| mount != 0 && note.mount.load(Ordering::Acquire) == mount)
}

fn note(mount: u64, disk: Disk) {
    let is_taken = |note: &&Note| {
        note.mount.compare_exchange(0, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok()
    };
    if let Some(note) = NOTED.iter().find(is_taken) {
        note.disk.store(disk as u64, Ordering::Relaxed);
        note.mount.store(mount, Ordering::Release);
    }
}

/// Returns whether the ext4 file system of an open file journals data, so that each sync commits
/// the journal. Returns `true` if that cannot be found out.
fn journals_data(fd: c_int) -> bool {
    let Ok(stat) = query::fstat(fd) else { return true };
    let mut link = [0; Text::BYTES];
    let Some(device) = device_name(stat.st_dev, &mut link) else { return true };
    let mut path = Text::new(b"/proc/fs/ext4/");
    path.push(device).push(b"/options");
    let mut text = Page::take();
    let options = Opened::open(libc::AT_FDCWD, path.as_c_str(), libc::O_RDONLY)
        .and_then(|file| query::read(file.number(), text.bytes_mut()));
    let Ok(len) = options else { return true };
    let mut options = text.bytes()[..len].split(|&byte| byte == b'\n');
    options.any(|option| option == b"data=journal")
}

/// The changes of other files that a sync of one file commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Journal {
    /// All earlier changes.
    InOrder,
    /// None.
    Absent,
    /// Unknown: changes stay pending until the whole file system is synced.
    Unknown,
}

/// Returns the kernel's name of a block device, in the memory of `link`.
fn device_name(device: u64, link: &mut [u8]) -> Option<&[u8]> {
    let mut name = Text::new(b"/sys/dev/block/");
    name.push_number(libc::major(device)).push(b":").push_number(libc::minor(device));
    query::readlink(name.as_c_str(), link).ok()?.rsplit(|&byte| byte == b'/').next()
}

/// Finds out the journal of the ext4 file system on a device.
fn journal_of(device: u64) -> Journal {
    let mut link = [0; Text::BYTES];
    let Some(last) = device_name(device, &mut link) else { return Journal::Unknown };
    let mut task = Text::new(b"/sys/fs/ext4/");
    task.push(last).push(b"/journal_task");
    by_task(&task).unwrap_or_else(|| by_name(last))
}

/// Finds out the journal by the number of its thread, which older kernels show to root only.
fn by_task(path: &Text) -> Option<Journal> {
    let file = Opened::open(libc::AT_FDCWD, path.as_c_str(), libc::O_RDONLY).ok()?;
    let mut text = [0_u8; 16];
    let len = query::read(file.number(), &mut text).ok()?;
    match text.get(..len)? {
        [b'0'..=b'9', ..] => Some(Journal::InOrder),
        [b'<', ..] => Some(Journal::Absent),
        _ => None,
    }
}

/// Finds out the journal by its directory, named after the device and the journal's inode, 8.
fn by_name(device: &[u8]) -> Journal {
    let mut journal = Text::new(b"/proc/fs/jbd2/");
    journal.push(device).push(b"-8");
    let arguments = words![libc::AT_FDCWD, journal.as_c_str().as_ptr(), libc::F_OK];
    // SAFETY: `journal` is a terminated path that lives until the call returns.
    let is_there = unsafe { query::call(libc::SYS_faccessat, arguments) }.is_ok();
    if is_there { Journal::InOrder } else { Journal::Unknown }
}

/// A short path on the stack; empty if it is too long.
struct Text {
    bytes: [u8; Self::BYTES],
    len_bytes: usize,
}

impl Text {
    const BYTES: usize = 256;

    fn new(start: &[u8]) -> Self {
        let mut text = Self { bytes: [0; Self::BYTES], len_bytes: 0 };
        text.push(start);
        text
    }

    fn push(&mut self, more: &[u8]) -> &mut Self {
        let end = self.len_bytes + more.len();
        // The last byte stays zero: the end of the string.
        match self.bytes[..Self::BYTES - 1].get_mut(self.len_bytes..end) {
            Some(space) => {
                space.copy_from_slice(more);
                self.len_bytes = end;
            }
            None => self.bytes[0] = 0,
        }
        self
    }

    fn push_number(&mut self, number: u32) -> &mut Self {
        let mut digits = [0; 10];
        self.push(path::decimal(number, &mut digits))
    }

    fn as_c_str(&self) -> &std::ffi::CStr {
        std::ffi::CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }
}

/// Returns whether a file may be on a file system whose files can be covered, as far as its device
/// number tells: such a file system has a block device. In tests files on any device can be.
pub(crate) fn may_be_covered(stat: &libc::stat) -> bool {
    libc::major(stat.st_dev) != 0 || process::includes_tmpfs() || cfg!(test)
}

fn is_allowed(kind: i64) -> bool {
    keeps_identities(kind) || (kind == TMPFS && process::includes_tmpfs())
}

fn kind(stat: &libc::statfs) -> i64 {
    stat.f_type & 0xffff_ffff
}

const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58f6;

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::state::files::Seen;
    use crate::testing::World;

    #[test]
    fn only_file_systems_with_lasting_identities_are_allowed() {
        for (kind, expected) in
            [(EXT_MAGIC, true), (XFS_MAGIC, true), (TMPFS, false), (0x9123_683e, false)]
        {
            assert_eq!(is_allowed(kind), expected, "{kind:#x}");
        }
        let proc = File::open("/proc/version").unwrap();
        let seen = Seen::of(proc.as_raw_fd()).unwrap();
        for _ in 0..2 {
            assert_eq!(disk_of(proc.as_raw_fd(), seen.mount), Ok(Disk::Other));
        }
        assert_eq!(disk_of(proc.as_raw_fd(), 0), Ok(Disk::Other));
    }

    #[test]
    fn an_identity_that_is_noted_comes_back() {
        let world = World::new();
        let file = tempfile::tempfile().unwrap();
        let (fd, seen) = (file.as_raw_fd(), Seen::of(file.as_raw_fd()).unwrap());
        disk_of(fd, seen.mount).unwrap();
        let identity = |mount| identity(world.log, fd, mount, seen.stat.st_dev).unwrap();
        assert_eq!(identity(seen.mount), identity(0));
        assert_eq!(identity(seen.mount), identity(seen.mount), "as noted");
    }

    #[test]
    fn a_path_that_gets_too_long_is_empty() {
        let mut text = Text::new(b"/sys/");
        assert_eq!(text.push_number(259).push(b":").push_number(0).as_c_str(), c"/sys/259:0");
        assert_eq!(text.push(&[b'x'; Text::BYTES]).as_c_str(), c"");
    }
}
