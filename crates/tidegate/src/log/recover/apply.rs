//! Applies a plan to files: writes the bytes and sizes that the disk lacks.
//!
//! Invariants:
//! 1. Recovery looks at all files before it changes one. A failure that requires a decision about
//!    the log, such as damage, stops recovery there: a person finds all files as the crash left
//!    them.
//! 2. A file that cannot be recovered for another reason is left, and holds back only its group of
//!    names. The log keeps its records, and notes that the other files are restored: the
//!    next recovery writes to none of these.
//! 3. A removed file needs nothing, unless the log has records of its names.
//! 4. The handle identifies a file, its path never does.
//! 5. Bytes that an interrupted recovery wrote are written and synced again: visible bytes need not
//!    be durable.
//! 6. Attributes that a write changes are noted in the log before the file changes, and restored.

use std::collections::BTreeSet;
use std::io;

use parking_lot::Mutex;

use super::carry_out::{Decision, NOTE_BYTES, NameSystem, NamesDone, Naming, Notes};
use super::decide::{Decisions, Source};
use super::extents::{Content, Extent};
use super::failure::Failure;
use super::finding::{Finding, Findings};
use super::gather::gather;
use super::groups::Failing;
use super::log_data::LogData;
use super::parallel;
use super::plan::{FilePlan, Plan};
use super::ranges::Ranges;
use super::replay::{Disk, Target, replay};
use super::saved::Saved;
use crate::log::RecordKind;

/// Bytes of a file that one thread copies at a time.
const PART_BYTES: u64 = 8 << 20;
/// Bytes of a file that are compared at a time.
const COMPARED_BYTES: u64 = 1 << 20;
/// The name of a sync in messages.
const SYNC: &str = "sync the file";

/// The files that recovery works on.
pub trait FileSystem: Sync {
    /// An open file.
    type File: Sync;

    /// Opens the file. Returns `None` if it was removed.
    ///
    /// # Errors
    /// The file cannot be found or opened.
    fn open(&self, file: &FilePlan, access: Access) -> Result<Option<Self::File>, Failure>;

    /// Returns size and times of an open file.
    ///
    /// # Errors
    /// The system's error.
    fn state(&self, file: &Self::File) -> io::Result<FileState>;

    /// Returns the bytes of an open file with size `size_bytes` that are allocated and written.
    ///
    /// # Errors
    /// The system's error.
    fn written(&self, file: &Self::File, size_bytes: u64) -> io::Result<Ranges>;

    /// Returns the attributes of an open file that a write changes.
    ///
    /// # Errors
    /// The system's error.
    fn saved(&self, _file: &Self::File) -> io::Result<Saved> {
        Ok(Saved { mode: 0o600, ..Saved::default() })
    }

    /// Makes a file writable that is open for reading, until [`restore`](Self::restore).
    ///
    /// # Errors
    /// The system's error.
    fn unlock(&self, _file: &Self::File, _saved: &Saved) -> io::Result<()> {
        Ok(())
    }

    /// Restores the attributes of an open file. If it `is_made` it keeps mode and capability from
    /// the log.
    ///
    /// # Errors
    /// The system's error.
    fn restore(&self, _file: &Self::File, _saved: &Saved, _is_made: bool) -> io::Result<()> {
        Ok(())
    }

    /// Drops the cached pages of a synced file if possible, so that [`read`](Self::read) gets the
    /// disk's.
    fn let_go(&self, _file: &Self::File) {}

    /// Reads all of `buf`.
    ///
    /// # Errors
    /// The system's error.
    fn read(&self, _file: &Self::File, _offset: u64, _buf: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sets the size. New bytes are zero.
    ///
    /// # Errors
    /// The system's error.
    fn set_size(&self, file: &Self::File, size_bytes: u64) -> io::Result<()>;

    /// Writes all of `data`.
    ///
    /// # Errors
    /// The system's error.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Zeroes bytes inside the file.
    ///
    /// # Errors
    /// The system's error.
    fn zero(&self, file: &Self::File, offset: u64, len: u64) -> io::Result<()>;

    /// Starts to write bytes back. Only [`sync`](Self::sync) reports whether they are durable.
    fn start_sync(&self, file: &Self::File, offset: u64, len: u64);

    /// Makes bytes and size durable.
    ///
    /// # Errors
    /// The system's error.
    fn sync(&self, file: &Self::File) -> io::Result<()>;

    /// Returns the directories and names, or `None` if recovery cannot change names of these files.
    fn names(&self) -> Option<&dyn NameSystem<Self::File>> {
        None
    }
}

/// The purpose of opening a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// To look at the file.
    Read,
    /// To restore the file.
    Write,
}

