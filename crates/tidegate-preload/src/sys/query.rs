//! What the library asks the kernel that the program does not ask itself.
//!
//! Invariant: nothing is asked once the log was given up. A program may have installed a filter of
//! system calls by then that kills for such a question; where another thread gives the log up, it
//! waits for those that are being asked. The answer is `ENOSYS` then, as of a kernel that does not
//! know the question: what nothing is known of is the kernel's alone.
//!
//! Entry points: [`asked`] for a question of another module; typed questions below it.
#![allow(unsafe_code)] // system calls

use std::ffi::{CStr, c_int, c_long, c_uint};
use std::mem::MaybeUninit;

use crate::state::process::Holder;
use crate::sys::raw::{self, Errno, words};

/// The answer of the kernel; `ENOSYS` if the log was given up.
#[inline]
pub(crate) fn asked<R>(question: impl FnOnce() -> Result<R, Errno>) -> Result<R, Errno> {
    if Holder::is_here() {
        return question();
    }
    let _holder = Holder::new().ok_or(libc::ENOSYS)?;
    question()
}

/// As [`asked`], for one system call.
///
/// # Safety
/// As the call itself: pointers among the arguments point to what the call reads and writes.
#[inline]
pub(crate) unsafe fn call(number: c_long, arguments: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    asked(|| raw::checked(unsafe { raw::call(number, arguments) }))
}

/// The status flags of a descriptor.
pub(crate) fn status_flags(fd: c_int) -> Result<c_int, Errno> {
    asked(|| raw::fcntl(fd, libc::F_GETFL, 0)).map(|flags| c_int::try_from(flags).unwrap_or(0))
}

/// The position of a descriptor.
#[inline]
pub(crate) fn position(fd: c_int) -> Result<u64, Errno> {
    asked(|| raw::lseek(fd, 0, libc::SEEK_CUR)).map(|at| at as u64)
}

/// What the kernel says of a descriptor's file.
pub(crate) fn fstat(fd: c_int) -> Result<libc::stat, Errno> {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: memory for the answer; on both architectures the C library's structure is the
    // kernel's.
    unsafe { call(libc::SYS_fstat, words![fd, stat.as_mut_ptr()]) }?;
    // SAFETY: zeroed, then filled.
    Ok(unsafe { stat.assume_init() })
}

/// What the kernel says of an open file, by one call.
#[derive(Clone, Copy)]
pub(crate) struct Seen {
    /// As of [`fstat`], without blocks.
    pub(crate) stat: libc::stat,
    /// The mount that it was opened through, 0 where the kernel has no number for it that is never
    /// given out again.
    pub(crate) mount: u64,
    /// When it was created, in nanoseconds since 1970; 0 where the file system does not say.
    pub(crate) created_ns: u64,
    /// `STATX_ATTR_`.
    pub(crate) attributes: u64,
}

/// The size of an open file in bytes. Nothing else is asked for: where the kernel gives times finer
/// than a tick to a caller that asks (Linux 6.13), the next write would set them anew, in the
/// journal.
#[inline]
pub(crate) fn size(fd: c_int) -> Result<u64, Errno> {
    statx_of(fd, libc::STATX_SIZE).map(|found| found.stx_size)
}

/// When an open file was created, in nanoseconds since 1970; 0 where the file system does not say.
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
    // SAFETY: zeroed, then filled.
    Ok(unsafe { found.assume_init() })
}

/// The size of an open file in bytes, and its time of modification in nanoseconds since 1970. Asks
/// for both times: where the kernel gives times finer than a tick (Linux 6.13), the next write of
/// whatever process gets a later one.
pub(crate) fn size_and_time(fd: c_int) -> Result<(u64, u64), Errno> {
    let wanted = libc::STATX_SIZE | libc::STATX_MTIME | libc::STATX_CTIME;
    statx_of(fd, wanted).map(|found| (found.stx_size, nanoseconds(&found.stx_mtime)))
}

