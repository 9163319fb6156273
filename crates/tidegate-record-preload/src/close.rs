//! Hooks: closing and copying descriptors.
//!
//! Invariant: a hook forgets a descriptor before it closes it. After the close, another thread can
//! get the same number.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_uint, c_void};

use libc::FILE;
use tidegate_record::event::{Event, Kind};

use crate::hook::hooks;
use crate::open::appeared;
use crate::session::{self, Recorder};
use crate::stream;
use crate::table::{self, DESCRIPTORS, Known};

/// Forgets `fd`, which is about to be closed, and reports the close to the recorder.
fn closing(fd: c_int) {
    session::recording(|recorder| {
        if recorder.has_own_memory() {
            forget(recorder, fd);
        }
    });
}

fn forget(recorder: Recorder, fd: c_int) {
    stream::forget(fd);
    if let Known::File(file) = table::take(fd) {
        let event = Event::new(Kind::Closed).of_file(file.number);
        recorder.tell_of_process(event.with([u64::try_from(fd).unwrap_or(0)]), &[]);
    }
}

/// Forgets the descriptors from `first` to `last`, which are about to be closed.
fn closing_all(first: c_uint, last: c_uint) {
    session::recording(|recorder| {
        if recorder.has_own_memory() {
            let most = c_uint::try_from(DESCRIPTORS).unwrap_or(c_uint::MAX);
            let fds = (first..=last.min(most)).filter_map(|fd| c_int::try_from(fd).ok());
            fds.for_each(|fd| forget(recorder, fd));
        }
    });
}

/// Records `copy` as a duplicate of `original` if the call returned a descriptor; returns `copy`.
fn copied(original: c_int, copy: c_int) -> c_int {
    if copy >= 0 && copy != original {
        session::recording(|recorder| {
            if recorder.has_own_memory() {
                forget(recorder, copy);
                note_copy(recorder, original, copy);
            }
        });
    }
    copy
}

fn note_copy(recorder: Recorder, original: c_int, copy: c_int) {
    let known = table::get(original).unwrap_or(Known::Nothing);
    if let Known::File(file) = known {
        let event = Event::new(Kind::Copied).of_file(file.number);
        recorder.tell_of_process(event.with([u64::try_from(copy).unwrap_or(0)]), &[]);
    }
    table::set(copy, known);
}

/// Records the effect of an `fcntl` call that returned `result`; returns `result`.
fn controlled(fd: c_int, command: c_int, result: c_int) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => copied(fd, result),
        libc::F_SETFL => {
            // `O_APPEND` may have changed: the flags are read again at the next use.
            session::recording(|recorder| {
                if matches!(table::get(fd), Some(Known::File(_))) {
                    appeared(recorder, fd, false);
                }
            });
            result
        }
        _ => result,
    }
}

hooks! {
    [close __close](fd: c_int) -> c_int => |call| {
        closing(fd);
        call()
    };
    [fclose](file: *mut FILE) -> c_int => |call| {
        // SAFETY: the program passed this stream to `fclose`, so it is open.
        closing(unsafe { stream::account(file) });
        call()
    };
    [closedir](directory: *mut c_void) -> c_int => |call| {
        if !directory.is_null() {
            // SAFETY: the program passed this directory stream to `closedir`, so it is open.
            closing(unsafe { libc::dirfd(directory.cast()) });
        }
        call()
    };
    [close_range](first: c_uint, last: c_uint, flags: c_int) -> c_int => |call| {
        if flags & libc::CLOSE_RANGE_CLOEXEC.cast_signed() == 0 {
            closing_all(first, last);
        }
        call()
    };
    [closefrom](first: c_int) -> () => |call| {
        closing_all(c_uint::try_from(first).unwrap_or(0), c_uint::MAX);
        call();
    };
    [dup](fd: c_int) -> c_int => |call| copied(fd, call());
    [dup2 __dup2](original: c_int, copy: c_int) -> c_int => |call| copied(original, call());
    [dup3](original: c_int, copy: c_int, flags: c_int) -> c_int => |call| copied(original, call());
    [fcntl fcntl64 __fcntl](fd: c_int, command: c_int, argument: usize) -> c_int =>
        |call| controlled(fd, command, call());
}
