//! Hooks: executing programs, and ending. Hooks report the program's path. The new program's own
//! start shows the recorder whether that program is recorded.
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

/// Makes a call that returns only on failure, and reports the attempt and the failure.
///
/// # Safety
/// `path` is a string that the program passes to the function.
unsafe fn executing(path: *const c_char, call: impl FnOnce() -> c_int) -> c_int {
    session::recording(|recorder| {
        // SAFETY: the caller passes a string of the program.
        tell(recorder, this_process(), unsafe { text(path) });
    });
    let result = call();
    session::recording(|recorder| {
        let event = Event { process: this_process(), ..Event::new(Kind::NotExecuted) };
        recorder.tell(event, &[]);
    });
    result
}

/// Reports an execution. A name without a slash is sent unchanged: the recorder searches `PATH`.
fn tell(recorder: Recorder, process: u32, path: &[u8]) {
    let mut buffer = PathBuffer::new();
    let is_name = !path.contains(&b'/');
    let folder = if is_name { b"" } else { buffer.of_folder(libc::AT_FDCWD, path) };
    let event = Event { process, ..Event::new(Kind::Executed) };
    recorder.tell(event, &[folder, path]);
}

/// # Safety
/// A call with `path` has returned `result` and, on success, stored the process's number at
/// `process`.
unsafe fn spawned(process: *const pid_t, path: *const c_char, result: c_int) -> c_int {
    if result == 0 && !process.is_null() {
        session::recording(|recorder| {
            // SAFETY: not null, and the successful call has stored the number there.
            let process = unsafe { process.read() };
            // SAFETY: the call with this path has succeeded.
            tell(recorder, process.unsigned_abs(), unsafe { text(path) });
        });
    }
    result
}

/// Reports that the process exits, unless it is a child of `vfork` in its parent's memory.
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
        // SAFETY: the call with `path` and `process` has just returned `result`.
        unsafe { spawned(process, path, result) }
    };
}
