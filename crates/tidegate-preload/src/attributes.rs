//! Hooks: owner, mode, times and extended attributes of files.
//!
//! Invariants: they are not in the log. So a change of them makes the file's next sync a real one. An absorbed file is settled
//! first: the writes that the kernel is told of later would change its times again.
#![allow(unsafe_code)] // C's functions

use std::ffi::{c_char, c_int, c_void};

use libc::{gid_t, mode_t, size_t, timespec, timeval, uid_t, utimbuf};
use tidegate::log::{FileRef, Log};

use crate::names::Name;
use crate::readable::text;
use crate::{absorb, files, next, process, raw};

/// What a call names its file by.
#[derive(Clone, Copy)]
enum File {
    Descriptor(c_int),
    /// A path in a directory, and `O_NOFOLLOW` or nothing.
    Path(c_int, *const c_char, c_int),
}

impl File {
    /// The entry of a file that is to be changed: none if it has none, or `is_so` already by what the kernel says of it. That is asked
    /// first: it takes less than to find out which file a descriptor is.
    fn changed(self, log: &Log, is_so: impl FnOnce(&libc::stat) -> bool) -> Option<FileRef> {
        match self {
            Self::Descriptor(fd) => {
                let stat = raw::fstat(fd).ok()?;
                if is_so(&stat) { None } else { files::of(fd).file() }
            }
            Self::Path(directory, path, flags) => {
                let target = Name { directory, path: text(path)? }.look(flags).ok()?;
                if is_so(target.stat()) { None } else { target.find(log) }
            }
        }
    }
}

/// Calls `function`, which changes attributes of `file` unless `is_so` already.
fn change<F>(
    file: File,
    is_so: impl FnOnce(&libc::stat) -> bool,
    function: &next::Next<F>,
    call: impl FnOnce(F) -> c_int,
) -> c_int
where
    F: Copy,
{
    let Some(function) = function.get() else { return raw::failed_int(libc::ENOSYS) };
    let changed = process::log().and_then(|log| Some((log, file.changed(log, is_so)?)));
    if let Some((log, file)) = changed {
        absorb::settle_attributes(log, file);
    }
    let mark = || {
        if let Some((log, file)) = changed {
            log.mark_unlogged(file);
        }
    };
    // Before and after: a sync in between does not cover the change.
    mark();
    let result = call(function);
    if result == 0 {
        mark();
    }
    result
}

fn has_mode(mode: mode_t) -> impl FnOnce(&libc::stat) -> bool {
    move |stat| stat.st_mode & !libc::S_IFMT == mode & !libc::S_IFMT
}

/// The owner is this one already: `SQLite` sets it for every journal that it makes as root.
fn has_owner(uid: uid_t, gid: gid_t) -> impl FnOnce(&libc::stat) -> bool {
    // A change of the owner takes these away, even where it changes nothing.
    const TAKEN_AWAY: mode_t = libc::S_ISUID | libc::S_ISGID;
    move |stat| {
        (uid == uid_t::MAX || uid == stat.st_uid)
            && (gid == gid_t::MAX || gid == stat.st_gid)
            && stat.st_mode & TAKEN_AWAY == 0
    }
}

fn never(_: &libc::stat) -> bool {
    false
}

fn by_path(path: *const c_char) -> File {
    File::Path(libc::AT_FDCWD, path, 0)
}

fn link_itself(path: *const c_char) -> File {
    File::Path(libc::AT_FDCWD, path, libc::O_NOFOLLOW)
}

fn at(directory: c_int, path: *const c_char, flags: c_int) -> File {
    let empty = text(path).is_none_or(std::ffi::CStr::is_empty);
    match flags & libc::AT_SYMLINK_NOFOLLOW {
        _ if empty => File::Descriptor(directory),
        0 => File::Path(directory, path, 0),
        _ => File::Path(directory, path, libc::O_NOFOLLOW),
    }
}

macro_rules! hooks {
    ($($name:ident($($argument:ident: $kind:ty),*): $file:expr, $is_so:expr;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> c_int {
            // SAFETY: the C library's function of this type, with what the program passed.
            change($file, $is_so, &next::$name, |function| unsafe { function($($argument),*) })
        }
    )*};
}

hooks! {
    chmod(path: *const c_char, mode: mode_t): by_path(path), has_mode(mode);
    lchmod(path: *const c_char, mode: mode_t): link_itself(path), has_mode(mode);
    fchmod(fd: c_int, mode: mode_t): File::Descriptor(fd), has_mode(mode);
    fchmodat(directory: c_int, path: *const c_char, mode: mode_t, flags: c_int): at(directory, path, flags), has_mode(mode);
    chown(path: *const c_char, uid: uid_t, gid: gid_t): by_path(path), has_owner(uid, gid);
    lchown(path: *const c_char, uid: uid_t, gid: gid_t): link_itself(path), has_owner(uid, gid);
    fchown(fd: c_int, uid: uid_t, gid: gid_t): File::Descriptor(fd), has_owner(uid, gid);
    fchownat(directory: c_int, path: *const c_char, uid: uid_t, gid: gid_t, flags: c_int): at(directory, path, flags), has_owner(uid, gid);
    utime(path: *const c_char, times: *const utimbuf): by_path(path), never;
    utimes(path: *const c_char, times: *const timeval): by_path(path), never;
    lutimes(path: *const c_char, times: *const timeval): link_itself(path), never;
    futimes(fd: c_int, times: *const timeval): File::Descriptor(fd), never;
    futimesat(directory: c_int, path: *const c_char, times: *const timeval): at(directory, path, 0), never;
    futimens(fd: c_int, times: *const timespec): File::Descriptor(fd), never;
    utimensat(directory: c_int, path: *const c_char, times: *const timespec, flags: c_int): at(directory, path, flags), never;
    setxattr(path: *const c_char, name: *const c_char, value: *const c_void, len: size_t, flags: c_int): by_path(path), never;
    lsetxattr(path: *const c_char, name: *const c_char, value: *const c_void, len: size_t, flags: c_int): link_itself(path), never;
    fsetxattr(fd: c_int, name: *const c_char, value: *const c_void, len: size_t, flags: c_int): File::Descriptor(fd), never;
    removexattr(path: *const c_char, name: *const c_char): by_path(path), never;
    lremovexattr(path: *const c_char, name: *const c_char): link_itself(path), never;
    fremovexattr(fd: c_int, name: *const c_char): File::Descriptor(fd), never;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(mode: mode_t, uid: uid_t, gid: gid_t) -> libc::stat {
        let mut stat = raw::fstat(0).unwrap();
        (stat.st_mode, stat.st_uid, stat.st_gid) = (libc::S_IFREG | mode, uid, gid);
        stat
    }

    #[test]
    fn what_changes_nothing_is_told() {
        assert!(has_mode(0o644)(&stat(0o644, 0, 0)) && !has_mode(0o600)(&stat(0o644, 0, 0)));
        for (uid, gid, is_so) in [
            (1, 2, true),
            (uid_t::MAX, 2, true),
            (1, gid_t::MAX, true),
            (1, 3, false),
            (0, 2, false),
        ] {
            assert_eq!(has_owner(uid, gid)(&stat(0o644, 1, 2)), is_so);
        }
        assert!(!has_owner(1, 2)(&stat(0o4755, 1, 2)), "the bit is lost");
    }
}
