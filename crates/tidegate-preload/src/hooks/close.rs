//! Hooks: descriptors that go, are copied, or change how they write.
//!
//! Invariants: see [`descriptors`]. A copy starts with what is known of the original, but pins a
//! file by a pin of its own.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_uint};

use crate::covered::{self, Open, unseen};
use crate::state::descriptors::{self, Kind, Known, PINNED};
use crate::state::{new_files, process, record_locks};
use crate::sys::raw::{self, Made, by_architecture, words};
use crate::sys::{next, query};

/// The descriptor will mean nothing, or something else: forgets what is known of it.
#[inline]
pub(crate) fn forget(fd: c_int) {
    new_files::closed(fd);
    let known = descriptors::clear(fd);
    if known.has(PINNED) {
        released(fd, known);
    }
}

#[cold]
fn released(fd: c_int, known: Known) {
    if let Some(log) = process::log() {
        Open { log, fd, known }.unpin();
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
        return raw::returned_int(unseen::leaving_table(call));
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
    let known = descriptors::get(original);
    if known.kind == Kind::Unknown {
        appeared(copy);
        return;
    }
    let is_pinned = known.has(PINNED) || covered::is_to_be_pinned(copy, known);
    let known = known.without(PINNED);
    descriptors::set(copy, known);
    if let Some(log) = process::log().filter(|_| is_pinned && known.kind == Kind::File) {
        Open { log, fd: copy, known }.pin();
    }
}

/// `fd` is a descriptor of something that nothing is known of.
#[inline]
pub(crate) fn appeared(fd: c_int) {
    forget(fd);
    if covered::is_to_be_pinned(fd, Known::UNKNOWN) {
        covered::find_out(fd);
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

/// Makes `copy` a copy by `number`, the call that the C library makes. The kernel closes the file
/// that `copy` was before, if it succeeds.
fn replace(original: c_int, copy: c_int, (number, arguments): Made) -> c_int {
    let before = descriptors::clear(copy);
    // SAFETY: no pointers.
    let result = unsafe { raw::call(number, arguments) };
    if result < 0 {
        descriptors::set(copy, before);
    } else if before.has(PINNED) {
        released(copy, before);
    }
    duplicated(original, copy, result)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup2(original: c_int, copy: c_int) -> c_int {
    if original == copy {
        // The C library asks in the same way whether it is open.
        let (number, arguments) = by_architecture!(
            (libc::SYS_dup2, words![original, copy]),
            (libc::SYS_fcntl, words![original, libc::F_GETFD]),
        );
        // SAFETY: no pointers.
        let result = raw::returned_int(unsafe { raw::call(number, arguments) });
        return if result < 0 { result } else { copy };
    }
    let made = by_architecture!(
        (libc::SYS_dup2, words![original, copy]),
        (libc::SYS_dup3, words![original, copy, 0]),
    );
    replace(original, copy, made)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup3(original: c_int, copy: c_int, flags: c_int) -> c_int {
    if original == copy {
        raw::failed_int(libc::EINVAL)
    } else {
        replace(original, copy, (libc::SYS_dup3, words![original, copy, flags]))
    }
}

/// Before the flags of a description are set: if that changes how it writes, what is noted of its
/// copies, in whatever process, is no longer true. So the file stays out of the log.
fn set_flags(fd: c_int, flags: c_int) {
    const OF_WRITES: c_int = libc::O_APPEND | libc::O_DIRECT;
    let Some(open) = Open::writable(fd) else { return };
    if query::status_flags(fd).is_ok_and(|now| (now ^ flags) & OF_WRITES != 0) {
        open.mark();
        descriptors::clear(fd);
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fcntl64(
    fd: c_int,
    command: c_int,
    argument: usize,
) -> c_int {
    match command {
        libc::F_SETFL => set_flags(fd, raw::low_half(argument)),
        libc::F_SETLK | libc::F_SETLKW => record_locks::note(fd),
        libc::F_SETLEASE if raw::low_half(argument) != libc::F_UNLCK => {
            covered::leave_for_lease(fd);
        }
        _ => {}
    }
    let result = if let Some(fcntl64) = next::fcntl64.resolved() {
        // SAFETY: the same function; an argument that is not given is not looked at.
        unsafe { fcntl64(fd, command, argument) }
    } else {
        // SAFETY: the program's own arguments.
        raw::returned_int(unsafe { raw::call(libc::SYS_fcntl, words![fd, command, argument]) })
    };
    if result >= 0 && matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        forget(result);
        copied(fd, result);
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn closedir(stream: *mut std::ffi::c_void) -> c_int {
    let Some(closedir) = next::closedir.get() else { return raw::failed_int(libc::ENOSYS) };
    if let Some(dirfd) = next::dirfd.get() {
        // SAFETY: the program's own stream.
        forget(unsafe { dirfd(stream) });
    }
    // SAFETY: the same function.
    unsafe { closedir(stream) }
}

/// Becomes a daemon: its standard descriptors are other ones then, in a child that only the C
/// library has forked.
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
        covered::note_standard();
    }
    result
}

tidegate_interpose::synonyms! {
    __close(fd: c_int) = close(fd);
    __dup2(original: c_int, copy: c_int) = dup2(original, copy);
    fcntl(fd: c_int, command: c_int, argument: usize) = fcntl64(fd, command, argument);
    __fcntl(fd: c_int, command: c_int, argument: usize) = fcntl64(fd, command, argument);
}
