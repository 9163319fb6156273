//! Hooks: the C functions that start programs.
#![allow(unsafe_code)] // C's functions
#![allow(clippy::missing_safety_doc)] // the manual page of each function says it

use std::ffi::{CStr, c_char, c_int, c_void};

use super::session::environment;
use super::{Argv, Program, Way, starting, starting_shell};
use crate::covered::unseen;
use crate::sys::path::PathBuffer;
use crate::sys::raw::{self, words};
use crate::sys::readable::{name_of_program, text};
use crate::sys::{next, query};

type ActionsAt = *const c_void;
type AttributesAt = *const c_void;

/// Executes a program as `execveat` does. Returns only if that fails.
fn execute(directory: c_int, path: *const c_char, argv: Argv, envp: Argv, flags: c_int) -> c_int {
    let (number, arguments) = if directory == libc::AT_FDCWD && flags == 0 {
        (libc::SYS_execve, words![path, argv, envp])
    } else {
        (libc::SYS_execveat, words![directory, path, argv, envp, flags])
    };
    let environment_at = if number == libc::SYS_execve { 2 } else { 3 };
    let start = |envp: Argv| {
        let mut arguments = arguments;
        arguments[environment_at] = envp.expose_provenance();
        // SAFETY: the arguments are the caller's; `starting` may have built the environment.
        let result = unsafe { raw::call(number, arguments) };
        c_int::try_from(result).unwrap_or(-libc::EIO)
    };
    let result = match name_of_program(path) {
        Some(path) => starting(
            &Program { directory, path, flags, argv, opens: false },
            Way::Exec,
            envp,
            start,
        ),
        None => start(envp),
    };
    c_int::try_from(raw::returned(result as isize)).unwrap_or(-1)
}

/// Finds the file that a name stands for, by the C library's search, if there is one.
fn found(name: *const c_char, buffer: &mut PathBuffer) -> Option<&CStr> {
    let name = name_of_program(name)?.to_bytes();
    if name.contains(&b'/') {
        buffer.push(name).ok()?;
        return Some(buffer.as_c_str());
    }
    tidegate_interpose::environment::search(environment(), |directory| {
        buffer.clear();
        [directory, b"/", name].iter().try_for_each(|part| buffer.push(part)).ok()?;
        is_executable(buffer.as_c_str()).then_some(())
    })?;
    Some(buffer.as_c_str())
}

fn is_executable(path: &CStr) -> bool {
    let arguments = words![libc::AT_FDCWD, path.as_ptr(), libc::X_OK];
    // SAFETY: a terminated path.
    unsafe { query::call(libc::SYS_faccessat, arguments) }.is_ok()
}

/// Runs `start` for the program that the search finds for this name.
fn with_found(
    name: *const c_char,
    way: Way,
    opens: bool,
    (argv, envp): (Argv, Argv),
    start: impl FnOnce(Argv) -> c_int,
) -> c_int {
    let mut buffer = PathBuffer::new();
    // No program has the empty path.
    let path = found(name, &mut buffer).unwrap_or_default();
    starting(&Program { directory: libc::AT_FDCWD, path, flags: 0, argv, opens }, way, envp, start)
}

fn execute_found(name: *const c_char, argv: Argv, envp: Argv) -> c_int {
    with_found(name, Way::Exec, false, (argv, envp), |envp| {
        let Some(execvpe) = next::execvpe.get() else { return raw::failed_int(libc::ENOSYS) };
        // SAFETY: the C library's function of this type, with the caller's arguments.
        unsafe { execvpe(name, argv, envp) }
    })
}

fn opens(actions: ActionsAt) -> bool {
    !actions.is_null()
}

macro_rules! hooks {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty $body:block)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> $result $body
    )*};
}

