//! The functions that the hooks stand in front of. The library looks up each function when it is
//! loaded, since the look-up may take the dynamic linker's lock.
#![allow(unsafe_code)] // the dynamic linker's answers become functions

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::{iovec, off_t, pid_t, ssize_t};
use tidegate_interpose::{InOrder, Next, raw};

/// A NULL-terminated array of strings.
pub(crate) type Argv = *const *const c_char;

tidegate_interpose::functions! {
    InOrder;
    open64: fn(*const c_char, c_int, c_uint) -> c_int;
    __open64_2: fn(*const c_char, c_int) -> c_int;
    openat64: fn(c_int, *const c_char, c_int, c_uint) -> c_int;
    __openat64_2: fn(c_int, *const c_char, c_int) -> c_int;
    mkostemps64: fn(*mut c_char, c_int, c_int) -> c_int;
    dup: fn(c_int) -> c_int;
    dup2: fn(c_int, c_int) -> c_int;
    dup3: fn(c_int, c_int, c_int) -> c_int;
    fcntl64: fn(c_int, c_int, usize) -> c_int;
    execvpe: fn(*const c_char, Argv, Argv) -> c_int;
    posix_spawn: fn(*mut pid_t, *const c_char, *const c_void, *const c_void, Argv, Argv) -> c_int;
    posix_spawnp: fn(*mut pid_t, *const c_char, *const c_void, *const c_void, Argv, Argv) -> c_int;
    pwritev64v2: fn(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t;
}

/// Calls a next function by `call`. Returns -1 with `ENOSYS` if no library has the function.
pub(crate) fn call<F: Copy, R: From<i8>>(next: &Next<F, InOrder>, call: impl FnOnce(F) -> R) -> R {
    if let Some(function) = next.get() {
        return call(function);
    }
    raw::set_errno(libc::ENOSYS);
    R::from(-1)
}
