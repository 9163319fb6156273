//! The C functions that change names.
//!
//! Each makes the system call that the C library's function makes, so that errors are the kernel's.
#![allow(unsafe_code)] // C's functions
#![allow(clippy::missing_safety_doc)] // as in the manual of each

use std::ffi::{c_char, c_int, c_long, c_uint};
use std::ptr;

use super::folders::{folder_made, unlogged_in};
use super::target::Name;
use super::{changing, link, rename, unlink};
use crate::raw::{self, words};
use crate::readable::text;
use crate::{next, path, process};

fn name<'a>(directory: c_int, at: *const c_char) -> Option<Name<'a>> {
    text(at).map(|path| Name { directory, path })
}

/// A system call with arguments of the program.
fn call(number: c_long, arguments: [usize; 6]) -> isize {
    // SAFETY: the program's promise to the function that it called.
    unsafe { raw::call(number, arguments) }
}

fn result(result: isize) -> c_int {
    c_int::try_from(raw::returned(result)).unwrap_or(-1)
}

/// A new name, of what is no file with data: never recorded.
fn make_name(directory: c_int, at: *const c_char, number: c_long, arguments: [usize; 6]) -> c_int {
    let operation = || call(number, arguments);
    result(match (process::log(), name(directory, at)) {
        // `mkdir -p` finds most of its directories there.
        (Some(log), Some(name)) if name.look(libc::O_NOFOLLOW).is_err() => {
            changing(log, || match number {
                libc::SYS_mkdirat => folder_made(log, name, operation),
                _ => unlogged_in(log, name, operation),
            })
        }
        _ => operation(),
    })
}

fn remove_name(directory: c_int, at: *const c_char, flags: c_int) -> isize {
    let operation = || call(libc::SYS_unlinkat, words![directory, at, flags]);
    match (process::log(), name(directory, at)) {
        (Some(log), Some(name)) if flags & libc::AT_REMOVEDIR == 0 => {
            changing(log, || unlink::unlink(log, name, operation))
        }
        (Some(log), Some(name)) => changing(log, || unlogged_in(log, name, operation)),
        _ => operation(),
    }
}

fn change_name(from: (c_int, *const c_char), to: (c_int, *const c_char), flags: c_uint) -> c_int {
    // As the C library does: where `renameat2` is forbidden, the older call may not be.
    let number = if flags == 0 { libc::SYS_renameat } else { libc::SYS_renameat2 };
    let operation = || call(number, words![from.0, from.1, to.0, to.1, flags]);
    result(match (process::log(), name(from.0, from.1), name(to.0, to.1)) {
        (Some(log), Some(from), Some(to)) => {
            changing(log, || rename::rename(log, from, to, flags, operation))
        }
        _ => operation(),
    })
}

fn add_name(old: (c_int, *const c_char), new: (c_int, *const c_char), flags: c_int) -> c_int {
    let operation = || call(libc::SYS_linkat, words![old.0, old.1, new.0, new.1, flags]);
    result(match (process::log(), name(old.0, old.1), name(new.0, new.1)) {
        (Some(log), Some(old), Some(new)) => {
            changing(log, || link::link(log, old, new, flags, operation))
        }
        _ => operation(),
    })
}

/// What programs that are older than glibc 2.33 pass.
fn device_at(device: *const u64) -> u64 {
    // SAFETY: the program's promise to the function that it called.
    unsafe { device.as_ref() }.copied().unwrap_or(0)
}

/// The C library makes the directory by itself.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn mkdtemp(template: *mut c_char) -> *mut c_char {
    let Some(mkdtemp) = next::mkdtemp.get() else {
        raw::set_errno(libc::ENOSYS);
        return ptr::null_mut();
    };
    // SAFETY: the same function.
    let made = unsafe { mkdtemp(template) };
    if let (Some(log), Some(name)) = (process::log(), name(libc::AT_FDCWD, made)) {
        folder_made(log, name, || 0);
    }
    made
}

