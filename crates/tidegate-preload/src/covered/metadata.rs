//! Changes of names, attributes and sizes: made by the kernel, and counted before and after.
//!
//! Invariants:
//! 1. From before the kernel makes such a change until a later sync has committed the journal, the
//!    change is pending in the log's count.
//! 2. A change of the names or attributes of a logged file is also counted for that file. The
//!    file's next sync would make the change durable, and so is real, whatever else is pending. If
//!    a story of any file begins during the call, the file is looked up again after the call.
//! 3. A process announces the change in its lane. If the process is killed during the call, the
//!    supervisor counts the change.
//! 4. A file whose names the log has leaves the log before a change of its names or attributes
//!    without a record.
//!
//! A change is counted for all file systems that the log knows. An unneeded real sync now and then
//! costs less than to look up the file system of each path.
//!
//! Entry points: [`counted`]; [`counted_of`] for changes of named files, [`counted_attributes`] for
//! changes of attributes; [`creating`].

use std::ffi::{c_char, c_int};

use tidegate::log::cover::leaves_unrecorded;
use tidegate::log::{FileRef, Log, PlainCall};

use crate::covered::{self, Gone, Remade, leave_gone, plain};
use crate::state::descriptors::{self, Kind};
use crate::state::files::{self, Identified};
use crate::state::new_files::{self, Numbers};
use crate::state::process;
use crate::state::process::Holding;
use crate::sys::path::{LINK_BYTES, Opened, proc_link};
use crate::sys::readable::text;
use crate::sys::signals::SignalsBlocked;
use crate::sys::{own_stack, query, raw};

/// Runs a call that changes names, attributes or sizes, and counts the change.
pub(crate) fn counted<R>(call: impl FnOnce() -> R) -> R {
    match process::log() {
        Some(log) => with_numbers(log, call).0,
        None => call(),
    }
}

/// Runs a call that changes the size of a plain file, and counts the change. If the file is new,
/// also notes the change with the file: the file's make record will have the new size.
pub(crate) fn counted_new<R>(fd: c_int, of_file: (u64, u64), call: impl FnOnce() -> R) -> R {
    let Some(log) = process::log().filter(|_| new_files::has_some()) else { return counted(call) };
    let (result, numbers) = with_numbers(log, call);
    if !new_files::own_change(of_file, numbers) {
        new_files::own_change_of(fd, numbers);
    }
    result
}

/// Runs a call as [`counted`] does. Returns the call's result and the numbers of the change.
pub(crate) fn with_numbers<R>(log: &'static Log, call: impl FnOnce() -> R) -> (R, Numbers) {
    let in_flight = plain::in_lane(log, PlainCall::Metadata);
    let before = log.file_systems().note_change_everywhere();
    let result = call();
    let numbers = [before, log.file_systems().note_change_everywhere()];
    drop(in_flight);
    (result, numbers)
}

/// Runs a call that creates a regular file and opens it with these `status` flags. Returns the
/// descriptor, after calling `appeared` with it and noting it, or a negative number if the call
/// fails.
pub(crate) fn creating(
    status: c_int,
    call: impl FnOnce() -> c_int,
    appeared: impl FnOnce(c_int),
) -> c_int {
    let Some(log) = process::log() else { return call() };
    let in_flight = plain::in_lane(log, PlainCall::Metadata);
    let before = log.file_systems().note_creation_everywhere();
    let fd = call();
    let numbers = [before, log.file_systems().note_creation_everywhere()];
    drop(in_flight);
    if fd < 0 {
        take_off_all(log, numbers);
        return fd;
    }
    appeared(fd);
    if !process::is_apart() {
        let _signals = SignalsBlocked::deferred();
        own_stack::run(|| {
            if let Some(seen) = new_files::note(fd, numbers) {
                covered::note(fd, &seen, || Ok(status));
            }
        });
    }
    fd
}

/// Takes off a pending change, which the kernel did not make or a record has.
pub(crate) fn take_off_all(log: &Log, numbers: Numbers) {
    for file_system in log.file_systems().all() {
        let numbers = numbers.iter().filter_map(|numbers| numbers.of(file_system));
        numbers.for_each(|number| log.file_systems().take_off(file_system, number));
    }
}

