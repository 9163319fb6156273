//! Files: what is told when one is seen for the first time, identities, and paths.
//!
//! Invariant: a file's number is told before it is noted for a descriptor, so that an event of it
//! comes after.
#![allow(unsafe_code)] // the program's descriptors and strings

use std::ffi::{CStr, c_char, c_int};
use std::io::Write as _;
use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, FileType, OFlags, SeekFrom, Statx, StatxFlags};
use tidegate_record::event::{Event, Kind, Unseen};

use crate::session::Recorder;
use crate::table::{self, File, Known};

/// The longest path, with its NUL.
const PATH_BYTES: usize = 4096;

/// Memory for a path.
pub(crate) struct PathBuffer([u8; PATH_BYTES]);

/// The file of `fd`; none if that is no storage, or cannot be noted.
pub(crate) fn of(recorder: Recorder, fd: c_int) -> Option<File> {
    match table::get(fd) {
        Some(Known::File(file)) => Some(file),
        Some(Known::Other) => None,
        Some(Known::Nothing) => meet(recorder, fd),
        None => {
            if fd >= 0 {
                count(recorder, Unseen::Descriptor);
            }
            None
        }
    }
}

/// Looks at a descriptor for the first time, and tells of its file.
fn meet(recorder: Recorder, fd: c_int) -> Option<File> {
    let found = stat(borrowed(fd), c"", AtFlags::EMPTY_PATH)?;
    if !is_storage(&found) {
        if recorder.has_own_memory() {
            table::set(fd, Known::Other);
        }
        return None;
    }
    let flags = rustix::fs::fcntl_getfl(borrowed(fd)).unwrap_or(OFlags::empty());
    // Half of the numbers are the table's.
    let number = recorder.file_number() & (u32::MAX >> 2);
    let file = File { number, appends: flags.contains(OFlags::APPEND) };
    let [device, inode, created_ns] = identity(&found);
    let event = Event::new(Kind::Opened).of_file(number).with([
        u64::try_from(fd).unwrap_or(0),
        device,
        inode,
        created_ns,
        u64::from(flags.bits()),
    ]);
    let mut buffer = PathBuffer::new();
    recorder.tell_of_process(event, &[buffer.of_descriptor(fd)]);
    if recorder.has_own_memory() {
        table::set(fd, Known::File(file));
    }
    Some(file)
}

/// Tells that something was done that no event tells.
pub(crate) fn count(recorder: Recorder, what: Unseen) {
    recorder.tell_of_process(Event::new(Kind::Unseen).with([u64::from(what as u8)]), &[]);
}

fn is_storage(found: &Statx) -> bool {
    let kind = FileType::from_raw_mode(found.stx_mode.into());
    matches!(kind, FileType::RegularFile | FileType::Directory | FileType::BlockDevice)
}

/// Whether it is an ordinary file.
pub(crate) fn is_regular(found: &Statx) -> bool {
    FileType::from_raw_mode(found.stx_mode.into()) == FileType::RegularFile
}

/// Whether it is a folder.
pub(crate) fn is_folder(found: &Statx) -> bool {
    FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory
}

/// Device, inode, and time of creation in nanoseconds, 0 where the file system has none.
pub(crate) fn identity(found: &Statx) -> [u64; 3] {
    let device = u64::from(found.stx_dev_major) << 32 | u64::from(found.stx_dev_minor);
    let created = &found.stx_btime;
    let seconds = u64::try_from(created.tv_sec).unwrap_or(0);
    let created_ns = seconds.wrapping_mul(1_000_000_000).wrapping_add(created.tv_nsec.into());
    [device, found.stx_ino, created_ns]
}

/// What the kernel says of an open file.
pub(crate) fn stat_open(fd: c_int) -> Option<Statx> {
    stat(borrowed(fd), c"", AtFlags::EMPTY_PATH)
}

/// What the kernel says of the file that a name stands for; of a symbolic link where `follows` is
/// false.
///
/// # Safety
/// `path` is what the program gives to a function that takes a path in `directory`: the kernel
/// looks whether it can be read.
pub(crate) unsafe fn stat_path(
    directory: c_int,
    path: *const c_char,
    follows: bool,
) -> Option<Statx> {
    let flags = if follows { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let wanted = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
    // SAFETY: memory for the answer; the kernel checks the path.
    let done = unsafe { libc::statx(directory, path, flags, wanted, found.as_mut_ptr()) };
    // SAFETY: both are the kernel's structure, zeroed, then filled.
    (done == 0).then(|| unsafe { std::mem::transmute(found) })
}

fn stat(fd: BorrowedFd<'_>, path: &CStr, flags: AtFlags) -> Option<Statx> {
    rustix::fs::statx(fd, path, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME).ok()
}

/// The position of a descriptor.
pub(crate) fn position(fd: c_int) -> Option<u64> {
    rustix::fs::seek(borrowed(fd), SeekFrom::Current(0)).ok()
}

fn borrowed(fd: c_int) -> BorrowedFd<'static> {
    // SAFETY: the number is used as one only, and is no -1: what it refers to is the program's,
    // whatever that does, and the kernel refuses one that is closed.
    unsafe { BorrowedFd::borrow_raw(fd.max(0)) }
}

/// The bytes of a path of the program.
///
/// # Safety
/// A call of the kernel with this path has just succeeded: it can be read, and stays as long as the
/// hook runs.
pub(crate) unsafe fn text<'a>(path: *const c_char) -> &'a [u8] {
    if path.is_null() {
        return b"";
    }
    // SAFETY: as promised.
    unsafe { CStr::from_ptr(path) }.to_bytes()
}

impl PathBuffer {
    pub(crate) fn new() -> Self {
        Self([0; PATH_BYTES])
    }

    /// The path of the file of `fd`; empty where the kernel does not say.
    pub(crate) fn of_descriptor(&mut self, fd: c_int) -> &[u8] {
        let mut link = [0_u8; 32];
        let mut rest = &mut link[..31];
        let written = write!(rest, "/proc/self/fd/{fd}");
        match (written, CStr::from_bytes_until_nul(&link)) {
            (Ok(()), Ok(link)) => self.of_link(link),
            _ => b"",
        }
    }

    /// The folder that a relative path begins in; empty for one that is not relative.
    pub(crate) fn of_folder(&mut self, directory: c_int, path: &[u8]) -> &[u8] {
        if path.first() == Some(&b'/') {
            b""
        } else if directory == libc::AT_FDCWD {
            self.of_link(c"/proc/self/cwd")
        } else {
            self.of_descriptor(directory)
        }
    }

    /// What a symbolic link says.
    pub(crate) fn of_link(&mut self, link: &CStr) -> &[u8] {
        let len = rustix::fs::readlinkat_raw(rustix::fs::CWD, link, &mut self.0[..]);
        self.0.get(..len.unwrap_or(0)).unwrap_or(b"")
    }
}
