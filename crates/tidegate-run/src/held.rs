//! Descriptors of file systems whose names are in the log, held by the supervisor.
//!
//! Files that the log can make again are not kept one by one: that would cost more than the syncs
//! that it saves. Their records are retired by a sync of the whole file system, whose errors the
//! kernel tells each description that was open before, once. They concern all files of it.
//!
//! Invariant: a file system is said to be held only while a descriptor of it is open here. It is
//! let go under the lock of its names, and only while the log is empty.

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
    /// A directory there.
    directory: File,
}

/// The file systems that are held.
#[derive(Debug, Default)]
pub(crate) struct HeldFileSystems {
    held: HashMap<FileSystemId, Held>,
}

impl HeldFileSystems {
    /// Opens the file systems that programs want to be held, and makes durable what was changed
    /// there before. No names are recorded of one whose files this user may not open by their
    /// handles: recovery could not.
    pub(crate) fn hold_wanted(&mut self, log: &Log) {
        for (reference, file) in log.file_systems().take_wanted_held() {
            match self.hold(log, reference, file) {
                Ok(()) => log.file_systems().note_held(reference),
                Err(error) if Errno::from_io_error(&error) == Some(Errno::PERM) => {
                    log.file_systems().refuse_held(reference);
                }
                // The program waits for a moment only, makes a real sync, and asks again.
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

    /// None is held that a supervisor held which died: programs ask again.
    pub(crate) fn take_over(log: &Log) {
        for reference in
            log.file_systems().all().filter(|reference| log.file_systems().is_held(*reference))
        {
            if let Ok(names) = log.file_systems().lock_names(reference) {
                names.let_go();
            }
        }
    }

    /// The file system with this id is held.
    pub(crate) fn holds(&self, id: &FileSystemId) -> bool {
        self.held.contains_key(id)
    }

    /// No file system is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Makes all of the file system durable, and what was pending in it; none, where it is not
    /// held.
    pub(crate) fn sync(&self, log: &Log, id: &FileSystemId) -> Option<io::Result<()>> {
        let held = self.held.get(id)?;
        let seen = log.file_systems().changes(held.reference);
        let synced = durable::syncfs(&held.directory).map_err(io::Error::from);
        if synced.is_ok() {
            log.file_systems().synced_whole(held.reference, seen);
        }
        Some(synced)
    }

    /// Ends the stories of files that are not kept and of which the log has nothing; lets all file
    /// systems go once the log is empty.
    pub(crate) fn release_all(&mut self, log: &Log) {
        for file in log.made_files().into_iter().filter(|file| !log.is_kept(*file)) {
            let Ok(guard) = log.lock_within(file, Duration::ZERO) else { continue };
            if !guard.has_live_changes() && !guard.owner_died() {
                // Without space for its end it goes on, and is ended later.
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

/// A directory of the file system of an entry's file, and its id.
fn open(log: &Log, file: FileRef) -> io::Result<(FileSystemId, File)> {
    let payload = log.definition_of(file).ok_or(io::ErrorKind::NotFound)?;
    let definition = Definition::decode(&payload).ok_or(io::ErrorKind::InvalidData)?;
    let known = Known::of(&definition, 0);
    let directory = locate::directory_on(known.device, &known.path);
    let directory = directory.ok_or(io::ErrorKind::NotFound)?;
    if file_system_id(&directory)? != known.file_system {
        return Err(io::ErrorKind::NotFound.into());
    }
    // As recovery will have to.
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
