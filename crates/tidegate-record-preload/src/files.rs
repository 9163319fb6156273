//! Files: reports at first sight, identities, and paths.
//!
//! Invariant: a file's number is reported before the table maps a descriptor to the number. So the
//! recorder sees the number before any event that uses it.
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

/// Returns the file of `fd`, or `None` if `fd` is not storage or does not fit in the table.
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

/// Examines a descriptor for the first time, and reports its file.
fn meet(recorder: Recorder, fd: c_int) -> Option<File> {
    let found = stat(borrowed(fd), c"", AtFlags::EMPTY_PATH)?;
    if !is_storage(&found) {
        if recorder.has_own_memory() {
            table::set(fd, Known::Other);
        }
        return None;
    }
    let flags = rustix::fs::fcntl_getfl(borrowed(fd)).unwrap_or(OFlags::empty());
    // 30 bits: a table entry stores the number and the append bit, and must differ from `OTHER`.
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

/// Reports an operation that changes or reads files without events.
pub(crate) fn count(recorder: Recorder, what: Unseen) {
    recorder.tell_of_process(Event::new(Kind::Unseen).with([u64::from(what as u8)]), &[]);
}

fn is_storage(found: &Statx) -> bool {
    let kind = FileType::from_raw_mode(found.stx_mode.into());
    matches!(kind, FileType::RegularFile | FileType::Directory | FileType::BlockDevice)
}

/// Returns whether the file is a regular file.
pub(crate) fn is_regular(found: &Statx) -> bool {
    FileType::from_raw_mode(found.stx_mode.into()) == FileType::RegularFile
}

/// Returns whether the file is a directory.
pub(crate) fn is_folder(found: &Statx) -> bool {
    FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory
}

/// Returns device, inode, and creation time in nanoseconds (0 if the file system stores none).
pub(crate) fn identity(found: &Statx) -> [u64; 3] {
    let device = u64::from(found.stx_dev_major) << 32 | u64::from(found.stx_dev_minor);
    let created = &found.stx_btime;
    let seconds = u64::try_from(created.tv_sec).unwrap_or(0);
    let created_ns = seconds.wrapping_mul(1_000_000_000).wrapping_add(created.tv_nsec.into());
    [device, found.stx_ino, created_ns]
}

/// Returns the status of an open file, or `None` on failure.
pub(crate) fn stat_open(fd: c_int) -> Option<Statx> {
    stat(borrowed(fd), c"", AtFlags::EMPTY_PATH)
}

/// Returns the status of the file that a path names, or `None` on failure. Follows a symbolic link
/// at the end of the path only if `follows` is set.
///
/// # Safety
/// `path` is an argument that the program passes to a function that takes a path in `directory`.
/// The kernel checks whether the path is readable.
pub(crate) unsafe fn stat_path(
    directory: c_int,
    path: *const c_char,
    follows: bool,
) -> Option<Statx> {
    let flags = if follows { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let wanted = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
    // SAFETY: `found` has space for the structure; the kernel checks the path.
    let done = unsafe { libc::statx(directory, path, flags, wanted, found.as_mut_ptr()) };
    // SAFETY: both types have the layout of the kernel's `statx`, which was zeroed and then filled.
    (done == 0).then(|| unsafe { std::mem::transmute(found) })
}

fn stat(fd: BorrowedFd<'_>, path: &CStr, flags: AtFlags) -> Option<Statx> {
    rustix::fs::statx(fd, path, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME).ok()
}

/// Returns the position of a descriptor, or `None` if the descriptor has none.
pub(crate) fn position(fd: c_int) -> Option<u64> {
    rustix::fs::seek(borrowed(fd), SeekFrom::Current(0)).ok()
}

fn borrowed(fd: c_int) -> BorrowedFd<'static> {
    // SAFETY: the number is not negative and is used only as an argument of system calls. The
    // kernel refuses a number that is closed.
    unsafe { BorrowedFd::borrow_raw(fd.max(0)) }
}

/// Returns the bytes of a path of the program.
///
/// # Safety
/// A system call with this path has just succeeded: the path is readable, and stays valid while the
/// hook runs.
pub(crate) unsafe fn text<'a>(path: *const c_char) -> &'a [u8] {
    if path.is_null() {
        return b"";
    }
    // SAFETY: not null, and the caller has seen a system call read this string.
    unsafe { CStr::from_ptr(path) }.to_bytes()
}

impl PathBuffer {
    pub(crate) fn new() -> Self {
        Self([0; PATH_BYTES])
    }

    /// Returns the path of the file of `fd`, or an empty path if the kernel reports none.
    pub(crate) fn of_descriptor(&mut self, fd: c_int) -> &[u8] {
        let mut link = [0_u8; 32];
        let mut rest = &mut link[..31];
        let written = write!(rest, "/proc/self/fd/{fd}");
        match (written, CStr::from_bytes_until_nul(&link)) {
            (Ok(()), Ok(link)) => self.of_link(link),
            _ => b"",
        }
    }

    /// Returns the directory that a relative path starts from; empty if `path` is absolute.
    pub(crate) fn of_folder(&mut self, directory: c_int, path: &[u8]) -> &[u8] {
        if path.first() == Some(&b'/') {
            b""
        } else if directory == libc::AT_FDCWD {
            self.of_link(c"/proc/self/cwd")
        } else {
            self.of_descriptor(directory)
        }
    }

    /// Returns the target of a symbolic link, or an empty path on failure.
    pub(crate) fn of_link(&mut self, link: &CStr) -> &[u8] {
        let len = rustix::fs::readlinkat_raw(rustix::fs::CWD, link, &mut self.0[..]);
        self.0.get(..len.unwrap_or(0)).unwrap_or(b"")
    }
}
