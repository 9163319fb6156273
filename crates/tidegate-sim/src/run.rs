//! Files under `tidegate run` (bytes and sizes): programs, the log, a kernel, and a power cut.
//!
//! One history is played on two kernels: on one with the log beside it, whose syncs the log answers
//! where it may, and on a *twin* without the log, whose syncs are all real. Write-backs and commits
//! from outside happen to both kernels, and so do the effects of syncs that the library adds. After
//! the power cut the real recovery runs, interrupted at random, and must leave a state that a
//! kernel with real syncs could have left:
//! 1. each page matches some moment since the file's last sync, and so does the size (the file is
//!    *at least* as promised);
//! 2. names are at least those that the twin has on its disk;
//! 3. a file that is longer than at its last sync comes with the names of the moment when it grew.
//!
//! One thread makes the calls of the preload library in their order. The log, its table, its
//! records and recovery are the real ones. The power cut tears the record that is being appended.

use std::io::IoSlice;
use std::sync::Arc;

use tidegate::log::cover::{
    AdmissionFacts, BeginAction, BeginFacts, CutAction, LeaveAction, Place, Sync, SyncAction,
    SyncFacts, SyncLookups, SyncedState, WriteAction, WriteExtent, WriteFacts, change_of_cut,
    decide_admission, decide_begin, decide_cut, decide_leave, decide_record, decide_sync,
    decide_write, is_overwritten_in_place, is_watched, splits_sync,
};
use tidegate::log::recover::{ApplyOptions, Payload, Planner, Recovered, apply, recover_pool};
use tidegate::log::{
    CONTROL_BYTES, CoverState, Definition, FileGuard, FileHandle, FileKey, FileRef, FileSystemRef,
    Header, Log, LogPool, RecordKind, Ring, Scanner, Ticket, create,
};
use tidegate::pmem::{Region, SharedMemory};

use crate::files::{Kernel, Mounted, PAGE_BYTES};
use crate::log::{POOL_BYTES, log_options, text};
use crate::random::Random;

const FILES: usize = 3;
const PAGES: usize = 4;
const STEPS: usize = 40;

/// A planted fault of the library, the supervisor or recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunFault {
    /// Nothing.
    None,
    /// A file is said to be covered before its real sync.
    CoveredBeforeSync,
    /// Recovery applies stories that were never covered.
    UnconfirmedReplayed,
    /// Recovery applies growth that no sync has promised.
    GrowthWithoutMark,
    /// The tail moves though the files were not synced.
    TailBeforeSync,
    /// The mark of a sync comes before the record of the write that it promises.
    MarkBeforeRecord,
    /// A sync is marked while names are pending.
    MarkWhilePending,
    /// A file that was cut grows in the log while names are pending.
    GrowthAfterCut,
    /// A file stays in the log when another file is made of its blocks.
    CoveredWhileShared,
    /// A file is covered as one that is overwritten in place, though its blocks are shared.
    SharedTakenForDense,
    /// The `fsync` of a file that was read, and not written, is answered while names are pending.
    ReadNotCommitted,
    /// A file is covered while the program writes in ways that no hook sees.
    AdmittedThoughUnseen,
    /// A file whose data is journaled is taken for one that is overwritten in place.
    JournaledTakenForInPlace,
    /// A write to the position of a descriptor with `O_DSYNC` is made by another descriptor.
    SplitAtPosition,
}

/// Steps of a history besides writes, cuts, syncs and changes of names. One kind at a time:
/// together they would make the rare orders of the other steps rarer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extra {
    /// None.
    Nothing,
    /// Files share blocks, and are read.
    Shared,
    /// The program writes in ways that no hook sees.
    Unseen,
    /// Writes by descriptors with `O_DSYNC`, and a file whose data is journaled.
    Synchronous,
}

impl RunFault {
    /// Returns the steps that the fault shows in.
    pub fn extra(self) -> Extra {
        match self {
            Self::CoveredWhileShared | Self::SharedTakenForDense | Self::ReadNotCommitted => {
                Extra::Shared
            }
            Self::AdmittedThoughUnseen => Extra::Unseen,
            Self::JournaledTakenForInPlace | Self::SplitAtPosition => Extra::Synchronous,
            _ => Extra::Nothing,
        }
    }
}

