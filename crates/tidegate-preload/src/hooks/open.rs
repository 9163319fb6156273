//! Hooks: opening files.
//!
//! Invariants:
//! 1. A file that is created is counted as pending before and after that; as a new file if the
//!    kernel says that it did not exist before.
//! 2. An open for writing never empties a file that can be covered: `O_TRUNC` is left out, and the
//!    opened file is truncated afterwards. By then it is known which file the path leads to and
//!    whether it is covered. For all other files the kernel gets the flag: some file systems act on
//!    it, as tracefs does, but not on a truncation.
//! 3. The kernel gets all other flags as they are, also `O_SYNC` and `O_DSYNC`.
#![allow(unsafe_code)] // C's calling convention and strings

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use tidegate_interpose::cancel;

use crate::covered::{self, Open, metadata, unseen};
use crate::hooks::close::{appeared, forget};
use crate::state::descriptors::Kind;
use crate::state::files::Seen;
use crate::state::{file_systems, process, record_locks};
use crate::sys::{next, query, raw, readable};

/// Errors of an open for writing that succeeds with `O_TRUNC`: a layer would copy a file that does
/// not fit, or takes only opens that empty the file.
const NEED_TRUNC: [c_int; 4] = [libc::ENOSPC, libc::EDQUOT, libc::EINVAL, libc::EOPNOTSUPP];
const CREATE_NEW: c_int = libc::O_CREAT | libc::O_EXCL;

/// An open that the program asks for.
#[derive(Clone, Copy)]
struct Request<'a> {
    directory: c_int,
    path: &'a CStr,
    flags: c_int,
    mode: c_uint,
}

/// The state of a path before it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    /// There is a file, or the open does not create one.
    There,
    /// There is a regular file that cannot be covered, and the open empties the file.
    Uncovered,
    /// There is a pipe or device, and the open has `O_TRUNC`.
    Special,
    /// There is no file, and the open creates one.
    Missing,
}

impl Request<'_> {
    /// Returns whether the open neither gives a new file a name nor empties a file.
    fn is_plain(&self) -> bool {
        self.flags & (libc::O_CREAT | libc::O_TRUNC) == 0
            || self.flags & libc::O_PATH != 0
            || self.flags & libc::O_TMPFILE == libc::O_TMPFILE
    }

    fn writes(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }

    /// Returns whether the file is to be emptied once it is open.
    fn empties(&self) -> bool {
        self.flags & libc::O_TRUNC != 0 && self.writes()
    }

    fn run(&self) -> c_int {
        if self.is_plain() || process::log().is_none() {
            return shown(self.by_library());
        }
        let before = self.before();
        let given = self.flags & if self.empties() { !libc::O_TRUNC } else { !0 };
        let request = Self { flags: given, ..*self };
        let fd = match before {
            Before::There => shown(request.existing()),
            Before::Missing => request.make(),
            Before::Uncovered => return shown(self.existing()),
            Before::Special => return shown(self.by_library()),
        };
        if fd < 0 && self.empties() && NEED_TRUNC.contains(&raw::errno()) {
            return shown(self.existing());
        }
        if fd < 0 {
            return fd;
        }
        if self.empties() { emptied(fd, given, before == Before::Missing) } else { fd }
    }

    /// Returns the state of the path. Looks it up only if the open may create or empty the file;
    /// with `O_CREAT` and `O_EXCL`, the file counts as missing.
    fn before(&self) -> Before {
        let creates = self.flags & libc::O_CREAT != 0;
        if self.flags & CREATE_NEW == CREATE_NEW {
            return Before::Missing;
        }
        if !creates && !self.empties() {
            return Before::There;
        }
        let follows = self.flags & libc::O_NOFOLLOW == 0;
        let flags = if follows { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
        match query::fstatat(self.directory, self.path, flags) {
            Ok(stat) if self.empties() && !is_regular(&stat) => Before::Special,
            Ok(stat) if self.empties() && !file_systems::may_be_covered(&stat) => Before::Uncovered,
            Err(_) if creates => Before::Missing,
            _ => Before::There,
        }
    }

    /// Opens by the C library: the thread may be cancelled while it waits, for a pipe, say.
    fn by_library(&self) -> c_int {
        let Some(openat64) = next::openat64.resolved() else { return self.by_kernel() };
        // SAFETY: a terminated path.
        unsafe { openat64(self.directory, self.path.as_ptr(), self.flags, self.mode) }
    }

    fn by_kernel(&self) -> c_int {
        let opened = raw::openat(self.directory, self.path, self.flags, self.mode);
        opened.unwrap_or_else(raw::failed_int)
    }

    fn existing(&self) -> c_int {
        if self.flags & libc::O_TRUNC == 0 {
            return self.by_library();
        }
        // The kernel empties the file, even if it is opened for reading.
        unseen::about_to_change(self.directory, self.path, false);
        metadata::counted(|| self.by_kernel())
    }

    /// Creates a file, unless another process creates it first.
    fn make(&self) -> c_int {
        cancel::point();
        // Only `O_EXCL` shows that the file is new.
        let exclusive = Self { flags: self.flags | libc::O_EXCL, ..*self };
        let fd = metadata::creating(self.flags, || exclusive.by_kernel(), appeared);
        if fd >= 0 || self.flags & libc::O_EXCL != 0 {
            return fd;
        }
        shown(metadata::counted(|| self.by_kernel()))
    }
}

