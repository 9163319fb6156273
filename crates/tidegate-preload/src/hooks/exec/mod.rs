//! Hooks: programs that this process starts, which are to have the library too.
//!
//! Invariants:
//! 1. A program that can load the library has it, whatever environment its caller passes.
//! 2. Before a program starts that will not have the library, or will not find the log, all files
//!    leave the log. None comes back while that program lives: it may change any file unseen. A
//!    program with system calls of its own has the library, which makes the files leave when it is
//!    loaded. If the user trusts the program, the supervisor is only told, and files stay in the
//!    log.
//! 3. After a process gives up rights, the programs that it starts do not map the log either: they
//!    may still have the right to open the pool.
//! 4. Nothing here touches the heap: it may run in a child of `vfork`.
//!
//! Entry points: `hooks`, which programs call; [`remember`] at load.

#![allow(unsafe_code)] // the environment

mod hooks;
mod memory;
mod program;
mod session;

use std::ffi::{CStr, c_char, c_int};

pub(crate) use hooks::{execve, execveat};
use program::{Judged, Verdict};
pub(crate) use program::{library_makes_own_calls, own_cause};
pub(crate) use session::remember;
use session::{Session, strings};
use tidegate::log::cover::Cause;
use tidegate_interpose::environment::{self, Additions};

use crate::covered::{metadata, unseen};
use crate::state::suspended::Suspended;
use crate::state::{process, supervisor};
use crate::sys::readable::{is_readable, name_of_program, text_up_to};

/// A NULL-terminated array of strings.
type Argv = *const *const c_char;

/// A program to be started, as the arguments of a call name it.
struct Program<'a> {
    directory: c_int,
    path: &'a CStr,
    flags: c_int,
    argv: Argv,
    /// The C library opens files for the program before it starts, and may create or empty them.
    opens: bool,
}

impl Program<'_> {
    /// Returns whether the program is the dynamic linker that only lists or checks libraries.
    fn is_asked_for_lists(&self) -> bool {
        const REQUESTS: [&CStr; 4] = [c"--verify", c"--list", c"--help", c"--version"];
        let name = crate::state::objects::name_of(self.path.to_bytes());
        if !name.starts_with(b"ld-linux") || !is_readable_list(self.argv) {
            return false;
        }
        let first = strings(self.argv).get(1);
        first.and_then(|first| name_of_program(*first)).is_some_and(|name| REQUESTS.contains(&name))
    }
}

/// How this process starts the program.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// This process becomes the program: a call that returns has failed.
    Exec,
    /// This process gets a child; the C library stores its number here, and returns 0 or an errno.
    Spawn(*mut libc::pid_t),
}

/// Calls `start` with the environment that the program is to have. If the program will not have the
/// library, all files leave the log before.
fn starting(
    program: &Program<'_>,
    way: Way,
    environment: Argv,
    start: impl FnOnce(Argv) -> c_int,
) -> c_int {
    let start = |envp| if program.opens { metadata::counted(|| start(envp)) } else { start(envp) };
    let Some(session) = Session::get().filter(|_| is_readable_list(environment)) else {
        return start(environment);
    };
    if environment::only_lists(strings(environment)) || program.is_asked_for_lists() {
        return with_additions(&additions(session, false), environment, start);
    }
    if process::log().is_none() && !process::has_given_up() {
        return start(environment);
    }
    let judged = program::judge(program.directory, program.path, program.flags);
    // Checked after `judge`: it returns `Missing` if another thread has given the log up by then.
    if process::has_given_up() {
        return with_additions(&additions(session, false), environment, start);
    }
    if judged.verdict == Verdict::Missing {
        return start(environment);
    }
    let additions = additions(session, judged.verdict != Verdict::AloneUnnamed);
    let suspension = suspension_for(program, &judged);
    let suspended = suspension.as_ref().map(|why| Suspended::new(why.cause, why.program));
    if way == Way::Exec {
        unseen::release();
    }
    let result = with_additions(&additions, environment, start);
    if way == Way::Exec {
        unseen::take_again();
    }
    if let Some(suspension) = suspension {
        suspension.hand_on(way, result, suspended);
    }
    result
}

/// A program for whose life logging is suspended.
struct Suspension<'a> {
    cause: Option<Cause>,
    program: &'a CStr,
}

/// Returns why logging has to be suspended before the program starts, or `None` if it need not be.
fn suspension_for<'a>(program: &Program<'a>, judged: &Judged) -> Option<Suspension<'a>> {
    let program = program.path;
    if judged.verdict == Verdict::Preloaded {
        let cause = Some(Cause::HiddenLog);
        return (!process::can_find_log()).then_some(Suspension { cause, program });
    }
    if judged.is_trusted {
        supervisor::tell_trusted(program);
        return None;
    }
    Some(Suspension { cause: judged.cause, program })
}

impl Suspension<'_> {
    /// Hands the suspension over to a child that was started: logging stays suspended while the
    /// child lives, and no longer for this process.
    fn hand_on(&self, way: Way, result: c_int, suspended: Option<Suspended>) {
        if let Way::Spawn(child) = way
            && result == 0
        {
            // SAFETY: the caller's pointer, or null; the C library has just written the number.
            let child = unsafe { child.as_ref() }.and_then(|child| u32::try_from(*child).ok());
            // The child's number is not known: logging stays suspended while this process lives.
            let Some(child) = child else { return std::mem::forget(suspended) };
            supervisor::suspend(child, self.cause, self.program);
        }
        drop(suspended);
    }
}

/// Returns whether the kernel can read a list of strings, and all its strings. If it cannot, the
/// call that starts the program fails.
fn is_readable_list(list: Argv) -> bool {
    /// The kernel accepts no longer string.
    const STRING_BYTES_MAX: usize = 128 << 10;
    // After the log was given up, the kernel is not asked: the caller's list is taken as valid.
    let mut place = if process::has_given_up() { std::ptr::null() } else { list };
    while !place.is_null() {
        if !is_readable(place.cast(), size_of::<*const c_char>()) {
            return false;
        }
        // SAFETY: `is_readable` has checked this entry of the list.
        let string = unsafe { *place };
        if string.is_null() {
            break;
        }
        if text_up_to(string, STRING_BYTES_MAX).is_none() {
            return false;
        }
        place = place.wrapping_add(1);
    }
    true
}

fn additions(session: &Session, preload: bool) -> Additions<'_> {
    Additions { library: session.library, preload, variables: session.variables() }
}

fn with_additions(
    additions: &Additions<'_>,
    environment: Argv,
    start: impl FnOnce(Argv) -> c_int,
) -> c_int {
    let theirs = strings(environment);
    let Some(needed_bytes) = additions.needed_bytes(theirs) else { return start(environment) };
    memory::with(needed_bytes, |memory| {
        let built = memory.and_then(|memory| additions.build(theirs, memory));
        start(built.map_or(environment, <[_]>::as_ptr))
    })
}

/// Calls `start`: the C library starts a shell with the environment of this process as it is.
fn starting_shell<R>(start: impl FnOnce() -> R) -> R {
    if process::has_given_up() {
        session::hide_pool();
        return start();
    }
    let (Some(_), Some(session)) = (process::log(), Session::get()) else { return start() };
    if additions(session, true).needed_bytes(session::environment()).is_some() {
        // The program has cleared its environment: the shell runs unwatched, for an unknown time.
        supervisor::suspend(process::number(), Some(Cause::DroppedLibrary), c"");
    }
    start()
}