/// The content that programs saw at one moment.
struct Moment {
    /// Number of changes of names until then.
    names: usize,
    files: Vec<Vec<u8>>,
}

/// The library's knowledge of a file.
struct Known {
    entry: FileRef,
    /// The moment of the last sync that was acknowledged.
    synced_at: usize,
}

/// A write whose record is late.
struct Late {
    file: usize,
    write: WriteExtent,
    data: Vec<u8>,
}

struct Life {
    region: Arc<Region>,
    log: Log,
    file_system: FileSystemRef,
    kernel: Kernel,
    twin: Kernel,
    files: Vec<Known>,
    moments: Vec<Moment>,
    late: Option<Late>,
    extra: Extra,
    /// The program writes in ways that no hook sees.
    writes_unseen: bool,
    fault: RunFault,
    /// The steps so far, for the report of a failure.
    steps: Vec<String>,
}

/// Plays the history of `seed`, cuts the power at its end, recovers and judges.
///
/// # Errors
/// Describes a state that no kernel with real syncs could have left.
pub fn play(seed: u64, extra: Extra, fault: RunFault) -> Result<(), String> {
    let mut random = Random::new(seed);
    let mut life = Life::begin(extra, fault)?;
    let steps = random.below(STEPS) + 1;
    for _ in 1..steps {
        life.step(&mut random)?;
    }
    let before = bytes_of(&life.region)?;
    let (head, kernel, promised) = (life.log.ring().head(), life.kernel.clone(), life.promised());
    life.step(&mut random)?;
    // The kernel makes a write only after the fence of its record: the cut comes before that fence,
    // where any words of the record may be missing, or between both, or after both.
    if random.one_in(2) && life.is_one_write(head) {
        life.kernel = kernel;
        life.promise(promised);
        if random.one_in(2) {
            life.tear(&before, &mut random)?;
        }
    }
    life.kernel.write_back_some(&mut random);
    life.recover(&mut random)?;
    life.judge().map_err(|what| {
        format!("seed {seed:#x}, {extra:?}, {fault:?}: {what}, after {}", life.steps.join(", "))
    })
}

fn bytes_of(region: &Region) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; usize::try_from(region.len_bytes()).unwrap_or(0)];
    region.read(0, &mut bytes).map_err(text)?;
    Ok(bytes)
}

fn definition(file: usize) -> Result<Definition<'static>, String> {
    let identity = file as u64 + 1;
    // Without a handle, recovery takes the records for those of a device.
    let handle = FileHandle::new(1, &identity.to_le_bytes()).ok_or("the handle is too long")?;
    Ok(Definition {
        identity,
        file_system: [1; 16],
        handle,
        covered: false,
        starts: false,
        size_bytes: 0,
        device: 1,
        inode: identity,
        path: b"/file",
    })
}

/// Takes a slot, and defines the file by it where the last definition may be retired soon.
fn begin<'g>(guard: &'g FileGuard<'_>, file: usize) -> Result<Ticket<'g>, String> {
    let mut ticket = guard.begin().map_err(text)?;
    if ticket.needs_define() {
        guard.define_again(&mut ticket, &definition(file)?).map_err(text)?;
    }
    Ok(ticket)
}

impl Life {
    fn begin(extra: Extra, fault: RunFault) -> Result<Self, String> {
        let region = Arc::new(Region::anonymous(POOL_BYTES.next_multiple_of(4096)).map_err(text)?);
        create(&region, &log_options(3)).map_err(text)?;
        let pool = LogPool::open(Arc::clone(&region)).map_err(text)?;
        let control = SharedMemory::anonymous(CONTROL_BYTES).map_err(text)?;
        let ring_bytes = pool.ring_bytes();
        let log = Ring::start(pool, control, ring_bytes).map(Log::over).map_err(text)?;
        let file_system = log.file_systems().find_or_add(7, true).ok_or("no file system")?;
        let files = (0..FILES).map(|file| {
            let identity = file as u64 + 1;
            let entry = log.entry_for(&FileKey { device: 1, inode: identity, identity });
            Ok(Known { entry: entry.map_err(text)?, synced_at: 0 })
        });
        let files = files.collect::<Result<Vec<_>, String>>()?;
        let mut kernel = Kernel::new(true, FILES, &[]);
        if extra == Extra::Synchronous {
            kernel.journal_data(0);
        }
        let twin = kernel.clone();
        let (moments, late, steps) = (Vec::new(), None, Vec::new());
        let writes_unseen = false;
        let mut life = Self {
            region,
            log,
            file_system,
            kernel,
            twin,
            files,
            moments,
            late,
            extra,
            writes_unseen,
            fault,
            steps,
        };
        life.note();
        Ok(life)
    }

