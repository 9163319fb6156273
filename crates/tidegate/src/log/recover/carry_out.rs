//! Names: looked at, decided, carried out.
//!
//! Rule B8 of docs/decisions/run-logs-what-was-synced.md, stage B. The order, and why a recovery
//! that was interrupted anywhere is completed by the next one:
//! 1. The decisions are in the pool before the first file is touched: what is done below changes
//!    what they were made of.
//! 2. Each file that gets names has a *reserved* name, in the directory of the first of them. A
//!    file that is made again gets it when it is whole and durable. So none is without a name while
//!    others are changed, and none is seen half made.
//! 3. All names are set before one is removed. Each step looks whether it was done.
//! 4. That all is done is noted in the pool before the reserved names go: without them a file could
//!    not be found again.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::decide::{Decisions, DiskNames, Source};
use super::failure::Failure;
use super::named::{MadeFile, NamedFile, NamedPlan, Place};
use crate::log::pool::names::Timestamp;
use crate::log::{FileSystemId, RecordKind};

/// The directories and names of file systems, as recovery sees them. `File` is an open file or
/// directory.
pub trait NameSystem<File> {
    /// Opens the directory of a name; none, where it was removed.
    ///
    /// # Errors
    /// It can't be found, or not be opened: for want of a right, for one.
    fn directory(&self, place: &Place) -> io::Result<Option<File>>;

    /// Opens a file for reading; none, where it was removed.
    ///
    /// # Errors
    /// As for [`directory`](Self::directory).
    fn file(&self, file: &NamedFile) -> io::Result<Option<File>>;

    /// The identity of what is at a name, whatever it is.
    ///
    /// # Errors
    /// As of the system.
    fn identity_at(&self, directory: &File, name: &[u8]) -> io::Result<Option<u64>>;

    /// Names that an open file has.
    ///
    /// # Errors
    /// As of the system.
    fn links(&self, file: &File) -> io::Result<u64>;

    /// When an open directory was last changed.
    ///
    /// # Errors
    /// As of the system.
    fn changed(&self, directory: &File) -> io::Result<Timestamp>;

    /// Makes an empty file without a name, for a directory.
    ///
    /// # Errors
    /// As of the system.
    fn make(&self, directory: &File) -> io::Result<File>;

    /// Sets what the log has of a file beside names and content; the times only where they are
    /// wanted.
    ///
    /// # Errors
    /// As of the system.
    fn set_attributes(&self, file: &File, made: &MadeFile, with_times: bool) -> io::Result<()>;

    /// Gives an open file a name where nothing is.
    ///
    /// # Errors
    /// As of the system.
    fn link(&self, file: &File, directory: &File, name: &[u8]) -> io::Result<()>;

    /// Gives what is at a name another one at the directory, in one step.
    ///
    /// # Errors
    /// As of the system.
    fn rename(&self, directory: &File, from: &[u8], to: &[u8]) -> io::Result<()>;

    /// Opens what is at a name.
    ///
    /// # Errors
    /// As of the system.
    fn open_at(&self, directory: &File, name: &[u8]) -> io::Result<File>;

    /// Removes a name of a file.
    ///
    /// # Errors
    /// As of the system.
    fn unlink(&self, directory: &File, name: &[u8]) -> io::Result<()>;

    /// Makes all of the file system of an open file durable.
    ///
    /// # Errors
    /// As of the system.
    fn commit(&self, file: &File) -> io::Result<()>;
}

/// What recovery notes in the log that it recovers.
pub trait Notes {
    /// Appends a note, durable when this returns: `payload` with byte `offset`.
    ///
    /// # Errors
    /// There is no space for it, or the memory failed.
    fn note(&self, kind: RecordKind, offset: u64, payload: &[u8]) -> io::Result<()>;

    /// Notes when recovery begins to write to files that it has no note of: later times may be of
    /// its own.
    ///
    /// # Errors
    /// The memory failed.
    fn note_recovery(&self) -> io::Result<()> {
        Ok(())
    }

    /// Makes the name under which recovery keeps the file with this identity: one that others
    /// cannot guess.
    fn reserved_name(&self, identity: u64) -> Vec<u8>;
}

/// The payload of a note, at most: small, so that a note fits where the log has little space left.
pub(super) const NOTE_BYTES: usize = 960;

/// What was done to names.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct NamesDone {
    /// Files that were made again.
    pub made: u64,
    /// Names that files were given.
    pub set: u64,
    /// Names that were removed.
    pub removed: u64,
    /// Names that could not be given, since another file has them.
    pub taken: Vec<String>,
}

/// The names of a plan and the file systems that they are in.
pub(super) struct Naming<'a, File> {
    pub(super) plan: &'a NamedPlan,
    pub(super) system: &'a dyn NameSystem<File>,
    pub(super) notes: &'a dyn Notes,
    /// When the machine was started after the crash, if that says something.
    pub(super) booted_ns: Option<i128>,
}

/// What the disk has at the names of a plan.
#[derive(Debug, Default)]
struct OnDisk {
    at: Vec<Option<u64>>,
    /// When the directories of the names were changed.
    changed: Vec<Option<Timestamp>>,
    links: BTreeMap<u64, u64>,
    /// Files that no commit can have had.
    unseen: BTreeSet<u64>,
}

/// What is at a name without a directory: no file, and nothing that may be replaced.
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
    /// The name, for messages.
    pub(super) fn name(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }
}

