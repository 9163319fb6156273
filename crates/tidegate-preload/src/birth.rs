//! Files that this process has just made.
//!
//! Invariant: what the kernel said of the file when it was made is what its definition says; but for its name, which is looked at
//! under the lock of names, by which no process of the tree changes it before the definition is in the log.

use std::ffi::CStr;

use crate::files::{self, Seen};
use crate::known_folder::{self, Known};
use crate::logged::Open;
use crate::path::PathBuffer;
use crate::raw::Errno;
use crate::{mend, names};

/// The path by which the program has made a file, and whether it is the kernel's, too.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    pub(crate) path: &'a CStr,
    pub(crate) known: Option<Known>,
}

/// The file was made by this process just now, and `seen` since: all of it is in the log from the start.
pub(crate) fn born(open: &Open, seen: &Seen, given: Option<Given<'_>>) {
    if defined(open, seen, given).is_none() {
        open.born();
    }
}

/// Defines the file, if nothing has to be waited for.
fn defined(open: &Open, seen: &Seen, given: Option<Given<'_>>) -> Option<()> {
    let _names = names::lock(open.log)?;
    let guard = open.log.lock(open.file).ok()?;
    if guard.owner_died() {
        mend::file(open.log, open.fd, &guard);
    }
    guard.mark_born();
    let mut ticket = guard.begin().ok()?;
    if !ticket.needs_define() {
        // Somebody else has opened and written it.
        return Some(());
    }
    let mut path = PathBuffer::new();
    find_path(open, seen, given, &mut path).ok()?;
    guard.note_mount(seen.mount);
    ticket.define(&seen.definition(open.log.key_of(guard.file()), true, &path)).ok()
}

/// The path by which the kernel knows the file.
fn find_path(
    open: &Open,
    seen: &Seen,
    given: Option<Given<'_>>,
    path: &mut PathBuffer,
) -> Result<(), Errno> {
    let known = |given: &Given<'_>| given.known.is_some_and(|known| known.still_holds(open.log));
    if let Some(given) = given.filter(known) {
        path.push(given.path.to_bytes())?;
        return files::leads_to(path, &seen.stat);
    }
    let names = open.log.names_unlogged();
    files::path_of(open.fd, &seen.stat, path)?;
    if let Some(given) = given {
        known_folder::learn(open.log, given.path, path.as_bytes(), names, seen.mount);
    }
    Ok(())
}