hooks! {
    execve(path: *const c_char, argv: Argv, envp: Argv) -> c_int {
        execute(libc::AT_FDCWD, path, argv, envp, 0)
    }
    execv(path: *const c_char, argv: Argv) -> c_int {
        execute(libc::AT_FDCWD, path, argv, environment().as_ptr(), 0)
    }
    execvp(name: *const c_char, argv: Argv) -> c_int {
        execute_found(name, argv, environment().as_ptr())
    }
    execvpe(name: *const c_char, argv: Argv, envp: Argv) -> c_int {
        execute_found(name, argv, envp)
    }
    fexecve(fd: c_int, argv: Argv, envp: Argv) -> c_int {
        execute(fd, c"".as_ptr(), argv, envp, libc::AT_EMPTY_PATH)
    }
    execveat(directory: c_int, path: *const c_char, argv: Argv, envp: Argv, flags: c_int) -> c_int {
        execute(directory, path, argv, envp, flags)
    }
    posix_spawn(pid: *mut libc::pid_t, path: *const c_char, actions: ActionsAt, attributes: AttributesAt, argv: Argv, envp: Argv) -> c_int {
        let start = |envp| match next::posix_spawn.get() {
            // SAFETY: the C library's function of this type, with the caller's arguments.
            Some(spawn) => unsafe { spawn(pid, path, actions, attributes, argv, envp) },
            None => libc::ENOSYS,
        };
        let Some(path) = name_of_program(path) else { return start(envp) };
        let opens = opens(actions);
        let program = Program { directory: libc::AT_FDCWD, path, flags: 0, argv, opens };
        starting(&program, Way::Spawn(pid), envp, start)
    }
    posix_spawnp(pid: *mut libc::pid_t, name: *const c_char, actions: ActionsAt, attributes: AttributesAt, argv: Argv, envp: Argv) -> c_int {
        with_found(name, Way::Spawn(pid), opens(actions), (argv, envp), |envp| match next::posix_spawnp.get() {
            // SAFETY: the C library's function of this type, with the caller's arguments.
            Some(spawn) => unsafe { spawn(pid, name, actions, attributes, argv, envp) },
            None => libc::ENOSYS,
        })
    }
    posix_spawn_file_actions_addopen(actions: *mut c_void, fd: c_int, path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
        let Some(add) = next::posix_spawn_file_actions_addopen.get() else { return libc::ENOSYS };
        // The C library empties the file in the child, at an unknown time. A program notes its
        // standard output itself when it starts; other files stay out of the log.
        if flags & libc::O_TRUNC != 0 && let Some(path) = text(path) {
            let is_noted_at_start = matches!(fd, libc::STDOUT_FILENO | libc::STDERR_FILENO);
            unseen::about_to_change(libc::AT_FDCWD, path, !is_noted_at_start);
        }
        // SAFETY: the C library's function of this type, with the caller's arguments.
        unsafe { add(actions, fd, path, flags, mode) }
    }
    system(command: *const c_char) -> c_int {
        starting_shell(|| match next::system.get() {
            // SAFETY: the C library's function of this type, with the caller's arguments.
            Some(system) => unsafe { system(command) },
            None => -1,
        })
    }
    wordexp(words: *const c_char, result: *mut c_void, flags: c_int) -> c_int {
        /// `WRDE_NOSPACE`.
        const NO_SPACE: c_int = 1;
        starting_shell(|| match next::wordexp.get() {
            // SAFETY: the C library's function of this type, with the caller's arguments.
            Some(wordexp) => unsafe { wordexp(words, result, flags) },
            None => NO_SPACE,
        })
    }
    popen(command: *const c_char, mode: *const c_char) -> *mut c_void {
        starting_shell(|| match next::popen.get() {
            // SAFETY: the C library's function of this type, with the caller's arguments.
            Some(popen) => unsafe { popen(command, mode) },
            None => std::ptr::null_mut(),
        })
    }
}

/// Runs `execl`: `argv` holds the arguments after the path, NULL included.
unsafe extern "C-unwind" fn execl_listed(path: *const c_char, argv: Argv) -> c_int {
    execute(libc::AT_FDCWD, path, argv, environment().as_ptr(), 0)
}

/// Runs `execlp`: `argv` holds the arguments after the name, NULL included.
unsafe extern "C-unwind" fn execlp_listed(name: *const c_char, argv: Argv) -> c_int {
    execute_found(name, argv, environment().as_ptr())
}

/// Runs `execle`: the environment follows the NULL of `argv`.
unsafe extern "C-unwind" fn execle_listed(path: *const c_char, argv: Argv) -> c_int {
    let arguments = super::strings(argv);
    // SAFETY: a caller of `execle` passes one more argument after the NULL.
    let behind = unsafe { argv.add(arguments.len() + 1) };
    // SAFETY: `behind` points to that argument.
    let envp: Argv = unsafe { *behind }.cast();
    execute(libc::AT_FDCWD, path, argv, envp, 0)
}

tidegate_interpose::listed! {
    execl => execl_listed;
    execlp => execlp_listed;
    execle => execle_listed;
}
