//! The session's variables, copied from the environment when the library is loaded: programs that
//! this process starts need them.
//!
//! The program may clear its environment, and `setproctitle` writes over it.
#![allow(unsafe_code)] // the environment, and the linker's answers

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use tidegate_interpose::environment::{self, Strings};

use crate::state::objects;
use crate::sys::page;

const VARIABLES_MOST: usize = 12;
const PREFIX: &[u8] = b"TIDEGATE_";

/// The path and the variables that are passed on.
pub(super) struct Session {
    /// The library, as `LD_PRELOAD` names it.
    pub(super) library: &'static [u8],
    variables: [&'static CStr; VARIABLES_MOST],
    count: usize,
}

static SESSION: OnceLock<Session> = OnceLock::new();

impl Session {
    pub(super) fn get() -> Option<&'static Self> {
        SESSION.get()
    }

    /// Returns the session's variables, each as `NAME=value`.
    pub(super) fn variables(&self) -> &[&'static CStr] {
        &self.variables[..self.count.min(VARIABLES_MOST)]
    }
}

/// Copies the session's variables. To be called once, when the library is loaded. If it fails,
/// programs start with the environment that their caller passes.
pub(crate) fn remember() {
    let Some(library) = objects::own_path().map(CStr::to_bytes) else { return };
    let mut session = Session { library, variables: [c""; VARIABLES_MOST], count: 0 };
    for &entry in environment() {
        // SAFETY: the entries of the environment are terminated strings.
        let entry = unsafe { CStr::from_ptr(entry) };
        let bytes = entry.to_bytes();
        if bytes.starts_with(PREFIX) && session.count < VARIABLES_MOST {
            let Some(copy) = copied(entry) else { return };
            session.variables[session.count] = copy;
            session.count += 1;
        }
    }
    let _ = SESSION.set(session);
}

/// Returns the program's environment.
pub(super) fn environment() -> Strings<'static> {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    // SAFETY: the C library defines it. A program changes it only while no other thread reads it.
    let array = unsafe { environ };
    strings(array)
}

/// Empties the path of the pool in the environment: programs started with it cannot map the pool.
pub(super) fn hide_pool() {
    const POOL: &[u8] = b"TIDEGATE_POOL=";
    for &entry in environment() {
        // SAFETY: the entries of the environment are terminated strings.
        if unsafe { CStr::from_ptr(entry) }.to_bytes().starts_with(POOL) {
            let value = entry.cast_mut().wrapping_add(POOL.len());
            // SAFETY: at least the terminating NUL is there. The string is writable: the kernel put
            // it on the stack, or `setenv` on the heap.
            unsafe { value.write(0) };
        }
    }
}

/// Returns the strings of a NULL-terminated array without the NULL; none if `array` is null.
pub(super) fn strings<'a>(array: *const *const c_char) -> Strings<'a> {
    // SAFETY: a list of terminated strings, which stay for the length of the call.
    unsafe { environment::strings(array) }
}

/// Copies a string for the life of the process, to memory outside of the program's heap.
fn copied(text: &CStr) -> Option<&'static CStr> {
    let bytes = text.to_bytes_with_nul();
    let at = page::map(bytes.len())?;
    // SAFETY: a new mapping of `bytes.len()` bytes, which is never unmapped.
    let copy: &'static mut [u8] = unsafe { std::slice::from_raw_parts_mut(at.cast(), bytes.len()) };
    copy.copy_from_slice(bytes);
    CStr::from_bytes_with_nul(copy).ok()
}
