//! System calls that the library makes and the program does not.
//!
//! Invariant: none is made once the log was given up: the program may have installed a filter of
//! system calls by then, which kills for such a call. A thread that gives the log up waits for
//! calls in progress. Later calls return `ENOSYS`, as from a kernel without them; a file that
//! nothing is known about is left to the kernel.
//!
//! Entry points: [`asked`] for calls of other modules; typed calls below it.
#![allow(unsafe_code)] // system calls

use std::ffi::{CStr, c_int, c_long, c_uint};
use std::mem::MaybeUninit;

use crate::state::process::Holder;
use crate::sys::raw::{self, Errno, words};

/// Returns the answer to `question`, or `ENOSYS` if the log was given up.
#[inline]
pub(crate) fn asked<R>(question: impl FnOnce() -> Result<R, Errno>) -> Result<R, Errno> {
    if Holder::is_here() {
        return question();
    }
    let _holder = Holder::new().ok_or(libc::ENOSYS)?;
    question()
}

/// Makes one system call. Returns `ENOSYS` if the log was given up.
///
/// # Safety
/// As for the call: pointers in `arguments` point to the memory that the call reads and writes.
#[inline]
pub(crate) unsafe fn call(number: c_long, arguments: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: the caller vouches for the arguments.
    asked(|| raw::checked(unsafe { raw::call(number, arguments) }))
}

/// Returns the status flags of a descriptor.
pub(crate) fn status_flags(fd: c_int) -> Result<c_int, Errno> {
    asked(|| raw::fcntl(fd, libc::F_GETFL, 0)).map(|flags| c_int::try_from(flags).unwrap_or(0))
}

/// Returns the position of a descriptor.
#[inline]
pub(crate) fn position(fd: c_int) -> Result<u64, Errno> {
    asked(|| raw::lseek(fd, 0, libc::SEEK_CUR)).map(|at| at as u64)
}

/// Returns the `stat` of an open file.
pub(crate) fn fstat(fd: c_int) -> Result<libc::stat, Errno> {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel fills `stat`: on both architectures its structure is the C library's.
    unsafe { call(libc::SYS_fstat, words![fd, stat.as_mut_ptr()]) }?;
    // SAFETY: zeroed and then filled by the kernel; any bits are valid numbers.
    Ok(unsafe { stat.assume_init() })
}

/// Facts about an open file, from one call of `statx`.
#[derive(Clone, Copy)]
pub(crate) struct Seen {
    /// As from [`fstat`], but without its number of blocks.
    pub(crate) stat: libc::stat,
    /// The mount that the file was opened through; 0 if it has no number that is never reused.
    pub(crate) mount: u64,
    /// When the file was created, in nanoseconds since 1970; 0 if the file system does not say.
    pub(crate) created_ns: u64,
    /// Flags `STATX_ATTR_`.
    pub(crate) attributes: u64,
}

/// Returns the size of an open file in bytes. It asks for nothing else: if the kernel has times
/// finer than a tick (Linux 6.13), a query of the times makes the next write set them anew, in the
/// journal.
#[inline]
pub(crate) fn size(fd: c_int) -> Result<u64, Errno> {
    statx_of(fd, libc::STATX_SIZE).map(|found| found.stx_size)
}

/// Returns when an open file was created, in nanoseconds since 1970; 0 if that is not known.
pub(crate) fn created_ns(fd: c_int) -> Result<u64, Errno> {
    statx_of(fd, libc::STATX_BTIME).map(|found| nanoseconds(&found.stx_btime))
}

fn nanoseconds(time: &libc::statx_timestamp) -> u64 {
    u64::try_from(time.tv_sec).unwrap_or(0) * raw::NS_PER_S + u64::from(time.tv_nsec)
}

fn statx_of(fd: c_int, wanted: c_uint) -> Result<libc::statx, Errno> {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    let arguments = words![fd, c"".as_ptr(), libc::AT_EMPTY_PATH, wanted, found.as_mut_ptr()];
    // SAFETY: a terminated path, and memory for the answer.
    unsafe { call(libc::SYS_statx, arguments) }?;
    // SAFETY: zeroed and then filled by the kernel; any bits are valid numbers.
    Ok(unsafe { found.assume_init() })
}

/// Returns the size of an open file in bytes, and its time of modification in nanoseconds since
/// 1970. It asks for both times: if the kernel has times finer than a tick (Linux 6.13), the next
/// write by any process then gets a later time.
pub(crate) fn size_and_time(fd: c_int) -> Result<(u64, u64), Errno> {
    let wanted = libc::STATX_SIZE | libc::STATX_MTIME | libc::STATX_CTIME;
    statx_of(fd, wanted).map(|found| (found.stx_size, nanoseconds(&found.stx_mtime)))
}

