//! From a plan to files: bytes and sizes that are missing on the disk are written.
//!
//! Invariants:
//! 1. All files are looked at before one is touched. If one can't be recovered, none is touched:
//!    a person who repairs the cause finds all files as the crash left them.
//! 2. A file that was removed needs nothing, unless the log has records of its names.
//! 3. A file is what its handle says, never what its path says.
//! 4. What a former, interrupted run wrote is written and synced again: that it is visible does not
//!    say that it is durable.
//! 5. One file's failure keeps no other file back, once files are touched.

use std::io;

use parking_lot::Mutex;

use super::carry_out::{NameSystem, NamesDone, Naming, Notes};
use super::decide::{Decisions, Source};
use super::extents::{Content, Extent};
use super::failure::Failure;
use super::finding::{Finding, Findings};
use super::gather::gather;
use super::log_data::LogData;
use super::parallel;
use super::plan::{FilePlan, Plan};
use super::ranges::Ranges;
use super::replay::{Disk, Target, replay};

/// Data of a file that one thread copies at a time.
const PART_BYTES: u64 = 8 << 20;

/// The files, as recovery sees them.
pub trait FileSystem: Sync {
    /// An open file.
    type File: Sync;

    /// Opens the file for writing; none, where it was removed.
    ///
    /// # Errors
    /// It can't be found, or not be opened.
    fn open(&self, file: &FilePlan) -> Result<Option<Self::File>, Failure>;

    /// Size and time of an open file.
    ///
    /// # Errors
    /// As of the system.
    fn state(&self, file: &Self::File) -> io::Result<FileState>;

    /// The bytes of an open file, `size_bytes` long, that are allocated and written.
    ///
    /// # Errors
    /// As of the system.
    fn written(&self, file: &Self::File, size_bytes: u64) -> io::Result<Ranges>;

    /// Sets the size; new bytes are zero.
    ///
    /// # Errors
    /// As of the system.
    fn set_size(&self, file: &Self::File, size_bytes: u64) -> io::Result<()>;

    /// Writes all of `data`.
    ///
    /// # Errors
    /// As of the system.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Makes bytes zero that are inside the file.
    ///
    /// # Errors
    /// As of the system.
    fn zero(&self, file: &Self::File, offset: u64, len: u64) -> io::Result<()>;

    /// Has the disk begin to take bytes that were written: ahead of [`sync`](Self::sync), which
    /// alone says whether it has.
    fn start_sync(&self, file: &Self::File, offset: u64, len: u64);

    /// Makes bytes and size durable.
    ///
    /// # Errors
    /// As of the system.
    fn sync(&self, file: &Self::File) -> io::Result<()>;

    /// Directories and names. None: the files have none that recovery could change.
    fn names(&self) -> Option<&dyn NameSystem<Self::File>> {
        None
    }
}

/// What the system says of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileState {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Size of the blocks in which its file system allocates, in bytes.
    pub block_bytes: u64,
    /// When the file was last changed (`st_ctime`), in nanoseconds since 1970.
    pub changed_ns: i128,
    /// When its bytes or size were last changed (`st_mtime`), in nanoseconds since 1970.
    pub modified_ns: i128,
}

/// How to recover.
#[derive(Debug, Clone, Copy)]
pub struct ApplyOptions {
    /// Threads that restore files at once.
    pub workers: usize,
    /// When the machine was started after the crash, in nanoseconds since 1970: a file that was
    /// changed since then is refused. None: it was not started anew, or that is not known.
    pub booted_ns: Option<i128>,
    /// What is damaged, or was changed since the boot, is passed over with a [`Finding`].
    pub salvage: bool,
}

/// How far recovery is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes copied to files.
    pub done_bytes: u64,
    /// Bytes that are to be copied, at most.
    pub total_bytes: u64,
}

/// What became of a plan.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Files whose bytes or size were set.
    pub files_written: u64,
    /// Files that were removed before the crash, or by it.
    pub files_gone: u64,
    /// What was done to names.
    pub names: NamesDone,
    /// Bytes that were copied.
    pub written_bytes: u64,
    /// What could not be done.
    pub failures: Vec<Failure>,
    /// What was odd.
    pub findings: Findings,
}

impl Outcome {
    /// All of the plan is on the disk: its records may go.
    pub fn is_complete(&self) -> bool {
        self.failures.is_empty()
    }

    /// Whether recovery can't go on for `failure`, which is noted.
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

/// What all phases use.
struct Context<'a, F> {
    data: &'a dyn LogData,
    files: &'a F,
    options: ApplyOptions,
    meter: Meter<'a>,
}

/// What is to be done to names.
struct Decided<'a, File> {
    naming: Naming<'a, File>,
    decisions: Decisions<usize, u64>,
}

