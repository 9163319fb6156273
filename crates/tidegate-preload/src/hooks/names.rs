//! Hooks: the C functions that change names.
//!
//! Each hook makes the system call that the C library's function makes. So errors are the kernel's,
//! and a filter of system calls that allows the program's calls allows the hook's. Links, renames
//! and removals of a file that the log has are recorded if they can be
//! ([`covered::change_name`](crate::covered::change_name)). All other changes are counted as
//! pending.
#![allow(unsafe_code)] // C's functions
#![allow(clippy::missing_safety_doc)] // the manual page of each function says it

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use libc::{FILE, sockaddr, socklen_t};
use tidegate_interpose::Next;

use crate::covered::metadata::{Named, counted_of};
use crate::covered::{self, Changed, metadata};
use crate::state::objects::BehindThis;
use crate::sys::next;
use crate::sys::raw::{self, Made, by_architecture, words};
use crate::sys::readable::{is_readable, text};

/// Makes a system call with arguments of the program.
fn call((number, arguments): Made) -> isize {
    // SAFETY: the caller's arguments, as for the function that it called.
    unsafe { raw::call(number, arguments) }
}

fn result(result: isize) -> c_int {
    c_int::try_from(raw::returned(result)).unwrap_or(-1)
}

/// Makes the first name of an object without data.
fn make_name(made: Made) -> c_int {
    result(metadata::counted(|| call(made)))
}

/// Returns a path of the program, if it can be read.
fn path<'p>((directory, path): (c_int, *const c_char)) -> Option<(c_int, &'p CStr)> {
    Some((directory, text(path)?))
}

fn recorded(changed: Option<Changed<'_>>) -> Option<isize> {
    changed.and_then(covered::change_name)
}

fn remove_name(directory: c_int, at: *const c_char, flags: c_int, made: Made) -> isize {
    let unlink = path((directory, at)).filter(|_| flags == 0).map(|from| Changed::Unlink { from });
    if let Some(result) = recorded(unlink) {
        return result;
    }
    let named = [Named::entry(directory, at)];
    counted_of(named, || call(made))
}

fn remove_file(path: *const c_char) -> isize {
    let made = by_architecture!(
        (libc::SYS_unlink, words![path]),
        (libc::SYS_unlinkat, words![libc::AT_FDCWD, path, 0])
    );
    remove_name(libc::AT_FDCWD, path, 0, made)
}

fn remove_directory(path: *const c_char) -> isize {
    const REMOVEDIR: c_int = libc::AT_REMOVEDIR;
    let made = by_architecture!(
        (libc::SYS_rmdir, words![path]),
        (libc::SYS_unlinkat, words![libc::AT_FDCWD, path, REMOVEDIR])
    );
    remove_name(libc::AT_FDCWD, path, REMOVEDIR, made)
}

type At = (c_int, *const c_char);

fn change_name(from: At, to: At, flags: c_uint, made: Made) -> c_int {
    let paths = path(from).zip(path(to)).filter(|_| flags & !libc::RENAME_NOREPLACE == 0);
    let rename = paths.map(|(from, to)| Changed::Rename { from, to, flags });
    if let Some(done) = recorded(rename) {
        return result(done);
    }
    let named = [Named::entry(from.0, from.1), Named::entry(to.0, to.1)];
    result(counted_of(named, || call(made)))
}

fn add_name(old: At, new: At, flags: c_int, made: Made) -> c_int {
    let paths = path(old).zip(path(new)).filter(|_| flags == 0);
    if let Some(done) = recorded(paths.map(|(from, to)| Changed::Link { from, to })) {
        return result(done);
    }
    let follows = flags & libc::AT_SYMLINK_FOLLOW != 0;
    let flags_of_old = if follows { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
    let named = [Named::at(old.0, old.1, flags_of_old)];
    result(counted_of(named, || call(made)))
}

/// Makes a node by the newer call, which the C library alone makes since 2.33.
fn make_node(directory: c_int, path: *const c_char, mode: c_uint, device: u64) -> c_int {
    make_name((libc::SYS_mknodat, words![directory, path, mode, device]))
}

/// Reads the device number that programs built for a glibc before 2.33 pass.
fn device_at(device: *const u64) -> u64 {
    // SAFETY: the caller's arguments, as for the function that it called.
    unsafe { device.as_ref() }.copied().unwrap_or(0)
}

/// Counts a directory that the C library makes by itself.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn mkdtemp(template: *mut c_char) -> *mut c_char {
    let Some(mkdtemp) = next::mkdtemp.get() else {
        raw::set_errno(libc::ENOSYS);
        return ptr::null_mut();
    };
    // SAFETY: the C library's function of this type, with the caller's arguments.
    metadata::counted(|| unsafe { mkdtemp(template) })
}

/// Declares hooks that count a file that the C library makes, perhaps under a name for a moment.
macro_rules! temporary {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name() -> *mut FILE {
            match next::$name.get() {
                // SAFETY: the C library's function of this type, with the caller's arguments.
                Some(function) => metadata::counted(|| unsafe { function() }),
                None => ptr::null_mut(),
            }
        }
    )*};
}
temporary!(tmpfile tmpfile64);

type Bind = unsafe extern "C-unwind" fn(c_int, *const sockaddr, socklen_t) -> c_int;
// SAFETY: `Bind` is the type of `bind` in the C library's manual.
static BIND: Next<Bind, BehindThis> = unsafe { Next::new(c"bind") };

thread_local! {
    /// Whether the thread is in the function [`BIND`], which may come back to the hook.
    static IS_IN_BIND: Cell<bool> = const { Cell::new(false) };
}

