//! Hook: `syscall`. A call that a hook has is made by that hook, any other one as it is.
#![allow(unsafe_code)] // C's calling convention

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};
use std::ptr;

use tidegate_interpose::raw;

use crate::{descriptors, open, sync, write};

/// The words that the program gave.
#[derive(Clone, Copy)]
struct Arguments([usize; 6]);

impl Arguments {
    fn int(self, at: usize) -> c_int {
        self.uint(at).cast_signed()
    }

    fn uint(self, at: usize) -> c_uint {
        let [a, b, c, d, ..] = self.0[at].to_le_bytes();
        c_uint::from_le_bytes([a, b, c, d])
    }

    fn long(self, at: usize) -> i64 {
        self.0[at].cast_signed() as i64
    }

    fn pointer<T>(self, at: usize) -> *mut T {
        ptr::with_exposed_provenance_mut(self.0[at])
    }

    fn path(self, at: usize) -> *const c_char {
        self.pointer(at)
    }
}

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
    if number == libc::SYS_pwritev2 {
        given.0[5] = write::without_sync(given.int(0), given.int(5)) as usize;
    }
    // SAFETY: the program's own arguments of that call.
    raw::returned(unsafe { raw::call(number, given.0) }) as c_long
}

/// # Safety
/// As for the call.
unsafe fn by_hook(number: c_long, given: Arguments) -> Option<c_int> {
    let fd = given.int(0);
    // SAFETY: the program's own arguments of the same call, as promised.
    Some(unsafe {
        match number {
            libc::SYS_fsync => sync::fsync(fd),
            libc::SYS_fdatasync => sync::fdatasync(fd),
            libc::SYS_syncfs => sync::syncfs(fd),
            libc::SYS_sync_file_range => {
                sync::sync_file_range(fd, given.long(1), given.long(2), given.uint(3))
            }
            libc::SYS_sync => {
                sync::sync();
                0
            }
            libc::SYS_msync => sync::msync(given.pointer::<c_void>(0), given.0[1], given.int(2)),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_open => open::open64(given.path(0), given.int(1), given.uint(2)),
            libc::SYS_openat => open::openat64(fd, given.path(1), given.int(2), given.uint(3)),
            libc::SYS_fcntl => descriptors::fcntl64(fd, given.int(1), given.0[2]),
            libc::SYS_dup => descriptors::dup(fd),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_dup2 => descriptors::dup2(fd, given.int(1)),
            libc::SYS_dup3 => descriptors::dup3(fd, given.int(1), given.int(2)),
            _ => return None,
        }
    })
}
