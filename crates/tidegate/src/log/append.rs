//! Appending: from the lock of a file to a durable record.
//!
//! Invariants:
//! 1. Records of one file are appended under its lock, which is held until the kernel has done the operation too: the
//!    order of records is the order in which the page cache changed.
//! 2. A [`Ticket`] holds a slot from before room is reserved until the operation is done. So the cleaner, which looks at all
//!    slots after it has chosen its goal, never retires a record whose operation the kernel may still have to do.
//! 3. A record names its file by an id whose definition is not retired before the record is: the slot's bound is not above the
//!    definition, and a definition below the cleaner's goal is written anew.
//!
//! Why 2 and 3 hold without a lock: the writer stores its bound and then reads head and goal; the cleaner stores the goal, which is
//! a head it has read, and then reads the bounds; all four in one total order (`SeqCst`). If the cleaner misses the
//! bound, the writer's reads come after the cleaner's stores: it reserves at or above that head, and finds its definition below
//! the goal, so that it writes a new one. If the cleaner sees the bound, it stays below it.

use std::io::IoSlice;

use zerocopy::IntoBytes;

use super::Log;
use super::control::SlotWords;
use super::error::{AppendError, LockError};
use super::keepers;
use super::layout::RECORD_ALIGN_BYTES;
use super::owner::{current_process, owner};
use super::record::{
    Definition, Header, PayloadDigest, RecordKind, RenamePaths, checked_path, payload_checksum,
    record_bytes,
};
use super::stats::Counter;
use super::table::{self, Entry, FileRef, flag};
use crate::pmem::{LockFailure, Locked};
use crate::sync::{Ordering, store_before_loads};

/// Most parts of a record's payload: what the kernel allows in `writev`, and the record's own.
const OWN_PARTS: usize = 3;
/// Bytes of a payload that are copied at once, and of one for which a smaller buffer will do.
const CHUNK_BYTES: usize = 4096;
const SMALL_BYTES: usize = 512;
/// Looks at the lock of the limit before a thread sleeps for it.
const LOOKS: u32 = 100;

/// A file, locked.
pub struct FileGuard<'a> {
    log: &'a Log,
    file: FileRef,
    entry: Entry<'a>,
    locked: Locked<'a>,
}

/// A slot, for the operation of one thread on one file; dropping it says that the kernel has done the operation.
pub struct Ticket<'a> {
    log: &'a Log,
    entry: Entry<'a>,
    number: u64,
    slot: SlotWords<'a>,
    absorbed: bool,
}

/// A slot, for the removal of a name of a file that the log has nothing else of, under the lock of names; dropping it says that
/// the kernel has done the operation.
pub struct NameTicket<'a> {
    log: &'a Log,
    slot: SlotWords<'a>,
}

/// An operation that a process was killed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupted {
    pub(super) slot: u64,
    /// The process.
    pub process: u32,
    /// The record, if one was finished: its operation may have been done by the kernel, or not, or in part.
    pub header: Option<Header>,
}