/// Looks up [`BIND`]. To be called when the library is loaded, since the look-up may take the
/// dynamic linker's lock.
pub(crate) fn find_bind() {
    BIND.get();
}

/// Binds by the next definition, which may be that of another preloaded library: `authbind`, say,
/// gives a socket an address that the kernel would refuse.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn bind(fd: c_int, at: *const sockaddr, len: socklen_t) -> c_int {
    let Some(next) = BIND.get().filter(|_| !IS_IN_BIND.replace(true)) else {
        // SAFETY: the caller's arguments.
        return unsafe { bind_by_kernel(fd, at, len) };
    };
    let bound = bound(at, || {
        // SAFETY: the next function of this type, with the caller's arguments.
        raw::by_kernel(unsafe { next(fd, at, len) } as isize)
    });
    IS_IN_BIND.set(false);
    bound
}

/// Binds by the system call.
///
/// # Safety
/// As for `bind`.
pub(crate) unsafe fn bind_by_kernel(fd: c_int, at: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the caller's arguments go to the kernel as they are.
    bound(at, || unsafe { raw::call(libc::SYS_bind, words![fd, at, len]) })
}

/// Gives a socket an address by `bind`. The address may be a name in a directory.
fn bound(at: *const sockaddr, bind: impl FnOnce() -> isize) -> c_int {
    let family = at.cast::<libc::sa_family_t>();
    let is_there = is_readable(family.cast::<c_void>(), size_of::<libc::sa_family_t>());
    // SAFETY: `is_readable` has checked the family.
    let family = is_there.then(|| unsafe { family.read_unaligned() });
    let is_name = family.is_some_and(|family| c_int::from(family) == libc::AF_UNIX);
    result(if is_name { metadata::counted(bind) } else { bind() })
}

macro_rules! hooks {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> c_int $body
    )*};
}

hooks! {
    rename(from: *const c_char, to: *const c_char) {
        let here = libc::AT_FDCWD;
        let made = by_architecture!((libc::SYS_rename, words![from, to]), (libc::SYS_renameat, words![here, from, here, to]));
        change_name((here, from), (here, to), 0, made)
    }
    renameat(from_dir: c_int, from: *const c_char, to_dir: c_int, to: *const c_char) {
        let made = (libc::SYS_renameat, words![from_dir, from, to_dir, to]);
        change_name((from_dir, from), (to_dir, to), 0, made)
    }
    renameat2(from_dir: c_int, from: *const c_char, to_dir: c_int, to: *const c_char, flags: c_uint) {
        // Without flags, the C library makes the older call.
        let number = if flags == 0 { libc::SYS_renameat } else { libc::SYS_renameat2 };
        let made = (number, words![from_dir, from, to_dir, to, flags]);
        change_name((from_dir, from), (to_dir, to), flags, made)
    }
    unlink(path: *const c_char) {
        result(remove_file(path))
    }
    unlinkat(directory: c_int, path: *const c_char, flags: c_int) {
        let made = (libc::SYS_unlinkat, words![directory, path, flags]);
        result(remove_name(directory, path, flags, made))
    }
    rmdir(path: *const c_char) {
        result(remove_directory(path))
    }
    remove(path: *const c_char) {
        const IS_DIRECTORY: isize = -(libc::EISDIR as isize);
        match remove_file(path) {
            IS_DIRECTORY => result(remove_directory(path)),
            other => result(other),
        }
    }
    link(old: *const c_char, new: *const c_char) {
        let here = libc::AT_FDCWD;
        let made = by_architecture!((libc::SYS_link, words![old, new]), (libc::SYS_linkat, words![here, old, here, new, 0]));
        add_name((here, old), (here, new), 0, made)
    }
    linkat(old_dir: c_int, old: *const c_char, new_dir: c_int, new: *const c_char, flags: c_int) {
        let made = (libc::SYS_linkat, words![old_dir, old, new_dir, new, flags]);
        add_name((old_dir, old), (new_dir, new), flags, made)
    }
    symlink(text: *const c_char, path: *const c_char) {
        make_name(by_architecture!((libc::SYS_symlink, words![text, path]), (libc::SYS_symlinkat, words![text, libc::AT_FDCWD, path])))
    }
    symlinkat(text: *const c_char, directory: c_int, path: *const c_char) {
        make_name((libc::SYS_symlinkat, words![text, directory, path]))
    }
    mkdir(path: *const c_char, mode: c_uint) {
        make_name(by_architecture!((libc::SYS_mkdir, words![path, mode]), (libc::SYS_mkdirat, words![libc::AT_FDCWD, path, mode])))
    }
    mkdirat(directory: c_int, path: *const c_char, mode: c_uint) {
        make_name((libc::SYS_mkdirat, words![directory, path, mode]))
    }
    mknod(path: *const c_char, mode: c_uint, device: u64) {
        make_node(libc::AT_FDCWD, path, mode, device)
    }
    mknodat(directory: c_int, path: *const c_char, mode: c_uint, device: u64) {
        make_node(directory, path, mode, device)
    }
    __xmknod(_version: c_int, path: *const c_char, mode: c_uint, device: *const u64) {
        make_node(libc::AT_FDCWD, path, mode, device_at(device))
    }
    __xmknodat(_version: c_int, directory: c_int, path: *const c_char, mode: c_uint, device: *const u64) {
        make_node(directory, path, mode, device_at(device))
    }
    mkfifo(path: *const c_char, mode: c_uint) {
        make_node(libc::AT_FDCWD, path, mode | libc::S_IFIFO, 0)
    }
    mkfifoat(directory: c_int, path: *const c_char, mode: c_uint) {
        make_node(directory, path, mode | libc::S_IFIFO, 0)
    }
}
