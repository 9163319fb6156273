//! Looks at names, decides about them, and carries the decisions out.
//!
//! Rule B8 of docs/decisions/run-logs-what-was-synced.md, stage B. This order lets the next
//! recovery complete one that was interrupted anywhere:
//! 1. The decisions on a group of names are in the pool before the group is changed,
//!    because the steps below change the facts that they are based on. They change no fact that the
//!    decisions on another group are based on, so that a later recovery may decide on that one.
//! 2. Each file that gets names has a *reserved* name, in the directory of its first new name. A
//!    file that is created again gets its reserved name once it is whole and durable. So no file is
//!    without a name while others change, and none is visible half made.
//! 3. All names are set before one is removed. Each step checks whether it was done.
//! 4. The pool notes the groups whose steps are done before their reserved names are removed:
//!    without its reserved name a file could not be found again. The notes add up, so each is whole
//!    by itself. A later recovery changes no name of these groups: programs may have changed them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::dates::Dates;
use super::decide::{Decisions, DiskNames, Source};
use super::failure::Failure;
use super::groups::{Failing, Groups};
use super::named::{BATCH_SHIFT, MadeFile, NamedFile, NamedPlan, Place};
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
    pub(super) groups: Groups,
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
    /// The groups that are decided.
    groups: BTreeSet<usize>,
    /// The groups among them that need nothing more: carried out by a former recovery, or given up.
    done: BTreeSet<usize>,
    /// The groups among them that no former recovery has decided.
    new: BTreeSet<usize>,
    /// The number of the batch of the new groups.
    batch: u64,
    /// Names that cannot be set, because a file that the log does not know has them.
    pub(super) taken: Vec<String>,
    /// The failures that are passed over when salvaging.
    pub(super) given_up: Vec<Failure>,
    /// The causes why other groups are not decided.
    pub(super) failures: Vec<Failure>,
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

