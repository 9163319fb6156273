//! Hooks: names of files, and their sizes.
//!
//! Invariant: the hook looks up the affected files before the call, because a removed name no
//! longer leads to its file. It reports the change only after the call has succeeded.
#![allow(unsafe_code)] // C's calling convention and strings

use std::ffi::{c_char, c_int, c_uint};

use libc::{AT_FDCWD, off_t};
use rustix::fs::Statx;
use tidegate_record::event::{Event, FOLDER, Kind};

use crate::files::{self, PathBuffer, identity, stat_path, text};
use crate::hook::hooks;
use crate::session;

/// A path argument, and the directory that a relative path starts from.
#[derive(Clone, Copy)]
struct Name {
    directory: c_int,
    path: *const c_char,
}

impl Name {
    const fn new(directory: c_int, path: *const c_char) -> Self {
        Self { directory, path }
    }

    /// Returns the status of the file that the path names, if this process is recorded.
    ///
    /// # Safety
    /// The condition of [`stat_path`].
    unsafe fn found(self, follows: bool) -> Option<Statx> {
        let mut found = None;
        session::recording(|_| {
            // SAFETY: the caller fulfils the condition of `stat_path`.
            found = unsafe { stat_path(self.directory, self.path, follows) };
        });
        found
    }
}

/// Makes a call that changes the file or name of `name`. On success, reports an event of `kind`
/// with the arguments that `given` computes from the file's status before the call.
///
/// # Safety
/// The condition of [`stat_path`], and `call` uses this path.
unsafe fn changing<const N: usize>(
    name: Name,
    (kind, follows): (Kind, bool),
    given: impl FnOnce(&Statx) -> [u64; N],
    call: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller fulfils the condition of `stat_path`.
    let before = unsafe { name.found(follows) };
    let result = call();
    if let (0, Some(found)) = (result, before) {
        // SAFETY: the call with this path has succeeded.
        unsafe { tell(name, Event::new(kind).with(given(&found))) };
    }
    result
}

/// # Safety
/// A call with this path has just succeeded.
unsafe fn tell(name: Name, event: Event) {
    session::recording(|recorder| {
        // SAFETY: a call with this path has just succeeded.
        let path = unsafe { text(name.path) };
        let mut buffer = PathBuffer::new();
        recorder.tell(event, &[buffer.of_folder(name.directory, path), path]);
    });
}

/// Returns the identity of the file that loses a name, and its number of links (1 for a directory).
fn removed(found: &Statx) -> [u64; 4] {
    let [device, inode, created_ns] = identity(found);
    let names = if files::is_folder(found) { 1 } else { found.stx_nlink };
    [device, inode, created_ns, names.into()]
}

/// # Safety
/// The conditions of [`changing`].
unsafe fn removing(name: Name, call: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the caller fulfils the conditions of `changing`.
    unsafe { changing(name, (Kind::Removed, false), removed, call) }
}

/// # Safety
/// The conditions of [`changing`], for both paths.
unsafe fn renaming(from: Name, to: Name, flags: c_uint, call: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the caller fulfils the condition of `stat_path` for `from`.
    let file = unsafe { from.found(false) };
    // SAFETY: the caller fulfils the condition of `stat_path` for `to`.
    let replaced = unsafe { to.found(false) };
    let result = call();
    let (0, Some(file)) = (result, file) else { return result };
    session::recording(|recorder| {
        let [device, inode, created_ns] = identity(&file);
        let [_, other_inode, other_created_ns] = replaced.as_ref().map_or([0; 3], identity);
        let given = [device, inode, created_ns, other_inode, other_created_ns];
        let event = Event::new(Kind::Renamed).with(given);
        // SAFETY: the call with both paths has succeeded.
        let (old, new) = (unsafe { text(from.path) }, unsafe { text(to.path) });
        let (mut folder, mut new_folder) = (PathBuffer::new(), PathBuffer::new());
        let folder = folder.of_folder(from.directory, old);
        let new_folder = new_folder.of_folder(to.directory, new);
        let is_folder =
            [Some(&file), replaced.as_ref()].into_iter().flatten().any(files::is_folder);
        let flags_of_kind = if is_folder { FOLDER } else { 0 };
        let event = Event { flags: flags_of_kind, ..event };
        let event = event.flagged(flags & libc::RENAME_EXCHANGE != 0);
        recorder.tell(event, &[folder, old, new_folder, new]);
    });
    result
}