/// A file as a call names it.
#[derive(Clone, Copy)]
pub(crate) enum Named {
    Descriptor(c_int),
    /// A path in a directory, with the flags of `fstatat`.
    Path(c_int, *const c_char, c_int),
}

impl Named {
    /// Returns the file of a path in the working directory.
    pub(crate) fn path(path: *const c_char) -> Self {
        Self::Path(libc::AT_FDCWD, path, 0)
    }

    /// Returns the file of a path in `directory`, without following a symbolic link at its end.
    pub(crate) fn entry(directory: c_int, path: *const c_char) -> Self {
        Self::Path(directory, path, libc::AT_SYMLINK_NOFOLLOW)
    }

    /// Returns the file that a call means by `directory`, `path` and `flags`: `directory` itself if
    /// the path is null or empty.
    pub(crate) fn at(directory: c_int, path: *const c_char, flags: c_int) -> Self {
        if text(path).is_none_or(std::ffi::CStr::is_empty) {
            return Self::Descriptor(directory);
        }
        Self::Path(directory, path, flags & libc::AT_SYMLINK_NOFOLLOW)
    }

    /// Returns the file's entry, if its changes are logged.
    fn logged(self, log: &Log) -> Option<FileRef> {
        let (device, inode) = self.numbers()?;
        let _holding = Holding::new().filter(|_| log.may_have(device, inode))?;
        let file = log.logged_with(device, inode)?;
        // A removed file may have had these numbers.
        match self.identity(log) {
            Some(identified) => log.find(&identified.key).ok()?.filter(|file| log.must_log(*file)),
            None => Some(file),
        }
    }

    fn identity(self, log: &Log) -> Option<Identified> {
        match self {
            Self::Descriptor(fd) => files::identify(log, fd),
            Self::Path(directory, path, flags) => {
                let flags =
                    if flags & libc::AT_SYMLINK_NOFOLLOW == 0 { 0 } else { libc::O_NOFOLLOW };
                let opened = Opened::path(directory, text(path)?, flags).ok()?;
                files::identify(log, opened.number())
            }
        }
    }

    /// Returns the logged `file`, if a change of its attributes may be recorded.
    fn remade(self, log: &'static Log, file: FileRef) -> Option<Remade> {
        if !log.has_names(file) {
            return None;
        }
        let numbers = self.numbers()?;
        let mut link = [0; LINK_BYTES];
        let (directory, path, flags) = match self {
            Self::Descriptor(fd) => (libc::AT_FDCWD, proc_link(fd, &mut link), 0),
            Self::Path(directory, path, flags) => (directory, text(path)?, flags),
        };
        let flags = if flags & libc::AT_SYMLINK_NOFOLLOW == 0 { 0 } else { libc::O_NOFOLLOW };
        Remade::find(log, file, numbers, (directory, path, flags))
    }

    /// Makes the file leave the log, if it must leave before a change of `sets`.
    fn leave(self, log: &'static Log, file: FileRef, sets: Sets) {
        if leaves_unrecorded(sets == Sets::Times, || log.has_names(file))
            && let Some((device, inode)) = self.numbers()
        {
            let path = match self {
                Self::Path(directory, path, flags) => {
                    text(path).map(|path| (directory, path, flags))
                }
                Self::Descriptor(_) => None,
            };
            leave_gone(log, file, &Gone { device, inode, path });
        }
    }

    fn numbers(self) -> Option<(u64, u64)> {
        let stat = match self {
            Self::Descriptor(fd) => {
                let known = descriptors::get(fd);
                if known.kind == Kind::File {
                    return Some((known.device, known.inode));
                }
                query::fstat(fd)
            }
            Self::Path(directory, path, flags) => query::fstatat(directory, text(path)?, flags),
        };
        stat.ok().map(|stat| (stat.st_dev, stat.st_ino))
    }
}

/// The attributes of a file that a call sets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sets {
    /// The times of access and modification.
    Times,
    /// Any other attributes or names.
    Others,
}

