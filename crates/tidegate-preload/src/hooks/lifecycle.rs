//! Work at load, at fork and at exit.
//!
//! Invariant: the library leaves no thread, no signal handler and no descriptor in the program.
#![allow(unsafe_code)] // the load-time constructor, and fork handlers

use std::ffi::{c_char, c_int};

use tidegate::log::cover::Cause;

use crate::covered::{self, unseen};
use crate::hooks::{exec, loading, names, stdio};
use crate::state::process::Attached;
use crate::state::{descriptors, inherited, process, record_locks, supervisor, suspended};
use crate::sys::{handlers, next};

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
static LOADED: unsafe extern "C" fn(c_int, Strings, Strings) = loaded;

type Strings = *const *const c_char;

/// Attaches to the log. The dynamic linker calls it with the arguments of `main`, before the
/// constructors of all other libraries, including the C library's.
unsafe extern "C" fn loaded(_count: c_int, _arguments: Strings, environment: Strings) {
    unsafe extern "C" {
        static mut environ: Strings;
    }
    // SAFETY: the C library defines it, and no other thread runs yet.
    if unsafe { environ }.is_null() {
        // SAFETY: no other thread runs yet. The C library's constructor sets it to this value, too.
        unsafe { environ = environment };
    }
    match std::env::var_os("TIDEGATE_POOL") {
        // A process that has given the log up started this one, and logging is suspended.
        Some(pool) if pool.is_empty() => return process::refuse_log(Cause::Rights),
        Some(_) => {}
        None => return,
    }
    next::resolve();
    names::find_bind();
    // SAFETY: the function lives as long as the process.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    // This comes first: the library opens the program's files from now on.
    let has_lease = record_locks::note_inherited();
    let attached = match attach() {
        Ok(attached) => attached,
        Err(cause) => {
            process::refuse_log(cause);
            return suspend();
        }
    };
    exec::remember();
    loading::remember();
    process::find_file_limit();
    handlers::find_handlers();
    process::use_log(attached);
    supervisor::announce();
    covered::note_standard();
    if has_lease {
        inherited::each(|fd, held| {
            if held.lease {
                covered::leave_for_lease(fd);
            }
        });
    }
}

/// Attaches to the log that the environment names, or returns why this process cannot use it.
fn attach() -> Result<Attached, Cause> {
    // This comes first: it also finds the socket of the supervisor.
    let attached = process::attach();
    match exec::own_cause(attached.as_ref()) {
        Some(cause) => Err(cause),
        None => attached.filter(|_| descriptors::make().is_ok()).ok_or_else(|| {
            let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
            if limit.is_some() { Cause::MemoryLimit } else { Cause::Rights }
        }),
    }
}

/// Asks the supervisor to suspend logging for this process, which has given the log up.
fn suspend() {
    supervisor::suspend(process::number(), Some(process::cause()), c"");
}

/// Makes a forked child a process of its own, also for the supervisor.
pub(crate) extern "C" fn forked() {
    let had_own_descriptors = process::become_child();
    record_locks::become_child();
    suspended::become_child();
    // This comes first: a thread of the parent may have been about to unmap the log.
    if process::has_given_up() {
        // If a filter may kill for the call, the supervisor finds the child by its environment.
        if !process::is_filtered() {
            suspend();
        }
        return;
    }
    if let Some(log) = process::log() {
        log.ring().forget_pages();
    }
    if had_own_descriptors {
        // The table describes the descriptors of the parent's other threads.
        descriptors::each(0, u32::MAX, |fd, _| {
            descriptors::clear(fd);
        });
    }
    // Both processes can write now, and each gives back its own pins.
    unseen::take_again();
    supervisor::announce();
}

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".fini_array"))]
static UNLOADED: extern "C" fn() = unloaded;

/// Runs when the process ends. Flushes standard output before the pins are given back, and all
/// streams if each write is synced.
extern "C" fn unloaded() {
    stdio::flush_standard();
    if process::every_write() {
        // The process ends, so nobody can be told of a failure.
        let _ = stdio::flush_and_sync_all();
    }
    unseen::release();
}