impl Log {
    /// Locks the file of an entry. Waits a second at most.
    ///
    /// # Errors
    /// [`LockError`]; the operation then goes on without the log.
    #[inline]
    pub fn lock(&self, file: FileRef) -> Result<FileGuard<'_>, LockError> {
        let locked = table::lock(&self.control, file)?;
        Ok(FileGuard { log: self, file, entry: table::entry(&self.control, file.index), locked })
    }

    /// The word at which a file's data is all in the log or on the disk.
    ///
    /// Needs no lock: what is written at the same time is not covered by the caller's sync.
    #[inline]
    pub fn is_covered(&self, file: FileRef) -> bool {
        let entry = table::entry(&self.control, file.index);
        let covered = is_covered(&entry);
        covered && entry.generation().load(Ordering::SeqCst) == u64::from(file.generation)
    }

    /// Takes a slot for an operation on a file whose lock nobody uses: one whose cleaner never moves the tail past its last
    /// definition, and whose records may come in any order.
    pub(super) fn begin_unlocked(&self, file: FileRef) -> Result<Ticket<'_>, AppendError> {
        let ticket = self.claim(file)?;
        store_before_loads(ticket.slot.bound, self.control.head().load(Ordering::SeqCst));
        Ok(ticket)
    }

    /// Takes a slot for the removal of a name of a file without an entry. The caller holds the lock of names.
    ///
    /// # Errors
    /// [`AppendError::NoSlot`].
    pub fn begin_on_names(&self) -> Result<NameTicket<'_>, AppendError> {
        let (_, slot) = self.take_slot().ok_or(AppendError::NoSlot)?;
        let ticket = NameTicket { log: self, slot };
        store_before_loads(slot.bound, self.control.head().load(Ordering::SeqCst));
        Ok(ticket)
    }

    fn claim(&self, file: FileRef) -> Result<Ticket<'_>, AppendError> {
        let (number, slot) = self.take_slot().ok_or(AppendError::NoSlot)?;
        slot.file.store(u64::from(file.index) + 1, Ordering::Relaxed);
        let entry = table::entry(&self.control, file.index);
        Ok(Ticket { log: self, entry, number, slot, absorbed: false })
    }

    /// A change of the file was or will be made without its lock and that the log does not have. To be called before the
    /// change and after it: a sync in between does not cover it.
    pub fn mark_unlogged(&self, file: FileRef) {
        let entry = table::entry(&self.control, file.index);
        if entry.generation().load(Ordering::SeqCst) == u64::from(file.generation) {
            entry.unlogged().fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Reserves room for a record of `bytes` bytes: its position.
    pub(super) fn reserve(&self, bytes: u64, room_bytes: u64) -> Result<u64, AppendError> {
        let control = &self.control;
        let ring_bytes = self.pool.ring_bytes();
        loop {
            let lap_bytes = control.lap_bytes().load(Ordering::Acquire);
            if bytes > lap_bytes {
                return Err(AppendError::TooLarge);
            }
            let head = control.head().load(Ordering::SeqCst);
            let at = head % ring_bytes;
            let start = if at + bytes > lap_bytes { head + (ring_bytes - at) } else { head };
            let end = start + bytes;
            let has_room = end - control.tail().load(Ordering::Acquire) <= room_bytes;
            if !has_room || !self.is_allocated(end) {
                return Err(AppendError::Full);
            }
            if end > control.limit().load(Ordering::Acquire) {
                self.raise_limit(end)?;
                continue;
            }
            let taken =
                control.head().compare_exchange(head, end, Ordering::SeqCst, Ordering::Relaxed);
            if taken.is_ok() {
                self.alarm_cleaner(end);
                self.touch(start, bytes);
                return Ok(start);
            }
            self.pool.region().relax();
        }
    }

    /// A large record found no room: asks for all that there may be at once. Where room is shown in steps, others fill each of them
    /// with smaller records.
    #[cold]
    fn ask_for_all_room(&self, bytes: u64, error: AppendError) {
        if error == AppendError::Full && bytes > self.pool.ring_bytes() / 16 {
            self.control.wanted().fetch_max(self.head(), Ordering::SeqCst);
        }
    }

    /// The file under the pool has space for the record that ends at `end`.
    fn is_allocated(&self, end: u64) -> bool {
        let end_in_lap = (end - 1) % self.pool.ring_bytes() + 1;
        end_in_lap <= self.control.allocated_bytes().load(Ordering::Acquire)
    }

    /// Has the kernel map what is about to be stored to, if it does not yet.
    #[inline]
    fn touch(&self, position: u64, bytes: u64) {
        let region = self.pool.region();
        self.touched.note(self.pool.region_offset(position), bytes, |at| {
            // What lies there does not matter, nor that a part may end behind the region.
            let _ = region.load_u64(at);
        });
    }

    /// Makes durable that records may end up to `end`. Seldom: the limit moves in steps.
    #[cold]
    fn raise_limit(&self, end: u64) -> Result<(), AppendError> {
        let _lock = self.lock_limit()?;
        let limit = self.control.limit();
        if end <= limit.load(Ordering::Relaxed) {
            return Ok(());
        }
        let raised = end.next_multiple_of(self.pool.limit_step_bytes());
        // Recovery notes what it makes behind the limit, within one lap of the tail.
        let room_end = self.control.tail().load(Ordering::Acquire) + self.room_bytes(Room::Reserve);
        let raised = raised.min(room_end).max(end);
        self.pool.set_limit(raised).map_err(|_| AppendError::Memory)?;
        // After the persistent one: who sees this one may acknowledge records below it.
        limit.store(raised, Ordering::Release);
        Ok(())
    }

    /// Held for the time of a store and a fence: seldom worth sleeping for.
    fn lock_limit(&self) -> Result<Locked<'_>, AppendError> {
        for _ in 0..LOOKS {
            match self.control.try_lock_limit() {
                Err(LockFailure::TimedOut) => self.pool.region().relax(),
                outcome => return outcome.map_err(|_| AppendError::Full),
            }
        }
        self.control.lock_limit().map_err(|_| AppendError::Full)
    }

    /// Stores the payload of the record at `position`, `bytes` bytes: its checksum.
    ///
    /// By way of a buffer of its own: another thread of the program may change the bytes meanwhile, as databases do with
    /// pages that they write, and what is stored must be what the checksum was taken of.
    fn store_payload<const CHUNK: usize>(
        &self,
        position: u64,
        parts: &[IoSlice<'_>],
        bytes: u64,
    ) -> Result<u32, AppendError> {
        let region = self.pool.region();
        let to = self.pool.region_offset(position) + RECORD_ALIGN_BYTES;
        // What the payload leaves of its last line is the record's, too.
        let stored = if bytes <= CHUNK as u64 {
            // A checksum of one piece takes half the time of one in pieces. This is that of no bytes.
            let mut checksum = 0;
            let see = |all: &[u8]| checksum = payload_checksum(&[IoSlice::new(all)]);
            region.write_streaming_seen::<CHUNK>(to, parts, see).map(|()| checksum)
        } else {
            let mut digest = PayloadDigest::default();
            let see = |chunk: &[u8]| digest.add(chunk);
            region.write_streaming_seen::<CHUNK>(to, parts, see).map(|()| digest.finish())
        };
        stored.map_err(|_| AppendError::Memory)
    }

    /// Stores the header of a record whose payload was stored, and makes both durable: one fence.
    fn seal(&self, header: &Header) -> Result<(), AppendError> {
        let region = self.pool.region();
        let at = self.pool.region_offset(header.position);
        let stored = region
            .write_streaming(at, header.encode(self.pool.salt()).as_bytes())
            // The only fence: header and payload carry each other's checksums, so their order does not matter.
            .and_then(|()| region.fence());
        stored.map_err(|_| AppendError::Memory)
    }
}

fn is_covered(entry: &Entry<'_>) -> bool {
    let flags = entry.flags().load(Ordering::SeqCst);
    flags & flag::NAMELESS != 0
        || flags & (flag::COVERED | flag::FAILED) == flag::COVERED
            && entry.sticky().load(Ordering::SeqCst) == 0
            && entry.unlogged().load(Ordering::SeqCst) == entry.synced().load(Ordering::SeqCst)
}

impl FileGuard<'_> {
    /// The former holder of the lock was killed while it held it: see [`Log::interrupted_on`].
    pub fn owner_died(&self) -> bool {
        self.locked.owner_died()
    }

    pub(super) fn log(&self) -> &Log {
        self.log
    }

    pub(super) fn entry(&self) -> &Entry<'_> {
        &self.entry
    }

    /// The file's entry.
    pub fn file(&self) -> FileRef {
        self.file
    }

    /// The file's id in the log, 0 if it has none yet.
    pub fn id(&self) -> u64 {
        self.entry.id().load(Ordering::Relaxed)
    }

    /// All of the file is in the log or on the disk: a sync has nothing to do.
    pub fn is_covered(&self) -> bool {
        is_covered(&self.entry)
    }

    /// The log has records of the file that are not retired yet.
    pub fn is_live(&self) -> bool {
        self.entry.last_end().load(Ordering::Relaxed)
            > self.log.control.tail().load(Ordering::SeqCst)
    }

    /// The log has changes of the file's bytes or size that are not retired yet.
    pub fn has_live_changes(&self) -> bool {
        self.entry.changed_end().load(Ordering::Relaxed)
            > self.log.control.tail().load(Ordering::SeqCst)
    }

    /// The log has records of the file that neither the tail nor a record of its own has retired.
    pub fn has_unretired(&self) -> bool {
        let retired_end = self.entry.retired_end().load(Ordering::Relaxed);
        self.is_live() && self.entry.last_end().load(Ordering::Relaxed) > retired_end
    }

    /// The file may change at any time in ways that are not logged.
    pub fn is_sticky(&self) -> bool {
        self.entry.sticky().load(Ordering::Relaxed) > 0
    }

    /// The file has no name any more: nothing of it outlives the processes that have it open.
    pub fn is_nameless(&self) -> bool {
        self.has(flag::NAMELESS)
    }

    /// The file was made under Tidegate.
    pub fn is_born(&self) -> bool {
        self.has(flag::BORN)
    }

    /// The file has just been made, by this process: all that is to come of it can be logged.
    pub fn mark_born(&self) {
        self.set(flag::BORN | flag::COVERED);
    }

    /// The file lost its last name.
    pub fn mark_nameless(&self) {
        self.set(flag::NAMELESS);
    }

    /// The file lost a name that the log may know it by alone: what comes next is preceded by a definition with one that it has.
    pub fn forget_definition(&self) {
        self.entry.defined_at().store(0, Ordering::Relaxed);
    }

    /// The file got a name again.
    pub fn mark_named(&self) {
        self.entry.flags().fetch_and(!flag::NAMELESS, Ordering::SeqCst);
    }

    /// A change that the log does not have was or will be made; with `sticky`, at any time until
    /// [`release_sticky`](Self::release_sticky). The file's records must be retired before the change.
    pub fn mark_unlogged(&self, sticky: bool) {
        if sticky {
            self.entry.sticky().fetch_add(1, Ordering::SeqCst);
        }
        self.entry.unlogged().fetch_add(1, Ordering::SeqCst);
    }

    /// Takes back one sticky mark; the next real sync brings the file back into the log.
    pub fn release_sticky(&self) {
        let less = |sticky: u64| Some(sticky.saturating_sub(1));
        let _ = self.entry.sticky().fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        self.entry.unlogged().fetch_add(1, Ordering::SeqCst);
    }

    /// It is a directory, in which names were or will be changed in ways that the log does not have.
    pub fn mark_names_unlogged(&self) {
        self.set(flag::FOLDER);
        self.entry.unlogged().fetch_add(1, Ordering::SeqCst);
    }

    /// The file may change at any time in ways that are not logged, until [`stop_keeping`](Self::stop_keeping), or until this
    /// process has ended.
    pub fn keep_unlogged(&self) {
        self.mark_unlogged(true);
        keepers::note(&self.log.control, self.file, current_process());
    }

    /// Takes one [`keep_unlogged`](Self::keep_unlogged) of this process back.
    pub fn stop_keeping(&self) {
        keepers::forget(&self.log.control, self.file, current_process());
        self.release_sticky();
    }

    /// A number of changes that the log does not have, to be given to [`synced`](Self::synced).
    pub fn unlogged(&self) -> u64 {
        self.entry.unlogged().load(Ordering::SeqCst)
    }

    /// A real sync that began after [`unlogged`](Self::unlogged) was `seen` has succeeded.
    pub fn synced(&self, seen: u64) {
        self.entry.synced().fetch_max(seen, Ordering::SeqCst);
        self.set(flag::COVERED);
    }

    /// Notes that a write-back of the file failed.
    pub fn note_failure(&self) {
        self.log.distrust_kernel();
        self.set(flag::FAILED | flag::DROPPED);
    }

    /// A sync of the file failed, and its caller was told: the cleaner has to write once more what the log has.
    pub fn note_dropped(&self) {
        self.log.distrust_kernel();
        self.set(flag::DROPPED);
    }

    /// Notes the mount through which the file is about to be defined, 0 if it is not known. While the log has records of the
    /// file the oldest one counts: numbers of mounts only grow, and the first records were made on that one.
    pub fn note_mount(&self, mount: u64) {
        let word = self.entry.mount();
        let oldest = if self.is_live() { mount.min(word.load(Ordering::Relaxed)) } else { mount };
        word.store(oldest, Ordering::Relaxed);
    }

    /// A write-back of the file failed since this was asked last: the sync that asks has to report it.
    pub fn take_failure(&self) -> bool {
        self.entry.flags().fetch_and(!flag::FAILED, Ordering::SeqCst) & flag::FAILED != 0
    }

    /// Takes a slot for an operation on the file.
    ///
    /// # Errors
    /// [`AppendError::NoSlot`].
    pub fn begin(&self) -> Result<Ticket<'_>, AppendError> {
        let log = self.log;
        let ticket = log.claim(self.file)?;
        let slot = ticket.slot;
        // See the module's text for why these are in this order and how strong they are.
        let head = log.control.head().load(Ordering::SeqCst);
        let defined_at = self.entry.defined_at().load(Ordering::Relaxed);
        let bound = if defined_at == 0 { head } else { defined_at.min(head) };
        store_before_loads(slot.bound, bound);
        if ticket.needs_define() {
            slot.bound.store(head, Ordering::SeqCst);
        }
        Ok(ticket)
    }

    fn has(&self, bit: u64) -> bool {
        self.entry.flags().load(Ordering::SeqCst) & bit != 0
    }

    fn set(&self, bits: u64) {
        self.entry.flags().fetch_or(bits, Ordering::SeqCst);
    }
}