/// All that is asked of an open file at once.
pub(crate) fn statx(fd: c_int) -> Result<Seen, Errno> {
    const MOUNT: c_uint = 0x4000;
    let found = statx_of(fd, libc::STATX_BASIC_STATS | libc::STATX_BTIME | MOUNT)?;
    // SAFETY: numbers, of which any bits are valid.
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

/// What the kernel says of a path's file; `flags` as for `fstatat`.
pub(crate) fn fstatat(dir: c_int, path: &CStr, flags: c_int) -> Result<libc::stat, Errno> {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: a terminated path, and memory for the answer.
    unsafe { call(libc::SYS_newfstatat, words![dir, path.as_ptr(), stat.as_mut_ptr(), flags]) }?;
    // SAFETY: zeroed, then filled.
    Ok(unsafe { stat.assume_init() })
}

/// What the kernel says of the file system of a descriptor's file.
pub(crate) fn fstatfs(fd: c_int) -> Result<libc::statfs, Errno> {
    let mut stat = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: memory for the answer.
    unsafe { call(libc::SYS_fstatfs, words![fd, stat.as_mut_ptr()]) }?;
    // SAFETY: zeroed, then filled.
    Ok(unsafe { stat.assume_init() })
}

/// Reads into `buffer`: the number of bytes.
pub(crate) fn read(fd: c_int, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (at, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: memory for the answer.
    unsafe { call(libc::SYS_read, words![fd, at, space]) }
}

/// Reads into `buffer` from byte `at` of the file: the number of bytes.
pub(crate) fn pread(fd: c_int, buffer: &mut [u8], at: u64) -> Result<usize, Errno> {
    let (to, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: memory for the answer.
    unsafe { call(libc::SYS_pread64, words![fd, to, space, at]) }
}

/// The names of a file's extended attributes, each with a NUL behind it: how many bytes.
pub(crate) fn flistxattr(fd: c_int, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (to, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: memory for the answer.
    unsafe { call(libc::SYS_flistxattr, words![fd, to, space]) }
}

/// The value of an extended attribute: how many bytes.
pub(crate) fn fgetxattr(fd: c_int, name: &CStr, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (to, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: a terminated name, and memory for the answer.
    unsafe { call(libc::SYS_fgetxattr, words![fd, name.as_ptr(), to, space]) }
}

/// Asks the driver or the file system of an open file for `T`, which is numbers only.
fn ask<T>(fd: c_int, request: u32) -> Result<T, Errno> {
    let mut answer = MaybeUninit::<T>::zeroed();
    // SAFETY: memory for the answer, whose size the request has.
    unsafe { call(libc::SYS_ioctl, words![fd, request, answer.as_mut_ptr()]) }?;
    // SAFETY: zeroed, then filled; any bits are valid numbers.
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

/// What a file system has of a file beside what `stat` says.
pub(crate) fn file_flags(fd: c_int) -> Result<FileFlags, Errno> {
    const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
    ask(fd, FS_IOC_FSGETXATTR)
}

/// `FS_*_FL` of a file or directory.
pub(crate) fn inode_flags(fd: c_int) -> Result<u32, Errno> {
    // The kernel writes an `int`, whatever the size that the request has.
    const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
    ask::<u64>(fd, FS_IOC_GETFLAGS).map(|flags| u32::try_from(flags & 0xffff_ffff).unwrap_or(!0))
}

/// The text of a symbolic link, as much as `buffer` holds.
pub(crate) fn readlink<'b>(path: &CStr, buffer: &'b mut [u8]) -> Result<&'b [u8], Errno> {
    let (at, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: a terminated path, and memory for the answer.
    let len =
        unsafe { call(libc::SYS_readlinkat, words![libc::AT_FDCWD, path.as_ptr(), at, space]) }?;
    Ok(&buffer[..len.min(space)])
}

/// Whether a thread of a process lives.
pub(crate) fn is_alive(process: u32, thread: u32) -> bool {
    asked(|| raw::tgkill(process, thread, 0)) != Err(libc::ESRCH)
}

/// The name of this thread in the kernel, with zeros behind it.
pub(crate) fn thread_name(name: &mut [u8; 16]) {
    let arguments = words![libc::PR_GET_NAME, name.as_mut_ptr()];
    // SAFETY: memory for the longest name with its end.
    let _ = unsafe { call(libc::SYS_prctl, arguments) };
}
