//! System calls that nothing interposes on, and `errno`.
//!
//! Invariant: nothing here calls the C library but for the address of `errno`, so that no call
//! comes back into a hook.
//!
//! Entry points: [`call`] for a call with the kernel's result, [`returned`] to hand that result to
//! the program, [`errno`] and [`set_errno`]; typed calls below them.
#![allow(unsafe_code)] // system calls, and the C library's `errno`

use std::ffi::{CStr, c_int, c_long, c_uint};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::time::ClockId;

/// An error number of the kernel.
pub(crate) type Errno = c_int;

/// Makes the system call `number`; a result in `-4095..0` is an error number, negated.
///
/// # Safety
/// As the call itself: pointers among the arguments point to what the call reads and writes.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) unsafe fn call(number: c_long, arguments: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention; the arguments are the caller's promise.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") arguments[0], in("rsi") arguments[1], in("rdx") arguments[2],
            in("r10") arguments[3], in("r8") arguments[4], in("r9") arguments[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    result
}

/// Makes the system call `number`; a result in `-4095..0` is an error number, negated.
///
/// # Safety
/// As the call itself: pointers among the arguments point to what the call reads and writes.
#[cfg(target_arch = "aarch64")]
#[inline]
pub(crate) unsafe fn call(number: c_long, arguments: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention; the arguments are the caller's promise.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") arguments[0] => result,
            in("x1") arguments[1], in("x2") arguments[2], in("x3") arguments[3],
            in("x4") arguments[4], in("x5") arguments[5],
            options(nostack)
        );
    }
    result
}

/// The arguments of a call as machine words; those that are not given are 0.
macro_rules! words {
    ($($argument:expr),* $(,)?) => {{
        let given = [$($crate::raw::Word::word($argument)),*];
        let mut all = [0_usize; 6];
        all[..given.len()].copy_from_slice(&given);
        all
    }};
}
pub(crate) use words;

/// What may be an argument of a system call.
pub(crate) trait Word {
    /// The argument as the kernel takes it: signed numbers are extended.
    fn word(self) -> usize;
}

macro_rules! word {
    ($($kind:ty),*) => {$(
        impl Word for $kind {
            #[inline]
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, trivial_numeric_casts)]
            fn word(self) -> usize {
                self as usize
            }
        }
    )*};
}
word!(i32, u32, i64, u64, isize, usize);

impl<T> Word for *const T {
    #[inline]
    fn word(self) -> usize {
        self as usize
    }
}

impl<T> Word for *mut T {
    #[inline]
    fn word(self) -> usize {
        self as usize
    }
}

/// The kernel's result as a `Result`.
#[inline]
pub(crate) fn checked(result: isize) -> Result<usize, Errno> {
    match usize::try_from(result) {
        Ok(value) => Ok(value),
        Err(_) => Err(c_int::try_from(-result).unwrap_or(libc::EIO)),
    }
}

/// Gives a result of the kernel to the program: as it is, or -1 with `errno`.
#[inline]
pub(crate) fn returned(result: isize) -> isize {
    if (-4095..0).contains(&result) {
        failed(c_int::try_from(-result).unwrap_or(libc::EIO))
    } else {
        result
    }
}

/// As [`returned`], for functions that return an `int`.
#[inline]
pub(crate) fn returned_int(result: isize) -> c_int {
    c_int::try_from(returned(result)).unwrap_or(c_int::MAX)
}

/// What the kernel's result was where the C library has returned this, and set `errno` if it is -1.
pub(crate) fn by_kernel(returned: isize) -> isize {
    if returned < 0 { -isize::try_from(errno()).unwrap_or(5) } else { returned }
}

/// As [`failed`], for functions that return an `int`.
#[cold]
pub(crate) fn failed_int(errno: Errno) -> c_int {
    set_errno(errno);
    -1
}

/// Sets `errno`, and is the -1 that goes with it.
#[cold]
pub(crate) fn failed(errno: Errno) -> isize {
    set_errno(errno);
    -1
}

/// The calling thread's `errno`.
pub(crate) fn errno() -> Errno {
    // SAFETY: takes nothing, gives the thread's own.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the thread's own, which lives as long as the thread.
    unsafe { *place }
}

