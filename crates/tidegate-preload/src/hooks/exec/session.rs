//! What the environment of this process said of the session when it was loaded: what programs that
//! it starts have to be told.
//!
//! The program may clear its environment, and `setproctitle` writes over it: so there is a copy,
//! made once.
#![allow(unsafe_code)] // the environment, and the linker's answers

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use super::environment::Strings;
use crate::state::objects;
use crate::sys::page;

const VARIABLES_MOST: usize = 12;
const PREFIX: &[u8] = b"TIDEGATE_";

/// What has to be passed on.
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

    /// `NAME=value`, each.
    pub(super) fn variables(&self) -> &[&'static CStr] {
        &self.variables[..self.count.min(VARIABLES_MOST)]
    }
}

/// Copies what is to be passed on. To be called once, when the library is loaded. Without it
/// programs run without the library.
pub(crate) fn remember() {
    let Some(library) = objects::own_path().map(CStr::to_bytes) else { return };
    let mut session = Session { library, variables: [c""; VARIABLES_MOST], count: 0 };
    for &entry in environment() {
        // SAFETY: the environment's entries are terminated strings.
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

/// The program's environment.
pub(super) fn environment() -> Strings<'static> {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    // SAFETY: the C library's own, which a program only changes while no thread reads it.
    let array = unsafe { environ };
    strings(array)
}

/// Takes the pool's path out of the program's environment: what is started with that cannot map it.
pub(super) fn hide_pool() {
    const POOL: &[u8] = b"TIDEGATE_POOL=";
    for &entry in environment() {
        // SAFETY: the environment's entries are terminated strings.
        if unsafe { CStr::from_ptr(entry) }.to_bytes().starts_with(POOL) {
            let value = entry.cast_mut().wrapping_add(POOL.len());
            // SAFETY: inside the string, or its end. It lies on the stack or the heap: the kernel
            // or `setenv` has put it there.
            unsafe { value.write(0) };
        }
    }
}

/// A NULL-terminated array of strings; NULL is an empty one.
pub(super) fn strings<'a>(array: *const *const c_char) -> Strings<'a> {
    if array.is_null() {
        return &[];
    }
    let mut len = 0;
    loop {
        // SAFETY: the array goes on until its NULL, which was not met yet.
        let place = unsafe { array.add(len) };
        // SAFETY: as above.
        if unsafe { *place }.is_null() {
            break;
        }
        len += 1;
    }
    // SAFETY: `len` pointers were just read there; they stay as long as the call that they were
    // passed to.
    unsafe { std::slice::from_raw_parts(array, len) }
}

/// A copy that stays, in memory that is not the program's heap.
fn copied(text: &CStr) -> Option<&'static CStr> {
    let bytes = text.to_bytes_with_nul();
    let at = page::map(bytes.len())?;
    // SAFETY: fresh memory of that length, which is never unmapped.
    let copy: &'static mut [u8] = unsafe { std::slice::from_raw_parts_mut(at.cast(), bytes.len()) };
    copy.copy_from_slice(bytes);
    CStr::from_bytes_with_nul(copy).ok()
}
