//! Hook of `syscall`. It makes a call by that call's own hook if there is one, and passes all other
//! calls to the kernel.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_int, c_long};

use tidegate_interpose::raw::{self, Arguments};

use crate::{confined, descriptors, exec, open, sync, write};

#[unsafe(no_mangle)]
#[allow(clippy::many_single_char_names)] // seven words without names of their own
unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let mut given = Arguments([a, b, c, d, e, f]);
    // SAFETY: the program's own arguments of that call.
    if let Some(result) = unsafe { by_hook(number, given) } {
        return result.into();
    }
    confined::before(number, given.int(0));
    if number == libc::SYS_pwritev2 {
        given.0[5] = write::without_sync(given.int(0), given.int(5)).cast_unsigned() as usize;
    }
    // SAFETY: the program's own arguments of that call.
    raw::returned(unsafe { raw::call(number, given.0) }) as c_long
}

/// Makes a call by a hook.
macro_rules! hook {
    ($call:expr) => {{
        // SAFETY: the program passed these arguments for this call.
        unsafe { $call }
    }};
}

/// Makes the call `number` by its hook. Returns `None` if it has none.
///
/// # Safety
/// As for the call.
unsafe fn by_hook(number: c_long, given: Arguments) -> Option<c_int> {
    let fd = given.int(0);
    Some(match number {
        libc::SYS_fsync | libc::SYS_fdatasync | libc::SYS_syncfs => sync::synced(number, fd),
        libc::SYS_sync_file_range => {
            hook!(sync::sync_file_range(fd, given.long(1), given.long(2), given.uint(3)))
        }
        libc::SYS_sync => {
            sync::sync();
            0
        }
        libc::SYS_msync => hook!(sync::msync(given.pointer(0), given.0[1], given.int(2))),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_open => hook!(open::open64(given.path(0), given.int(1), given.uint(2))),
        libc::SYS_openat => {
            hook!(open::openat64(fd, given.path(1), given.int(2), given.uint(3)))
        }
        libc::SYS_fcntl => hook!(descriptors::fcntl64(fd, given.int(1), given.0[2])),
        libc::SYS_execve => {
            hook!(exec::execve(given.path(0), given.pointer(1), given.pointer(2)))
        }
        libc::SYS_execveat => {
            let (argv, envp) = (given.pointer(2), given.pointer(3));
            hook!(exec::execveat(fd, given.path(1), argv, envp, given.int(4)))
        }
        libc::SYS_dup => hook!(descriptors::dup(fd)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_dup2 => hook!(descriptors::dup2(fd, given.int(1))),
        libc::SYS_dup3 => hook!(descriptors::dup3(fd, given.int(1), given.int(2))),
        _ => return None,
    })
}