macro_rules! hooks {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> c_int $body
    )*};
}

hooks! {
    rename(from: *const c_char, to: *const c_char) {
        change_name((libc::AT_FDCWD, from), (libc::AT_FDCWD, to), 0)
    }
    renameat(from_dir: c_int, from: *const c_char, to_dir: c_int, to: *const c_char) {
        change_name((from_dir, from), (to_dir, to), 0)
    }
    renameat2(from_dir: c_int, from: *const c_char, to_dir: c_int, to: *const c_char, flags: c_uint) {
        change_name((from_dir, from), (to_dir, to), flags)
    }
    unlink(path: *const c_char) {
        result(remove_name(libc::AT_FDCWD, path, 0))
    }
    unlinkat(directory: c_int, path: *const c_char, flags: c_int) {
        result(remove_name(directory, path, flags))
    }
    rmdir(path: *const c_char) {
        result(remove_name(libc::AT_FDCWD, path, libc::AT_REMOVEDIR))
    }
    remove(path: *const c_char) {
        const IS_DIRECTORY: isize = -(libc::EISDIR as isize);
        match remove_name(libc::AT_FDCWD, path, 0) {
            IS_DIRECTORY => result(remove_name(libc::AT_FDCWD, path, libc::AT_REMOVEDIR)),
            other => result(other),
        }
    }
    link(old: *const c_char, new: *const c_char) {
        add_name((libc::AT_FDCWD, old), (libc::AT_FDCWD, new), 0)
    }
    linkat(old_dir: c_int, old: *const c_char, new_dir: c_int, new: *const c_char, flags: c_int) {
        add_name((old_dir, old), (new_dir, new), flags)
    }
    symlink(text: *const c_char, path: *const c_char) {
        make_name(libc::AT_FDCWD, path, libc::SYS_symlinkat, words![text, libc::AT_FDCWD, path])
    }
    symlinkat(text: *const c_char, directory: c_int, path: *const c_char) {
        make_name(directory, path, libc::SYS_symlinkat, words![text, directory, path])
    }
    mkdir(path: *const c_char, mode: c_uint) {
        make_name(libc::AT_FDCWD, path, libc::SYS_mkdirat, words![libc::AT_FDCWD, path, mode])
    }
    mkdirat(directory: c_int, path: *const c_char, mode: c_uint) {
        make_name(directory, path, libc::SYS_mkdirat, words![directory, path, mode])
    }
    mknod(path: *const c_char, mode: c_uint, device: u64) {
        make_name(libc::AT_FDCWD, path, libc::SYS_mknodat, words![libc::AT_FDCWD, path, mode, device])
    }
    mknodat(directory: c_int, path: *const c_char, mode: c_uint, device: u64) {
        make_name(directory, path, libc::SYS_mknodat, words![directory, path, mode, device])
    }
    __xmknod(_version: c_int, path: *const c_char, mode: c_uint, device: *const u64) {
        make_name(libc::AT_FDCWD, path, libc::SYS_mknodat, words![libc::AT_FDCWD, path, mode, device_at(device)])
    }
    __xmknodat(_version: c_int, directory: c_int, path: *const c_char, mode: c_uint, device: *const u64) {
        make_name(directory, path, libc::SYS_mknodat, words![directory, path, mode, device_at(device)])
    }
    mkfifo(path: *const c_char, mode: c_uint) {
        make_name(libc::AT_FDCWD, path, libc::SYS_mknodat, words![libc::AT_FDCWD, path, mode | libc::S_IFIFO, 0_usize])
    }
    mkfifoat(directory: c_int, path: *const c_char, mode: c_uint) {
        make_name(directory, path, libc::SYS_mknodat, words![directory, path, mode | libc::S_IFIFO, 0_usize])
    }
    chroot(path: *const c_char) {
        let changed = call(libc::SYS_chroot, words![path]);
        if changed >= 0 {
            path::forget_root();
        }
        result(changed)
    }
}