impl Access {
    /// Describes the attempt, for messages.
    pub(super) fn doing(self) -> &'static str {
        match self {
            Self::Read => "open the file",
            Self::Write => "open the file for writing",
        }
    }
}

/// Size and times of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileState {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Block size of the file system's allocation, in bytes.
    pub block_bytes: u64,
    /// Time of the last change (`st_ctime`), in nanoseconds since 1970.
    pub changed_ns: i128,
    /// Time of the last change of bytes or size (`st_mtime`), in nanoseconds since 1970.
    pub modified_ns: i128,
}

/// Options of a recovery.
#[derive(Debug, Clone, Copy)]
pub struct ApplyOptions {
    /// Threads that restore files at once.
    pub workers: usize,
    /// Time when the machine was started after the crash, in nanoseconds since 1970. Files that
    /// were changed since then are refused. `None`: the machine was not restarted, or the time is
    /// unknown.
    pub booted_ns: Option<i128>,
    /// Report damage, and files that were changed since the boot, as [`Finding`]s, and go on.
    pub salvage: bool,
}

/// Progress of a recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes copied to files.
    pub done_bytes: u64,
    /// Bytes to copy, at most.
    pub total_bytes: u64,
}

/// Result of applying a plan.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Files whose bytes or size were set.
    pub files_written: u64,
    /// Files that were removed before the crash, or by it.
    pub files_gone: u64,
    /// Changes of names.
    pub names: NamesDone,
    /// Bytes that were copied to files.
    pub written_bytes: u64,
    /// Failures. The plan is incomplete if there is one.
    pub failures: Vec<Failure>,
    /// Oddities in the records or the files.
    pub findings: Findings,
}

impl Outcome {
    /// Returns whether the disk has the whole plan, so that its records may be retired.
    pub fn is_complete(&self) -> bool {
        self.failures.is_empty()
    }

    /// Returns whether no failure requires a decision before files are changed.
    fn may_begin(&self) -> bool {
        self.failures.iter().all(Failure::leaves_one_file)
    }

    /// Adds `failure` to the failures, or to the findings if salvaged. Returns whether recovery
    /// stops.
    fn stops_at(&mut self, failure: Failure, options: ApplyOptions) -> bool {
        let stops = !(options.salvage && failure.can_be_salvaged());
        if stops {
            self.failures.push(failure);
        } else {
            self.findings.add(Finding::Salvaged { what: failure.to_string() });
        }
        stops
    }
}

/// State that all phases share.
struct Context<'a, F> {
    data: &'a dyn LogData,
    files: &'a F,
    options: ApplyOptions,
    meter: Meter<'a>,
}

/// A file that exists and may need changes.
struct Due<'p> {
    file: &'p FilePlan,
    /// Its attributes before recovery first changed it.
    saved: Saved,
    /// It can be opened for writing, perhaps after an unlock.
    is_writable: bool,
}

/// Result of a look at all files.
struct Survey<'p> {
    due: Vec<Due<'p>>,
    /// Identities of files that cannot be recovered now.
    left: BTreeSet<u64>,
}

/// The changes of names to carry out.
struct Decided<'a, File> {
    naming: Naming<'a, File>,
    decision: Decision,
}

/// Counts copied bytes and reports the progress to the caller.
struct Meter<'a> {
    done_bytes: Mutex<u64>,
    total_bytes: u64,
    tell: &'a (dyn Fn(Progress) + Sync),
}

impl Meter<'_> {
    fn add(&self, bytes: u64) {
        let mut done = self.done_bytes.lock();
        *done += bytes;
        // The lock is held here so that the caller's progress never goes back.
        (self.tell)(Progress { done_bytes: *done, total_bytes: self.total_bytes });
    }
}