impl Ticket<'_> {
    /// No position from here on is retired before the operation is done.
    #[cfg(all(test, not(feature = "loom")))]
    pub(super) fn bound(&self) -> u64 {
        self.slot.bound.load(Ordering::Relaxed)
    }

    /// The file's definition is not in the log, or may be retired soon: [`define`](Self::define) comes first.
    pub fn needs_define(&self) -> bool {
        let defined_at = self.entry.defined_at().load(Ordering::Relaxed);
        defined_at == 0 || defined_at < self.log.control.goal().load(Ordering::SeqCst)
    }

    /// Says which file the records are about.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn define(&mut self, definition: &Definition<'_>) -> Result<(), AppendError> {
        let fixed = definition.encode();
        let parts = [IoSlice::new(fixed.as_bytes()), IoSlice::new(definition.path)];
        let id = self.entry.id().load(Ordering::Relaxed);
        // The first definition names the file by the position that it gets.
        let position = self.append(RecordKind::Define, id, [0, 0, 0], &parts, Room::Names)?;
        if id == 0 {
            self.entry.id().store(position, Ordering::Relaxed);
        }
        self.entry.defined_at().store(position, Ordering::Relaxed);
        self.log.stats().add(Counter::Definitions, 1);
        Ok(())
    }

    /// Appends that `parts` are written at byte `offset`: the record's position.
    ///
    /// # Errors
    /// [`AppendError`].
    #[inline]
    pub fn write(&mut self, offset: u64, parts: &[IoSlice<'_>]) -> Result<u64, AppendError> {
        self.about(RecordKind::Write, [offset, 0, 0], parts, Room::Data)
    }

    /// The same for a write that the kernel is not told of: whoever cleans or recovers the log brings it into the file.
    ///
    /// # Errors
    /// [`AppendError`].
    #[inline]
    pub fn absorb(&mut self, offset: u64, parts: &[IoSlice<'_>]) -> Result<u64, AppendError> {
        self.absorbed = true;
        let position = self.about(RecordKind::Write, [offset, 0, 0], parts, Room::Data);
        self.absorbed = false;
        position
    }

    /// Counts a write of so many bytes; with `absorbed`, one that ended in the log.
    #[inline]
    pub fn count(&self, bytes: u64, absorbed: bool) {
        self.log.stats().add_write(self.number, bytes, absorbed);
    }

    /// Appends that the kernel has all absorbed writes to the file.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn settle(&mut self) -> Result<u64, AppendError> {
        self.about(RecordKind::Settle, [0, 0, 0], &[], Room::Reserve)
    }

    /// Appends that the file's size becomes `size`.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn set_size(&mut self, size: u64) -> Result<u64, AppendError> {
        self.about(RecordKind::SetSize, [size, 0, 0], &[], Room::Data)
    }

    /// Appends that `len` bytes at `offset` become zero.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn zero(&mut self, offset: u64, len: u64) -> Result<u64, AppendError> {
        self.about(RecordKind::Zero, [offset, len, 0], &[], Room::Data)
    }

    /// Appends that all earlier records of the file are durable in the file.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn retire(&mut self) -> Result<u64, AppendError> {
        let position = self.about(RecordKind::Retire, [0, 0, 0], &[], Room::Reserve)?;
        self.entry.changed_end().store(0, Ordering::Relaxed);
        self.entry.retired_end().store(position + RECORD_ALIGN_BYTES, Ordering::Relaxed);
        Ok(position)
    }

    /// Appends that the operation of the record at `position` failed.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn void(&mut self, position: u64) -> Result<u64, AppendError> {
        self.about(RecordKind::Void, [0, 0, position], &[], Room::Reserve)
    }

    /// Appends that the file gets the name `path`.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn link(&mut self, path: &[u8]) -> Result<u64, AppendError> {
        let path = checked_path(path).ok_or(AppendError::TooLarge)?;
        self.about(RecordKind::Link, [0, 0, 0], &[IoSlice::new(path)], Room::Names)
    }

    /// Appends that the file loses the name `path`.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn unlink(&mut self, path: &[u8]) -> Result<u64, AppendError> {
        let path = checked_path(path).ok_or(AppendError::TooLarge)?;
        self.about(RecordKind::Unlink, [0, 0, 0], &[IoSlice::new(path)], Room::Names)
    }

    /// Appends that the file's name `from` becomes `to`, which the file of identity `replaced` (0: none) loses.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn rename(&mut self, from: &[u8], to: &[u8], replaced: u64) -> Result<u64, AppendError> {
        let from = checked_path(from).ok_or(AppendError::TooLarge)?;
        let to = checked_path(to).ok_or(AppendError::TooLarge)?;
        let fixed = RenamePaths { from, to }.encode();
        let parts: [_; OWN_PARTS] =
            [IoSlice::new(fixed.as_bytes()), IoSlice::new(from), IoSlice::new(to)];
        self.about(RecordKind::Rename, [0, 0, replaced], &parts, Room::Names)
    }

    fn about(
        &mut self,
        kind: RecordKind,
        numbers: [u64; 3],
        parts: &[IoSlice<'_>],
        room: Room,
    ) -> Result<u64, AppendError> {
        let id = self.entry.id().load(Ordering::Relaxed);
        debug_assert!(id != 0, "a record of a file that was never defined");
        self.append(kind, id, numbers, parts, room)
    }

    fn append(
        &mut self,
        kind: RecordKind,
        file: u64,
        [offset, len, aux]: [u64; 3],
        parts: &[IoSlice<'_>],
        room: Room,
    ) -> Result<u64, AppendError> {
        let draft = Header {
            position: 0,
            kind,
            file,
            offset,
            len,
            aux,
            payload_bytes: 0,
            payload_checksum: 0,
            absorbed: self.absorbed,
        };
        let header = self.log.put(self.slot, draft, parts, room)?;
        let end = header.position + header.record_bytes();
        self.entry.last_end().store(end, Ordering::Release);
        if matches!(kind, RecordKind::Write | RecordKind::Zero | RecordKind::SetSize) {
            self.entry.changed_end().store(end, Ordering::Relaxed);
        }
        Ok(header.position)
    }
}

impl Log {
    /// Appends the record of `draft` and `parts` for the holder of `slot`: its header.
    #[inline]
    fn put(
        &self,
        slot: SlotWords<'_>,
        draft: Header,
        parts: &[IoSlice<'_>],
        room: Room,
    ) -> Result<Header, AppendError> {
        let payload: u64 = parts.iter().map(|part| part.len() as u64).sum();
        if payload > self.pool.payload_bytes_max() {
            return Err(AppendError::TooLarge);
        }
        let payload_bytes = u32::try_from(payload).map_err(|_| AppendError::TooLarge)?;
        let bytes = record_bytes(payload);
        let position = self
            .reserve(bytes, self.room_bytes(room))
            .inspect_err(|error| self.ask_for_all_room(bytes, *error))?;
        // Before the record is whole: a killed writer's record is found by who mends after it.
        slot.record.store(position, Ordering::Release);
        let payload_checksum = if payload <= SMALL_BYTES as u64 {
            self.store_payload::<SMALL_BYTES>(position, parts, payload)?
        } else {
            self.store_payload::<CHUNK_BYTES>(position, parts, payload)?
        };
        let file = if draft.file == 0 { position } else { draft.file };
        let header = Header { position, file, payload_bytes, payload_checksum, ..draft };
        self.seal(&header)?;
        Ok(header)
    }
}

impl NameTicket<'_> {
    /// Appends that the file of this identity loses the name `path`: the record's position. Leaves what must be said
    /// its room.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn unlink(&mut self, path: &[u8], identity: u64) -> Result<u64, AppendError> {
        let path = checked_path(path).ok_or(AppendError::TooLarge)?;
        self.append(RecordKind::Unlink, identity, &[IoSlice::new(path)], Room::Data)
    }

    /// Appends that the operation of the record at `position` failed.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn void(&mut self, position: u64) -> Result<u64, AppendError> {
        self.append(RecordKind::Void, position, &[], Room::Reserve)
    }

    fn append(
        &mut self,
        kind: RecordKind,
        aux: u64,
        parts: &[IoSlice<'_>],
        room: Room,
    ) -> Result<u64, AppendError> {
        // The record's own position stands for the file: no definition has it.
        let (position, file, offset, len) = (0, 0, 0, 0);
        let (payload_bytes, payload_checksum, absorbed) = (0, 0, false);
        let draft = Header {
            position,
            kind,
            file,
            offset,
            len,
            aux,
            payload_bytes,
            payload_checksum,
            absorbed,
        };
        Ok(self.log.put(self.slot, draft, parts, room)?.position)
    }
}

