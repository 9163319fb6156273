//! Looks at names, decides about them, and carries the decisions out.
//!
//! Rule B8 of docs/decisions/run-logs-what-was-synced.md, stage B. This order lets the next
//! recovery complete one that was interrupted anywhere:
//! 1. The decisions are in the pool before the first file is changed, because the steps below
//!    change the facts that they are based on.
//! 2. Each file that gets names has a *reserved* name, in the directory of its first new name. A
//!    file that is created again gets its reserved name once it is whole and durable. So no file is
//!    without a name while others change, and none is visible half made.
//! 3. All names are set before one is removed. Each step checks whether it was done.
//! 4. The pool notes that all steps are done before the reserved names are removed: without its
//!    reserved name a file could not be found again.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::dates::Dates;
use super::decide::{Decisions, DiskNames, Source};
use super::failure::Failure;
use super::named::{MadeFile, NamedFile, NamedPlan, Place};
use crate::log::pool::names::Timestamp;
use crate::log::{FileSystemId, RecordKind};

/// The directories and names of file systems. `File` is an open file or directory.
pub trait NameSystem<File> {
    /// Opens the directory of a name. Returns `None` if it was removed.
    ///
    /// # Errors
    /// The directory cannot be found or opened, for example for lack of a right.
    fn directory(&self, place: &Place) -> io::Result<Option<File>>;

    /// Opens a file for reading. Returns `None` if it was removed.
    ///
    /// # Errors
    /// See [`directory`](Self::directory).
    fn file(&self, file: &NamedFile) -> io::Result<Option<File>>;

    /// Returns the identity of the file at a name, of any type.
    ///
    /// # Errors
    /// The system's error.
    fn identity_at(&self, directory: &File, name: &[u8]) -> io::Result<Option<u64>>;

    /// Returns the number of names of an open file.
    ///
    /// # Errors
    /// The system's error.
    fn links(&self, file: &File) -> io::Result<u64>;

    /// Returns the ctime of an open file or directory.
    ///
    /// # Errors
    /// The system's error.
    fn changed(&self, file: &File) -> io::Result<Timestamp>;

    /// Returns the time when bytes or size of an open file were last changed.
    ///
    /// # Errors
    /// The system's error.
    fn modified(&self, file: &File) -> io::Result<Timestamp>;

    /// Creates an empty file without a name, for a directory.
    ///
    /// # Errors
    /// The system's error.
    fn make(&self, directory: &File) -> io::Result<File>;

    /// Sets the attributes of a file, and its timestamps if `with_times`.
    ///
    /// # Errors
    /// The system's error.
    fn set_attributes(&self, file: &File, made: &MadeFile, with_times: bool) -> io::Result<()>;

    /// Gives an open file a name that no file has.
    ///
    /// # Errors
    /// The system's error.
    fn link(&self, file: &File, directory: &File, name: &[u8]) -> io::Result<()>;

    /// Renames a file within the directory, in one step.
    ///
    /// # Errors
    /// The system's error.
    fn rename(&self, directory: &File, from: &[u8], to: &[u8]) -> io::Result<()>;

    /// Opens the file at a name.
    ///
    /// # Errors
    /// The system's error.
    fn open_at(&self, directory: &File, name: &[u8]) -> io::Result<File>;

    /// Removes a name of a file.
    ///
    /// # Errors
    /// The system's error.
    fn unlink(&self, directory: &File, name: &[u8]) -> io::Result<()>;

    /// Makes the whole file system of an open file durable.
    ///
    /// # Errors
    /// The system's error.
    fn commit(&self, file: &File) -> io::Result<()>;
}

/// The notes of recovery in its log.
pub trait Notes {
    /// Appends a note whose `payload` starts at byte `offset` of its whole. Durable on return.
    ///
    /// # Errors
    /// The log has no space for the note, or the memory failed.
    fn note(&self, kind: RecordKind, offset: u64, payload: &[u8]) -> io::Result<()>;

    /// Notes the time when recovery begins to write to files without notes of their attributes:
    /// later timestamps may be from recovery.
    ///
    /// # Errors
    /// The memory failed.
    fn note_recovery(&self) -> io::Result<()> {
        Ok(())
    }

    /// Returns the name under which recovery keeps the file. No other user can guess it.
    fn reserved_name(&self, identity: u64) -> Vec<u8>;
}