/// Makes `files` match `plan`, whose bytes are in `data`. Calls `begin` before it changes the first
/// file. `unreadable_bytes` of the log are not in the plan.
///
/// May be called again after any crash or failure, with the plan of the same records. The log's
/// tail may move over the records only if the outcome is complete.
pub fn apply<F: FileSystem>(
    (plan, unreadable_bytes): (&Plan, u64),
    data: &dyn LogData,
    files: &F,
    options: ApplyOptions,
    progress: &(dyn Fn(Progress) + Sync),
    begin: &mut dyn FnMut() -> io::Result<()>,
) -> Outcome {
    apply_noting((plan, unreadable_bytes), (data, None), files, options, progress, begin)
}

/// Applies a plan like [`apply`], and notes decisions in `notes`. Without it no name is changed.
pub(super) fn apply_noting<F: FileSystem>(
    (plan, unreadable_bytes): (&Plan, u64),
    (data, notes): (&dyn LogData, Option<&dyn Notes>),
    files: &F,
    options: ApplyOptions,
    progress: &(dyn Fn(Progress) + Sync),
    begin: &mut dyn FnMut() -> io::Result<()>,
) -> Outcome {
    let total_bytes = plan.data_bytes();
    let meter = Meter { done_bytes: Mutex::new(0), total_bytes, tell: progress };
    let context = Context { data, files, options, meter };
    let mut outcome = Outcome { findings: plan.findings.clone(), ..Outcome::default() };
    let survey = context.survey(plan, unreadable_bytes, &mut outcome);
    let naming = context.naming(plan, notes, &mut outcome);
    if outcome.may_begin() {
        let noting = (notes, begin);
        let restored = context.restore(plan, survey, naming.as_ref(), noting, &mut outcome);
        outcome.failures.extend(restored.err());
    }
    outcome.written_bytes = *context.meter.done_bytes.lock();
    outcome
}