    /// Notes the content that programs see now.
    fn note(&mut self) {
        let files = (0..FILES).map(|file| self.twin.bytes(file).to_vec()).collect();
        self.moments.push(Moment { names: self.twin.changes(), files });
    }

    /// Returns the promises of syncs: the number of changes of names, and a moment for each file.
    fn promised(&self) -> (usize, [usize; FILES]) {
        (self.twin.committed, std::array::from_fn(|file| self.files[file].synced_at))
    }

    /// Reverts the promises: the power cut came before a later sync had returned.
    fn promise(&mut self, (names, synced_at): (usize, [usize; FILES])) {
        self.twin.committed = names;
        self.files.iter_mut().zip(synced_at).for_each(|(file, at)| file.synced_at = at);
    }

    /// Makes a change in both kernels that no hook sees.
    fn each(&mut self, change: impl Fn(&mut Kernel)) {
        change(&mut self.kernel);
        change(&mut self.twin);
    }

    /// Picks a write: its first byte, and its bytes.
    fn pick_write(&self, file: usize, random: &mut Random) -> (usize, Vec<u8>) {
        let offset = random.below(PAGES * PAGE_BYTES - 1);
        let len = random.below((PAGES * PAGE_BYTES - offset).min(90)) + 1;
        let data = vec![random.below(255).to_le_bytes()[0] + 1; len];
        // Mostly at the end, as files grow.
        let end = self.kernel.bytes(file).len();
        let fits = end + len <= PAGES * PAGE_BYTES && random.one_in(2);
        (if fits { end } else { offset }, data)
    }

    /// Makes one step of a program, the kernel or the supervisor.
    fn step(&mut self, random: &mut Random) -> Result<(), String> {
        // Faults with shared blocks show in long orders of steps on one file.
        let files = if self.extra == Extra::Shared { 1 } else { FILES };
        let (file, page) = (random.below(files), random.below(PAGES));
        let kinds = if self.extra == Extra::Nothing { 16 } else { 20 };
        match random.below(kinds) {
            0..6 => {
                let (offset, data) = self.pick_write(file, random);
                self.steps.push(format!("write {file} {offset}+{} of {}", data.len(), data[0]));
                self.write(file, (offset, offset), &data)?;
            }
            6 => {
                let size = random.below(PAGES * PAGE_BYTES);
                self.steps.push(format!("set size {file} {size}"));
                self.set_size(file, size)?;
            }
            7..10 => {
                let data_only = random.one_in(2);
                self.steps.push(format!("sync {file} {data_only}"));
                self.sync(file, data_only)?;
            }
            10 => {
                self.steps.push(format!("begin {file}"));
                self.begin_story(file)?;
            }
            11 => {
                self.steps.push("rename".into());
                self.log.file_systems().note_change(self.file_system);
                self.each(Kernel::change_other);
                self.log.file_systems().note_change(self.file_system);
            }
            12 => {
                self.steps.push("commit".into());
                self.each(Kernel::commit);
            }
            13 => {
                self.steps.push("clean".into());
                self.clean()?;
            }
            16.. => self.step_extra(file, random)?,
            _ => {
                self.steps.push(format!("write back {file} {page}"));
                self.each(|kernel| kernel.write_back_page(file, page));
            }
        }
        self.note();
        Ok(())
    }

    /// Makes a step that only some histories have.
    fn step_extra(&mut self, file: usize, random: &mut Random) -> Result<(), String> {
        let (offset, data) = self.pick_write(file, random);
        let write = format!("{file} {offset}+{} of {}", data.len(), data[0]);
        let is_first = random.one_in(2);
        match self.extra {
            Extra::Nothing => {}
            Extra::Shared if is_first => {
                self.steps.push(format!("share {file}"));
                self.share(file)?;
            }
            Extra::Shared => {
                self.steps.push(format!("read {file}"));
                self.each(|kernel| kernel.read(file));
            }
            Extra::Unseen if is_first => {
                self.steps.push("begin or end unseen writes".into());
                self.toggle_unseen()?;
            }
            Extra::Unseen => {
                if self.writes_unseen {
                    self.steps.push(format!("unseen write {write}"));
                    self.each(|kernel| kernel.write(file, offset, &data));
                }
            }
            Extra::Synchronous => {
                self.steps.push(format!("synchronous write {write}, at a place {is_first}"));
                self.write_synchronous(file, (offset, !is_first), &data)?;
            }
        }
        Ok(())
    }