/// Makes a call that adds a name to a file, and reports the new name on success.
///
/// # Safety
/// `call` uses the path of `to` as the new name.
unsafe fn linking(to: Name, call: impl FnOnce() -> c_int) -> c_int {
    let result = call();
    if result == 0 {
        // SAFETY: the call with this path has succeeded.
        if let Some(found) = unsafe { to.found(false) } {
            // SAFETY: the call with this path has succeeded.
            unsafe { tell(to, Event::new(Kind::Linked).with(identity(&found))) };
        }
    }
    result
}

/// # Safety
/// The conditions of [`changing`].
unsafe fn resizing_path(path: *const c_char, len: off_t, call: impl FnOnce() -> c_int) -> c_int {
    let len = u64::try_from(len).unwrap_or(0);
    let given = |found: &Statx| {
        let [device, inode, created_ns] = identity(found);
        [len, device, inode, created_ns]
    };
    // SAFETY: the caller fulfils the conditions of `changing`.
    unsafe { changing(Name::new(AT_FDCWD, path), (Kind::ResizedPath, true), given, call) }
}

/// Reports an event of an open file if the call has succeeded; returns `result`.
fn of_open<const N: usize>(kind: Kind, fd: c_int, given: [off_t; N], result: c_int) -> c_int {
    if result == 0 {
        session::recording(|recorder| {
            if let Some(file) = files::of(recorder, fd) {
                let given = given.map(|argument| u64::try_from(argument).unwrap_or(0));
                recorder.tell(Event::new(kind).of_file(file.number).with(given), &[]);
            }
        });
    }
    result
}

hooks! {
    [unlink remove](path: *const c_char) -> c_int => |call| {
        // SAFETY: the program's own path.
        unsafe { removing(Name::new(AT_FDCWD, path), call) }
    };
    [unlinkat](directory: c_int, path: *const c_char, flags: c_int) -> c_int => |call| {
        // SAFETY: the program's own path.
        unsafe { removing(Name::new(directory, path), call) }
    };
    [rename](from: *const c_char, to: *const c_char) -> c_int => |call| {
        // SAFETY: the program's own paths.
        unsafe { renaming(Name::new(AT_FDCWD, from), Name::new(AT_FDCWD, to), 0, call) }
    };
    [renameat](
        from_directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char
    ) -> c_int => |call| {
        // SAFETY: the program's own paths.
        unsafe { renaming(Name::new(from_directory, from), Name::new(to_directory, to), 0, call) }
    };
    [renameat2](
        from_directory: c_int,
        from: *const c_char,
        to_directory: c_int,
        to: *const c_char,
        flags: c_uint
    ) -> c_int => |call| {
        let (old, new) = (Name::new(from_directory, from), Name::new(to_directory, to));
        // SAFETY: the program's own paths.
        unsafe { renaming(old, new, flags, call) }
    };
    [link](from: *const c_char, to: *const c_char) -> c_int => |call| {
        // SAFETY: the call is made with this path.
        unsafe { linking(Name::new(AT_FDCWD, to), call) }
    };
    [linkat](
        from_directory: c_int,
        from: *const c_char,
        to_directory: c_int,
        to: *const c_char,
        flags: c_int
    ) -> c_int => |call| {
        // SAFETY: the call is made with this path.
        unsafe { linking(Name::new(to_directory, to), call) }
    };
    [truncate truncate64](path: *const c_char, len: off_t) -> c_int => |call| {
        // SAFETY: the program's own path.
        unsafe { resizing_path(path, len, call) }
    };
    [ftruncate ftruncate64](fd: c_int, len: off_t) -> c_int =>
        |call| of_open(Kind::Resized, fd, [len], call());
    [fallocate fallocate64](fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int =>
        |call| of_open(Kind::Allocated, fd, [offset, len], call());
    [posix_fallocate posix_fallocate64](fd: c_int, offset: off_t, len: off_t) -> c_int =>
        |call| of_open(Kind::Allocated, fd, [offset, len], call());
}
