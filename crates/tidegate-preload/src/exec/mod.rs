//! Programs that this process starts: they are to have the library too.
//!
//! Invariants:
//! 1. A program that can have the library has it, whatever environment its caller passes.
//! 2. Before a program starts that will not have it, the files behind the descriptors that it inherits leave the log: it
//!    may change them unseen. A descriptor whose `O_SYNC` was taken away cannot get it back: such a program does not
//!    get what it was promised, and the manual says so.
//! 3. Nothing here touches the heap: it may run in a child of `vfork`.
//!
//! Entry points: `hooks` are what programs call; [`remember`] at load.

#![allow(unsafe_code)] // the environment

mod environment;
mod hand_over;
mod hooks;
mod image;
mod memory;
mod program;
mod session;

use std::ffi::{CStr, c_char, c_int};

use environment::Additions;
pub(crate) use environment::SYNC_ALL;
use hand_over::List;
pub(crate) use hand_over::each_open;
pub(crate) use hooks::{execve, execveat};
use program::Verdict;
pub(crate) use session::remember;
use session::{Session, strings};

use crate::readable::{is_readable, text_up_to};
use crate::{absorb, process, unseen};

/// A NULL-terminated array of strings.
type Argv = *const *const c_char;

/// A program to be started, as the arguments of a call name it.
struct Program<'a> {
    directory: c_int,
    path: &'a CStr,
    flags: c_int,
    /// Descriptors may be moved before it starts.
    moves: bool,
}

/// What happens to this process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// It becomes the program: who comes back has failed.
    Exec,
    /// It gets a child, or an error's number.
    Spawn,
}

/// Calls `start` with the environment that the program is to have, and sees to the files that this process and the
/// program change unseen.
fn starting(
    program: &Program<'_>,
    way: Way,
    environment: Argv,
    start: impl FnOnce(Argv) -> c_int,
) -> c_int {
    let (Some(_), Some(session)) = (process::log(), Session::get()) else {
        return start(environment);
    };
    if !is_readable_list(environment) {
        return start(environment);
    }
    let verdict = program::judge(program.directory, program.path, program.flags);
    if verdict == Verdict::Missing {
        return start(environment);
    }
    // Behind `exec` nobody knows what is absorbed; what is spawned shares the descriptors.
    absorb::sharing();
    let runs_alone = verdict != Verdict::Preloaded;
    let list = if runs_alone { List::EMPTY } else { List::of_stripped(program.moves) };
    let additions = additions(session, verdict != Verdict::AloneUnnamed, &list);
    if runs_alone {
        hand_over::mark_inherited(program.moves);
    }
    if way == Way::Exec {
        unseen::release();
    }
    let result = with_additions(&additions, environment, start);
    let failed = way == Way::Exec || result != 0;
    absorb::shared();
    if way == Way::Exec {
        unseen::take_again();
    }
    if runs_alone && failed {
        hand_over::unmark_inherited(program.moves);
    }
    result
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

fn additions<'a>(session: &'a Session, preload: bool, list: &'a List) -> Additions<'a> {
    Additions {
        library: session.library,
        preload,
        variables: session.variables(),
        sync_fds: list.as_bytes(),
    }
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

/// Calls `start`, by which the C library starts a shell with the environment of this process as it is.
fn starting_shell<R>(start: impl FnOnce() -> R) -> R {
    let (Some(_), Some(session)) = (process::log(), Session::get()) else { return start() };
    let list = List::of_stripped(false);
    let told = Told::of(&list);
    let additions = additions(session, true, &list);
    if additions.needed_bytes(session::environment()).is_some() {
        // The program has cleared its environment: the shell runs alone.
        hand_over::mark_inherited(false);
    }
    absorb::sharing();
    let result = start();
    absorb::shared();
    drop(told);
    result
}

/// While this lives, the environment of this process tells which descriptors were opened with `O_SYNC`. Seldom: such
/// descriptors are rarely inherited by a shell.
struct Told;

impl Told {
    fn of(list: &List) -> Option<Self> {
        if list.as_bytes().is_empty() {
            return None;
        }
        // SAFETY: two terminated strings. The C library's callers know that it reads the environment now.
        unsafe { libc::setenv(environment::SYNC_FDS_NAME.as_ptr(), list.as_c_str().as_ptr(), 1) };
        Some(Self)
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        // SAFETY: a terminated string.
        unsafe { libc::unsetenv(environment::SYNC_FDS_NAME.as_ptr()) };
    }
}
