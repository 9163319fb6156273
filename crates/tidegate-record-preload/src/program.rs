//! Hooks: executing programs, and ending. The recorder is told which program, and learns from its
//! own start whether it is recorded.
#![allow(unsafe_code)] // C's calling convention and strings

use std::ffi::{c_char, c_int, c_void};

use libc::pid_t;
use tidegate_record::event::{Event, Kind};

use crate::files::{PathBuffer, text};
use crate::hook::hooks;
use crate::session::{self, Recorder};

type Argv = *const *const c_char;

fn this_process() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()
}

/// Makes a call that does not return where it succeeds.
///
/// # Safety
/// `path` is a string of the program, as the function wants it.
unsafe fn executing(path: *const c_char, call: impl FnOnce() -> c_int) -> c_int {
    session::recording(|recorder| {
        // SAFETY: as promised.
        tell(recorder, this_process(), unsafe { text(path) });
    });
    let result = call();
    session::recording(|recorder| {
        let event = Event { process: this_process(), ..Event::new(Kind::NotExecuted) };
        recorder.tell(event, &[]);
    });
    result
}

/// A name without a slash is sent as it is: the recorder searches for it.
fn tell(recorder: Recorder, process: u32, path: &[u8]) {
    let mut buffer = PathBuffer::new();
    let is_name = !path.contains(&b'/');
    let folder = if is_name { b"" } else { buffer.of_folder(libc::AT_FDCWD, path) };
    let event = Event { process, ..Event::new(Kind::Executed) };
    recorder.tell(event, &[folder, path]);
}

/// # Safety
/// A call that has returned `result`, has left the process's number at `process` and was given
/// `path`.
unsafe fn spawned(process: *const pid_t, path: *const c_char, result: c_int) -> c_int {
    if result == 0 && !process.is_null() {
        session::recording(|recorder| {
            // SAFETY: as promised.
            let process = unsafe { process.read() };
            // SAFETY: the call has succeeded.
            tell(recorder, process.unsigned_abs(), unsafe { text(path) });
        });
    }
    result
}

/// The process ends by itself, unless this is a child of `vfork` in its memory.
pub(crate) fn ending() {
    session::recording(|recorder| {
        if recorder.has_own_memory() {
            recorder.tell_of_process(Event::new(Kind::Ended), &[]);
        }
    });
}

hooks! {
    [_exit _Exit](status: c_int) -> () => |call| {
        ending();
        call();
    };
    [execve execvpe](path: *const c_char, arguments: Argv, environment: Argv) -> c_int => |call| {
        // SAFETY: the program's own path.
        unsafe { executing(path, call) }
    };
    [execv execvp](path: *const c_char, arguments: Argv) -> c_int => |call| {
        // SAFETY: the program's own path.
        unsafe { executing(path, call) }
    };
    [posix_spawn posix_spawnp](
        process: *mut pid_t,
        path: *const c_char,
        actions: *const c_void,
        attributes: *const c_void,
        arguments: Argv,
        environment: Argv
    ) -> c_int => |call| {
        let result = call();
        // SAFETY: what was just called.
        unsafe { spawned(process, path, result) }
    };
}