fn is_regular(stat: &libc::stat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// Notes a new descriptor, if `fd` is one. Returns `fd`.
fn shown(fd: c_int) -> c_int {
    if fd >= 0 {
        appeared(fd);
    }
    fd
}

/// Empties the file of `fd`, which was opened with these status flags, as `O_TRUNC` does. Leaves a
/// file alone that `is_new` and empty. Returns `fd`, or closes it and returns -1.
fn emptied(fd: c_int, status: c_int, is_new: bool) -> c_int {
    let Ok(seen) = Seen::of(fd) else { return emptied_unseen(fd) };
    // `O_TRUNC` has no effect on pipes and devices.
    if !seen.is_file() {
        return fd;
    }
    let known = covered::note(fd, &seen, || Ok(status));
    if is_new && seen.size() == 0 {
        return fd;
    }
    // SAFETY: the call takes no pointers.
    let kernel = || unsafe { raw::call(libc::SYS_ftruncate, raw::words![fd, 0_i64]) };
    let open = process::log().map(|log| Open { log, fd, known });
    let result = match open.filter(|open| open.known.kind == Kind::File) {
        Some(open) => covered::truncate(&open, 0, kernel),
        None => metadata::counted(kernel),
    };
    if result < 0 {
        forget(fd);
        let _ = raw::close(fd);
        return raw::returned_int(result);
    }
    fd
}

/// Empties the file of `fd` after the log was given up: no file is logged any more.
#[cold]
fn emptied_unseen(fd: c_int) -> c_int {
    // The kernel refuses this for pipes and devices.
    let _ = raw::ftruncate(fd, 0);
    fd
}

/// Opens a file by `open`, which gets the flags without `O_TRUNC`, and empties it afterwards. Opens
/// a file that cannot be covered once more, with all flags. For calls that have no [`Request`],
/// such as `openat2`.
pub(crate) fn open_emptying(flags: c_int, open: impl Fn(c_int) -> c_int) -> c_int {
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY && flags & libc::O_PATH == 0;
    let empties = writes && flags & libc::O_TRUNC != 0;
    let given = if empties { flags & !libc::O_TRUNC } else { flags };
    let changes = flags & (libc::O_CREAT | libc::O_TRUNC) != 0;
    let fd = if changes { metadata::counted(|| open(given)) } else { open(given) };
    if fd < 0 {
        return fd;
    }
    appeared(fd);
    if empties && flags & CREATE_NEW != CREATE_NEW && can_be_closed_uncovered(fd) {
        forget(fd);
        let _ = raw::close(fd);
        return shown(metadata::counted(|| open(flags)));
    }
    if empties { emptied(fd, given, false) } else { fd }
}

/// Returns whether `fd` is a regular file that cannot be covered, and the process has no record
/// lock on the file that a close would release.
fn can_be_closed_uncovered(fd: c_int) -> bool {
    let may_be_closed = |stat: &libc::stat| !record_locks::may_have(stat.st_dev, stat.st_ino);
    query::fstat(fd).is_ok_and(|stat| {
        is_regular(&stat) && !file_systems::may_be_covered(&stat) && may_be_closed(&stat)
    })
}

/// Opens a path as `openat` does.
///
/// # Safety
/// `path` is the path that the program gave to `open`.
pub(crate) unsafe fn open_at(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    if let Some(path) = readable::text(path) {
        return Request { directory, path, flags, mode }.run();
    }
    // The call fails, and the kernel returns the error.
    let arguments = raw::words![directory, path, flags, mode];
    // SAFETY: the caller's arguments go to the kernel as they are.
    raw::returned_int(unsafe { raw::call(libc::SYS_openat, arguments) })
}

/// Declares hooks that open `path`.
macro_rules! opens {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
            // SAFETY: the caller's path. A mode that the caller leaves out is not used.
            unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
        }
    )*};
}
opens!(open open64 __open __open64);

/// Declares hooks that open `path` in `directory`.
macro_rules! opens_at {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            directory: c_int,
            path: *const c_char,
            flags: c_int,
            mode: c_uint,
        ) -> c_int {
            // SAFETY: the caller's path. A mode that the caller leaves out is not used.
            unsafe { open_at(directory, path, flags, mode) }
        }
    )*};
}
opens_at!(openat openat64);

/// Declares the functions for an `open` without a mode, which must not create a file.
macro_rules! opens_without_mode {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(path: *const c_char, flags: c_int) -> c_int {
            match next::__open_2.get().filter(|_| needs_mode(flags)) {
                // SAFETY: the C library's function of this type, which ends the program.
                Some(__open_2) => unsafe { __open_2(path, flags) },
                // SAFETY: the caller's path.
                None => unsafe { open_at(libc::AT_FDCWD, path, flags, 0) },
            }
        }
    )*};
}
opens_without_mode!(__open_2 __open64_2);

