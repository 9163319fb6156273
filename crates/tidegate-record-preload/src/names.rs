//! Hooks: names of files, and their sizes.
//!
//! Invariant: which files a change of names is about is asked before it is made, since a name that
//! is taken away says nothing after; that it was made is told when it was.
#![allow(unsafe_code)] // C's calling convention and strings

use std::ffi::{c_char, c_int, c_uint};

use libc::{AT_FDCWD, off_t};
use rustix::fs::Statx;
use tidegate_record::event::{Event, FOLDER, Kind};

use crate::files::{self, PathBuffer, identity, stat_path, text};
use crate::hook::hooks;
use crate::session;

/// A path as a function takes it.
#[derive(Clone, Copy)]
struct Name {
    directory: c_int,
    path: *const c_char,
}

impl Name {
    const fn new(directory: c_int, path: *const c_char) -> Self {
        Self { directory, path }
    }

    /// The file that it stands for, if this process is recorded.
    ///
    /// # Safety
    /// As for [`stat_path`].
    unsafe fn found(self, follows: bool) -> Option<Statx> {
        let mut found = None;
        session::recording(|_| {
            // SAFETY: as promised.
            found = unsafe { stat_path(self.directory, self.path, follows) };
        });
        found
    }
}

/// Makes a call that changes what `name` stands for, and tells of it, if it succeeds, by an event
/// of `kind` whose arguments are those that `given` makes of the file.
///
/// # Safety
/// As for [`stat_path`], and the call is made with this path.
unsafe fn changing<const N: usize>(
    name: Name,
    (kind, follows): (Kind, bool),
    given: impl FnOnce(&Statx) -> [u64; N],
    call: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: as promised.
    let before = unsafe { name.found(follows) };
    let result = call();
    if let (0, Some(found)) = (result, before) {
        // SAFETY: the call has succeeded.
        unsafe { tell(name, Event::new(kind).with(given(&found))) };
    }
    result
}

/// # Safety
/// A call with this path has just succeeded.
unsafe fn tell(name: Name, event: Event) {
    session::recording(|recorder| {
        // SAFETY: as promised.
        let path = unsafe { text(name.path) };
        let mut buffer = PathBuffer::new();
        recorder.tell(event, &[buffer.of_folder(name.directory, path), path]);
    });
}

/// The file that loses a name, and how many it has; a folder has one.
fn removed(found: &Statx) -> [u64; 4] {
    let [device, inode, created_ns] = identity(found);
    let names = if files::is_folder(found) { 1 } else { found.stx_nlink };
    [device, inode, created_ns, names.into()]
}

/// # Safety
/// As for [`changing`].
unsafe fn removing(name: Name, call: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: as promised.
    unsafe { changing(name, (Kind::Removed, false), removed, call) }
}

/// # Safety
/// As for [`changing`], for both paths.
unsafe fn renaming(from: Name, to: Name, flags: c_uint, call: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: as promised.
    let file = unsafe { from.found(false) };
    // SAFETY: as promised.
    let replaced = unsafe { to.found(false) };
    let result = call();
    let (0, Some(file)) = (result, file) else { return result };
    session::recording(|recorder| {
        let [device, inode, created_ns] = identity(&file);
        let [_, other_inode, other_created_ns] = replaced.as_ref().map_or([0; 3], identity);
        let given = [device, inode, created_ns, other_inode, other_created_ns];
        let event = Event::new(Kind::Renamed).with(given);
        // SAFETY: the call has succeeded.
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

/// Makes a call that gives a file one more name, and tells of it.
///
/// # Safety
/// A call with this new path.
unsafe fn linking(to: Name, call: impl FnOnce() -> c_int) -> c_int {
    let result = call();
    if result == 0 {
        // SAFETY: the call has succeeded.
        if let Some(found) = unsafe { to.found(false) } {
            // SAFETY: the call has succeeded.
            unsafe { tell(to, Event::new(Kind::Linked).with(identity(&found))) };
        }
    }
    result
}

/// # Safety
/// As for [`changing`].
unsafe fn resizing_path(path: *const c_char, len: off_t, call: impl FnOnce() -> c_int) -> c_int {
    let len = u64::try_from(len).unwrap_or(0);
    let given = |found: &Statx| {
        let [device, inode, created_ns] = identity(found);
        [len, device, inode, created_ns]
    };
    // SAFETY: as promised.
    unsafe { changing(Name::new(AT_FDCWD, path), (Kind::ResizedPath, true), given, call) }
}

/// Tells of an event of an open file whose arguments are these, if the call has succeeded.
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
