//! Hooks: descriptors that go, are copied, or change how they write.
//!
//! Invariants: see [`descriptors`]. A copy starts with what is known of the original, but keeps a file unlogged by a
//! mark of its own.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicBool, Ordering};

use libc::off_t;

use crate::alike::alike;
use crate::descriptors::{
    self, ABSORBED, APPEND, DATA_SYNC, DIRECT, Kind, Known, STICKY, STRIPPED, SYNC,
};
use crate::logged::Open;
use crate::raw::{self, words};
use crate::{absorb, files, fork, next, process, stdio, unseen};

/// The descriptor will mean nothing, or something else: forgets what is known of it.
#[inline]
pub(crate) fn forget(fd: c_int) {
    let known = descriptors::clear(fd);
    if known.has(STICKY | ABSORBED) {
        released(fd, known);
    }
}

#[cold]
fn released(fd: c_int, known: Known) {
    if let Some((log, file)) = process::log().zip(known.file()) {
        if known.has(ABSORBED) {
            absorb::closing(fd, file);
        }
        Open { log, fd, known, file }.show();
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    forget(fd);
    match next::close.resolved() {
        // SAFETY: the same function.
        Some(close) => unsafe { close(fd) },
        // SAFETY: no pointers.
        None => raw::returned_int(unsafe { raw::call(libc::SYS_close, words![fd]) }),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn close_range(
    first: c_uint,
    last: c_uint,
    flags: c_int,
) -> c_int {
    const ONLY_MARKS: c_int = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
    const LEAVES_TABLE: c_int = libc::CLOSE_RANGE_UNSHARE.cast_signed();
    // SAFETY: no pointers.
    let call = || unsafe { raw::call(libc::SYS_close_range, words![first, last, flags]) };
    if flags & LEAVES_TABLE != 0 {
        // The others keep theirs.
        return raw::returned_int(fork::leaving_table(call));
    }
    if flags & ONLY_MARKS == 0 {
        descriptors::each(first, last, |fd, _| forget(fd));
    }
    raw::returned_int(call())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn closefrom(first: c_int) {
    descriptors::each(c_uint::try_from(first).unwrap_or(0), c_uint::MAX, |fd, _| forget(fd));
    if let Some(closefrom) = next::closefrom.get() {
        // SAFETY: the same function.
        unsafe { closefrom(first) };
    }
}

/// `copy` is a copy of `original` since now.
pub(crate) fn copied(original: c_int, copy: c_int) {
    let known = if process::in_vfork_child() { Known::UNKNOWN } else { files::of(original) };
    if known.kind == Kind::Unknown {
        appeared(copy);
        descriptors::opened_with(original, copy);
        return;
    }
    let kept = absorb::noted(copy, known.without(STICKY));
    descriptors::opened_with(original, copy);
    let hidden = known.has(STICKY) || unseen::is_to_be_marked(copy, known);
    if let Some((log, file)) = process::log().zip(known.file()).filter(|_| hidden) {
        Open { log, fd: copy, known: kept, file }.hide();
    }
}

/// `fd` is a descriptor of something that nothing is known of.
#[inline]
pub(crate) fn appeared(fd: c_int) {
    forget(fd);
    if unseen::is_to_be_marked(fd, Known::UNKNOWN) && process::log().is_some() {
        files::find_out(fd, 0);
    }
}

fn duplicated(original: c_int, copy: c_int, result: isize) -> c_int {
    if result >= 0 {
        copied(original, copy);
    }
    raw::returned_int(result)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: no pointers.
    let result = unsafe { raw::call(libc::SYS_dup, words![fd]) };
    if let Ok(copy) = c_int::try_from(result)
        && copy >= 0
    {
        forget(copy);
        copied(fd, copy);
    }
    raw::returned_int(result)
}

/// Makes `copy` a copy; what it was before is closed, if the kernel does it.
fn replace(original: c_int, copy: c_int, flags: c_int) -> c_int {
    let before = descriptors::get(copy);
    if let Some(file) = before.file().filter(|_| before.has(ABSORBED)) {
        // As long as the descriptor is the file's.
        absorb::closing(copy, file);
    }
    let before = descriptors::clear(copy).without(ABSORBED);
    // SAFETY: no pointers.
    let result = unsafe { raw::call(libc::SYS_dup3, words![original, copy, flags]) };
    if result < 0 {
        absorb::noted(copy, before);
    } else if before.has(STICKY) {
        released(copy, before);
    }
    duplicated(original, copy, result)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup2(original: c_int, copy: c_int) -> c_int {
    if original == copy {
        // Nothing is done but to look whether it is open.
        return match raw::fcntl(original, libc::F_GETFD, 0) {
            Ok(_) => copy,
            Err(errno) => raw::failed_int(errno),
        };
    }
    replace(original, copy, 0)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup3(original: c_int, copy: c_int, flags: c_int) -> c_int {
    if original == copy { raw::failed_int(libc::EINVAL) } else { replace(original, copy, flags) }
}

/// What `F_GETFL` says of a descriptor whose `O_SYNC` or `O_DSYNC` was taken away.
pub(crate) fn shown_flags(known: Known, flags: c_int) -> c_int {
    let mut shown = flags;
    if known.has(SYNC) {
        shown |= libc::O_SYNC;
    }
    if known.has(DATA_SYNC) {
        shown |= libc::O_DSYNC;
    }
    shown
}

/// The program changes how a descriptor writes, and how all copies of it do, in whatever process: what is noted of them is no
/// longer true, so that the file stays out of the log.
fn changes_writes(open: &Open, flags: c_int) -> bool {
    let (appends, direct) = (flags & libc::O_APPEND != 0, flags & libc::O_DIRECT != 0);
    open.known.has(APPEND) != appends || open.known.has(DIRECT) != direct
}

/// Before the flags of a description are set.
fn set_flags(fd: c_int, flags: c_int) {
    let Some(open) = Open::writable(fd) else { return };
    if changes_writes(&open, flags) {
        let _ = absorb::never(fd);
        open.mark();
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn flock(fd: c_int, operation: c_int) -> c_int {
    // As for `F_OFD_SETLK`.
    let _ = absorb::never(fd);
    match next::flock.get() {
        // SAFETY: the same function.
        Some(flock) => unsafe { flock(fd, operation) },
        None => raw::failed_int(libc::ENOSYS),
    }
}

/// This process has taken a record lock, which it loses with any descriptor of the file that is closed.
static LOCKS: AtomicBool = AtomicBool::new(false);

/// This process may hold record locks.
pub(crate) fn locks() -> bool {
    LOCKS.load(Ordering::Relaxed)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn lockf64(fd: c_int, command: c_int, len: off_t) -> c_int {
    LOCKS.store(true, Ordering::Relaxed);
    match next::lockf64.get() {
        // SAFETY: the same function.
        Some(lockf64) => unsafe { lockf64(fd, command, len) },
        None => raw::failed_int(libc::ENOSYS),
    }
}

/// An `int` among arguments of unknown type: the upper half of the word is anything.
fn low_half(argument: usize) -> c_int {
    let [a, b, c, d, ..] = argument.to_le_bytes();
    c_int::from_le_bytes([a, b, c, d])
}

/// After `fcntl` has succeeded.
fn noted(fd: c_int, command: c_int, result: c_int) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            forget(result);
            copied(fd, result);
            result
        }
        libc::F_GETFL => {
            let known = descriptors::get(fd);
            if known.has(STRIPPED) { shown_flags(known, result) } else { result }
        }
        _ => result,
    }
}

const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fcntl64(
    fd: c_int,
    command: c_int,
    argument: usize,
) -> c_int {
    match command {
        libc::F_SETFL => set_flags(fd, low_half(argument)),
        libc::F_SETLK | libc::F_SETLKW => LOCKS.store(true, Ordering::Relaxed),
        // A lock lasts as long as the description, of which the supervisor would have a copy; so do a lease, which it would
        // hold itself, and the owner that is told of it.
        libc::F_OFD_SETLK
        | libc::F_OFD_SETLKW
        | libc::F_SETLEASE
        | libc::F_GETLEASE
        | libc::F_SETOWN
        | F_SETOWN_EX
        | F_SETSIG => drop(absorb::never(fd)),
        _ => {}
    }
    let result = if let Some(fcntl64) = next::fcntl64.resolved() {
        // SAFETY: the same function; an argument that is not given is not looked at.
        unsafe { fcntl64(fd, command, argument) }
    } else {
        // SAFETY: the program's own arguments.
        raw::returned_int(unsafe { raw::call(libc::SYS_fcntl, words![fd, command, argument]) })
    };
    if result >= 0 { noted(fd, command, result) } else { result }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn closedir(stream: *mut std::ffi::c_void) -> c_int {
    let Some(closedir) = next::closedir.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the program's own stream.
    forget(unsafe { libc::dirfd(stream.cast()) });
    // SAFETY: the same function.
    unsafe { closedir(stream) }
}

/// Becomes a daemon: its standard descriptors are other ones then, in a child that only the C library has forked.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn daemon(
    keep_directory: c_int,
    keep_descriptors: c_int,
) -> c_int {
    let Some(daemon) = next::daemon.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the same function.
    let result = unsafe { daemon(keep_directory, keep_descriptors) };
    if result == 0 && keep_descriptors == 0 {
        (0..3).for_each(forget);
        stdio::note_standard();
    }
    result
}

alike! {
    __close(fd: c_int) = close(fd);
    __dup2(original: c_int, copy: c_int) = dup2(original, copy);
    lockf(fd: c_int, command: c_int, len: off_t) = lockf64(fd, command, len);
    fcntl(fd: c_int, command: c_int, argument: usize) = fcntl64(fd, command, argument);
    __fcntl(fd: c_int, command: c_int, argument: usize) = fcntl64(fd, command, argument);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_were_taken_away_are_shown() {
        let known = Known::IGNORED.with(SYNC);
        assert_eq!(shown_flags(known, libc::O_RDWR), libc::O_RDWR | libc::O_SYNC);
        let known = Known::IGNORED.with(DATA_SYNC);
        assert_eq!(shown_flags(known, libc::O_RDWR), libc::O_RDWR | libc::O_DSYNC);
    }
}