/// Sets the calling thread's `errno`.
pub(crate) fn set_errno(errno: Errno) {
    // SAFETY: takes nothing, gives the thread's own.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the thread's own, which lives as long as the thread.
    unsafe { *place = errno };
}

/// Makes a call that has no pointers among its arguments.
macro_rules! plain {
    ($(#[$doc:meta])* $name:ident = $number:ident($($argument:ident: $kind:ty),*)) => {
        $(#[$doc])*
        #[inline]
        pub(crate) fn $name($($argument: $kind),*) -> Result<usize, Errno> {
            // SAFETY: no pointer is passed; descriptors are checked by the kernel.
            checked(unsafe { call(libc::$number, words![$($argument),*]) })
        }
    };
}

plain!(/** The position of a descriptor. */ lseek = SYS_lseek(fd: c_int, offset: i64, whence: c_int));
plain!(/** Sets a file's size. */ ftruncate = SYS_ftruncate(fd: c_int, size_bytes: i64));
plain!(/** Makes a file durable. */ fsync = SYS_fsync(fd: c_int));
plain!(/** Makes a file's data durable. */ fdatasync = SYS_fdatasync(fd: c_int));
plain!(/** Closes a descriptor. */ close = SYS_close(fd: c_int));
plain!(/** Descriptor operations with a number as argument. */ fcntl = SYS_fcntl(fd: c_int, command: c_int, argument: usize));
plain!(/** Sends a thread of a process a signal; 0 only asks whether it is there. */ tgkill = SYS_tgkill(process: u32, thread: u32, signal: c_int));
plain!(/** Makes everything durable. */ sync_all = SYS_sync());

/// The program's descriptor as the libraries take it.
pub(crate) fn borrowed<'fd>(fd: c_int) -> BorrowedFd<'fd> {
    // SAFETY: the number is used as one only: what it refers to is the program's, whatever that
    // does, and the kernel refuses one that is closed.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// The status flags of a descriptor.
pub(crate) fn status_flags(fd: c_int) -> Result<c_int, Errno> {
    fcntl(fd, libc::F_GETFL, 0).map(|flags| c_int::try_from(flags).unwrap_or(0))
}

/// What the kernel says of a descriptor's file.
pub(crate) fn fstat(fd: c_int) -> Result<libc::stat, Errno> {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: memory for the answer; on both architectures the C library's structure is the
    // kernel's.
    checked(unsafe { call(libc::SYS_fstat, words![fd, stat.as_mut_ptr()]) })?;
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

fn statx_of(fd: c_int, wanted: c_uint) -> Result<libc::statx, Errno> {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    let arguments = words![fd, c"".as_ptr(), libc::AT_EMPTY_PATH, wanted, found.as_mut_ptr()];
    // SAFETY: a terminated path, and memory for the answer.
    checked(unsafe { call(libc::SYS_statx, arguments) })?;
    // SAFETY: zeroed, then filled.
    Ok(unsafe { found.assume_init() })
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
    let (seconds, rest) = (u64::try_from(found.stx_btime.tv_sec), found.stx_btime.tv_nsec);
    let created_ns = seconds.unwrap_or(0) * NS_PER_S + u64::from(rest);
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
    checked(unsafe {
        call(libc::SYS_newfstatat, words![dir, path.as_ptr(), stat.as_mut_ptr(), flags])
    })?;
    // SAFETY: zeroed, then filled.
    Ok(unsafe { stat.assume_init() })
}

/// What the kernel says of the file system of a descriptor's file.
pub(crate) fn fstatfs(fd: c_int) -> Result<libc::statfs, Errno> {
    let mut stat = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: memory for the answer.
    checked(unsafe { call(libc::SYS_fstatfs, words![fd, stat.as_mut_ptr()]) })?;
    // SAFETY: zeroed, then filled.
    Ok(unsafe { stat.assume_init() })
}

/// Opens a path.
pub(crate) fn openat(dir: c_int, path: &CStr, flags: c_int, mode: u32) -> Result<c_int, Errno> {
    // SAFETY: a terminated path.
    let fd = checked(unsafe { call(libc::SYS_openat, words![dir, path.as_ptr(), flags, mode]) })?;
    Ok(c_int::try_from(fd).unwrap_or(-1))
}

/// Reads into `buffer`: the number of bytes.
pub(crate) fn read(fd: c_int, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (at, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: memory for the answer.
    checked(unsafe { call(libc::SYS_read, words![fd, at, space]) })
}

/// Reads into `buffer` from byte `at` of the file: the number of bytes.
pub(crate) fn pread(fd: c_int, buffer: &mut [u8], at: u64) -> Result<usize, Errno> {
    let (to, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: memory for the answer.
    checked(unsafe { call(libc::SYS_pread64, words![fd, to, space, at]) })
}

/// The names of a file's extended attributes, each with a NUL behind it: how many bytes.
pub(crate) fn flistxattr(fd: c_int, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (to, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: memory for the answer.
    checked(unsafe { call(libc::SYS_flistxattr, words![fd, to, space]) })
}

/// The value of an extended attribute: how many bytes.
pub(crate) fn fgetxattr(fd: c_int, name: &CStr, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (to, space) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: a terminated name, and memory for the answer.
    checked(unsafe { call(libc::SYS_fgetxattr, words![fd, name.as_ptr(), to, space]) })
}

/// Asks the driver or the file system of an open file for `T`, which is numbers only.
fn ask<T>(fd: c_int, request: u32) -> Result<T, Errno> {
    let mut answer = MaybeUninit::<T>::zeroed();
    // SAFETY: memory for the answer, whose size the request has.
    checked(unsafe { call(libc::SYS_ioctl, words![fd, request, answer.as_mut_ptr()]) })?;
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
    let len = checked(unsafe {
        call(libc::SYS_readlinkat, words![libc::AT_FDCWD, path.as_ptr(), at, space])
    })?;
    Ok(&buffer[..len.min(space)])
}

/// Whether a thread of a process lives.
pub(crate) fn is_alive(process: u32, thread: u32) -> bool {
    tgkill(process, thread, 0) != Err(libc::ESRCH)
}

/// Sleeps while `word` is `seen`, until [`wake`] or for `timeout` at most: whether it was not that
/// long.
pub(crate) fn wait(word: &AtomicU32, seen: u32, timeout: Duration) -> bool {
    let seconds = i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX);
    let timeout = libc::timespec { tv_sec: seconds, tv_nsec: timeout.subsec_nanos().into() };
    let arguments = words![word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout];
    // SAFETY: a word of this process and a time, for the length of the call.
    unsafe { call(libc::SYS_futex, arguments) != -(libc::ETIMEDOUT as isize) }
}

/// Wakes the threads that [`wait`] for the word to change.
pub(crate) fn wake(word: &AtomicU32) {
    let arguments = words![word.as_ptr(), libc::FUTEX_WAKE, i32::MAX];
    // SAFETY: a word of this process.
    unsafe { call(libc::SYS_futex, arguments) };
}

const NS_PER_S: u64 = 1_000_000_000;

/// Nanoseconds of a clock that only goes forwards.
pub(crate) fn now_ns() -> u64 {
    clock_ns(ClockId::Monotonic)
}

/// The name of this thread in the kernel, with zeros behind it.
pub(crate) fn thread_name(name: &mut [u8; 16]) {
    let arguments = words![libc::PR_GET_NAME, name.as_mut_ptr()];
    // SAFETY: memory for the longest name with its end.
    let _ = unsafe { call(libc::SYS_prctl, arguments) };
}

/// Nanoseconds since 1970, as the file systems count them.
pub(crate) fn wall_clock_ns() -> u64 {
    clock_ns(ClockId::RealtimeCoarse)
}

/// How far the clock of times of files is ahead of one that nobody sets, in nanoseconds.
pub(crate) fn clock_ahead_ns() -> u64 {
    clock_ns(ClockId::Realtime).saturating_sub(clock_ns(ClockId::Boottime))
}

fn clock_ns(clock: ClockId) -> u64 {
    let now = rustix::time::clock_gettime(clock);
    let (seconds, rest) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * NS_PER_S + rest.unwrap_or(0)
}

/// Makes everything on the machine durable.
pub(crate) fn sync() {
    // It cannot fail.
    let _ = sync_all();
}
