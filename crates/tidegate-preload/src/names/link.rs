//! Further names of a file.

use std::ffi::c_int;

use tidegate::log::Log;

use super::scarce::{is_scarcity, settled};
use super::target::{Name, Target};
use super::unlogged;
use crate::path::{LINK_BYTES, Opened, PathBuffer, proc_link};
use crate::raw::Errno;
use crate::subject::Place;

/// Gives the file `old` the further name `new`, with the flags of `linkat`.
pub(super) fn link(
    log: &Log,
    old: Name<'_>,
    new: Name<'_>,
    flags: c_int,
    operation: impl FnOnce() -> isize,
) -> isize {
    let target = match source(old, flags) {
        Ok(target) => target,
        Err(error) if is_scarcity(error) => {
            return settled(log, &[old], libc::AT_SYMLINK_NOFOLLOW, operation);
        }
        Err(_) => return unlogged(log, operation),
    };
    if target.is_file() && target.stat().st_nlink == 0 {
        return publish(log, &target, operation);
    }
    let Some(subject) = target.recorded(log) else {
        return unlogged(log, operation);
    };
    let path = || {
        let mut path = PathBuffer::new();
        new.absolute(&mut path).map(|()| path)
    };
    subject.run(&target, |ticket| Ok([ticket.link(path()?.as_bytes())?, 0]), operation)
}

fn source(old: Name<'_>, flags: c_int) -> Result<Target, Errno> {
    if flags & libc::AT_EMPTY_PATH != 0 && old.path.is_empty() {
        // A descriptor of our own for the same thing, whatever theirs is open for.
        let path = &mut [0; LINK_BYTES];
        return Target::of(Opened::path(libc::AT_FDCWD, proc_link(old.directory, path), 0)?);
    }
    old.look(if flags & libc::AT_SYMLINK_FOLLOW == 0 { libc::O_NOFOLLOW } else { 0 })
}

/// Gives a file without a name its first one, as after `O_TMPFILE`. While it had none it was not logged and its `fsync`
/// did nothing: what was written to it becomes durable now. The name does by the next `fsync`, which is a real one.
fn publish(log: &Log, target: &Target, operation: impl FnOnce() -> isize) -> isize {
    let subject = target.entered(log);
    target.make_durable();
    let result = unlogged(log, operation);
    if let Some(subject) = subject.filter(|_| result >= 0) {
        subject.guard.mark_named();
        subject.guard.mark_unlogged(false);
    }
    result
}
