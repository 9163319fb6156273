//! Hooks: opening files. The file of a descriptor is reported at the first use of the descriptor.
//! Only the effect of `O_TRUNC` is reported here.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_char, c_int, c_uint};

use tidegate_record::event::{Event, Kind};

use crate::files;
use crate::hook::hooks;
use crate::session::{self, Recorder};
use crate::table::{self, Known};

/// Notes the result of an open with `flags`, which may be a failure; returns `fd`.
fn opened(fd: c_int, flags: c_int) -> c_int {
    if fd >= 0 {
        session::recording(|recorder| appeared(recorder, fd, flags & libc::O_TRUNC != 0));
    }
    fd
}

/// Notes a new descriptor whose file is not examined yet. Reports the truncation if `is_emptied`.
pub(crate) fn appeared(recorder: Recorder, fd: c_int, is_emptied: bool) {
    if recorder.has_own_memory() {
        table::set(fd, Known::Nothing);
    }
    if is_emptied
        && files::stat_open(fd).is_some_and(|found| files::is_regular(&found))
        && let Some(file) = files::of(recorder, fd)
    {
        recorder.tell(Event::new(Kind::Resized).of_file(file.number), &[]);
    }
}

hooks! {
    [open open64 __open __open64](path: *const c_char, flags: c_int, mode: c_uint) -> c_int =>
        |call| opened(call(), flags);
    [__open_2 __open64_2](path: *const c_char, flags: c_int) -> c_int =>
        |call| opened(call(), flags);
    [openat openat64](
        directory: c_int, path: *const c_char, flags: c_int, mode: c_uint
    ) -> c_int => |call| opened(call(), flags);
    [__openat_2 __openat64_2](directory: c_int, path: *const c_char, flags: c_int) -> c_int =>
        |call| opened(call(), flags);
    [creat creat64](path: *const c_char, mode: c_uint) -> c_int =>
        |call| opened(call(), libc::O_TRUNC);
}
