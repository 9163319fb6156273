//! What is done when the library is loaded, and when the process forks and ends.
//!
//! Invariant: nothing lasting is made in the program: no thread, no signal handler, no descriptor.
#![allow(unsafe_code)] // the load-time constructor, and fork handlers

use std::ffi::{c_char, c_int};

use tidegate::log::cover::Cause;

use crate::covered::{self, unseen};
use crate::hooks::{exec, loading, stdio};
use crate::state::process::Attached;
use crate::state::{descriptors, process, record_locks, supervisor, suspended};
use crate::sys::{next, signals};

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
static LOADED: unsafe extern "C" fn(c_int, Strings, Strings) = loaded;

type Strings = *const *const c_char;

/// The dynamic linker calls it with the arguments of `main`, before the constructors of all other
/// libraries, the C library's included.
unsafe extern "C" fn loaded(_count: c_int, _arguments: Strings, environment: Strings) {
    unsafe extern "C" {
        static mut environ: Strings;
    }
    // SAFETY: the C library's own; no other thread runs yet.
    if unsafe { environ }.is_null() {
        // SAFETY: as above. The C library sets it in its constructor to the same.
        unsafe { environ = environment };
    }
    match std::env::var_os("TIDEGATE_POOL") {
        // Of a process that has given the log up, for which logging is suspended.
        Some(pool) if pool.is_empty() => return process::refuse_log(Cause::Rights),
        Some(_) => {}
        None => return,
    }
    next::resolve();
    // SAFETY: a function that lives as long as the process.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
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
    signals::find_handlers();
    process::use_log(attached);
    supervisor::announce();
    covered::note_standard();
}

/// What the environment names; or why this process cannot use it.
fn attach() -> Result<Attached, Cause> {
    // First: it also tells where the supervisor is.
    let attached = process::attach();
    match exec::own_cause(attached.as_ref()) {
        Some(cause) => Err(cause),
        None => attached.filter(|_| descriptors::make().is_ok()).ok_or_else(|| {
            let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
            if limit.is_some() { Cause::MemoryLimit } else { Cause::Rights }
        }),
    }
}

/// Has the supervisor suspend logging for this process, which has given the log up.
fn suspend() {
    supervisor::suspend(process::number(), Some(process::cause()), c"");
}

/// In the child: it is another process to the supervisor.
pub(crate) extern "C" fn forked() {
    let had_own_descriptors = process::become_child();
    record_locks::become_child();
    suspended::become_child();
    // First: the parent's thread that gave the log up may not have come to its memory.
    if process::has_given_up() {
        // Where a filter may kill, the supervisor finds the child by its environment.
        if !process::is_filtered() {
            suspend();
        }
        return;
    }
    if let Some(log) = process::log() {
        log.ring().forget_pages();
    }
    if had_own_descriptors {
        // What is noted is about those of the parent's other threads.
        descriptors::each(0, u32::MAX, |fd, _| {
            descriptors::clear(fd);
        });
    }
    // Both processes can write now, and each will give its own pins back.
    unseen::take_again();
    supervisor::announce();
}

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".fini_array"))]
static UNLOADED: extern "C" fn() = unloaded;

/// The process ends. What the C library still has to write for standard output goes first.
extern "C" fn unloaded() {
    stdio::flush_standard();
    if process::every_write() {
        // SAFETY: all streams.
        unsafe { stdio::flush_stream(std::ptr::null_mut()) };
    }
    unseen::release();
}