/// Declares the functions for an `openat` without a mode.
macro_rules! opens_at_without_mode {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            directory: c_int,
            path: *const c_char,
            flags: c_int,
        ) -> c_int {
            match next::__openat_2.get().filter(|_| needs_mode(flags)) {
                // SAFETY: the C library's function of this type, which ends the program.
                Some(__openat_2) => unsafe { __openat_2(directory, path, flags) },
                // SAFETY: the caller's path.
                None => unsafe { open_at(directory, path, flags, 0) },
            }
        }
    )*};
}
opens_at_without_mode!(__openat_2 __openat64_2);

fn needs_mode(flags: c_int) -> bool {
    flags & libc::O_CREAT != 0 || flags & libc::O_TMPFILE == libc::O_TMPFILE
}

/// Declares hooks of `creat`, which is a system call of its own on some architectures.
macro_rules! creates {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(path: *const c_char, mode: c_uint) -> c_int {
            if process::log().is_none()
                && let Some(creat64) = next::creat64.resolved()
            {
                // SAFETY: the C library's function of this type, with the caller's path.
                return shown(unsafe { creat64(path, mode) });
            }
            let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
            // SAFETY: the caller's path.
            unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
        }
    )*};
}
creates!(creat creat64);

/// Opens a file by its handle, without `O_TRUNC`, and empties it afterwards if that was asked for.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn open_by_handle_at(
    mount: c_int,
    handle: *mut c_void,
    flags: c_int,
) -> c_int {
    let Some(open_by_handle_at) = next::open_by_handle_at.get() else {
        return raw::failed_int(libc::ENOSYS);
    };
    // SAFETY: the C library's function of this type, with the caller's handle.
    open_emptying(flags, |flags| unsafe { open_by_handle_at(mount, handle, flags) })
}

/// Creates a temporary file as `mkostemps` does.
///
/// # Safety
/// As for `mkostemps`.
unsafe fn make_temporary(template: *mut c_char, suffix_bytes: c_int, flags: c_int) -> c_int {
    let Some(mkostemps64) = next::mkostemps64.get() else { return raw::failed_int(libc::ENOSYS) };
    // SAFETY: the caller's template, as for `mkostemps`.
    let make = || unsafe { mkostemps64(template, suffix_bytes, flags) };
    metadata::creating(flags & !libc::O_ACCMODE | libc::O_RDWR, make, appeared)
}

tidegate_interpose::synonyms! {
    mkstemp(template: *mut c_char) = make_temporary(template, 0, 0);
    mkstemp64(template: *mut c_char) = make_temporary(template, 0, 0);
    mkostemp(template: *mut c_char, flags: c_int) = make_temporary(template, 0, flags);
    mkostemp64(template: *mut c_char, flags: c_int) = make_temporary(template, 0, flags);
    mkstemps(template: *mut c_char, suffix_bytes: c_int) = make_temporary(template, suffix_bytes, 0);
    mkstemps64(template: *mut c_char, suffix_bytes: c_int) = make_temporary(template, suffix_bytes, 0);
    mkostemps(template: *mut c_char, suffix_bytes: c_int, flags: c_int) = make_temporary(template, suffix_bytes, flags);
    mkostemps64(template: *mut c_char, suffix_bytes: c_int, flags: c_int) = make_temporary(template, suffix_bytes, flags);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(flags: c_int) -> Request<'static> {
        Request { directory: libc::AT_FDCWD, path: c"/x", flags, mode: 0 }
    }

    #[test]
    fn only_what_makes_or_empties_is_looked_at() {
        for plain in [
            libc::O_RDONLY,
            libc::O_RDWR | libc::O_APPEND | libc::O_CLOEXEC,
            libc::O_PATH | libc::O_CREAT,
            libc::O_TMPFILE | libc::O_RDWR,
            libc::O_DIRECTORY,
            libc::O_RDWR | libc::O_DSYNC,
        ] {
            assert!(request(plain).is_plain(), "{plain:#o}");
        }
        for other in [libc::O_CREAT, libc::O_TRUNC] {
            assert!(!request(other | libc::O_RDWR).is_plain(), "{other:#o}");
        }
        assert!(request(libc::O_WRONLY | libc::O_TRUNC).empties());
        assert!(!request(libc::O_RDONLY | libc::O_TRUNC).empties());
    }

    #[test]
    fn a_file_is_made_where_nothing_is_or_must_be() {
        let dir = tempfile::tempdir().unwrap();
        let path = std::ffi::CString::new(dir.path().join("x").to_str().unwrap()).unwrap();
        let before = |flags| Request { path: &path, ..request(flags) }.before();
        assert_eq!(before(libc::O_CREAT), Before::Missing);
        std::fs::write(dir.path().join("x"), b"").unwrap();
        assert_eq!(before(libc::O_CREAT), Before::There);
        assert_eq!(before(CREATE_NEW), Before::Missing);
        assert_eq!(before(libc::O_TRUNC), Before::There);
    }
}
