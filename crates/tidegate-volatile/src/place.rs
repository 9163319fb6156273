//! Decides whether the library answers the syncs of a file, or makes them.
//!
//! It answers syncs of files and directories on a disk of this machine. It makes all other syncs:
//! where the kernel's answer depends on more (pipes, devices, descriptors of `O_PATH`), where a
//! sync concerns other machines, and where syncs are fast anyway (read-only file systems, and those
//! without blocks, such as `/proc`).
#![allow(unsafe_code)] // descriptors are numbers here

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, OFlags, Stat};
use tidegate_interpose::file_systems::is_remote_magic;
use tidegate_interpose::raw::{self, words};

use crate::confined::is_confined;

/// The mount is read-only: a flag of `statfs`.
const ST_RDONLY: i64 = 1;
/// The longest path that the kernel takes, with its end.
const PATH_BYTES: usize = 4096;

/// Returns the program's descriptor as `rustix` takes it. Returns `None` once no call but the
/// program's own may be made.
fn borrowed<'fd>(fd: c_int) -> Option<BorrowedFd<'fd>> {
    // SAFETY: only the number is used. If the program closes the descriptor, the kernel refuses it.
    (fd >= 0 && !is_confined()).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Returns whether syncs of the file behind `fd` are answered.
pub(crate) fn is_answered(fd: c_int) -> bool {
    borrowed(fd).is_some_and(|fd| {
        let flags = rustix::fs::fcntl_getfl(fd);
        flags.is_ok_and(|flags| !flags.contains(OFlags::PATH)) && is_on_disk(fd)
    })
}

/// Returns the device and inode of the file behind `fd`.
pub(crate) fn identity(fd: c_int) -> Option<(u64, u64)> {
    let Stat { st_dev, st_ino, .. } = rustix::fs::fstat(borrowed(fd)?).ok()?;
    Some((st_dev, st_ino))
}

/// Returns whether syncs of the file that `openat` opens with these arguments are answered. A file
/// that does not exist yet is judged by its directory.
///
/// # Safety
/// As for `openat`.
pub(crate) unsafe fn is_answered_at(directory: c_int, path: *const c_char, flags: c_int) -> bool {
    if is_confined() {
        return false;
    }
    let kept = flags & libc::O_NOFOLLOW;
    // SAFETY: the caller passes the arguments of an `openat`.
    let judged = match unsafe { is_found_on_disk(directory, path, kept) } {
        Err(libc::ENOENT) => {
            let mut buffer = [0; PATH_BYTES];
            // SAFETY: a terminated path, which the kernel has read.
            let parent = parent(unsafe { CStr::from_ptr(path) }, &mut buffer);
            parent.map_or(Err(libc::ENAMETOOLONG), |path| {
                // SAFETY: a terminated path.
                unsafe { is_found_on_disk(directory, path.as_ptr(), kept) }
            })
        }
        judged => judged,
    };
    judged.unwrap_or(false)
}

/// Returns whether `path` leads to a file or directory on a disk.
///
/// # Safety
/// As for `openat`.
unsafe fn is_found_on_disk(
    directory: c_int,
    path: *const c_char,
    kept: c_int,
) -> Result<bool, raw::Errno> {
    let arguments = words![directory, path, libc::O_PATH | libc::O_CLOEXEC | kept];
    // SAFETY: the path is the caller's, and the kernel checks it.
    let fd = raw::checked(unsafe { raw::call(libc::SYS_openat, arguments) })?;
    let judged = c_int::try_from(fd).ok().and_then(borrowed).is_some_and(is_on_disk);
    // SAFETY: the descriptor was just opened, and no other code knows it.
    unsafe { raw::call(libc::SYS_close, words![fd]) };
    Ok(judged)
}

/// Returns the directory of `path`, written into `buffer`.
fn parent<'buffer>(path: &CStr, buffer: &'buffer mut [u8; PATH_BYTES]) -> Option<&'buffer CStr> {
    let bytes = path.to_bytes();
    let len = bytes.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    let directory = if len == 0 { b"." } else { &bytes[..len] };
    buffer.get_mut(..directory.len())?.copy_from_slice(directory);
    CStr::from_bytes_until_nul(buffer).ok()
}

fn is_on_disk(fd: BorrowedFd<'_>) -> bool {
    let (Ok(found), Ok(of)) = (rustix::fs::fstat(fd), rustix::fs::fstatfs(fd)) else {
        return false;
    };
    let is_file = matches!(
        FileType::from_raw_mode(found.st_mode),
        FileType::RegularFile | FileType::Directory
    );
    let is_written = of.f_blocks != 0 && of.f_flags & ST_RDONLY == 0;
    is_file && is_written && !is_remote_magic(of.f_type.cast_unsigned())
}
