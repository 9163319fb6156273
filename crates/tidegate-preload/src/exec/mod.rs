//! Programs that this process starts: they are to have the library too.
//!
//! Invariants:
//! 1. A program that can have the library has it, whatever environment its caller passes.
//! 2. Before a program starts that will not have it, all files leave the log, and none comes back
//!    while it lives: it may change any of them unseen. One that the user trusts only is told of.
//! 3. What a process starts that has given up rights does not map the log either: it may still have
//!    the right to open the pool.
//! 4. Nothing here touches the heap: it may run in a child of `vfork`.
//!
//! Entry points: `hooks` are what programs call; [`remember`] at load.

#![allow(unsafe_code)] // the environment

mod environment;
mod hooks;
mod image;
mod memory;
mod program;
mod session;

use std::ffi::{CStr, c_char, c_int};

use environment::Additions;
pub(crate) use hooks::{execve, execveat};
use program::Verdict;
pub(crate) use session::remember;
use session::{Session, strings};

use crate::readable::{is_readable, text_up_to};
use crate::{metadata, process, supervisor, unseen};

/// A NULL-terminated array of strings.
type Argv = *const *const c_char;

/// A program to be started, as the arguments of a call name it.
struct Program<'a> {
    directory: c_int,
    path: &'a CStr,
    flags: c_int,
    /// The C library opens files for it before it starts, and may make or empty them.
    opens: bool,
}

/// What happens to this process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// It becomes the program: a call that returns has failed.
    Exec,
    /// It gets a child, whose number is put there, or an error's number.
    Spawn(*mut libc::pid_t),
}

/// Calls `start` with the environment that the program is to have. Where the program will not have
/// the library, all files have left the log by then.
fn starting(
    program: &Program<'_>,
    way: Way,
    environment: Argv,
    start: impl FnOnce(Argv) -> c_int,
) -> c_int {
    let Some(session) = Session::get().filter(|_| is_readable_list(environment)) else {
        return start(environment);
    };
    if process::has_given_up() {
        return with_additions(&additions(session, false), environment, start);
    }
    if process::log().is_none() {
        return start(environment);
    }
    let judged = program::judge(program.directory, program.path, program.flags);
    let verdict = judged.verdict;
    if verdict == Verdict::Missing {
        return start(environment);
    }
    let additions = additions(session, verdict != Verdict::AloneUnnamed);
    let is_alone = verdict != Verdict::Preloaded;
    let suspends = is_alone && !judged.is_trusted;
    if suspends {
        supervisor::suspend(process::number(), cause_of(verdict));
    } else if is_alone {
        supervisor::tell_trusted(program.path);
    }
    if way == Way::Exec {
        unseen::release();
    }
    let run = || with_additions(&additions, environment, start);
    let result = if program.opens { metadata::counted(run) } else { run() };
    if way == Way::Exec {
        unseen::take_again();
    }
    if suspends {
        hand_suspension_on(way, cause_of(verdict), result);
    }
    result
}

/// Why a program cannot be watched, in the supervisor's words, as far as that is told apart.
fn cause_of(verdict: Verdict) -> Option<&'static str> {
    (verdict == Verdict::AloneUnnamed).then_some("other_libc")
}

/// After the start of a program without the library: it is the child for whose life logging is
/// suspended, if there is one, and not this process.
fn hand_suspension_on(way: Way, cause: Option<&str>, result: c_int) {
    if let Way::Spawn(child) = way
        && result == 0
    {
        // SAFETY: the program's own, or null; the C library has just written it.
        let child = unsafe { child.as_ref() }.and_then(|child| u32::try_from(*child).ok());
        // Whose number is not known, for its life this process stands.
        let Some(child) = child else { return };
        supervisor::suspend(child, cause);
    }
    supervisor::resume(process::number());
}

/// Whether the kernel could read a list of strings, too; where it cannot, it will say so.
fn is_readable_list(list: Argv) -> bool {
    /// No program can be started with a longer one.
    const STRING_BYTES_MAX: usize = 128 << 10;
    let mut place = list;
    while !place.is_null() {
        if !is_readable(place.cast(), size_of::<*const c_char>()) {
            return false;
        }
        // SAFETY: readable.
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

/// Calls `start`, by which the C library starts a shell with the environment of this process as it
/// is.
fn starting_shell<R>(start: impl FnOnce() -> R) -> R {
    if process::has_given_up() {
        session::hide_pool();
        return start();
    }
    let (Some(_), Some(session)) = (process::log(), Session::get()) else { return start() };
    if additions(session, true).needed_bytes(session::environment()).is_some() {
        // The program has cleared its environment: the shell runs alone, for how long is not known.
        supervisor::suspend(process::number(), Some("dropped_library"));
    }
    start()
}
