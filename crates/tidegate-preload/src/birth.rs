//! Files that this process has just made.
//!
//! Invariant: what the kernel said of the file when it was made is what its definition says; but for its name, which is looked at
//! under the lock of names, by which no process of the tree changes it before the definition is in the log; unless nobody has had that
//! lock since before the file was made.

use std::ffi::CStr;

use crate::files::{self, Seen};
use crate::known_folder::{self, Known};
use crate::logged::Open;
use crate::mend;
use crate::names::{self, Names};
use crate::path::PathBuffer;
use crate::raw::Errno;

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
    let names = names::lock(open.log)?;
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
    find_path(open, seen, given, &names, &mut path).ok()?;
    guard.note_mount(seen.mount);
    ticket.define(&seen.definition(open.log.key_of(guard.file()), true, &path)).ok()
}

/// The path by which the kernel knows the file.
fn find_path(
    open: &Open,
    seen: &Seen,
    given: Option<Given<'_>>,
    names: &Names<'_>,
    path: &mut PathBuffer,
) -> Result<(), Errno> {
    let known = given.and_then(|given| Some((given.path, given.known?)));
    if let Some((given, known)) = known.filter(|(_, known)| known.still_holds(open.log)) {
        path.push(given.to_bytes())?;
        // The file was made by this path after the version was read: it stands there still, unless a program outside has moved it,
        // which it may do at any later time as well.
        let stands = names.guard.unchanged_since(known.version);
        return if stands { Ok(()) } else { files::leads_to(path, &seen.stat) };
    }
    let names = open.log.names_unlogged();
    files::path_of(open.fd, &seen.stat, path)?;
    if let Some(given) = given {
        known_folder::learn(open.log, given.path, path.as_bytes(), names, seen.mount);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsRawFd;
    use std::path::Path;

    use super::*;
    use crate::descriptors;
    use crate::known_folder::tests::{IN_TESTS, learn_twice};
    use crate::names::changing;
    use crate::testing::{World, c_path, look};

    /// The path that a file is defined by which was made as `a` in a directory that is known; `between` runs since.
    fn defined_as(world: &'static World, path: &Path, between: impl FnOnce()) -> String {
        let (log, name) = (&world.log, c_path(path));
        let known = known_folder::knows(log, &name);
        assert!(known.is_some());
        let file = File::create_new(path).unwrap();
        between();
        let seen = Seen::of(file.as_raw_fd()).unwrap();
        let entry = log.entry_for(&files::key_of(file.as_raw_fd(), &seen).unwrap()).unwrap();
        let known_as = descriptors::Known::of_file(entry, 0);
        let open = Open { log, fd: file.as_raw_fd(), known: known_as, file: entry };
        born(&open, &seen, Some(Given { path: &name, known }));
        world.records().pop().unwrap()
    }

    #[test]
    fn a_new_file_that_another_process_has_renamed_is_defined_by_its_name() {
        let _tests = IN_TESTS.lock().unwrap();
        let world: &'static World = Box::leak(Box::new(World::new()));
        let (path, moved) = (world.path("a"), world.path("b"));
        let one = world.file("one");
        let rename = || changing(&world.log, || fs::rename(&path, &moved).map_or(-1, |()| 0));
        learn_twice(&world.log, &one, &one);
        assert_eq!(defined_as(world, &path, || {}), "define a");
        fs::remove_file(&path).unwrap();
        let renamed = || assert_eq!(rename(), 0);
        assert_eq!(defined_as(world, &path, renamed), "define b");
        fs::remove_file(&moved).unwrap();
        // By one who had the lock before the file was made.
        let names = world.log.lock_names().unwrap();
        let finished = || {
            fs::rename(&path, &moved).unwrap();
            drop(names);
        };
        assert_eq!(defined_as(world, &path, finished), "define b");
        assert!(look(&moved).find(&world.log).is_some());
    }
}