impl Drop for NameTicket<'_> {
    fn drop(&mut self) {
        release(self.slot);
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        release(self.slot);
    }
}

/// Frees a slot. The owner last: a free slot's other words mean nothing.
pub(super) fn release(slot: SlotWords<'_>) {
    slot.file.store(0, Ordering::Relaxed);
    slot.record.store(0, Ordering::Relaxed);
    slot.bound.store(0, Ordering::Release);
    slot.owner.store(0, Ordering::Release);
}

/// How full a record may make the log. Each kind leaves a part for the next.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// Users' data.
    Data,
    /// What became of files: without it, they leave the log.
    Names,
    /// What takes records back: without it, a replay would undo what the log does not have. A part is left for what recovery has
    /// to note.
    Reserve,
}

impl Log {
    /// Bytes of the ring that a record may help to fill.
    pub(super) fn room_bytes(&self, room: Room) -> u64 {
        let ring_bytes = self.pool.ring_bytes();
        let reserve_bytes = (ring_bytes / 16).min(1 << 20);
        match room {
            Room::Data => ring_bytes - reserve_bytes,
            Room::Names => ring_bytes - reserve_bytes / 2,
            Room::Reserve => ring_bytes - reserve_bytes / 4,
        }
    }

    /// Takes a free slot: near the thread's last one, so that threads seldom meet.
    pub(super) fn take_slot(&self) -> Option<(u64, SlotWords<'_>)> {
        use super::control::SLOTS;
        let owner = owner();
        let first = owner.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        (0..SLOTS).find_map(|step| {
            let number = (first + step) % SLOTS;
            let slot = self.control.slot(number);
            let free = slot.owner.load(Ordering::Relaxed) == 0;
            let taken = free
                && slot
                    .owner
                    .compare_exchange(0, owner, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok();
            taken.then_some((number, slot))
        })
    }
}
