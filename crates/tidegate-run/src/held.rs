//! One descriptor of each file system whose names the log has, held by the supervisor.
//!
//! Files that a record can make again are not kept one by one: their delivery would cost less than
//! the descriptor. They become durable with their whole file system, and a failed write-back of one
//! of them concerns them all.
//!
//! Invariants:
//! 1. A file system is said to be held only while its descriptor is open, which was opened before
//!    the first of its names was recorded: it hears of each failed write-back since.
//! 2. It is held only if its files can be found by their handles, as recovery has to find them.
//! 3. It is let go under the lock of its names, and only while the log is empty.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use tidegate::durable;
use tidegate::log::recover::LocalFiles;
use tidegate::log::{Definition, FileRef, FileSystemId, FileSystemRef, Log};

use super::backlog::Known;
use super::locate;

/// A file system that the supervisor holds.
#[derive(Debug)]
struct Held {
    reference: FileSystemRef,
    id: FileSystemId,
    /// A directory on it, open for reading.
    directory: File,
    /// A path on it, for people.
    path: PathBuf,
}

/// The file systems that are held.
#[derive(Debug, Default)]
pub(crate) struct HeldFileSystems(Vec<Held>);

impl Held {
    /// Opens the file system of an entry, and makes durable what was changed on it before.
    fn open(log: &Log, reference: FileSystemRef, entry: FileRef) -> io::Result<Self> {
        let payload = log.definition_of(entry).ok_or(io::ErrorKind::NotFound)?;
        let definition = Definition::decode(&payload).ok_or(io::ErrorKind::InvalidData)?;
        let known = Known::of(&definition, 0);
        let directory = locate::directory_on(known.device, &known.path);
        let directory = directory.ok_or(io::ErrorKind::NotFound)?;
        let on = (&known.file_system, known.device);
        LocalFiles::new()?.find(on, &known.handle, OFlags::RDONLY | OFlags::NONBLOCK)?;
        let held = Self { reference, id: known.file_system, directory, path: known.path };
        held.sync(log)?;
        Ok(held)
    }

    fn sync(&self, log: &Log) -> io::Result<()> {
        let seen = log.changes(self.reference);
        durable::syncfs(&self.directory)?;
        log.synced_whole(self.reference, seen);
        Ok(())
    }
}

impl HeldFileSystems {
    /// Holds the file systems that programs want to be held.
    pub(crate) fn hold_wanted(&mut self, log: &Log) {
        for (reference, entry) in log.take_wanted_held() {
            if !self.0.iter().any(|held| held.reference == reference) {
                match Held::open(log, reference, entry) {
                    Ok(held) => self.0.push(held),
                    Err(error) => {
                        // Else the program asks again.
                        if Errno::from_io_error(&error) == Some(Errno::PERM) {
                            log.refuse_held(reference);
                        }
                        continue;
                    }
                }
            }
            log.note_held(reference);
        }
    }

    /// Makes all held file systems durable: how many these are.
    ///
    /// # Errors
    /// A path on the one that fails, and why.
    pub(crate) fn sync(&self, log: &Log) -> Result<u64, (PathBuf, io::Error)> {
        for held in &self.0 {
            held.sync(log).map_err(|error| (held.path.clone(), error))?;
        }
        Ok(self.0.len() as u64)
    }

    /// The file system with this id is held.
    pub(crate) fn has(&self, id: &FileSystemId) -> bool {
        self.0.iter().any(|held| held.id == *id)
    }

    /// No file system is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Ends the stories of files that a record can make again, of which the log has nothing, and
    /// lets go of all file systems, if the log is empty.
    pub(crate) fn release_all(&mut self, log: &Log) {
        for entry in log.made_files() {
            let Ok(guard) = log.lock_within(entry, Duration::ZERO) else { continue };
            let has_some = guard.has_live_changes() || guard.has_names() || guard.owner_died();
            if !has_some {
                // Without space for its end the story goes on.
                let _ = guard.end_story();
            }
        }
        self.0.retain(|held| {
            let Ok(names) = log.lock_names(held.reference) else { return true };
            let is_empty = log.head() == log.tail();
            if is_empty {
                names.let_go();
            }
            !is_empty
        });
    }
}