impl Decision {
    /// Returns whether names of the group are to be changed.
    fn is_due(&self, group: usize, failing: &Failing) -> bool {
        self.groups.contains(&group) && !self.done.contains(&group) && !failing.has(group)
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

impl<'a, File> Naming<'a, File> {
    /// Makes the naming of a plan, without times of the session.
    pub(super) fn of(
        plan: &'a NamedPlan,
        system: &'a dyn NameSystem<File>,
        notes: &'a dyn Notes,
    ) -> Self {
        Self {
            plan,
            groups: Groups::of(plan),
            system,
            notes,
            dates: Dates::default(),
            ended_ns: None,
            begun: BTreeSet::new(),
            salvages: false,
        }
    }

    /// Removes all reserved names of former recoveries, for a log that is given up.
    pub(super) fn release_all(&self) {
        self.release(&self.noted().decisions, &mut Failing::default());
    }

    /// Decides from the state of the disk on the groups that no former recovery has decided. A
    /// group that cannot be decided now holds no other back. Changes nothing.
    pub(super) fn decide(&self) -> Decision {
        let (mut decision, mut failing) = (self.noted(), Failing::default());
        let undecided: BTreeSet<usize> =
            self.groups.all().difference(&decision.groups).copied().collect();
        self.leave_gone(&mut decision, &mut failing);
        if !undecided.is_empty() {
            self.decide_on(&undecided, &mut decision, &mut failing);
        }
        decision.failures = failing.failures;
        decision
    }

    /// Gives up the groups that a former recovery decided on, and of which a directory was removed
    /// since. Such a group fails, unless salvaging.
    fn leave_gone(&self, decision: &mut Decision, failing: &mut Failing) {
        let due = self.part(&decision.decisions, |group| !decision.done.contains(&group));
        for at in due.names.iter().filter_map(|(at, gets)| gets.and(Some(*at))) {
            let group = self.groups.of_name(at);
            if !matches!(self.directory_if_there(at), Ok((_, None))) {
                continue;
            }
            let failure = Failure::NoDirectory { path: self.plan.places[at].name() };
            if self.salvages {
                decision.done.insert(group);
                decision.given_up.push(failure);
            } else {
                decision.groups.remove(&group);
                failing.add(group, failure);
            }
        }
    }

    /// Decides on groups that no former recovery has decided.
    fn decide_on(
        &self,
        undecided: &BTreeSet<usize>,
        decision: &mut Decision,
        failing: &mut Failing,
    ) {
        let mut disk = self.look(undecided, failing);
        let taken = (0..self.plan.places.len()).filter(|at| self.is_taken(*at, &disk));
        decision.taken = taken.map(|at| self.plan.places[at].name()).collect();
        for at in self.missing_of_changed(&disk) {
            let failure = Failure::Removed { path: self.plan.places[at].name() };
            if self.salvages {
                decision.given_up.push(failure);
            } else {
                failing.add(self.groups.of_name(at), failure);
            }
        }
        let new = self.decide_keeping(undecided, &mut disk, failing, &mut decision.given_up);
        decision.new = undecided.iter().copied().filter(|group| !failing.has(*group)).collect();
        decision.groups.extend(&decision.new);
        decision.decisions.names.extend(new.names);
        decision.decisions.files.extend(new.files);
    }

    /// Decides on these groups without the failing ones. A name that would lose a file that was
    /// changed since the session ended fails its group, or stays if salvaging.
    fn decide_keeping(
        &self,
        groups: &BTreeSet<usize>,
        disk: &mut OnDisk,
        failing: &mut Failing,
        given_up: &mut Vec<Failure>,
    ) -> Decisions<usize, u64> {
        loop {
            let is_due = |group| groups.contains(&group) && !failing.has(group);
            let decisions = self.part(&self.plan.stories.decide(disk), is_due);
            let newer = self.newer(disk, &decisions);
            if newer.is_empty() {
                return decisions;
            }
            for (at, failure) in newer {
                if self.salvages && matches!(failure, Failure::Changed { .. }) {
                    // The name stays, whatever follows from that for others.
                    disk.at[at] = Some(NOWHERE);
                    given_up.push(failure);
                } else {
                    failing.add(self.groups.of_name(at), failure);
                }
            }
        }
    }

    /// Returns the names that would lose a file that was changed since the session ended, or whose
    /// file cannot be looked at. A file that gets another name loses nothing.
    fn newer(&self, disk: &OnDisk, decisions: &Decisions<usize, u64>) -> Vec<(usize, Failure)> {
        let lost = decisions.names.keys().filter(|at| {
            let found = disk.at(at).filter(|found| !self.begun.contains(found));
            found.is_some_and(|found| !decisions.files.contains_key(&found))
        });
        let newer = lost.copied().filter_map(|at| {
            let is_newer = self.directory_if_there(at).and_then(|(place, directory)| {
                directory.map_or(Ok(false), |directory| self.is_newer(&directory, place))
            });
            match is_newer {
                Ok(false) => None,
                Ok(true) => Some((at, Failure::Changed { path: self.plan.places[at].name() })),
                Err(failure) => Some((at, failure)),
            }
        });
        newer.collect()
    }

    /// Returns the decisions on the groups for which `has` holds.
    fn part(
        &self,
        decisions: &Decisions<usize, u64>,
        mut has: impl FnMut(usize) -> bool,
    ) -> Decisions<usize, u64> {
        let names = decisions.names.iter().filter(|(at, _)| has(self.groups.of_name(**at)));
        let names: BTreeMap<_, _> = names.map(|(at, gets)| (*at, *gets)).collect();
        let files = decisions
            .files
            .iter()
            .filter(|(file, _)| self.groups.of_file(**file).is_some_and(&mut has));
        let files = files.map(|(file, source)| (*file, *source)).collect();
        Decisions { names, files }
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

    /// Returns the decisions of former recoveries, of batches whose parts are all in the log.
    fn noted(&self) -> Decision {
        let done = if self.plan.is_done { self.groups.all() } else { self.plan.done.clone() };
        let mut noted = Decision { batch: 1, done, ..Decision::default() };
        for (batch, bytes) in &self.plan.decided {
            let Some((decisions, mut groups)) = self.decoded(*batch, bytes) else { continue };
            groups.retain(|group| !noted.groups.contains(group));
            let decisions = self.part(&decisions, |group| groups.contains(&group));
            noted.decisions.names.extend(decisions.names);
            noted.decisions.files.extend(decisions.files);
            noted.groups.extend(groups);
            noted.batch = batch + 1;
        }
        noted
    }

    /// Decodes a batch: the bits of all decisions, and a bit for each name, whether the batch has
    /// its group.
    fn decoded(
        &self,
        batch: u64,
        bytes: &[u8],
    ) -> Option<(Decisions<usize, u64>, BTreeSet<usize>)> {
        let bit = |at: usize| bytes.get(at / 8).map(|byte| byte >> (at % 8) & 1 != 0);
        let (count, places) = (self.plan.stories.bits(), self.plan.places.len());
        let bits: Option<Vec<bool>> = (0..count).map(bit).collect();
        let decisions = self.plan.stories.from_bits(&bits?)?;
        if batch == 0 {
            return Some((decisions, self.groups.all()));
        }
        let has: Option<Vec<bool>> = (count..count + places).map(bit).collect();
        let has = (0..places).zip(has?).filter(|(_, has)| *has);
        Some((decisions, has.map(|(at, _)| self.groups.of_name(at)).collect()))
    }

    /// Returns whether a file that the log does not know has the name that a file was to get.
    fn is_taken(&self, at: usize, disk: &OnDisk) -> bool {
        let found = disk.at(&at).filter(|found| *found != NOWHERE);
        let stories = &self.plan.stories;
        found.is_some_and(|found| !stories.knows(&at, &found)) && stories.last_of(&at).is_some()
    }

    /// Looks at the names and files of these groups. A group that cannot be looked at fails.
    fn look(&self, groups: &BTreeSet<usize>, failing: &mut Failing) -> OnDisk {
        let places = self.plan.places.len();
        let (at, changed) = (vec![Some(NOWHERE); places], vec![None; places]);
        let mut disk = OnDisk { at, changed, ..OnDisk::default() };
        let is_lasting = |at: &usize| self.plan.stories.last_of(at).is_some();
        // The failure of a group names each name that stays without its file, or else one name.
        let (lasting, others): (Vec<_>, Vec<_>) = (0..places).partition(is_lasting);
        for at in lasting.into_iter().chain(others) {
            let group = self.groups.of_name(at);
            if !groups.contains(&group) {
                continue;
            }
            match self.look_at(&self.plan.places[at]) {
                Ok(found) => (disk.at[at], disk.changed[at]) = found,
                Err(failure) if is_lasting(&at) || !failing.has(group) => {
                    failing.add(group, failure);
                }
                Err(_) => {}
            }
        }
        for (identity, file) in &self.plan.files {
            let group = self.groups.of_file(*identity).filter(|group| groups.contains(group));
            let Some(group) = group.filter(|group| !failing.has(*group)) else { continue };
            match self.links(*identity, file) {
                Ok(links) => _ = disk.links.insert(*identity, links),
                Err(failure) => failing.add(group, failure),
            }
        }
        disk.unseen = self.unseen(&disk);
        disk
    }

    /// Returns the file at a name, and the ctime of its directory.
    fn look_at(&self, place: &Place) -> Result<(Option<u64>, Option<Timestamp>), Failure> {
        let opened = self.system.directory(place).map_err(failed(place, "open a directory"))?;
        let Some(directory) = opened else { return Ok((Some(NOWHERE), None)) };
        let at = self.system.identity_at(&directory, &place.name);
        let changed = self.system.changed(&directory);
        Ok((
            at.map_err(failed(place, "look at a name"))?,
            Some(changed.map_err(failed(place, "look at a directory"))?),
        ))
    }

    /// Returns the number of names of a file.
    fn links(&self, identity: u64, file: &NamedFile) -> Result<u64, Failure> {
        let opened = self.system.file(file);
        let links =
            opened.and_then(|opened| opened.map_or(Ok(0), |opened| self.system.links(&opened)));
        links.map_err(|error| match self.place_of(identity) {
            Some(place) => failed(place, "open the file")(error),
            None => Failure::Log(error),
        })
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

    /// Returns the names of missing files whose directories were changed since the session ended.
    /// Such a file may have been removed, or may have to be created again.
    fn missing_of_changed(&self, disk: &OnDisk) -> Vec<usize> {
        let Some(ended_ns) = self.ended_ns else { return Vec::new() };
        let stories = &self.plan.stories;
        let missing = self.plan.made.keys().filter(|file| {
            disk.links.get(file) == Some(&0)
                && !disk.is_unseen(file)
                && stories.last_names(file).next().is_some()
        });
        let names = missing.filter_map(|file| stories.made_at(file)).copied();
        let is_later = |at: &usize| disk.changed[*at].is_some_and(|at| ns_of(at) > ended_ns);
        names.filter(is_later).collect()
    }

    /// Writes the new decisions to the log.
    pub(super) fn note(&self, decision: &Decision) -> Result<(), Failure> {
        if decision.new.is_empty() {
            return Ok(());
        }
        let mut bits = self.plan.stories.to_bits(&decision.decisions);
        let is_new = |at| decision.new.contains(&self.groups.of_name(at));
        bits.extend((0..self.plan.places.len()).map(is_new));
        let byte =
            |bits: &[bool]| bits.iter().rev().fold(0_u8, |byte, bit| byte << 1 | u8::from(*bit));
        let bytes: Vec<u8> = bits.chunks(8).map(byte).collect();
        for (number, part) in bytes.chunks(NOTE_BYTES).enumerate() {
            let offset = decision.batch << BATCH_SHIFT | (number * NOTE_BYTES) as u64;
            self.notes.note(RecordKind::Decided, offset, part).map_err(Failure::Log)?;
        }
        Ok(())
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
        decision: &Decision,
        failing: &mut Failing,
        fill: &dyn Fn(u64, &File) -> Result<(), Failure>,
    ) -> u64 {
        let decisions = self.part(&decision.decisions, |group| decision.is_due(group, failing));
        let mut made = 0;
        for (identity, source) in &decisions.files {
            let Some(home) = Self::home(&decisions, *identity) else { continue };
            let group = self.groups.of_name(home);
            if failing.has(group) {
                continue;
            }
            match self.reserve_one((*identity, *source), home, fill) {
                Ok(()) => made += u64::from(*source == Source::Log),
                Err(failure) => failing.add(group, failure),
            }
        }
        made
    }

    fn reserve_one(
        &self,
        (identity, source): (u64, Source),
        home: usize,
        fill: &dyn Fn(u64, &File) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let (place, directory) = self.directory(home)?;
        let name = self.notes.reserved_name(identity);
        let found = self.system.identity_at(&directory, &name);
        if found.map_err(failed(place, "look at a name"))?.is_some() {
            return Ok(());
        }
        let file = match source {
            Source::Disk => {
                let file = self.system.file(&self.plan.files[&identity]);
                let file = file.map_err(failed(place, "open the file"))?;
                let gone = || failed(place, "open the file")(io::ErrorKind::Other.into());
                file.ok_or_else(gone)?
            }
            Source::Log => {
                let file = self.system.make(&directory);
                let file = file.map_err(failed(place, "make the file again"))?;
                fill(identity, &file)?;
                file
            }
        };
        let linked = self.system.link(&file, &directory, &name);
        linked.map_err(failed(place, "make a name"))
    }

    /// Adds the groups of these files to the failing ones.
    pub(super) fn leave(&self, files: &BTreeSet<u64>, failing: &mut Failing) {
        failing.leave(files.iter().filter_map(|file| self.groups.of_file(*file)));
    }

    /// Sets names, then removes names, of the groups that do not fail. Notes that these are done,
    /// and removes the reserved names. A name stays that another file has taken meanwhile, or, when
    /// salvaging, whose file was changed since the session ended.
    pub(super) fn set_names(
        &self,
        decision: &Decision,
        failing: &mut Failing,
        done: &mut NamesDone,
    ) {
        let decisions = self.part(&decision.decisions, |group| decision.is_due(group, failing));
        self.commit(&decisions, failing);
        let (sets, removes): (Vec<_>, Vec<_>) =
            decisions.names.iter().partition(|(_, gets)| gets.is_some());
        for (at, gets) in sets.into_iter().chain(removes) {
            let group = self.groups.of_name(*at);
            if failing.has(group) {
                continue;
            }
            let changed = match gets {
                Some(identity) => self.set(&decisions, *at, *identity, done),
                None => self.remove(&decisions, *at, done),
            };
            if let Err(failure) = changed {
                failing.add(group, failure);
            }
        }
        self.commit(&decisions, failing);
        let is_done = |group: &usize| decision.groups.contains(group) && !failing.has(*group);
        let done: BTreeSet<usize> = self.groups.all().into_iter().filter(is_done).collect();
        match self.note_done(&done) {
            Ok(()) => {
                let done = self.part(&decision.decisions, |group| done.contains(&group));
                self.release(&done, failing);
            }
            Err(error) => failing.failures.push(Failure::Log(error)),
        }
    }

    /// Notes that the decisions on these groups are carried out. A note without groups is about all
    /// groups.
    fn note_done(&self, groups: &BTreeSet<usize>) -> io::Result<()> {
        if *groups == self.groups.all() {
            return self.notes.note(RecordKind::Done, 0, &[]);
        }
        let groups: Vec<usize> = groups.difference(&self.plan.done).copied().collect();
        groups.chunks(NOTE_BYTES / size_of::<u32>()).try_for_each(|part| {
            // A log has fewer names than 32 bits can number.
            let number = |group: &usize| u32::try_from(*group).unwrap_or(u32::MAX).to_le_bytes();
            let part: Vec<u8> = part.iter().flat_map(number).collect();
            self.notes.note(RecordKind::Done, 0, &part)
        })
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
    fn release(&self, decisions: &Decisions<usize, u64>, failing: &mut Failing) {
        for identity in decisions.files.keys() {
            let Some(home) = Self::home(decisions, *identity) else { continue };
            if let Err(failure) = self.release_one(*identity, home) {
                failing.add(self.groups.of_name(home), failure);
            }
        }
        self.commit(decisions, failing);
    }

    fn release_one(&self, identity: u64, home: usize) -> Result<(), Failure> {
        let (place, Some(directory)) = self.directory_if_there(home)? else { return Ok(()) };
        let name = self.notes.reserved_name(identity);
        let doing = |error| failed(place, "remove a reserved name")(error);
        if self.system.identity_at(&directory, &name).map_err(doing)?.is_some() {
            self.system.unlink(&directory, &name).map_err(doing)?;
        }
        Ok(())
    }

    /// Makes the file systems of the decided names durable, each through any directory that is
    /// there. If that fails, all groups with such names fail.
    fn commit(&self, decisions: &Decisions<usize, u64>, failing: &mut Failing) {
        let mut committed: BTreeSet<FileSystemId> = BTreeSet::new();
        for at in decisions.names.keys() {
            let (group, file_system) =
                (self.groups.of_name(*at), self.plan.places[*at].file_system);
            if failing.has(group) || committed.contains(&file_system) {
                continue;
            }
            match self.commit_through(*at) {
                Ok(true) => _ = committed.insert(file_system),
                Ok(false) => {}
                Err(failure) => {
                    failing.add(group, failure);
                    let of_it = |at: &&usize| self.plan.places[**at].file_system == file_system;
                    let names = decisions.names.keys().filter(of_it);
                    failing.leave(names.map(|at| self.groups.of_name(*at)));
                }
            }
        }
    }

    /// Makes the file system of a name durable. Returns `false` if the directory was removed.
    fn commit_through(&self, at: usize) -> Result<bool, Failure> {
        let (place, Some(directory)) = self.directory_if_there(at)? else { return Ok(false) };
        let result = self.system.commit(&directory);
        result.map_err(failed(place, "sync the file system")).map(|()| true)
    }
}