    fn lock(&self, file: usize) -> Result<FileGuard<'_>, String> {
        self.log.lock(self.files[file].entry).map_err(text)
    }

    fn is_logged(&self, file: usize) -> Result<bool, String> {
        Ok(self.lock(file)?.is_logged())
    }

    fn is_pending(&self) -> bool {
        self.log.file_systems().is_pending(self.file_system)
    }

    /// Appends the record of a write, and notes the kernel's effect.
    fn append(&self, file: usize, write: &WriteExtent, data: &[u8]) -> Result<(), String> {
        let guard = self.lock(file)?;
        if write.makes_hole() {
            guard.note_hole();
        }
        let changes = self.log.file_systems().changes(self.file_system);
        let mut ticket = begin(&guard, file)?;
        ticket.write(write.start, &[IoSlice::new(data)], write.grows).map_err(text)?;
        drop(ticket);
        // The kernel's clock moves with each write: all set the file's times.
        let watches = is_watched(self.is_pending(), guard.journaled_changes(), changes);
        let journaled = (write.is_resized() || watches).then_some(changes);
        guard.note_change(write.change(journaled));
        Ok(())
    }

    /// Writes at `offset` of the file; the library has the kernel write at `at`.
    fn write(
        &mut self,
        file: usize,
        (offset, at): (usize, usize),
        data: &[u8],
    ) -> Result<(), String> {
        self.append_late()?;
        let guard = self.lock(file)?;
        let write = WriteExtent::of(&guard, offset as u64, data.len() as u64);
        let size = || Some(self.kernel.bytes(file).len() as u64);
        let is_pending = || self.is_pending() && self.fault != RunFault::GrowthAfterCut;
        let action = match decide_write(&WriteFacts::of(&guard)) {
            WriteAction::Record if !decide_record(&write, false, u64::MAX, size, is_pending) => {
                WriteAction::Leave
            }
            action => action,
        };
        drop(guard);
        match action {
            WriteAction::Plain => {}
            WriteAction::Leave => self.leave(file)?,
            WriteAction::Record if self.fault == RunFault::MarkBeforeRecord => {
                self.late = Some(Late { file, write, data: data.to_vec() });
            }
            WriteAction::Record => self.append(file, &write, data)?,
        }
        self.kernel.write(file, at, data);
        self.twin.write(file, offset, data);
        Ok(())
    }

    /// Writes by a descriptor with `O_DSYNC`.
    fn write_synchronous(
        &mut self,
        file: usize,
        (offset, to_position): (usize, bool),
        data: &[u8],
    ) -> Result<(), String> {
        let is_told = !to_position || self.fault == RunFault::SplitAtPosition;
        let place = if is_told { Place::At(offset as u64) } else { Place::Current };
        if splits_sync(place, false, || false) {
            // The position of another descriptor is its own.
            let at = if to_position { 0 } else { offset };
            self.write(file, (offset, at), data)?;
            return self.sync(file, true);
        }
        self.write(file, (offset, offset), data)?;
        self.append_late()?;
        self.twin.sync(file, true);
        self.sync_really(file, true);
        self.files[file].synced_at = self.moments.len();
        Ok(())
    }

    /// Appends the record that was left out.
    fn append_late(&mut self) -> Result<(), String> {
        let Some(Late { file, write, data }) = self.late.take() else { return Ok(()) };
        if self.is_logged(file)? { self.append(file, &write, &data) } else { Ok(()) }
    }

    fn set_size(&mut self, file: usize, size: usize) -> Result<(), String> {
        self.append_late()?;
        let new_size = size as u64;
        let guard = self.lock(file)?;
        let facts = (guard.is_logged(), guard.is_covered());
        let action = decide_cut(facts, new_size, u64::MAX, || self.is_pending());
        if action == CutAction::Record {
            let grew = new_size > guard.size();
            begin(&guard, file)?.set_size(new_size, grew).map_err(text)?;
            guard.note_size(new_size, grew);
            guard.note_change(change_of_cut(
                new_size,
                self.log.file_systems().changes(self.file_system),
            ));
        }
        drop(guard);
        if action == CutAction::Leave {
            self.leave(file)?;
        }
        if action != CutAction::Record {
            self.log.file_systems().note_change(self.file_system);
        }
        self.kernel.set_size(file, size);
        self.twin.set_size(file, size);
        if action != CutAction::Record {
            self.log.file_systems().note_change(self.file_system);
        }
        Ok(())
    }

    /// Makes another file of the file's blocks.
    fn share(&mut self, file: usize) -> Result<(), String> {
        self.append_late()?;
        if self.fault != RunFault::CoveredWhileShared {
            self.leave(file)?;
        }
        self.log.file_systems().note_change(self.file_system);
        self.each(|kernel| kernel.share(file));
        self.log.file_systems().note_change(self.file_system);
        Ok(())
    }

    /// Starts or ends writes that no hook sees; when they start, all files leave.
    fn toggle_unseen(&mut self) -> Result<(), String> {
        self.append_late()?;
        self.writes_unseen = !self.writes_unseen;
        if self.writes_unseen { (0..FILES).try_for_each(|file| self.leave(file)) } else { Ok(()) }
    }

    /// Makes a real sync of a file, which the program may not have asked for. The twin writes back
    /// and commits as from outside: a kernel may do so at any moment, and a later sync of the
    /// program then finds nothing to commit. Uncommitted changes stay so in the twin.
    fn sync_really(&mut self, file: usize, data_only: bool) {
        let seen = self.log.file_systems().changes(self.file_system);
        let commits = self.kernel.sync(file, data_only);
        if commits {
            self.log.file_systems().committed(self.file_system, seen);
            // The twin also commits before the write-back: pages wait for the commit of a new size.
            self.twin.commit();
        }
        self.twin.write_back(file);
        if commits {
            self.twin.commit();
        }
    }

    /// Makes the file leave the log: makes it durable, and ends its story.
    fn leave(&mut self, file: usize) -> Result<(), String> {
        let guard = self.lock(file)?;
        let action = decide_leave(guard.is_logged(), || guard.needs_sync());
        drop(guard);
        if action == LeaveAction::SyncAndEnd {
            self.sync_really(file, false);
        }
        if action == LeaveAction::Nothing {
            return Ok(());
        }
        self.lock(file)?.end_story().map_err(text)
    }

    /// Returns whether an overwrite of the file changes its bytes and times alone.
    fn is_in_place(&self, file: usize) -> bool {
        let is_asked = self.fault != RunFault::JournaledTakenForInPlace;
        let flags = || is_asked.then(|| self.kernel.flags(file));
        is_overwritten_in_place(0o644, || false, flags, || None)
    }

    /// Returns whether a sync of a plain file admits it.
    fn is_admitted(&self, file: usize) -> bool {
        let is_told = self.fault != RunFault::AdmittedThoughUnseen;
        let facts = AdmissionFacts {
            syncs: 1,
            cover_after: 1,
            every_write: false,
            is_suspended: self.log.processes().is_suspended(),
            writes_unseen: self.writes_unseen && is_told,
            is_direct: false,
            is_pinned: false,
        };
        decide_admission(&facts, || true, || false).is_ok() && self.is_in_place(file)
    }

    /// Makes the first half of an admission: from now on writes are logged.
    fn begin_story(&mut self, file: usize) -> Result<(), String> {
        if !self.is_admitted(file) {
            return Ok(());
        }
        let guard = self.lock(file)?;
        let action = decide_begin(&BeginFacts::of(&guard));
        drop(guard);
        match action {
            BeginAction::Refuse => return Ok(()),
            BeginAction::LeaveAndBegin => self.leave(file)?,
            BeginAction::Begin => {}
        }
        let begins = definition(file)?;
        let size = self.kernel.bytes(file).len() as u64;
        self.lock(file)?.begin_story(&begins, size).map_err(text)?;
        if self.fault == RunFault::CoveredBeforeSync {
            self.cover(file, self.log.ring().head())?;
        }
        Ok(())
    }

    fn cover(&mut self, file: usize, synced_from: u64) -> Result<(), String> {
        let size = self.kernel.bytes(file).len() as u64;
        let is_shared = self.kernel.is_shared(file) && self.fault != RunFault::SharedTakenForDense;
        let is_dense = self.kernel.written(file).contain(0..size) && !is_shared;
        let guard = self.lock(file)?;
        let state = CoverState { unlogged: guard.unlogged(), synced_from, size, is_dense };
        let covers = definition(file)?;
        guard.cover(&state, &covers).map(drop).map_err(text)
    }

    fn sync(&mut self, file: usize, data_only: bool) -> Result<(), String> {
        self.twin.sync(file, data_only);
        let wanted = if data_only { Sync::Data } else { Sync::All };
        let facts = SyncFacts::of(&self.lock(file)?);
        let is_seen = self.fault != RunFault::ReadNotCommitted || facts.was_written;
        let lookups = SyncLookups {
            is_in_place: || self.is_in_place(file),
            is_resized: || false,
            is_pending: || self.is_pending() && self.fault != RunFault::MarkWhilePending && is_seen,
        };
        match decide_sync(wanted, &facts, &lookups) {
            SyncAction::Plain => self.sync_plain(file, data_only)?,
            SyncAction::Real(_) => self.sync_covered(file)?,
            SyncAction::Leave(_) => {
                self.sync_really(file, false);
                self.leave(file)?;
            }
            SyncAction::Nothing | SyncAction::NothingYet => self.confirm(file)?,
            SyncAction::Mark => {
                // The mark has the file's attributes, too: a later fsync has nothing to commit. A
                // kernel that had committed by itself at this moment would be in the same state.
                self.twin.commit();
                self.confirm(file)?;
                let guard = self.lock(file)?;
                guard.mark(guard.size(), 0).map_err(text)?;
            }
        }
        self.append_late()?;
        self.files[file].synced_at = self.moments.len();
        Ok(())
    }

    fn sync_plain(&mut self, file: usize, data_only: bool) -> Result<(), String> {
        if !self.is_admitted(file) {
            self.sync_really(file, data_only);
            return Ok(());
        }
        self.begin_story(file)?;
        let synced_from = self.log.ring().head();
        self.sync_really(file, false);
        self.cover(file, synced_from)
    }

    fn confirm(&self, file: usize) -> Result<(), String> {
        let guard = self.lock(file)?;
        if guard.is_unconfirmed() { guard.confirm(0).map_err(text) } else { Ok(()) }
    }

    /// Makes a real sync of a covered file, and the mark that may follow.
    fn sync_covered(&mut self, file: usize) -> Result<(), String> {
        let guard = self.lock(file)?;
        let (before, journaled) = (SyncedState::of(&guard), guard.journaled_changes());
        drop(guard);
        self.sync_really(file, false);
        self.log.file_systems().committed(self.file_system, journaled);
        let guard = self.lock(file)?;
        if before.has_bytes(&SyncedState::of(&guard)) {
            guard.mark(guard.size(), 0).map_err(text)?;
            guard.note_real_sync();
        }
        Ok(())
    }

    /// Plays the supervisor: syncs, then retires.
    fn clean(&mut self) -> Result<(), String> {
        let safe = self.log.ring().safe_position();
        for file in 0..FILES {
            if self.is_logged(file)? && self.fault != RunFault::TailBeforeSync {
                self.sync_really(file, false);
            }
        }
        if self.log.ring().may_retire_to(safe) {
            self.log.ring().retire_to(safe).map_err(text)?;
        }
        Ok(())
    }

    /// Returns whether exactly one record was appended since the head was `head`, that of a write.
    fn is_one_write(&self, head: u64) -> bool {
        let mut records = Scanner::new(self.log.ring().pool(), head, self.log.ring().head());
        let first = records.next().map(|record| record.kind);
        first == Some(RecordKind::Write) && records.next().is_none()
    }

    /// Reverts random words that were stored since the pool was `before`.
    fn tear(&self, before: &[u8], random: &mut Random) -> Result<(), String> {
        for (number, word) in bytes_of(&self.region)?.chunks_exact(8).enumerate() {
            let (at, old) = (number * 8, &before[number * 8..][..8]);
            if word != old && random.one_in(2) {
                self.region.write(at as u64, old).map_err(text)?;
            }
        }
        Ok(())
    }

    /// Recovers after the power cut; further power cuts interrupt the recovery, which is repeated.
    fn recover(&mut self, random: &mut Random) -> Result<(), String> {
        for round in 0..3 {
            self.kernel.crash();
            let calls = if round == 2 { usize::MAX } else { random.below(20) };
            let files = Mounted::new(self.kernel.clone(), calls);
            let pool = LogPool::open(Arc::clone(&self.region)).map_err(text)?;
            let failures = recover_once(&pool, &files, self.fault)?;
            if calls == usize::MAX && !failures.is_empty() {
                return Err(failures);
            }
            self.kernel = files.into_kernel();
            self.kernel.write_back_some(random);
        }
        self.kernel.crash();
        Ok(())
    }

    fn judge(&self) -> Result<(), String> {
        let (names, least) = (self.kernel.changes(), self.twin.committed);
        if names < least {
            return Err(format!("names {names} are older than what was promised, {least}"));
        }
        (0..FILES).try_for_each(|file| self.judge_file(file, names))
    }

    fn judge_file(&self, file: usize, names: usize) -> Result<(), String> {
        let found = self.kernel.bytes(file);
        let since = &self.moments[self.files[file].synced_at.min(self.moments.len() - 1)..];
        let sizes = || since.iter().map(|moment| moment.files[file].len());
        let (least, most) = (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0));
        if !(least..=most).contains(&found.len()) {
            let size = found.len();
            return Err(format!("file {file} has {size} bytes, expected {least} to {most}"));
        }
        if let Some(grown) = since.iter().find(|moment| moment.files[file].len() >= found.len()) {
            let was_longer = since[0].files[file].len() >= found.len();
            if !was_longer && names < grown.names {
                return Err(format!(
                    "file {file} has grown after names {}, but names are {names}",
                    grown.names
                ));
            }
        }
        for (page, content) in found.chunks(PAGE_BYTES).enumerate() {
            let is_of =
                |moment: &Moment| page_of(&moment.files[file], page, content.len()) == content;
            if !since.iter().any(is_of) {
                return Err(format!("page {page} of file {file} was never so since its last sync"));
            }
        }
        Ok(())
    }
}