/// The failure of `doing` something with a name.
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
    /// What is to be done: what a former recovery has decided, or what the disk says. Touches
    /// nothing. Also the names that cannot be given.
    pub(super) fn decide(&self) -> Result<(Decisions<usize, u64>, Vec<String>), Failure> {
        if let Some(decisions) = self.decided() {
            return Ok((decisions, Vec::new()));
        }
        let disk = self.look()?;
        let decisions = self.plan.stories.decide(&disk);
        self.refuse_changed(&disk)?;
        let taken = (0..self.plan.places.len()).filter(|at| self.is_taken(*at, &disk));
        let taken = taken.map(|at| self.plan.places[at].name()).collect();
        Ok((decisions, taken))
    }

    /// What a former recovery has decided, all of it.
    fn decided(&self) -> Option<Decisions<usize, u64>> {
        let bytes = &self.plan.decided;
        let bit = |at: usize| bytes.get(at / 8).map(|byte| byte >> (at % 8) & 1 != 0);
        let bits: Option<Vec<bool>> = (0..self.plan.stories.bits()).map(bit).collect();
        (!bytes.is_empty()).then(|| self.plan.stories.from_bits(&bits?)).flatten()
    }

    /// Another file has the name that a file was to get.
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

    /// A name of the file, for messages.
    fn place_of(&self, identity: u64) -> Option<&Place> {
        let mut names = self.plan.stories.names();
        let known = names.find(|at| self.plan.stories.knows(at, &identity));
        known.and_then(|at| self.plan.places.get(*at))
    }

    /// The directory of a file that can be made again is as old as its record.
    fn unseen(&self, disk: &OnDisk) -> BTreeSet<u64> {
        let is_unseen = |(identity, made): &(&u64, &MadeFile)| {
            let changed = self.plan.stories.made_at(identity).and_then(|at| disk.changed[*at]);
            changed.is_some_and(|changed| changed <= made.parent_changed)
        };
        self.plan.made.iter().filter(is_unseen).map(|(identity, _)| *identity).collect()
    }

    /// A file is missing whose directory was changed since the machine was started: whether it was
    /// removed or is to be made again cannot be told.
    fn refuse_changed(&self, disk: &OnDisk) -> Result<(), Failure> {
        let Some(booted_ns) = self.booted_ns else { return Ok(()) };
        let stories = &self.plan.stories;
        let missing = self.plan.made.keys().filter(|file| {
            disk.links(file) == 0
                && !disk.is_unseen(file)
                && stories.last_names(file).next().is_some()
        });
        for at in missing.filter_map(|file| stories.made_at(file)) {
            let changed = disk.changed[*at]
                .map(|time| i128::from(time.s) * 1_000_000_000 + i128::from(time.ns));
            if changed.is_some_and(|changed_ns| changed_ns > booted_ns) {
                return Err(Failure::Changed { path: self.plan.places[*at].name() });
            }
        }
        Ok(())
    }

    /// Writes the decisions into the log, unless they are there.
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

    /// A former recovery has carried out the decisions.
    pub(super) fn is_done(&self) -> bool {
        self.plan.is_done && self.decided().is_some()
    }

    /// Opens the directory of a name that was decided on.
    fn directory(&self, at: usize) -> Result<(&Place, File), Failure> {
        let place = &self.plan.places[at];
        let opened = self.system.directory(place).map_err(failed(place, "open a directory"))?;
        let gone = || failed(place, "open a directory")(io::ErrorKind::NotADirectory.into());
        Ok((place, opened.ok_or_else(gone)?))
    }

    /// The name in whose directory the file has its reserved name.
    fn home(decisions: &Decisions<usize, u64>, file: u64) -> Option<usize> {
        let gets = decisions.names.iter().find(|(_, gets)| **gets == Some(file));
        gets.map(|(at, _)| *at)
    }

    /// Gives each file that gets names its reserved one; `fill` makes one that is made again whole.
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

    /// Sets names, then removes names. What another file has since is left alone.
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
                self.remove(*at, done)?;
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
            Some(found) if self.plan.stories.knows(&at, &found) => {
                // Under a second reserved name first: what is there is replaced in one step.
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

    fn remove(&self, at: usize, done: &mut NamesDone) -> Result<(), Failure> {
        let (place, directory) = self.directory(at)?;
        let doing = |error| failed(place, "remove a name")(error);
        let found = self.system.identity_at(&directory, &place.name).map_err(doing)?;
        if found.is_some_and(|found| self.plan.stories.knows(&at, &found)) {
            self.system.unlink(&directory, &place.name).map_err(doing)?;
        }
        done.removed += 1;
        Ok(())
    }

    /// Removes the reserved names.
    pub(super) fn release(&self, decisions: &Decisions<usize, u64>) -> Result<(), Failure> {
        for identity in decisions.files.keys() {
            let Some(home) = Self::home(decisions, *identity) else { continue };
            let (place, directory) = self.directory(home)?;
            let name = self.notes.reserved_name(*identity);
            let doing = |error| failed(place, "remove a reserved name")(error);
            if self.system.identity_at(&directory, &name).map_err(doing)?.is_some() {
                self.system.unlink(&directory, &name).map_err(doing)?;
            }
        }
        self.commit(decisions)
    }

    /// Makes the file systems of the names durable.
    fn commit(&self, decisions: &Decisions<usize, u64>) -> Result<(), Failure> {
        let mut committed: BTreeSet<FileSystemId> = BTreeSet::new();
        for at in decisions.names.keys() {
            if committed.insert(self.plan.places[*at].file_system) {
                let (place, directory) = self.directory(*at)?;
                let result = self.system.commit(&directory);
                result.map_err(failed(place, "sync the file system"))?;
            }
        }
        Ok(())
    }
}
