//! System calls that no hook stands in front of, and `errno`.
//!
//! Invariant: this module calls the C library only for the address of `errno`, so that no call
//! comes back into a hook.
//!
//! Untyped calls are in [`tidegate_interpose::raw`]; typed calls are here.
#![allow(unsafe_code)] // system calls, and the C library's `errno`

use std::ffi::{CStr, c_int, c_long};
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::time::ClockId;
pub(crate) use tidegate_interpose::raw::{
    Errno, call, checked, errno, failed, failed_int, low_half, returned, returned_int, set_errno,
    words,
};

/// Expands to the first expression on an architecture that has the older system calls, else to the
/// second: each C library makes the oldest call that its architecture has.
#[cfg(target_arch = "x86_64")]
macro_rules! by_architecture {
    ($older:expr, $newer:expr $(,)?) => {
        $older
    };
}
/// Expands to the first expression on an architecture that has the older system calls, else to the
/// second: each C library makes the oldest call that its architecture has.
#[cfg(not(target_arch = "x86_64"))]
macro_rules! by_architecture {
    ($older:expr, $newer:expr $(,)?) => {
        $newer
    };
}
pub(crate) use by_architecture;

/// The system call that the C library makes for a function: its number and the arguments.
pub(crate) type Made = (c_long, [usize; 6]);

/// Returns the kernel's result from the C library's: `-errno` if `returned` is negative.
pub(crate) fn by_kernel(returned: isize) -> isize {
    if returned < 0 { -isize::try_from(errno()).unwrap_or(5) } else { returned }
}

/// Runs `work`, and leaves `errno` as it was.
pub(crate) fn keeping_errno<R>(work: impl FnOnce() -> R) -> R {
    let errno = errno();
    let result = work();
    set_errno(errno);
    result
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

plain!(/** Returns the position of a descriptor. */ lseek = SYS_lseek(fd: c_int, offset: i64, whence: c_int));
plain!(/** Sets a file's size. */ ftruncate = SYS_ftruncate(fd: c_int, size_bytes: i64));
plain!(/** Makes a file durable. */ fsync = SYS_fsync(fd: c_int));
plain!(/** Makes a file's data durable. */ fdatasync = SYS_fdatasync(fd: c_int));
plain!(/** Closes a descriptor. */ close = SYS_close(fd: c_int));
plain!(/** Does a descriptor operation with a number as argument. */ fcntl = SYS_fcntl(fd: c_int, command: c_int, argument: usize));
plain!(/** Sends a thread of a process a signal; 0 only asks whether it is there. */ tgkill = SYS_tgkill(process: u32, thread: u32, signal: c_int));
plain!(/** Makes everything durable. */ sync_all = SYS_sync());

/// Returns the program's descriptor as the libraries take it.
pub(crate) fn borrowed<'fd>(fd: c_int) -> BorrowedFd<'fd> {
    // SAFETY: only the number is used; the kernel refuses it if the program has closed it.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Opens a path.
pub(crate) fn openat(dir: c_int, path: &CStr, flags: c_int, mode: u32) -> Result<c_int, Errno> {
    // SAFETY: a terminated path.
    let fd = checked(unsafe { call(libc::SYS_openat, words![dir, path.as_ptr(), flags, mode]) })?;
    Ok(c_int::try_from(fd).unwrap_or(-1))
}

/// Sleeps while `word` is `seen`, until [`wake`] or `timeout`. Returns false after the timeout.
pub(crate) fn wait(word: &AtomicU32, seen: u32, timeout: Duration) -> bool {
    let seconds = i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX);
    let timeout = libc::timespec { tv_sec: seconds, tv_nsec: timeout.subsec_nanos().into() };
    let arguments = words![word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout];
    // SAFETY: the word and the time live until the call returns.
    unsafe { call(libc::SYS_futex, arguments) != -(libc::ETIMEDOUT as isize) }
}

/// Wakes the threads that [`wait`] for the word to change.
pub(crate) fn wake(word: &AtomicU32) {
    let arguments = words![word.as_ptr(), libc::FUTEX_WAKE, i32::MAX];
    // SAFETY: the word lives until the call returns.
    unsafe { call(libc::SYS_futex, arguments) };
}

pub(crate) const NS_PER_S: u64 = 1_000_000_000;

/// Returns nanoseconds of a clock that only goes forwards.
pub(crate) fn now_ns() -> u64 {
    clock_ns(ClockId::Monotonic)
}

/// Returns nanoseconds since 1970, as the file systems count them.
pub(crate) fn wall_clock_ns() -> u64 {
    clock_ns(ClockId::RealtimeCoarse)
}

/// Returns by how much the clock of times of files is ahead of one that nobody sets, in ns.
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
    // `sync` cannot fail.
    let _ = sync_all();
}
