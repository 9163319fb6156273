//! What the supervisor does to a log: choosing how far it may be retired, moving the tail, minding
//! killed processes.
//!
//! Invariants:
//! 1. One process at a time calls the functions here, the one that holds the supervisor's lock.
//! 2. [`Ring::safe_position`] is not above any slot's bound: all records below it are finished, and
//!    the kernel has done their operations.
//! 3. [`Ring::retire_to`] makes the new tail durable before it shows it: free space is not used
//!    again before the medium says that it is free space.

use std::time::Duration;

use super::Ring;
use crate::log::control::owner::{process_of, thread_of};
use crate::log::control::{SLOTS, SPACE_AT, WORK_AT, table};
use crate::log::error::LogError;
use crate::log::pool::NO_BOOT;
use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::log::pool::scan::Scanner;
use crate::pmem::Kind;
use crate::sync::{Ordering, store_before_loads};
use crate::tier::clock::monotonic_ns;

impl Ring {
    /// How far the log may be retired, once the files that its records name are synced: see
    /// `append` for the order.
    pub fn safe_position(&self) -> u64 {
        self.safe_position_beside(|_, _| false)
    }

    /// As [`safe_position`](Self::safe_position), whatever the operations are that threads were
    /// killed in, of which `is_dead` knows by the numbers of process and thread.
    pub(in crate::log) fn safe_position_beside(&self, is_dead: impl Fn(u32, u32) -> bool) -> u64 {
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
    pub(in crate::log) fn with_definitions(&self, mut safe: u64) -> u64 {
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
    pub(in crate::log) fn announce_space(&self) {
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
    pub(in crate::log) fn alarm_cleaner(&self, head: u64) {
        if head >= self.control.wake_at().load(Ordering::SeqCst) {
            self.wake_cleaner();
        }
    }

    /// A number that changes whenever free space in the log was made. To be read before an append
    /// that may find it full.
    pub fn space_changes(&self) -> u32 {
        self.control.announced(SPACE_AT)
    }

    /// Waits until free space was made after [`space_changes`](Self::space_changes) returned
    /// `seen`, `timeout` at most; wakes the cleaner first.
    pub fn wait_for_space(&self, seen: u32, timeout: Duration) {
        self.control.blocked_writer().store(1, std::sync::atomic::Ordering::Release);
        self.wake_cleaner();
        self.control.wait(SPACE_AT, seen, Some(timeout));
    }

    /// Has the cleaner retire all that the log has by now, and waits for it, `timeout` at most:
    /// whether that was done. The caller must have no [`Ticket`](super::Ticket).
    pub fn checkpoint(&self, timeout: Duration) -> bool {
        let until = self.head();
        self.control.wanted().fetch_max(until, Ordering::SeqCst);
        let step = Duration::from_millis(100).min(timeout);
        let mut left = timeout;
        loop {
            let seen = self.space_changes();
            if self.tail() >= until {
                return true;
            }
            if left.is_zero() || !self.supervisor_alive() {
                return false;
            }
            self.wait_for_space(seen, step);
            left = left.saturating_sub(step);
        }
    }

    /// The position up to which a caller wants the log to be retired.
    pub fn wanted(&self) -> u64 {
        self.control.wanted().load(Ordering::SeqCst)
    }

    /// A write-back failed: from now on the kernel may take for clean what the disk does not have.
    /// Durable, so that the next opening, after the processes that use it, replays all of it.
    pub fn distrust_kernel(&self) {
        // Memory that fails in this place too leaves nothing better to be done.
        let _ = self.pool.set_session(NO_BOOT);
    }

    /// A record of names was appended: the cleaner is woken for the first one of a batch.
    pub(in crate::log) fn note_names(&self) {
        let named_ns = self.control.named_ns();
        if named_ns.load(Ordering::SeqCst) == 0 {
            named_ns.store(monotonic_ns().max(1), Ordering::SeqCst);
            self.wake_cleaner();
        }
    }
}
