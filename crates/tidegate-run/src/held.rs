//! Descriptors of file systems whose names are in the log, held by the supervisor.
//!
//! Files that the log can make again are not kept one by one: that would cost more than the syncs
//! that it saves. A sync of the whole file system retires their records. The kernel reports each
//! error of the file system once to every description that was open before, and such an error
//! concerns all its files.
//!
//! Invariant: a file system is noted as held only while this process has a descriptor of the file
//! system open. It is released under the lock of its names, and only while the log is empty.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use tidegate::durable;
use tidegate::log::recover::{file_system_id, handle_of, open_by_handle};
use tidegate::log::{Definition, FileRef, FileSystemId, FileSystemRef, Log};

use super::backlog::Known;
use super::locate;

/// A file system that the supervisor has open.
#[derive(Debug)]
struct Held {
    reference: FileSystemRef,
    /// A directory of the file system.
    directory: File,
}

/// The held file systems.
#[derive(Debug, Default)]
pub(crate) struct HeldFileSystems {
    held: HashMap<FileSystemId, Held>,
}

impl HeldFileSystems {
    /// Opens the file systems that programs want held, and makes earlier changes in them durable.
    /// Refuses a file system whose files this user may not open by handle, since recovery could not
    /// open them either: no names are recorded in it.
    pub(crate) fn hold_wanted(&mut self, log: &Log) {
        for (reference, file) in log.file_systems().take_wanted_held() {
            match self.hold(log, reference, file) {
                Ok(()) => log.file_systems().note_held(reference),
                Err(error) if Errno::from_io_error(&error) == Some(Errno::PERM) => {
                    log.file_systems().refuse_held(reference);
                }
                // The program waits only briefly, makes a real sync, and asks again.
                Err(_) => {}
            }
        }
    }

    fn hold(&mut self, log: &Log, reference: FileSystemRef, file: FileRef) -> io::Result<()> {
        let (id, directory) = open(log, file)?;
        if log.file_systems().has_copies(reference) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.held.entry(id).or_insert(Held { reference, directory });
        self.sync(log, &id).unwrap_or(Ok(()))
    }

    /// Releases the file systems that a dead supervisor held: programs ask again.
    pub(crate) fn take_over(log: &Log) {
        for reference in
            log.file_systems().all().filter(|reference| log.file_systems().is_held(*reference))
        {
            if let Ok(names) = log.file_systems().lock_names(reference) {
                names.let_go();
            }
        }
    }

    /// Returns whether the file system with this id is held.
    pub(crate) fn holds(&self, id: &FileSystemId) -> bool {
        self.held.contains_key(id)
    }

    /// Returns whether no file system is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Makes the whole file system durable, with its pending changes; `None` if it is not held.
    pub(crate) fn sync(&self, log: &Log, id: &FileSystemId) -> Option<io::Result<()>> {
        let held = self.held.get(id)?;
        let seen = log.file_systems().changes(held.reference);
        let synced = durable::syncfs(&held.directory).map_err(io::Error::from);
        if synced.is_ok() {
            log.file_systems().synced_whole(held.reference, seen);
        }
        Some(synced)
    }

    /// Ends the stories of files that are not kept and have no changes in the log. Releases the
    /// file systems if the log is empty.
    pub(crate) fn release_all(&mut self, log: &Log) {
        for file in log.made_files().into_iter().filter(|file| !log.is_kept(*file)) {
            let Ok(guard) = log.lock_within(file, Duration::ZERO) else { continue };
            if !guard.has_live_changes() && !guard.owner_died() {
                // If the log has no space for the end, the story goes on, and is ended later.
                let _ = guard.end_story();
            }
        }
        self.held.retain(|_, held| !Self::is_let_go(log, held));
    }

    fn is_let_go(log: &Log, held: &Held) -> bool {
        let names = log.file_systems().lock_names_within(held.reference, Duration::ZERO);
        let is_free = names.as_ref().is_ok_and(|_| log.ring().head() == log.ring().tail());
        if let (Ok(names), true) = (names, is_free) {
            names.let_go();
        }
        is_free
    }
}

/// Opens a directory of the file system of an entry's file. Returns the file system's id too.
fn open(log: &Log, file: FileRef) -> io::Result<(FileSystemId, File)> {
    let payload = log.definition_of(file).ok_or(io::ErrorKind::NotFound)?;
    let definition = Definition::decode(&payload).ok_or(io::ErrorKind::InvalidData)?;
    let known = Known::of(&definition, 0);
    let directory = locate::directory_on(known.device, &known.path);
    let directory = directory.ok_or(io::ErrorKind::NotFound)?;
    if file_system_id(&directory)? != known.file_system {
        return Err(io::ErrorKind::NotFound.into());
    }
    // Recovery will open directories in the same way.
    open_by_handle(&directory, &handle_of(&directory)?, OFlags::PATH | OFlags::DIRECTORY)?;
    Ok((known.file_system, directory))
}

#[cfg(test)]
mod tests {
    use super::super::trial::Trial;
    use super::*;

    #[test]
    fn a_file_system_is_held_until_the_log_is_empty() {
        let trial = Trial::new();
        let file = trial.file("file", b"");
        let Ok(id) = file_system_id(&file) else { return };
        let reference = trial.log.file_systems().find_or_add(1, true).unwrap();
        trial.begin_story_on(&file, "file", id);
        let entry = trial.lock(&file).file();
        let mut held = HeldFileSystems::default();
        trial.log.file_systems().want_held(reference, entry);
        held.hold_wanted(&trial.log);
        if !held.holds(&id) {
            return;
        }
        assert!(
            trial.log.file_systems().is_held(reference)
                && !trial.log.file_systems().is_pending(reference)
        );
        trial.log.file_systems().note_change(reference);
        held.sync(&trial.log, &id).unwrap().unwrap();
        assert!(!trial.log.file_systems().is_pending(reference), "all of it was made durable");
        held.release_all(&trial.log);
        assert!(trial.log.file_systems().is_held(reference), "the log is not empty");
        trial.log.ring().retire_to(trial.log.ring().safe_position()).unwrap();
        held.release_all(&trial.log);
        assert!(!trial.log.file_systems().is_held(reference) && held.is_empty());
    }

    #[test]
    fn what_a_dead_supervisor_held_is_asked_for_again() {
        let trial = Trial::new();
        let reference = trial.log.file_systems().find_or_add(1, true).unwrap();
        trial.log.file_systems().note_held(reference);
        HeldFileSystems::take_over(&trial.log);
        assert!(!trial.log.file_systems().is_held(reference));
    }
}
