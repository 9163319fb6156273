//! What the supervisor does to a log: choosing how far it may be retired, moving the tail, minding
//! killed processes.
//!
//! Invariants:
//! 1. One process at a time calls the functions here, the one that holds the supervisor's lock.
//! 2. [`Log::safe_position`] is not above any slot's bound: all records below it are finished, and
//!    the kernel has done their operations.
//! 3. [`Log::retire_to`] makes the new tail durable before it shows it: free space is not used
//!    again before the medium says that it is free space.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use rustix::io::Errno;

use super::append::{FileGuard, Interrupted, release};
use super::control::{SLOTS, SPACE_AT, WORK_AT};
use super::error::{LockError, LogError};
use super::layout::RECORD_ALIGN_BYTES;
use super::owner::{owner, process_of, thread_of};
use super::pool::NO_BOOT;
use super::record::RecordKind;
use super::table::{self, FileKey, FileRef, flag};
use super::{Log, Scanner};
use crate::pmem::Kind;
use crate::sync::{Ordering, store_before_loads};

impl Log {
    /// How far the log may be retired, once the files that its records name are synced: see
    /// `append` for the order.
    pub fn safe_position(&self) -> u64 {
        self.safe_position_beside(|_, _| false)
    }

    /// As [`safe_position`](Self::safe_position), whatever the operations are that threads were
    /// killed in, of which `is_dead` knows by the numbers of process and thread.
    fn safe_position_beside(&self, is_dead: impl Fn(u32, u32) -> bool) -> u64 {
        let control = &self.control;
        let head = control.head().load(Ordering::SeqCst);
        store_before_loads(control.goal(), head);
        let bounds = (0..SLOTS).filter_map(|number| {
            let slot = control.slot(number);
            let owner = slot.owner.load(Ordering::SeqCst);
            // Without a bound its holder has reserved nothing, and will see this goal.
            let bound = (owner != 0).then(|| slot.bound.load(Ordering::SeqCst));
            bound.filter(|bound| *bound != 0 && !is_dead(process_of(owner), thread_of(owner)))
        });
        let safe = bounds.fold(head, u64::min);
        self.with_definitions(safe).max(control.tail().load(Ordering::Relaxed))
    }

    /// Whether the log may be retired to `position`, a place between two records and not above a
    /// [`safe_position`](Self::safe_position).
    ///
    /// As good a goal as that: all records below it are finished too, and a writer that was not
    /// seen to rely on a definition finds that one below the goal, and writes a new one. What is
    /// left are files that are not in use, whose definition is below `position` while a record of
    /// them is not.
    pub fn may_retire_to(&self, position: u64) -> bool {
        self.with_definitions(position) == position
    }

    /// The largest position, at most `safe`, behind which no record is without a definition of its
    /// file.
    ///
    /// Only records below the last goal are in question: those behind it have been defined behind
    /// it. Looked at after the slots: a writer leaves its file's `last_end` before it gives its
    /// slot back.
    pub(super) fn with_definitions(&self, mut safe: u64) -> u64 {
        loop {
            let needed = table::all(&self.control).filter_map(|(_, entry)| {
                let defined_at = entry.defined_at().load(Ordering::SeqCst);
                let has_records_behind = entry.last_end().load(Ordering::SeqCst) > safe;
                (has_records_behind && defined_at < safe).then_some(defined_at)
            });
            match needed.min() {
                Some(lower) => safe = lower,
                None => return safe,
            }
        }
    }