impl<F: FileSystem> Context<'_, F> {
    /// Returns the files that exist and can be recovered. Changes no file.
    fn survey<'p>(
        &self,
        plan: &'p Plan,
        unreadable_bytes: u64,
        outcome: &mut Outcome,
    ) -> Survey<'p> {
        if unreadable_bytes > 0 {
            outcome.stops_at(Failure::Unreadable { bytes: unreadable_bytes }, self.options);
        }
        for lost in &plan.missing {
            let (position, bytes) = (lost.start, lost.end - lost.start);
            outcome.stops_at(Failure::Missing { position, bytes }, self.options);
        }
        if plan.undefined_records > 0 {
            let records = plan.undefined_records;
            outcome.stops_at(Failure::Undefined { records }, self.options);
        }
        let looks = parallel::map(self.options.workers, &plan.files, |file| self.look(plan, file));
        let mut survey = Survey { due: Vec::with_capacity(looks.len()), left: BTreeSet::new() };
        for (file, look) in plan.files.iter().zip(looks) {
            match look {
                Ok(Some(due)) => survey.due.push(due),
                Ok(None) => outcome.files_gone += 1,
                Err(failure) => {
                    if outcome.stops_at(failure, self.options) {
                        survey.left.insert(file.identity);
                    }
                }
            }
        }
        survey
    }

    /// Decides the changes of names. Changes no file.
    fn naming<'a>(
        &'a self,
        plan: &'a Plan,
        notes: Option<&'a dyn Notes>,
        outcome: &mut Outcome,
    ) -> Option<Decided<'a, F::File>> {
        if plan.names().is_empty() || !outcome.may_begin() {
            return None;
        }
        let Some((system, notes)) = self.files.names().zip(notes) else {
            let error = io::Error::from(io::ErrorKind::Unsupported);
            outcome.failures.push(Failure::Log(error));
            return None;
        };
        // The log's own time is preferred: the clock of this boot may be behind, and the boot is
        // unknown after a failed write-back. Changes by a former recovery do not count: it noted
        // its decisions before.
        let ended_ns = plan.dates.ended_ns().or(self.options.booted_ns);
        let begun = plan.files.iter().filter(|file| file.begun.is_some());
        let begun = begun.map(|file| file.identity).collect();
        let (dates, salvages) = (plan.dates, self.options.salvage);
        let naming = Naming::of(plan.names(), system, notes);
        let naming = Naming { dates, ended_ns, begun, salvages, ..naming };
        let mut decision = naming.decide();
        self.find_damaged(plan, &decision.decisions, outcome);
        outcome.names.taken = std::mem::take(&mut decision.taken);
        for failure in std::mem::take(&mut decision.given_up) {
            outcome.stops_at(failure, self.options);
        }
        outcome.failures.append(&mut decision.failures);
        Some(Decided { naming, decision })
    }

    /// Reports damaged records of files that are to be created again.
    fn find_damaged(&self, plan: &Plan, decisions: &Decisions<usize, u64>, outcome: &mut Outcome) {
        let is_made = |file: &&FilePlan| decisions.files.get(&file.identity) == Some(&Source::Log);
        for file in plan.files.iter().filter(is_made) {
            if let Some(damage) = file.damaged {
                let failure = Failure::Damaged { path: file.name(), damage };
                outcome.stops_at(failure, self.options);
            }
        }
    }

    /// Restores names and files. Does not repeat changes of names that a former recovery completed.
    fn restore(
        &self,
        plan: &Plan,
        Survey { due, mut left }: Survey<'_>,
        decided: Option<&Decided<'_, F::File>>,
        (notes, begin): (Option<&dyn Notes>, &mut dyn FnMut() -> io::Result<()>),
        outcome: &mut Outcome,
    ) -> Result<(), Failure> {
        if let Some(Decided { naming, decision }) = decided {
            naming.note(decision)?;
        }
        let is_noted = notes.is_some_and(|notes| note_saved(plan, &due, notes).is_ok());
        if let Some(notes) = notes.filter(|_| !is_noted) {
            // By this time a later recovery recognizes changes that may be from this one.
            notes.note_recovery().map_err(Failure::Log)?;
        }
        if !is_noted || self.options.booted_ns.is_none() {
            begin().map_err(Failure::Log)?;
        }
        let mut failing = Failing::default();
        if let Some(decided) = decided {
            self.reserve(plan, decided, &mut failing, outcome);
        }
        let restored = self.restore_all(&due, &mut left, outcome);
        if let Some(Decided { naming, decision }) = decided {
            // If a file is left, its names could replace a whole file by an unrestored one.
            naming.leave(&left, &mut failing);
            naming.set_names(decision, &mut failing, &mut outcome.names);
        }
        outcome.failures.append(&mut failing.failures);
        match notes.filter(|_| !outcome.is_complete()) {
            Some(notes) => note_restored(&restored, notes),
            None => Ok(()),
        }
    }

    /// Gives reserved names to the files that get names, and creates missing files.
    fn reserve(
        &self,
        plan: &Plan,
        Decided { naming, decision }: &Decided<'_, F::File>,
        failing: &mut Failing,
        outcome: &mut Outcome,
    ) {
        let fill = |identity, file: &F::File| self.fill_made(plan, identity, file);
        let made = naming.reserve(decision, failing, &fill);
        outcome.names.made = made;
        outcome.files_gone = outcome.files_gone.saturating_sub(made);
    }

    /// Writes content and attributes of the file with this identity to a new file, durably.
    fn fill_made(&self, plan: &Plan, identity: u64, opened: &F::File) -> Result<(), Failure> {
        let Some(file) = plan.files.iter().find(|file| file.identity == identity) else {
            return Err(Failure::Undefined { records: 1 });
        };
        let state = self.files.state(opened);
        let state = state.map_err(|error| Failure::io(file, "look at the file", error))?;
        let disk = Disk { block_bytes: state.block_bytes, ..Disk::default() };
        let filled = self.fill(&replay(file, &disk), opened);
        let filled = filled.and_then(|()| self.set_made(file, opened, true));
        let synced = filled.and_then(|()| self.sync(opened));
        synced.map_err(|(doing, error)| Failure::io(file, doing, error))
    }

    /// Sets the attributes of a file, if the log has a record of the whole file.
    fn set_made(&self, file: &FilePlan, opened: &F::File, with_times: bool) -> Attempt {
        let Some((made, system)) = file.made.as_ref().zip(self.files.names()) else {
            return Ok(());
        };
        let set = system.set_attributes(opened, made, with_times);
        set.map_err(|error| ("set the attributes", error))
    }

    /// Looks at the file. Returns `None` if it was removed.
    fn look<'p>(&self, plan: &Plan, file: &'p FilePlan) -> Result<Option<Due<'p>>, Failure> {
        let Some(opened) = self.files.open(file, Access::Read)? else {
            // The damaged record may be the one that was to create the file.
            let lost = file.damaged.filter(|_| file.has_lost_make);
            let damaged = |damage| Failure::Damaged { path: file.name(), damage };
            return lost.map_or(Ok(None), |damage| Err(damaged(damage)));
        };
        let failed = |error| Failure::io(file, "look at the file", error);
        let state = self.files.state(&opened).map_err(failed)?;
        // If an earlier recovery was interrupted, the change may be its own.
        if file.begun.is_none() && self.was_changed(plan, file, &state) {
            return Err(Failure::Changed { path: file.name() });
        }
        if let Some(damage) = file.damaged {
            return Err(Failure::Damaged { path: file.name(), damage });
        }
        let saved = if let Some(saved) = &file.begun {
            saved.clone()
        } else {
            let saved = self.files.saved(&opened).map_err(failed)?;
            saved.modified_at(file.changed_ns, state.changed_ns)
        };
        let is_writable = saved.is_locked() || self.files.open(file, Access::Write).is_ok();
        Ok(Some(Due { file, saved, is_writable }))
    }

    /// Returns whether a process outside has changed the file since the log's last record of it. If
    /// the records have no time, the last boot counts instead.
    fn was_changed(&self, plan: &Plan, file: &FilePlan, state: &FileState) -> bool {
        match file.modified_until_ns {
            Some(until_ns) => plan.dates.is_from_outside(state.modified_ns, until_ns),
            None => self.options.booted_ns.is_some_and(|booted_ns| state.changed_ns > booted_ns),
        }
    }

    /// Restores all files that it can. Returns the restored ones.
    fn restore_all<'d, 'p>(
        &self,
        due: &'d [Due<'p>],
        left: &mut BTreeSet<u64>,
        outcome: &mut Outcome,
    ) -> Vec<&'d Due<'p>> {
        let restored = parallel::map(self.options.workers, due, |due| self.restore_one(due));
        let mut done = Vec::with_capacity(due.len());
        for (due, restored) in due.iter().zip(restored) {
            match restored {
                Ok(Restored::Written) => outcome.files_written += 1,
                Ok(Restored::Whole) => {}
                Ok(Restored::Gone) => outcome.files_gone += 1,
                Err(failure) => {
                    left.insert(due.file.identity);
                    outcome.failures.push(failure);
                    continue;
                }
            }
            done.push(due);
        }
        done
    }

    /// Sets bytes and size of a file. One that cannot be opened for writing may already have both.
    fn restore_one(&self, due: &Due<'_>) -> Result<Restored, Failure> {
        let file = due.file;
        let Some(found) = self.files.open(file, Access::Read)? else { return Ok(Restored::Gone) };
        let failed = |(doing, error)| Failure::io(file, doing, error);
        let mut opened = self.files.open(file, Access::Write);
        let is_unlocked = opened.is_err()
            && due.saved.is_locked()
            && self.files.unlock(&found, &due.saved).is_ok();
        if is_unlocked {
            opened = self.files.open(file, Access::Write);
        }
        match opened {
            Ok(None) => Ok(Restored::Gone),
            Ok(Some(opened)) => {
                let written = self.write_durably(due, &opened).map_err(failed);
                written.map(|()| Restored::Written)
            }
            Err(failure) => {
                let is_whole = self.is_whole(file, &found);
                if is_unlocked || file.begun.is_some() || file.made.is_some() {
                    let given = self.give_back(due, &found).and_then(|()| self.sync(&found));
                    given.map_err(failed)?;
                }
                if is_whole.map_err(failed)? { Ok(Restored::Whole) } else { Err(failure) }
            }
        }
    }

    fn target(&self, file: &FilePlan, opened: &F::File) -> Result<Target, Failed> {
        let state = self.files.state(opened).map_err(|error| ("look at the file", error))?;
        let (size_bytes, block_bytes) = (state.size_bytes, state.block_bytes);
        let written = self.files.written(opened, size_bytes);
        let written = written.map_err(|error| ("tell which of its bytes were written", error))?;
        Ok(replay(file, &Disk { size_bytes, written, block_bytes }))
    }

    fn write_durably(&self, due: &Due<'_>, opened: &F::File) -> Attempt {
        let target = self.target(due.file, opened)?;
        let written = self.write(due, &target, opened);
        // A failed sync may report an earlier write-back, and leaves pages clean that the disk does
        // not have. So the file is written once more.
        let written = written.or_else(|failed| match failed {
            (SYNC, _) => self.unlock(due, opened).and_then(|()| self.write(due, &target, opened)),
            failed => Err(failed),
        });
        if written.is_err() {
            // The next recovery tries again, from the attributes noted in the log.
            let _ = self.files.restore(opened, &due.saved, due.file.made.is_some());
        }
        written
    }

    /// Writes the target, restores the attributes, syncs.
    fn write(&self, due: &Due<'_>, target: &Target, opened: &F::File) -> Attempt {
        self.fill(target, opened)?;
        self.give_back(due, opened)?;
        self.sync(opened)
    }

    fn unlock(&self, due: &Due<'_>, opened: &F::File) -> Attempt {
        let unlocked =
            if due.saved.is_locked() { self.files.unlock(opened, &due.saved) } else { Ok(()) };
        unlocked.map_err(|error| ("take its protection away", error))
    }

    fn give_back(&self, due: &Due<'_>, opened: &F::File) -> Attempt {
        let file = due.file;
        self.set_made(file, opened, !file.is_changed_since_made())?;
        let mut saved = due.saved.clone();
        if let Some(made) = file.made.as_ref().filter(|_| !file.is_changed_since_made()) {
            (saved.accessed, saved.modified) = made.times;
        }
        let restored = self.files.restore(opened, &saved, file.made.is_some());
        restored.map_err(|error| ("give back its attributes", error))
    }

    /// Returns whether the disk has the file's target.
    fn is_whole(&self, file: &FilePlan, opened: &F::File) -> Result<bool, Failed> {
        self.sync(opened)?;
        self.files.let_go(opened);
        let target = self.target(file, opened)?;
        let state = self.files.state(opened).map_err(|error| ("look at the file", error))?;
        Ok(state.size_bytes == target.size_bytes && self.has(&target.extents, opened)?)
    }

    /// Returns whether the open file has the bytes of these extents.
    fn has(&self, extents: &[Extent], opened: &F::File) -> Result<bool, Failed> {
        let (mut expected, mut found) = (Vec::new(), Vec::new());
        for extent in extents {
            let mut start = extent.start;
            while start < extent.end {
                let end = extent.end.min(start + COMPARED_BYTES);
                let len = usize::try_from(end - start).unwrap_or(0);
                expected.clear();
                expected.resize(len, 0);
                found.resize(len, 0);
                if let Content::Log(position) = extent.part(start..end).content {
                    let read = self.data.read(position, &mut expected);
                    read.map_err(|error| ("read its data from the log", error))?;
                }
                let read = self.files.read(opened, start, &mut found);
                read.map_err(|error| ("read the file", error))?;
                if expected != found {
                    return Ok(false);
                }
                start = end;
            }
        }
        Ok(true)
    }

    fn sync(&self, opened: &F::File) -> Attempt {
        self.files.sync(opened).map_err(|error| (SYNC, error))
    }

    /// Sets the size, zeroes ranges, copies bytes. The size comes first: no byte is written behind
    /// it.
    fn fill(&self, target: &Target, opened: &F::File) -> Attempt {
        let state = self.files.state(opened).map_err(|error| ("look at the file", error))?;
        if state.size_bytes != target.size_bytes {
            let sized = self.files.set_size(opened, target.size_bytes);
            sized.map_err(|error| ("set the size", error))?;
        }
        for extent in target.extents.iter().filter(|extent| extent.content == Content::Zero) {
            let zeroed = self.files.zero(opened, extent.start, extent.bytes());
            zeroed.map_err(|error| ("zero a range", error))?;
        }
        self.copy(&target.extents, opened)
    }

    /// Copies all data, adjacent data in large writes. Several parts of a large file are copied in
    /// parallel: while the kernel writes one part, others are read from the log or written back to
    /// the disk.
    fn copy(&self, extents: &[Extent], opened: &F::File) -> Attempt {
        let parts = parts(extents);
        // The kernel serializes writes to a file, and a waiting thread may spin on a CPU.
        let turn = Mutex::new(());
        let copied = parallel::map(self.options.workers, &parts, |part| {
            self.copy_part(part, opened, &turn)?;
            if let (Some(first), Some(last), true) = (part.first(), part.last(), parts.len() > 1) {
                self.files.start_sync(opened, first.start, last.end - first.start);
            }
            Ok(())
        });
        copied.into_iter().collect()
    }

    fn copy_part(&self, extents: &[Extent], opened: &F::File, turn: &Mutex<()>) -> Attempt {
        let read = |position, buf: &mut [u8]| {
            let read = self.data.read(position, buf);
            read.map_err(|error| ("read its data from the log", error))
        };
        gather(extents.iter().copied(), read, |batch| {
            let turn = turn.lock();
            for (offset, bytes) in batch.runs() {
                let written = self.files.write(opened, offset, bytes);
                written.map_err(|error| ("write to the file", error))?;
            }
            drop(turn);
            self.meter.add(batch.used() as u64);
            Ok(())
        })
    }
}