/// The largest payload of a note, in bytes. A small note fits a log with little free space.
pub(super) const NOTE_BYTES: usize = 960;

/// Changes of names.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct NamesDone {
    /// Files that were created again.
    pub made: u64,
    /// Names that were set.
    pub set: u64,
    /// Names that were removed.
    pub removed: u64,
    /// Names that were not set because another file has them.
    pub taken: Vec<String>,
}

/// The names of a plan and their file systems.
pub(super) struct Naming<'a, File> {
    pub(super) plan: &'a NamedPlan,
    pub(super) system: &'a dyn NameSystem<File>,
    pub(super) notes: &'a dyn Notes,
    pub(super) dates: Dates,
    /// The latest time that the session may have left on the disk, in nanoseconds since 1970;
    /// `None` if unknown.
    pub(super) ended_ns: Option<i128>,
    /// Files that a former recovery began to restore: their times may be its own.
    pub(super) begun: BTreeSet<u64>,
    /// Keep files that were changed since the session ended, and go on.
    pub(super) salvages: bool,
}

/// The changes of names to carry out, and names that stay.
#[derive(Debug, Default)]
pub(super) struct Decision {
    pub(super) decisions: Decisions<usize, u64>,
    /// Names that cannot be set, because a file that the log does not know has them.
    pub(super) taken: Vec<String>,
    /// Names whose files were changed since the session ended, and stay.
    pub(super) changed: Vec<String>,
}

/// The state of a plan's names on the disk.
#[derive(Debug, Default)]
struct OnDisk {
    at: Vec<Option<u64>>,
    /// The ctime of each name's directory.
    changed: Vec<Option<Timestamp>>,
    links: BTreeMap<u64, u64>,
    /// Files that no commit can have included.
    unseen: BTreeSet<u64>,
}

/// The identity at a name whose directory is gone: no file, and never replaced.
const NOWHERE: u64 = 0;

impl DiskNames<usize, u64> for OnDisk {
    fn at(&self, name: &usize) -> Option<u64> {
        self.at.get(*name).copied().flatten()
    }

    fn links(&self, file: &u64) -> u64 {
        self.links.get(file).copied().unwrap_or(0)
    }

    fn is_unseen(&self, file: &u64) -> bool {
        self.unseen.contains(file)
    }
}

impl Place {
    /// Returns the name for messages.
    pub(super) fn name(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }
}

/// Returns a timestamp in nanoseconds since 1970.
fn ns_of(time: Timestamp) -> i128 {
    i128::from(time.s) * 1_000_000_000 + i128::from(time.ns)
}

/// Returns a function that converts an error of `doing` at `place` to a failure.
fn failed<'p>(place: &'p Place, doing: &'static str) -> impl Fn(io::Error) -> Failure + use<'p> {
    move |source| match source.raw_os_error() {
        Some(libc::EPERM) => Failure::Unprivileged { path: place.name() },
        _ if source.kind() == io::ErrorKind::NotFound => Failure::NotMounted {
            path: place.name(),
            file_system: uuid::Uuid::from_bytes(place.file_system),
        },
        _ => Failure::Io { path: place.name(), doing, source },
    }
}