/// Counts copied bytes and tells the caller.
struct Meter<'a> {
    done_bytes: Mutex<u64>,
    total_bytes: u64,
    tell: &'a (dyn Fn(Progress) + Sync),
}

impl Meter<'_> {
    fn add(&self, bytes: u64) {
        let mut done = self.done_bytes.lock();
        *done += bytes;
        // Under the lock, so that the caller never sees it go back.
        (self.tell)(Progress { done_bytes: *done, total_bytes: self.total_bytes });
    }
}

/// Makes `files` match `plan`, whose bytes are in `data`. `begin` is called before the first file
/// is touched. `unreadable_bytes` of the log are not in the plan.
///
/// May be called again after any crash or failure, with the plan of the same records. Only if the
/// outcome is complete may the log's tail move over them.
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

/// As [`apply`], with a place to note what recovery decides, without which no name is touched.
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
    let due = context.survey(plan, unreadable_bytes, &mut outcome);
    let naming = context.naming(plan, notes, &mut outcome);
    if outcome.is_complete() {
        let restored = context.restore(plan, &due, naming.as_ref(), begin, &mut outcome);
        outcome.failures.extend(restored.err());
    }
    outcome.written_bytes = *context.meter.done_bytes.lock();
    outcome
}

impl<F: FileSystem> Context<'_, F> {
    /// The files that are there and can be recovered. Touches none.
    fn survey<'p>(
        &self,
        plan: &'p Plan,
        unreadable_bytes: u64,
        outcome: &mut Outcome,
    ) -> Vec<&'p FilePlan> {
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
        let mut due = Vec::with_capacity(looks.len());
        for (file, look) in plan.files.iter().zip(looks) {
            match look {
                Ok(true) => due.push(file),
                Ok(false) => outcome.files_gone += 1,
                Err(failure) => drop(outcome.stops_at(failure, self.options)),
            }
        }
        due
    }

    /// What is to be done to names. Touches none.
    fn naming<'a>(
        &'a self,
        plan: &'a Plan,
        notes: Option<&'a dyn Notes>,
        outcome: &mut Outcome,
    ) -> Option<Decided<'a, F::File>> {
        if plan.names().is_empty() || !outcome.is_complete() {
            return None;
        }
        let Some((system, notes)) = self.files.names().zip(notes) else {
            let error = io::Error::from(io::ErrorKind::Unsupported);
            outcome.failures.push(Failure::Log(error));
            return None;
        };
        // By the log's own time where it has one: the clock of this boot may be behind.
        let booted_ns = self.options.booted_ns.filter(|_| !self.options.salvage);
        let booted_ns = booted_ns.map(|booted_ns| plan.dates.ended_ns().unwrap_or(booted_ns));
        let naming = Naming { plan: plan.names(), system, notes, booted_ns };
        match naming.decide() {
            Ok((decisions, taken)) => {
                self.find_damaged(plan, &decisions, outcome);
                outcome.names.taken = taken;
                Some(Decided { naming, decisions })
            }
            Err(failure) => {
                outcome.failures.push(failure);
                None
            }
        }
    }

    /// A file that is to be made again has a damaged record.
    fn find_damaged(&self, plan: &Plan, decisions: &Decisions<usize, u64>, outcome: &mut Outcome) {
        let is_made = |file: &&FilePlan| decisions.files.get(&file.identity) == Some(&Source::Log);
        for file in plan.files.iter().filter(is_made) {
            if let Some(damage) = file.damaged {
                let failure = Failure::Damaged { path: file.name(), damage };
                outcome.stops_at(failure, self.options);
            }
        }
    }

    /// Restores names and files; what a former recovery has done to names is not done again.
    fn restore(
        &self,
        plan: &Plan,
        due: &[&FilePlan],
        decided: Option<&Decided<'_, F::File>>,
        begin: &mut dyn FnMut() -> io::Result<()>,
        outcome: &mut Outcome,
    ) -> Result<(), Failure> {
        if let Some(Decided { naming, decisions }) = decided {
            naming.note(decisions)?;
        }
        begin().map_err(Failure::Log)?;
        let unfinished = decided.filter(|decided| !decided.naming.is_done());
        if let Some(Decided { naming, decisions }) = unfinished {
            let made = naming
                .reserve(decisions, &|identity, file| self.fill_made(plan, identity, file))?;
            outcome.names.made = made;
            outcome.files_gone = outcome.files_gone.saturating_sub(made);
        }
        self.restore_all(due, outcome);
        if !outcome.is_complete() {
            return Ok(());
        }
        if let Some(Decided { naming, decisions }) = unfinished {
            naming.set_names(decisions, &mut outcome.names)?;
        }
        decided.map_or(Ok(()), |Decided { naming, decisions }| naming.release(decisions))
    }

    /// Makes a new file what the log says of the file with this identity, and durable.
    fn fill_made(&self, plan: &Plan, identity: u64, opened: &F::File) -> Result<(), Failure> {
        let Some(file) = plan.files.iter().find(|file| file.identity == identity) else {
            return Err(Failure::Undefined { records: 1 });
        };
        let state = self.files.state(opened);
        let state = state.map_err(|error| Failure::io(file, "look at the file", error))?;
        let disk = Disk { block_bytes: state.block_bytes, ..Disk::default() };
        let filled = self.fill(&replay(file, &disk), opened);
        let filled = filled.and_then(|()| self.set_attributes(file, opened));
        let synced = filled.and_then(|()| self.sync(opened));
        synced.map_err(|(doing, error)| Failure::io(file, doing, error))
    }

    /// Sets the attributes of a file of which the log has all. What is written after that changes
    /// its times.
    fn set_attributes(&self, file: &FilePlan, opened: &F::File) -> Attempt {
        let Some((made, system)) = file.made.as_ref().zip(self.files.names()) else {
            return Ok(());
        };
        let set = system.set_attributes(opened, made, !file.is_changed_since_made());
        set.map_err(|error| ("set the attributes", error))
    }

    /// Whether the file is there.
    fn look(&self, plan: &Plan, file: &FilePlan) -> Result<bool, Failure> {
        let Some(opened) = self.files.open(file)? else {
            // It may be one that was to be made again.
            let lost = file.damaged.filter(|_| file.has_lost_make);
            let damaged = |damage| Failure::Damaged { path: file.name(), damage };
            return lost.map_or(Ok(false), |damage| Err(damaged(damage)));
        };
        let state = self.files.state(&opened);
        let state = state.map_err(|error| Failure::io(file, "look at the file", error))?;
        if self.was_changed(plan, file, &state) {
            return Err(Failure::Changed { path: file.name() });
        }
        match file.damaged {
            Some(damage) => Err(Failure::Damaged { path: file.name(), damage }),
            None => Ok(true),
        }
    }

    /// A process outside has changed the file since the log's last record of it, or since the
    /// machine was started where the log does not say when its records were made.
    fn was_changed(&self, plan: &Plan, file: &FilePlan, state: &FileState) -> bool {
        match file.modified_until_ns {
            Some(until_ns) => plan.dates.is_from_outside(state.modified_ns, until_ns),
            None => self.options.booted_ns.is_some_and(|booted_ns| state.changed_ns > booted_ns),
        }
    }

    fn restore_all(&self, due: &[&FilePlan], outcome: &mut Outcome) {
        let restored = parallel::map(self.options.workers, due, |file| self.restore_one(file));
        for restored in restored {
            match restored {
                Ok(true) => outcome.files_written += 1,
                Ok(false) => outcome.files_gone += 1,
                Err(failure) => outcome.failures.push(failure),
            }
        }
    }

    /// Sets bytes and size of a file; false, where it is gone.
    fn restore_one(&self, file: &FilePlan) -> Result<bool, Failure> {
        let Some(opened) = self.files.open(file)? else { return Ok(false) };
        let restored = self.write_durably(file, &opened);
        restored.map(|()| true).map_err(|(doing, error)| Failure::io(file, doing, error))
    }

    fn write_durably(&self, file: &FilePlan, opened: &F::File) -> Attempt {
        let state = self.files.state(opened).map_err(|error| ("look at the file", error))?;
        let (size_bytes, block_bytes) = (state.size_bytes, state.block_bytes);
        let written = self.files.written(opened, size_bytes);
        let written = written.map_err(|error| ("tell which of its bytes were written", error))?;
        let target = replay(file, &Disk { size_bytes, written, block_bytes });
        self.fill(&target, opened)?;
        self.set_attributes(file, opened)?;
        // A sync that fails may tell of what went wrong before, and leaves clean what the disk did
        // not take.
        self.sync(opened).or_else(|_| self.fill(&target, opened).and_then(|()| self.sync(opened)))
    }

    fn sync(&self, opened: &F::File) -> Attempt {
        self.files.sync(opened).map_err(|error| ("sync the file", error))
    }

    /// Size, zeroes, bytes. The size first: what is behind it is not to be written.
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

    /// Copies all data, joined to large writes where it is adjacent; of a large file several parts
    /// at a time: while the kernel has one, the others are read from the log or are on their way to
    /// the disk.
    fn copy(&self, extents: &[Extent], opened: &F::File) -> Attempt {
        let parts = parts(extents);
        // The kernel lets one write to a file at a time, and a thread that waits there may use up a
        // CPU.
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

/// Done, or what was tried and why it failed.
type Attempt = Result<(), (&'static str, io::Error)>;

/// The extents in parts of [`PART_BYTES`] or more.
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
