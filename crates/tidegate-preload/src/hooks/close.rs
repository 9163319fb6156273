//! Hooks: descriptors that are closed or duplicated, or change how they write.
//!
//! Invariants: see [`descriptors`]. A copy starts with all that is known about the original, but
//! pins a file by a pin of its own.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_uint};

use crate::covered::{self, Open, unseen};
use crate::state::descriptors::{self, Kind, Known, PINNED};
use crate::state::{new_files, process, record_locks};
use crate::sys::raw::{self, Made, by_architecture, words};
use crate::sys::{next, query};

/// Forgets all that is known about a descriptor, which will soon mean nothing or another file.
#[inline]
pub(crate) fn forget(fd: c_int) {
    new_files::closed(fd);
    let known = descriptors::clear(fd);
    if known.has(PINNED) {
        released(fd, known);
    }
}

/// Forgets all that is known about the descriptors from `first` to `last`.
fn forget_all(first: c_uint, last: c_uint) {
    new_files::all_closed(first, last);
    descriptors::each(first, last, |fd, _| forget(fd));
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
        // SAFETY: the C library's function of this type, with the caller's arguments.
        Some(close) => unsafe { close(fd) },
        // SAFETY: the call takes no pointers.
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
    // SAFETY: the call takes no pointers.
    let call = || unsafe { raw::call(libc::SYS_close_range, words![first, last, flags]) };
    if flags & LEAVES_TABLE != 0 {
        // Other threads keep their descriptors, so the table stays as it is.
        return raw::returned_int(unseen::leaving_table(call));
    }
    if flags & ONLY_MARKS == 0 {
        forget_all(first, last);
    }
    raw::returned_int(call())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn closefrom(first: c_int) {
    forget_all(c_uint::try_from(first).unwrap_or(0), c_uint::MAX);
    if let Some(closefrom) = next::closefrom.get() {
        // SAFETY: the C library's function of this type, with the caller's arguments.
        unsafe { closefrom(first) };
    }
}

/// Notes that `copy` is a duplicate of `original` from now on.
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

/// Notes that `fd` is a new descriptor of an unknown file.
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
    // SAFETY: the call takes no pointers.
    let result = unsafe { raw::call(libc::SYS_dup, words![fd]) };
    if let Ok(copy) = c_int::try_from(result)
        && copy >= 0
    {
        forget(copy);
        copied(fd, copy);
    }
    raw::returned_int(result)
}

/// Makes `copy` a duplicate by `number`, the call that the C library makes. If it succeeds, the
/// kernel closes the file that `copy` was before.
fn replace(original: c_int, copy: c_int, (number, arguments): Made) -> c_int {
    // If the call fails, the note of a new file is lost, which makes a sync real.
    new_files::closed(copy);
    let before = descriptors::clear(copy);
    // SAFETY: the call takes no pointers.
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
        // The C library checks in this way whether the descriptor is open.
        let (number, arguments) = by_architecture!(
            (libc::SYS_dup2, words![original, copy]),
            (libc::SYS_fcntl, words![original, libc::F_GETFD]),
        );
        // SAFETY: the call takes no pointers.
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

/// Pins the file if new status flags will change how the description writes: the notes about all
/// its copies, in any process, then become wrong. To be called before the flags are set.
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
        // SAFETY: the C library's function, which ignores an argument that is not given.
        unsafe { fcntl64(fd, command, argument) }
    } else {
        // SAFETY: the caller's arguments go to the kernel as they are.
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
        // SAFETY: the caller's open stream.
        forget(unsafe { dirfd(stream) });
    }
    // SAFETY: the C library's function of this type, with the caller's arguments.
    unsafe { closedir(stream) }
}

/// Runs `daemon`, and notes the standard descriptors anew, which the C library replaces unseen.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn daemon(
    keep_directory: c_int,
    keep_descriptors: c_int,
) -> c_int {
    let Some(daemon) = next::daemon.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the C library's function of this type, with the caller's arguments.
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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::state::files::Seen;
    use crate::testing::World;

    /// A new file, closed by a call that names another descriptor or none, is noted no longer: the
    /// descriptor would find the note of the former file.
    #[test]
    fn no_note_of_a_new_file_is_left_behind_a_descriptor_that_is_closed() {
        let world = World::of_process();
        let other = world.file("other");
        let ways: [fn(c_int, c_int); 4] = [
            // SAFETY: the calls close a copy, which this test owns.
            |fd, other| assert_eq!(unsafe { dup2(other, fd) }, fd),
            // SAFETY: as above.
            |fd, other| assert_eq!(unsafe { dup3(other, fd, 0) }, fd),
            |fd, _| forget_all(fd.cast_unsigned(), fd.cast_unsigned()),
            // SAFETY: as above.
            |fd, _| assert_eq!(unsafe { close(fd) }, 0),
        ];
        for (number, closes) in ways.into_iter().enumerate() {
            let file = File::create_new(world.path(&number.to_string())).unwrap();
            // SAFETY: the call takes no pointers.
            let fd = unsafe { libc::dup(file.as_raw_fd()) };
            let seen = Seen::of(fd).unwrap();
            let numbers = [(); 2].map(|()| world.log.file_systems().note_change_everywhere());
            new_files::note(fd, numbers);
            closes(fd, other.as_raw_fd());
            assert!(new_files::find(fd, &seen).is_none(), "way {number}");
        }
    }
}
