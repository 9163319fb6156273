//! Hooks that copy descriptors, and `fcntl`, which also reports their flags.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::c_int;

use crate::{flags, next};

/// Notes that `copy` refers to the file of `original`, if the call made a descriptor.
fn copied(original: c_int, copy: c_int) -> c_int {
    if copy != original {
        flags::copied(original, copy);
    }
    copy
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: no pointers.
    copied(fd, next::call(&next::dup, |dup| unsafe { dup(fd) }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup2(fd: c_int, copy: c_int) -> c_int {
    // SAFETY: no pointers.
    copied(fd, next::call(&next::dup2, |dup2| unsafe { dup2(fd, copy) }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn dup3(fd: c_int, copy: c_int, flags: c_int) -> c_int {
    // SAFETY: no pointers.
    copied(fd, next::call(&next::dup3, |dup3| unsafe { dup3(fd, copy, flags) }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn fcntl64(
    fd: c_int,
    command: c_int,
    argument: usize,
) -> c_int {
    // SAFETY: the program's own arguments. The kernel ignores `argument` for commands without one.
    let result = next::call(&next::fcntl64, |fcntl| unsafe { fcntl(fd, command, argument) });
    match command {
        libc::F_GETFL if result >= 0 => result | flags::taken(fd),
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => copied(fd, result),
        _ => result,
    }
}

tidegate_interpose::synonyms! {
    __dup2(fd: c_int, copy: c_int) = dup2(fd, copy);
    fcntl(fd: c_int, command: c_int, argument: usize) = fcntl64(fd, command, argument);
    __fcntl(fd: c_int, command: c_int, argument: usize) = fcntl64(fd, command, argument);
}