/// Result of restoring one file.
enum Restored {
    Written,
    /// It could not be opened for writing, and was already as it must be.
    Whole,
    Gone,
}

/// Notes the attributes of the files that recovery is about to change, unless noted before.
fn note_saved(plan: &Plan, due: &[Due<'_>], notes: &dyn Notes) -> io::Result<()> {
    // A change of names changes the file's ctime, too.
    let is_touched =
        |due: &&Due<'_>| due.is_writable || plan.names().files.contains_key(&due.file.identity);
    let new = due.iter().filter(|due| due.file.begun.is_none()).filter(is_touched);
    let entries = new.map(|due| {
        let mut entry = Vec::new();
        due.saved.encode(due.file.id, &mut entry);
        entry
    });
    note_all(notes, RecordKind::Begun, entries)
}

/// Notes that these files are restored.
fn note_restored(restored: &[&Due<'_>], notes: &dyn Notes) -> Result<(), Failure> {
    let entries = restored.iter().map(|due| due.file.id.to_le_bytes().to_vec());
    note_all(notes, RecordKind::Restored, entries).map_err(Failure::Log)
}

/// Notes `entries`, each note with as many entries as fit.
fn note_all(
    notes: &dyn Notes,
    kind: RecordKind,
    entries: impl Iterator<Item = Vec<u8>>,
) -> io::Result<()> {
    let mut note = Vec::new();
    for entry in entries {
        if note.len() + entry.len() > NOTE_BYTES {
            notes.note(kind, 0, &note)?;
            note.clear();
        }
        note.extend(entry);
    }
    if note.is_empty() { Ok(()) } else { notes.note(kind, 0, &note) }
}

/// The attempt and its error.
type Failed = (&'static str, io::Error);
/// Success, or the failed attempt.
type Attempt = Result<(), Failed>;

/// Splits the extents into parts of [`PART_BYTES`] or more.
fn parts(extents: &[Extent]) -> Vec<&[Extent]> {
    let (mut parts, mut from, mut bytes) = (Vec::new(), 0, 0);
    for (index, extent) in extents.iter().enumerate() {
        bytes += if extent.content == Content::Zero { 0 } else { extent.bytes() };
        if bytes >= PART_BYTES || index + 1 == extents.len() {
            parts.push(&extents[from..=index]);
            (from, bytes) = (index + 1, 0);
        }
    }
    parts
}
