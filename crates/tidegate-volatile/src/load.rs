//! Prepares the hooks when the dynamic linker loads the library, before the program runs.
#![allow(unsafe_code)] // the dynamic linker's list of functions to call

use crate::{exec, next};

#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

extern "C" fn loaded() {
    next::resolve();
    exec::remember();
    // SAFETY: takes no arguments. It clears the error of a function that an older C library lacks,
    // so that the program does not see it.
    unsafe { libc::dlerror() };
}