    /// The records from `start` to `end`, a position that [`safe_position`](Self::safe_position)
    /// returned.
    pub fn records(&self, start: u64, end: u64) -> Scanner<'_> {
        let lap_bytes = self.control.lap_bytes().load(Ordering::Acquire);
        Scanner::of_finished(&self.pool, start, end).in_laps_of(lap_bytes)
    }

    /// Retires all that can be retired, where no supervisor does. `sync` makes all files durable as
    /// the kernel has them, also where threads were killed in the middle of an operation, of which
    /// `is_dead` knows by the numbers of process and thread: nobody was told of those. Returns
    /// whether the tail has moved.
    ///
    /// Not where a write-back has failed: the log alone has what the disk does not.
    pub fn retire_alone(
        &self,
        is_dead: impl Fn(u32, u32) -> bool,
        sync: impl FnOnce() -> Result<(), Errno>,
    ) -> bool {
        let Ok(_supervision) = self.supervise(Duration::ZERO) else { return false };
        let tail = self.tail();
        let position = self.safe_position_beside(&is_dead);
        let is_durable = position > tail && sync().is_ok() && !self.has_dropped();
        if !is_durable || self.retire_to(position).is_err() {
            return false;
        }
        let dead = self.in_the_middle().filter(|it| is_dead(it.process, it.thread()));
        dead.for_each(|it| self.complete(&it));
        true
    }

    /// The kernel may have dropped what the log has of some file.
    fn has_dropped(&self) -> bool {
        let mut entries = table::all(&self.control);
        let bits = flag::FAILED | flag::DROPPED;
        entries.any(|(_, entry)| entry.flags().load(Ordering::SeqCst) & bits != 0)
    }

    /// Moves the tail: all operations of records below `position` are durable in their files.
    ///
    /// # Errors
    /// [`LogError::Pmem`]; the tail is then where it was.
    pub fn retire_to(&self, position: u64) -> Result<(), LogError> {
        self.retire_unseen(position)?;
        self.show_space(position);
        Ok(())
    }

    /// As [`retire_to`](Self::retire_to), but writers are not shown the free space yet.
    ///
    /// # Errors
    /// As for [`retire_to`](Self::retire_to).
    pub fn retire_unseen(&self, position: u64) -> Result<(), LogError> {
        Ok(self.pool.set_tail(position)?)
    }

    /// Shows writers the free space up to `position`, which was retired; or up to 63 bytes less, as
    /// records are placed: the limit follows from what is shown, and the next tail from the limit.
    pub fn show_space(&self, position: u64) {
        let position = position - position % RECORD_ALIGN_BYTES;
        if self.control.tail().fetch_max(position, Ordering::SeqCst) < position {
            self.announce_space();
        }
    }

    /// Gives the next `bytes` of the ring space in the file under the pool: what is left to do, in
    /// bytes.
    ///
    /// # Errors
    /// [`LogError::Pmem`]: no space left, for one.
    pub fn allocate(&self, bytes: u64) -> Result<u64, LogError> {
        let ring_bytes = self.pool.ring_bytes();
        let from = self.control.allocated_bytes().load(Ordering::Relaxed);
        let bytes = bytes.min(ring_bytes - from.min(ring_bytes));
        if bytes > 0 {
            let (region, at) = (self.pool.region(), self.pool.region_offset(from));
            region.allocate(at, bytes)?;
            self.control.allocated_bytes().store(from + bytes, Ordering::Release);
            self.announce_space();
        }
        Ok(ring_bytes - from - bytes)
    }

    /// Has the kernel clear the pages of the ring from the head to the end of its space, which it
    /// does when they are first looked at: of a tmpfs, where a writer would wait for it else.
    ///
    /// # Errors
    /// [`LogError::Pmem`].
    pub fn clear_pages(&self) -> Result<(), LogError> {
        let region = self.pool.region();
        if region.kind() != Kind::Tmpfs {
            return Ok(());
        }
        let start = self.pool.region_offset(0);
        let from = self.control.head().load(Ordering::Relaxed) % self.pool.ring_bytes();
        for page in (start + from..start + self.allocated_bytes()).step_by(4096) {
            // Loads are of whole words.
            region.load_u64(page - page % 4096)?;
        }
        Ok(())
    }

    /// There is no more space for the ring than it has: records go on in that. The largest ones are
    /// refused, then.
    pub fn stop_allocating(&self) {
        self.control.lap_bytes().store(self.allocated_bytes(), Ordering::Release);
        self.announce_space();
    }

    /// The ring has no more space than it had when [`stop_allocating`](Self::stop_allocating) was
    /// called.
    pub fn is_space_limited(&self) -> bool {
        self.control.lap_bytes().load(Ordering::Acquire) < self.pool.ring_bytes()
    }

    /// Sleeps until the head reaches `position`, or [`wake_cleaner`](Self::wake_cleaner) was called
    /// after [`work`](Self::work) returned `seen`; at most `timeout`. May return early.
    pub fn wait_for_work(&self, seen: u32, position: u64, timeout: Option<Duration>) {
        self.control.wake_at().store(position, Ordering::SeqCst);
        // Writers move the head and then look where to wake: one of both sees the other.
        if self.head() < position {
            self.control.wait(WORK_AT, seen, timeout);
        }
        self.control.wake_at().store(u64::MAX, Ordering::Release);
    }

    /// A number that changes when the cleaner is woken.
    pub fn work(&self) -> u32 {
        self.control.announced(WORK_AT)
    }

    /// Wakes the cleaner.
    pub fn wake_cleaner(&self) {
        self.control.wake_at().store(u64::MAX, Ordering::Release);
        self.control.announce(WORK_AT);
    }

    /// Wakes all writers that wait for free space, to look at what has changed.
    pub(super) fn announce_space(&self) {
        self.control.announce(SPACE_AT);
    }

    /// A writer has found no free space since [`take_blocked_writer`](Self::take_blocked_writer).
    pub fn has_blocked_writer(&self) -> bool {
        self.control.blocked_writer().load(std::sync::atomic::Ordering::Acquire) != 0
    }

    /// A writer has found no free space since this was asked last.
    pub fn take_blocked_writer(&self) -> bool {
        self.control.blocked_writer().swap(0, std::sync::atomic::Ordering::AcqRel) != 0
    }

    /// Wakes a cleaner that waits for the head to come to where it is now.
    #[inline]
    pub(super) fn alarm_cleaner(&self, head: u64) {
        if head >= self.control.wake_at().load(Ordering::SeqCst) {
            self.wake_cleaner();
        }
    }

    /// The operations that threads of `process` were killed in, or of the killed holder of a file's
    /// lock: slots that it never gave back. The process must be dead.
    pub fn interrupted_by(&self, process: u32) -> impl Iterator<Item = Interrupted> {
        self.taken_slots(move |slot_owner, _| process_of(slot_owner) == process)
    }

    /// The operations on a locked file that their threads were killed in.
    pub(super) fn interrupted_on<'a>(
        &'a self,
        guard: &'a FileGuard<'_>,
    ) -> impl Iterator<Item = Interrupted> + 'a {
        let file = u64::from(guard.file().index) + 1;
        let own = owner();
        self.taken_slots(move |slot_owner, slot_file| slot_file == file && slot_owner != own)
    }

    /// All operations in the middle: of killed processes, where all processes are.
    pub fn in_the_middle(&self) -> impl Iterator<Item = Interrupted> {
        self.taken_slots(|_, _| true)
    }

    fn taken_slots(&self, wanted: impl Fn(u64, u64) -> bool) -> impl Iterator<Item = Interrupted> {
        (0..SLOTS).filter_map(move |number| {
            let slot = self.control.slot(number);
            let owner = slot.owner.load(Ordering::Acquire);
            if owner == 0 || !wanted(owner, slot.file.load(Ordering::Acquire)) {
                return None;
            }
            let record = slot.record_position();
            let header = (record != 0).then(|| self.pool.read_header(record).ok().flatten());
            let header = header.flatten().filter(|it| self.pool.is_whole(it).unwrap_or(false));
            let process = process_of(owner);
            let interrupted = Interrupted { slot: number, owner, record, process, header };
            self.make_durable(&interrupted);
            Some(interrupted)
        })
    }

    /// Makes the record durable: its writer may have been killed before it did. The thread that
    /// finds it whole does what it says, other programs read that, and their syncs rely on the log.
    fn make_durable(&self, interrupted: &Interrupted) {
        let Some(header) = &interrupted.header else { return };
        let persisted = self.pool.persist_record(header);
        if persisted.is_err() {
            self.note_hole();
        }
        if let (Err(_), Some(file)) = (persisted, self.file_of(interrupted)) {
            // One that is gone from the table is synced by nobody.
            let _ = self.note_failure(file);
        }
    }

    /// The entry of the file on which an operation was interrupted, if it was one on a file.
    pub fn file_of(&self, interrupted: &Interrupted) -> Option<FileRef> {
        let number = self.control.slot(interrupted.slot).file.load(Ordering::Acquire);
        let index = u32::try_from(number.checked_sub(1)?).ok()?;
        let found = table::entry(&self.control, index).generation().load(Ordering::SeqCst);
        Some(FileRef { index, generation: u32::try_from(found).ok()? })
    }

    /// The slot is the interrupted operation's still.
    pub fn is_interrupted(&self, interrupted: &Interrupted) -> bool {
        let slot = self.control.slot(interrupted.slot);
        slot.owner.load(Ordering::Acquire) == interrupted.owner
            && slot.record_position() == interrupted.record
    }

    /// Nothing is left to do of the interrupted operation: its slot is free again. One that serves
    /// another operation by now is left alone.
    pub fn complete(&self, interrupted: &Interrupted) {
        if self.is_interrupted(interrupted) {
            let slot = self.control.slot(interrupted.slot);
            if interrupted.header.is_none() && slot.unfinished_from().is_some() {
                self.note_hole();
            }
            release(slot);
        }
    }

    /// What the kernel calls the file of an entry.
    pub fn key_of(&self, file: FileRef) -> FileKey {
        table::entry(&self.control, file.index).key()
    }

    /// The entries of the files with these ids, of those that have one: one walk through the table
    /// for all of them.
    pub fn files_with_ids(&self, ids: impl IntoIterator<Item = u64>) -> HashMap<u64, FileRef> {
        // 0 is the id of all files that have none yet.
        let wanted: HashSet<u64> = ids.into_iter().filter(|id| *id != 0).collect();
        let found = table::all(&self.control)
            .map(|(file, entry)| (entry.id().load(Ordering::Acquire), file))
            .filter(|(id, _)| wanted.contains(id));
        found.take(wanted.len()).collect()
    }

    /// The id that records name the file by, 0 if it has none yet.
    pub fn id_of(&self, file: FileRef) -> u64 {
        table::entry(&self.control, file.index).id().load(Ordering::Acquire)
    }

    /// The payload of the file's last definition, if that is not retired: see
    /// [`Definition::decode`].
    ///
    /// [`Definition::decode`]: super::Definition::decode
    pub fn definition_of(&self, file: FileRef) -> Option<Vec<u8>> {
        let entry = table::entry(&self.control, file.index);
        let position = entry.defined_at().load(Ordering::Acquire);
        if position < self.tail() || !self.is_current(file) {
            return None;
        }
        let header = self.pool.read_header(position).ok()??;
        let mut payload = vec![0; header.payload_bytes as usize];
        self.pool.read_payload(&header, 0, &mut payload).ok()?;
        (header.kind == RecordKind::Define).then_some(payload)
    }

    /// The entry is still that of the file it was made for.
    pub(super) fn is_current(&self, file: FileRef) -> bool {
        let entry = table::entry(&self.control, file.index);
        entry.generation().load(Ordering::SeqCst) == u64::from(file.generation)
    }

    /// Notes that a write-back of the file failed: its next sync will say so, and it is [to be
    /// written](Self::take_dropped) once more.
    ///
    /// # Errors
    /// [`LockError::Stale`]: the file is gone from the table.
    pub fn note_failure(&self, file: FileRef) -> Result<(), LockError> {
        self.distrust_kernel();
        self.raise(file, flag::FAILED | flag::DROPPED)
    }

    /// The file is still [to be written](Self::take_dropped) once more: that was not possible yet.
    ///
    /// # Errors
    /// [`LockError::Stale`]: the file is gone from the table.
    pub fn drop_again(&self, file: FileRef) -> Result<(), LockError> {
        self.raise(file, flag::DROPPED)
    }

    fn raise(&self, file: FileRef, flags: u64) -> Result<(), LockError> {
        let entry = table::entry(&self.control, file.index);
        if entry.generation().load(Ordering::SeqCst) != u64::from(file.generation) {
            return Err(LockError::Stale);
        }
        entry.flags().fetch_or(flags, Ordering::SeqCst);
        Ok(())
    }

    /// A write-back failed: from now on the kernel may take for clean what the disk does not have.
    /// Durable, so that the next opening, after the processes that use it, replays all of it.
    pub fn distrust_kernel(&self) {
        // Memory that fails in this place too leaves nothing better to be done.
        let _ = self.pool.set_session(NO_BOOT);
    }

    /// Has all that the log has written to its files once more before they are synced.
    pub fn distrust_all_files(&self) {
        for (_, entry) in table::all(&self.control) {
            entry.flags().fetch_or(flag::DROPPED, Ordering::SeqCst);
        }
    }

    /// Ids of the files of which the kernel may have dropped what the log has, since a write-back
    /// failed that others were told of; each is handed out once.
    pub fn take_dropped(&self) -> Vec<u64> {
        let dropped = table::all(&self.control).filter(|(_, it)| it.take_flag(flag::DROPPED));
        dropped.map(|(_, entry)| entry.id().load(Ordering::Acquire)).collect()
    }
}