/// Returns the first `len` bytes of a page, with zeroes behind the file's end.
fn page_of(file: &[u8], page: usize, len: usize) -> Vec<u8> {
    let bytes = file.iter().skip(page * PAGE_BYTES).copied();
    bytes.chain(std::iter::repeat(0)).take(len).collect()
}

/// Recovers a pool as the supervisor does; returns a description of the failures.
fn recover_once(pool: &LogPool, files: &Mounted, fault: RunFault) -> Result<String, String> {
    let options = ApplyOptions { workers: 1, booted_ns: None, salvage: false };
    let faulty = [RunFault::UnconfirmedReplayed, RunFault::GrowthWithoutMark];
    let outcome = if faulty.contains(&fault) {
        let plan = faulty_planner(pool, fault)?.finish();
        apply((&plan, 0), pool, files, options, &|_| (), &mut || Ok(()))
    } else {
        match recover_pool(pool, files, options, &|_| ()).map_err(text)? {
            Some(Recovered { outcome, .. }) => outcome,
            None => return Ok(String::new()),
        }
    };
    let failures: Vec<_> = outcome.failures.iter().map(ToString::to_string).collect();
    Ok(failures.join("; "))
}

/// Makes a planner from records that were changed as a faulty planner would read them.
fn faulty_planner(pool: &LogPool, fault: RunFault) -> Result<Planner, String> {
    let mut planner = Planner::new();
    let records = Scanner::new(pool, pool.tail().map_err(text)?, pool.limit().map_err(text)?);
    for header in records {
        let mut payload = vec![0; header.payload_bytes as usize];
        pool.read_payload(&header, 0, &mut payload).map_err(text)?;
        if header.kind == RecordKind::Define && fault == RunFault::UnconfirmedReplayed {
            // Sets the flag of a covered definition.
            payload[54] |= 1;
        }
        let grows = header.grows && fault != RunFault::GrowthWithoutMark;
        planner.add(&Header { grows, ..header }, Payload::Whole(&payload));
    }
    Ok(planner)
}