/// Returns all facts about an open file, by one call.
pub(crate) fn statx(fd: c_int) -> Result<Seen, Errno> {
    const MOUNT: c_uint = 0x4000;
    let found = statx_of(fd, libc::STATX_BASIC_STATS | libc::STATX_BTIME | MOUNT)?;
    // SAFETY: the structure has only numbers, and zero is valid.
    let mut stat: libc::stat = unsafe { MaybeUninit::zeroed().assume_init() };
    stat.st_dev = libc::makedev(found.stx_dev_major, found.stx_dev_minor);
    (stat.st_ino, stat.st_nlink) = (found.stx_ino, found.stx_nlink.into());
    stat.st_mode = found.stx_mode.into();
    (stat.st_uid, stat.st_gid) = (found.stx_uid, found.stx_gid);
    stat.st_size = found.stx_size.cast_signed();
    let mount = if found.stx_mask & MOUNT == 0 { 0 } else { found.stx_mnt_id };
    let created_ns = nanoseconds(&found.stx_btime);
    (stat.st_ctime, stat.st_ctime_nsec) = of_time(&found.stx_ctime);
    (stat.st_mtime, stat.st_mtime_nsec) = of_time(&found.stx_mtime);
    (stat.st_atime, stat.st_atime_nsec) = of_time(&found.stx_atime);
    Ok(Seen { stat, mount, created_ns, attributes: found.stx_attributes })
}

fn of_time(time: &libc::statx_timestamp) -> (i64, i64) {
    (time.tv_sec, time.tv_nsec.into())
}

/// Returns the `stat` of the file at a path; `flags` as for `fstatat`.
pub(crate) fn fstatat(dir: c_int, path: &CStr, flags: c_int) -> Result<libc::stat, Errno> {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: a terminated path, and memory for the answer.
    unsafe { call(libc::SYS_newfstatat, words![dir, path.as_ptr(), stat.as_mut_ptr(), flags]) }?;
    // SAFETY: zeroed and then filled by the kernel; any bits are valid numbers.
    Ok(unsafe { stat.assume_init() })
}

/// Returns the `statfs` of the file system of an open file.
pub(crate) fn fstatfs(fd: c_int) -> Result<libc::statfs, Errno> {
    let mut stat = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: memory for the answer.
    unsafe { call(libc::SYS_fstatfs, words![fd, stat.as_mut_ptr()]) }?;
    // SAFETY: zeroed and then filled by the kernel; any bits are valid numbers.
    Ok(unsafe { stat.assume_init() })
}

/// Reads into `buffer`. Returns the number of bytes.
pub(crate) fn read(fd: c_int, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (at, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: memory for the answer.
    unsafe { call(libc::SYS_read, words![fd, at, space]) }
}

/// Reads into `buffer` from byte `at` of the file. Returns the number of bytes.
pub(crate) fn pread(fd: c_int, buffer: &mut [u8], at: u64) -> Result<usize, Errno> {
    let (to, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: memory for the answer.
    unsafe { call(libc::SYS_pread64, words![fd, to, space, at]) }
}

/// Reads the names of extended attributes, each with a NUL. Returns the number of bytes.
pub(crate) fn flistxattr(fd: c_int, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (to, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: memory for the answer.
    unsafe { call(libc::SYS_flistxattr, words![fd, to, space]) }
}

/// Reads the value of an extended attribute. Returns the number of bytes.
pub(crate) fn fgetxattr(fd: c_int, name: &CStr, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (to, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: a terminated name, and memory for the answer.
    unsafe { call(libc::SYS_fgetxattr, words![fd, name.as_ptr(), to, space]) }
}

/// Asks the driver or the file system of an open file for `T`, which is numbers only.
fn ask<T>(fd: c_int, request: u32) -> Result<T, Errno> {
    let mut answer = MaybeUninit::<T>::zeroed();
    // SAFETY: `answer` has the size that the request is about.
    unsafe { call(libc::SYS_ioctl, words![fd, request, answer.as_mut_ptr()]) }?;
    // SAFETY: zeroed and then filled by the kernel; any bits are valid numbers.
    Ok(unsafe { answer.assume_init() })
}

/// `struct fsxattr`.
#[repr(C)]
pub(crate) struct FileFlags {
    /// `FS_XFLAG_`.
    pub(crate) flags: u32,
    pub(crate) extent_bytes: u32,
    extents: u32,
    pub(crate) project: u32,
    pub(crate) cow_extent_bytes: u32,
    reserved: [u8; 8],
}

/// Returns the flags of a file that `stat` does not have.
pub(crate) fn file_flags(fd: c_int) -> Result<FileFlags, Errno> {
    const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
    ask(fd, FS_IOC_FSGETXATTR)
}

/// Returns the flags `FS_*_FL` of a file or directory.
pub(crate) fn inode_flags(fd: c_int) -> Result<u32, Errno> {
    // The kernel writes an `int`, although the request has the size of a long.
    const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
    ask::<u64>(fd, FS_IOC_GETFLAGS).map(|flags| u32::try_from(flags & 0xffff_ffff).unwrap_or(!0))
}

/// Reads a symbolic link, as much as `buffer` holds.
pub(crate) fn readlink<'b>(path: &CStr, buffer: &'b mut [u8]) -> Result<&'b [u8], Errno> {
    let (at, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: a terminated path, and memory for the answer.
    let len =
        unsafe { call(libc::SYS_readlinkat, words![libc::AT_FDCWD, path.as_ptr(), at, space]) }?;
    Ok(&buffer[..len.min(space)])
}

/// Returns whether a thread of a process lives.
pub(crate) fn is_alive(process: u32, thread: u32) -> bool {
    asked(|| raw::tgkill(process, thread, 0)) != Err(libc::ESRCH)
}

/// Reads the name of this thread in the kernel, filled up with zeros.
pub(crate) fn thread_name(name: &mut [u8; 16]) {
    let arguments = words![libc::PR_GET_NAME, name.as_mut_ptr()];
    // SAFETY: memory for the longest name with its NUL.
    let _ = unsafe { call(libc::SYS_prctl, arguments) };
}