/// The logged files that a call will change, looked up before the call.
struct Before<const N: usize> {
    /// [`Log::stories`] before the look-up.
    stories: u64,
    files: [Option<FileRef>; N],
}

impl<const N: usize> Before<N> {
    fn look_up(log: &Log, names: [Named; N]) -> Self {
        let stories = log.stories();
        // While the log has no story, programs pay for no look-up.
        let files = if stories == 0 { [None; N] } else { names.map(|name| name.logged(log)) };
        Self { stories, files }
    }
}

/// Runs and counts a call that changes names, or attributes other than times, of the files `names`.
pub(crate) fn counted_of<R, const N: usize>(names: [Named; N], call: impl FnOnce() -> R) -> R {
    match process::log() {
        Some(log) => of_named(log, names, Sets::Others, call).0,
        None => call(),
    }
}

/// Runs a call that changes `sets` of the files `names`, and counts the change. Returns the call's
/// result and the numbers of the change.
fn of_named<R, const N: usize>(
    log: &'static Log,
    names: [Named; N],
    sets: Sets,
    call: impl FnOnce() -> R,
) -> (R, Numbers) {
    let before = raw::keeping_errno(|| Before::look_up(log, names));
    of_logged(log, names, &before, sets, call)
}

/// Runs a call as [`of_named`] does, with the files that were looked up `before`.
fn of_logged<R, const N: usize>(
    log: &'static Log,
    names: [Named; N],
    before: &Before<N>,
    sets: Sets,
    call: impl FnOnce() -> R,
) -> (R, Numbers) {
    raw::keeping_errno(|| {
        for (name, file) in names.into_iter().zip(before.files) {
            if let Some(file) = file {
                name.leave(log, file, sets);
                log.note_own_change(file);
            }
        }
    });
    let result = with_numbers(log, call);
    raw::keeping_errno(|| {
        let has_begun = log.stories() != before.stories;
        for (name, file) in names.into_iter().zip(before.files) {
            if let Some(file) = file.or_else(|| has_begun.then(|| name.logged(log))?) {
                log.note_own_change(file);
            }
        }
    });
    result
}

/// Runs a call that sets attributes of one file, and counts the change. The make record of a new
/// file will have its attributes; a file that has its make record gets a second one.
pub(crate) fn counted_attributes<R>(name: Named, sets: Sets, call: impl FnOnce() -> R) -> R {
    let Some(log) = process::log() else { return call() };
    if !new_files::has_some() {
        return of_named(log, [name], sets, call).0;
    }
    let _signals = SignalsBlocked::deferred();
    own_stack::run(|| counted_noted(log, name, sets, call))
}

/// Runs a call that sets attributes of one file, in a process that has noted new files.
fn counted_noted<R>(log: &'static Log, name: Named, sets: Sets, call: impl FnOnce() -> R) -> R {
    let (before, remade) = raw::keeping_errno(|| {
        let before = Before::look_up(log, [name]);
        let remade = before.files[0].and_then(|file| name.remade(log, file));
        (before, remade)
    });
    let own = |call| counted_own(log, name, &before, sets, call);
    match remade {
        Some(remade) => remade.change(call).unwrap_or_else(own),
        None => own(call),
    }
}

/// Runs a call that changes attributes of a file without a record, and notes the change with the
/// file if it is new.
fn counted_own<R>(
    log: &'static Log,
    name: Named,
    before: &Before<1>,
    sets: Sets,
    call: impl FnOnce() -> R,
) -> R {
    let of_file = raw::keeping_errno(|| name.numbers());
    let (result, numbers) = of_logged(log, [name], before, sets, call);
    raw::keeping_errno(|| {
        // The path may lead to another file by now.
        let of_file = of_file.filter(|of_file| name.numbers() == Some(*of_file));
        let is_noted = of_file.is_some_and(|of_file| new_files::own_change(of_file, numbers));
        if let (false, Named::Descriptor(fd)) = (is_noted, name) {
            new_files::own_change_of(fd, numbers);
        }
    });
    result
}