impl<File> Naming<'_, File> {
    /// Returns the decisions of a former recovery, or decides from the state of the disk. Changes
    /// nothing.
    pub(super) fn decide(&self) -> Result<Decision, Failure> {
        if let Some(decisions) = self.decided() {
            return Ok(Decision { decisions, ..Decision::default() });
        }
        let mut disk = self.look()?;
        let taken = (0..self.plan.places.len()).filter(|at| self.is_taken(*at, &disk));
        let taken = taken.map(|at| self.plan.places[at].name()).collect();
        self.refuse_changed(&disk)?;
        let mut changed = Vec::new();
        loop {
            let decisions = self.plan.stories.decide(&disk);
            let Some(at) = self.newer(&disk, &decisions)? else {
                return Ok(Decision { decisions, taken, changed });
            };
            let path = self.plan.places[at].name();
            if !self.salvages {
                return Err(Failure::Changed { path });
            }
            // The name stays, whatever follows from that for others.
            disk.at[at] = Some(NOWHERE);
            changed.push(path);
        }
    }

    /// Returns the first name that would lose a file that was changed since the session ended. A
    /// file that gets another name loses nothing.
    fn newer(
        &self,
        disk: &OnDisk,
        decisions: &Decisions<usize, u64>,
    ) -> Result<Option<usize>, Failure> {
        for at in decisions.names.keys() {
            let Some(found) = disk.at(at).filter(|found| !self.begun.contains(found)) else {
                continue;
            };
            if !decisions.files.contains_key(&found) {
                let (place, Some(directory)) = self.directory_if_there(*at)? else { continue };
                if self.is_newer(&directory, place)? {
                    return Ok(Some(*at));
                }
            }
        }
        Ok(None)
    }

    /// Returns whether bytes or size of the file at `place` were changed since the session ended.
    /// The ctime counts too, because a program of the session may have set the modification time.
    fn is_newer(&self, directory: &File, place: &Place) -> Result<bool, Failure> {
        let Some(ended_ns) = self.ended_ns else { return Ok(false) };
        let times = self
            .system
            .open_at(directory, &place.name)
            .and_then(|file| Ok((self.system.modified(&file)?, self.system.changed(&file)?)));
        let (modified, changed) = times.map_err(failed(place, "look at a name"))?;
        Ok(self.dates.is_from_outside(ns_of(modified).min(ns_of(changed)), ended_ns))
    }

    /// Returns the decisions of a former recovery, if the log has all parts.
    fn decided(&self) -> Option<Decisions<usize, u64>> {
        let bytes = &self.plan.decided;
        let bit = |at: usize| bytes.get(at / 8).map(|byte| byte >> (at % 8) & 1 != 0);
        let bits: Option<Vec<bool>> = (0..self.plan.stories.bits()).map(bit).collect();
        (!bytes.is_empty()).then(|| self.plan.stories.from_bits(&bits?)).flatten()
    }

    /// Returns whether a file that the log does not know has the name that a file was to get.
    fn is_taken(&self, at: usize, disk: &OnDisk) -> bool {
        let found = disk.at(&at).filter(|found| *found != NOWHERE);
        let stories = &self.plan.stories;
        found.is_some_and(|found| !stories.knows(&at, &found)) && stories.last_of(&at).is_some()
    }

    fn look(&self) -> Result<OnDisk, Failure> {
        let mut disk = OnDisk::default();
        for place in &self.plan.places {
            let opened = self.system.directory(place).map_err(failed(place, "open a directory"))?;
            let (at, changed) = match opened {
                None => (Some(NOWHERE), None),
                Some(directory) => {
                    let at = self.system.identity_at(&directory, &place.name);
                    let changed = self.system.changed(&directory);
                    (
                        at.map_err(failed(place, "look at a name"))?,
                        Some(changed.map_err(failed(place, "look at a directory"))?),
                    )
                }
            };
            disk.at.push(at);
            disk.changed.push(changed);
        }
        for (identity, file) in &self.plan.files {
            let links = self
                .system
                .file(file)
                .and_then(|opened| opened.map_or(Ok(0), |opened| self.system.links(&opened)));
            let links = links.map_err(|error| match self.place_of(*identity) {
                Some(place) => failed(place, "open the file")(error),
                None => Failure::Log(error),
            })?;
            disk.links.insert(*identity, links);
        }
        disk.unseen = self.unseen(&disk);
        Ok(disk)
    }

    /// Returns a name of the file, for messages.
    fn place_of(&self, identity: u64) -> Option<&Place> {
        let mut names = self.plan.stories.names();
        let known = names.find(|at| self.plan.stories.knows(at, &identity));
        known.and_then(|at| self.plan.places.get(*at))
    }

    /// Returns the files that no commit can have included: their directories are as old as the
    /// records.
    fn unseen(&self, disk: &OnDisk) -> BTreeSet<u64> {
        let is_unseen = |(identity, made): &(&u64, &MadeFile)| {
            let changed = self.plan.stories.made_at(identity).and_then(|at| disk.changed[*at]);
            changed.is_some_and(|changed| changed <= made.parent_changed)
        };
        self.plan.made.iter().filter(is_unseen).map(|(identity, _)| *identity).collect()
    }

    /// Fails if a file is missing and its directory was changed since the session ended. Such a
    /// file may have been removed, or may have to be created again.
    fn refuse_changed(&self, disk: &OnDisk) -> Result<(), Failure> {
        let Some(ended_ns) = self.ended_ns.filter(|_| !self.salvages) else { return Ok(()) };
        let stories = &self.plan.stories;
        let missing = self.plan.made.keys().filter(|file| {
            disk.links(file) == 0
                && !disk.is_unseen(file)
                && stories.last_names(file).next().is_some()
        });
        for at in missing.filter_map(|file| stories.made_at(file)) {
            if disk.changed[*at].is_some_and(|changed| ns_of(changed) > ended_ns) {
                return Err(Failure::Changed { path: self.plan.places[*at].name() });
            }
        }
        Ok(())
    }

    /// Writes the decisions to the log, unless a former recovery did.
    pub(super) fn note(&self, decisions: &Decisions<usize, u64>) -> Result<(), Failure> {
        if self.decided().is_some() {
            return Ok(());
        }
        let bits = self.plan.stories.to_bits(decisions);
        let byte =
            |bits: &[bool]| bits.iter().rev().fold(0_u8, |byte, bit| byte << 1 | u8::from(*bit));
        let bytes: Vec<u8> = bits.chunks(8).map(byte).collect();
        for (number, part) in bytes.chunks(NOTE_BYTES).enumerate() {
            let offset = (number * NOTE_BYTES) as u64;
            self.notes.note(RecordKind::Decided, offset, part).map_err(Failure::Log)?;
        }
        Ok(())
    }

    /// Returns whether a former recovery has carried out the decisions.
    pub(super) fn is_done(&self) -> bool {
        self.plan.is_done && self.decided().is_some()
    }

    /// Opens the directory of a decided name. Fails if it was removed.
    fn directory(&self, at: usize) -> Result<(&Place, File), Failure> {
        let (place, opened) = self.directory_if_there(at)?;
        let gone = || failed(place, "open a directory")(io::ErrorKind::NotADirectory.into());
        Ok((place, opened.ok_or_else(gone)?))
    }

    /// Opens the directory of a decided name, or returns `None` if it was removed.
    fn directory_if_there(&self, at: usize) -> Result<(&Place, Option<File>), Failure> {
        let place = &self.plan.places[at];
        let opened = self.system.directory(place).map_err(failed(place, "open a directory"))?;
        Ok((place, opened))
    }

    /// Returns the name whose directory holds the file's reserved name.
    fn home(decisions: &Decisions<usize, u64>, file: u64) -> Option<usize> {
        let gets = decisions.names.iter().find(|(_, gets)| **gets == Some(file));
        gets.map(|(at, _)| *at)
    }

    /// Gives its reserved name to each file that gets names. `fill` completes a file that is
    /// created again. Returns the number of files that are created again.
    pub(super) fn reserve(
        &self,
        decisions: &Decisions<usize, u64>,
        fill: &dyn Fn(u64, &File) -> Result<(), Failure>,
    ) -> Result<u64, Failure> {
        let mut made = 0;
        for (identity, source) in &decisions.files {
            let Some(home) = Self::home(decisions, *identity) else { continue };
            let (place, directory) = self.directory(home)?;
            let name = self.notes.reserved_name(*identity);
            let found = self.system.identity_at(&directory, &name);
            let is_there = found.map_err(failed(place, "look at a name"))?.is_some();
            made += u64::from(*source == Source::Log);
            if is_there {
                continue;
            }
            let file = match source {
                Source::Disk => {
                    let file = self.system.file(&self.plan.files[identity]);
                    let file = file.map_err(failed(place, "open the file"))?;
                    let gone = || failed(place, "open the file")(io::ErrorKind::Other.into());
                    file.ok_or_else(gone)?
                }
                Source::Log => {
                    let file = self.system.make(&directory);
                    let file = file.map_err(failed(place, "make the file again"))?;
                    fill(*identity, &file)?;
                    file
                }
            };
            let linked = self.system.link(&file, &directory, &name);
            linked.map_err(failed(place, "make a name"))?;
        }
        Ok(made)
    }

    /// Sets names, then removes names. A name stays that another file has taken meanwhile, or, when
    /// salvaging, whose file was changed since the session ended.
    pub(super) fn set_names(
        &self,
        decisions: &Decisions<usize, u64>,
        done: &mut NamesDone,
    ) -> Result<(), Failure> {
        self.commit(decisions)?;
        for (at, gets) in &decisions.names {
            if let Some(identity) = gets {
                self.set(decisions, *at, *identity, done)?;
            }
        }
        for (at, gets) in &decisions.names {
            if gets.is_none() {
                self.remove(decisions, *at, done)?;
            }
        }
        self.commit(decisions)?;
        self.notes.note(RecordKind::Done, 0, &[]).map_err(Failure::Log)
    }

    fn set(
        &self,
        decisions: &Decisions<usize, u64>,
        at: usize,
        identity: u64,
        done: &mut NamesDone,
    ) -> Result<(), Failure> {
        let (place, directory) = self.directory(at)?;
        let Some(home) = Self::home(decisions, identity) else { return Ok(()) };
        let (_, home) = self.directory(home)?;
        let reserved = self.notes.reserved_name(identity);
        let doing = |error| failed(place, "make a name")(error);
        let own = self.system.identity_at(&home, &reserved).map_err(doing)?;
        if own.is_none() {
            return Err(doing(io::Error::other("its reserved name is not there")));
        }
        let found = self.system.identity_at(&directory, &place.name).map_err(doing)?;
        done.set += 1;
        if found == own {
            return Ok(());
        }
        let file = self.system.open_at(&home, &reserved).map_err(doing)?;
        match found {
            None => self.system.link(&file, &directory, &place.name).map_err(doing),
            Some(found) if self.may_lose(decisions, (at, found), &directory)? => {
                // A second reserved name lets the rename replace the old file in one step.
                let second = [&reserved[..], b"-to"].concat();
                if self.system.identity_at(&directory, &second).map_err(doing)?.is_some() {
                    self.system.unlink(&directory, &second).map_err(doing)?;
                }
                self.system.link(&file, &directory, &second).map_err(doing)?;
                self.system.rename(&directory, &second, &place.name).map_err(doing)
            }
            Some(_) => {
                done.set -= 1;
                done.taken.push(place.name());
                Ok(())
            }
        }
    }

    /// Returns whether the name may lose the file that was found there. Files that were changed
    /// before the decisions were noted stopped them; this finds later changes. All files have been
    /// restored by now, with their times, so the times are not from recovery.
    ///
    /// # Errors
    /// The file was changed since the session ended, or the system's error.
    fn may_lose(
        &self,
        decisions: &Decisions<usize, u64>,
        (at, found): (usize, u64),
        directory: &File,
    ) -> Result<bool, Failure> {
        let place = &self.plan.places[at];
        if !self.plan.stories.knows(&at, &found) {
            return Ok(false);
        }
        if decisions.files.contains_key(&found) || !self.is_newer(directory, place)? {
            return Ok(true);
        }
        if self.salvages { Ok(false) } else { Err(Failure::Changed { path: place.name() }) }
    }

    fn remove(
        &self,
        decisions: &Decisions<usize, u64>,
        at: usize,
        done: &mut NamesDone,
    ) -> Result<(), Failure> {
        let (place, Some(directory)) = self.directory_if_there(at)? else { return Ok(()) };
        let doing = |error| failed(place, "remove a name")(error);
        let found = self.system.identity_at(&directory, &place.name).map_err(doing)?;
        if let Some(found) = found
            && self.may_lose(decisions, (at, found), &directory)?
        {
            self.system.unlink(&directory, &place.name).map_err(doing)?;
        }
        done.removed += 1;
        Ok(())
    }

    /// Removes the reserved names. One whose directory was removed since has gone with it.
    pub(super) fn release(&self, decisions: &Decisions<usize, u64>) -> Result<(), Failure> {
        for identity in decisions.files.keys() {
            let Some(home) = Self::home(decisions, *identity) else { continue };
            let (place, Some(directory)) = self.directory_if_there(home)? else { continue };
            let name = self.notes.reserved_name(*identity);
            let doing = |error| failed(place, "remove a reserved name")(error);
            if self.system.identity_at(&directory, &name).map_err(doing)?.is_some() {
                self.system.unlink(&directory, &name).map_err(doing)?;
            }
        }
        self.commit(decisions)
    }

    /// Makes the file systems of the decided names durable, each through any directory that is
    /// there.
    fn commit(&self, decisions: &Decisions<usize, u64>) -> Result<(), Failure> {
        let mut committed: BTreeSet<FileSystemId> = BTreeSet::new();
        for at in decisions.names.keys() {
            if committed.contains(&self.plan.places[*at].file_system) {
                continue;
            }
            let (place, Some(directory)) = self.directory_if_there(*at)? else { continue };
            let result = self.system.commit(&directory);
            result.map_err(failed(place, "sync the file system"))?;
            committed.insert(place.file_system);
        }
        Ok(())
    }
}
