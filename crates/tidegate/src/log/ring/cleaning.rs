//! Cleaning a log: chooses how far it may be retired, and moves the tail.
//!
//! Invariants:
//! 1. Only the holder of the supervisor's lock chooses the goal and moves the tail.
//! 2. [`Ring::safe_position`] is not above any slot's bound: all records below it are finished, and
//!    the kernel has done their operations.
//! 3. [`Ring::retire_to`] makes the new tail durable before writers see it: free space is used
//!    again only once the medium says that it is free.

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
    /// Returns the highest tail that is safe once the files that the log's records name are synced.
    /// The invariants of `ring` explain the order.
    pub fn safe_position(&self) -> u64 {
        self.safe_position_beside(|_, _| false)
    }

    /// Returns the [`safe_position`](Self::safe_position) without regard to operations of dead
    /// threads. `is_dead` takes the numbers of process and thread.
    pub(in crate::log) fn safe_position_beside(&self, is_dead: impl Fn(u32, u32) -> bool) -> u64 {
        let control = &self.control;
        let head = control.head().load(Ordering::SeqCst);
        store_before_loads(control.goal(), head);
        let bounds = (0..SLOTS).filter_map(|number| {
            let slot = control.slot(number);
            let owner = slot.owner.load(Ordering::SeqCst);
            // A holder without a bound has reserved nothing, and will see this goal.
            let bound = (owner != 0).then(|| slot.bound.load(Ordering::SeqCst));
            bound.filter(|bound| *bound != 0 && !is_dead(process_of(owner), thread_of(owner)))
        });
        let safe = bounds.fold(head, u64::min);
        self.with_definitions(safe).max(control.tail().load(Ordering::Relaxed))
    }

    /// Returns whether the log may be retired to `position`, which must lie between two records and
    /// not above a [`safe_position`](Self::safe_position).
    ///
    /// All records below `position` are finished too, and a writer whose slot the cleaner missed
    /// finds its definition below the goal, and writes a new one. That leaves files that are not in
    /// use: the answer is `false` if one has its definition below `position` and a record above.
    pub fn may_retire_to(&self, position: u64) -> bool {
        self.with_definitions(position) == position
    }

    /// Returns the largest position up to `safe` behind which each record has its definition too.
    ///
    /// Only records below the last goal matter: later ones have definitions behind the goal. The
    /// caller has read the slots before: a writer stores `last_end` before it frees its slot.
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

    /// Returns the records from `start` to a [`safe_position`](Self::safe_position).
    pub fn records(&self, start: u64, end: u64) -> Scanner<'_> {
        let lap_bytes = self.control.lap_bytes().load(Ordering::Acquire);
        Scanner::of_finished(&self.pool, start, end).in_laps_of(lap_bytes)
    }

    /// Moves the tail to `position`, once the files have the operations of all records below.
    ///
    /// # Errors
    /// [`LogError::Pmem`]; the tail has not moved.
    pub fn retire_to(&self, position: u64) -> Result<(), LogError> {
        self.retire_unseen(position)?;
        self.show_space(position);
        Ok(())
    }

    /// Makes the tail at `position` durable like [`retire_to`](Self::retire_to), but does not yet
    /// give the free space to writers: [`show_space`](Self::show_space) does.
    ///
    /// # Errors
    /// [`LogError::Pmem`]; the tail has not moved.
    pub fn retire_unseen(&self, position: u64) -> Result<(), LogError> {
        Ok(self.pool.set_tail(position)?)
    }

    /// Gives writers the free space up to `position`, which must be retired. Rounds down to the
    /// records' alignment: the limit follows from this tail, and the next tail from the limit.
    pub fn show_space(&self, position: u64) {
        let position = position - position % RECORD_ALIGN_BYTES;
        if self.control.tail().fetch_max(position, Ordering::SeqCst) < position {
            self.announce_space();
        }
    }

    /// Allocates space in the file under the pool for the next `bytes` of the ring. Returns how
    /// many bytes of the ring still lack space.
    ///
    /// # Errors
    /// [`LogError::Pmem`], for example if the file system is full.
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

    /// Loads from the pages of the ring from the head to the end of its space, so that the kernel
    /// clears them now. Only for a pool in tmpfs, where a writer would wait for this otherwise.
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
            // Loads are of aligned words.
            region.load_u64(page - page % 4096)?;
        }
        Ok(())
    }

    /// Confines the ring to its present space, since the file under the pool can have no more. The
    /// largest records are refused from then on.
    pub fn stop_allocating(&self) {
        self.control.lap_bytes().store(self.allocated_bytes(), Ordering::Release);
        self.announce_space();
    }

    /// Returns whether [`stop_allocating`](Self::stop_allocating) has confined the ring.
    pub fn is_space_limited(&self) -> bool {
        self.control.lap_bytes().load(Ordering::Acquire) < self.pool.ring_bytes()
    }

    /// Sleeps until the head reaches `position`, or [`wake_cleaner`](Self::wake_cleaner) was called
    /// after [`work`](Self::work) returned `seen`; at most `timeout`. May return early.
    pub fn wait_for_work(&self, seen: u32, position: u64, timeout: Option<Duration>) {
        self.control.wake_at().store(position, Ordering::SeqCst);
        // A writer moves the head and then reads `wake_at`: one of the two sees the other.
        if self.head() < position {
            self.control.wait(WORK_AT, seen, timeout);
        }
        self.control.wake_at().store(u64::MAX, Ordering::Release);
    }

    /// Returns a number that changes whenever the cleaner is woken.
    pub fn work(&self) -> u32 {
        self.control.announced(WORK_AT)
    }

    /// Wakes the cleaner.
    pub fn wake_cleaner(&self) {
        self.control.wake_at().store(u64::MAX, Ordering::Release);
        self.control.announce(WORK_AT);
    }

    /// Wakes all writers that wait for free space, so that they try again.
    pub(in crate::log) fn announce_space(&self) {
        self.control.announce(SPACE_AT);
    }

    /// Returns whether a writer has found no free space since
    /// [`take_blocked_writer`](Self::take_blocked_writer).
    pub fn has_blocked_writer(&self) -> bool {
        self.control.blocked_writer().load(std::sync::atomic::Ordering::Acquire) != 0
    }

    /// Takes the flag of a blocked writer: whether one found no free space since the last call.
    pub fn take_blocked_writer(&self) -> bool {
        self.control.blocked_writer().swap(0, std::sync::atomic::Ordering::AcqRel) != 0
    }

    /// Wakes the cleaner if it waits for the head to reach `head` or less.
    #[inline]
    pub(in crate::log) fn alarm_cleaner(&self, head: u64) {
        if head >= self.control.wake_at().load(Ordering::SeqCst) {
            self.wake_cleaner();
        }
    }

    /// Returns a number that changes with new free space, to read before an append that may fail.
    pub fn space_changes(&self) -> u32 {
        self.control.announced(SPACE_AT)
    }

    /// Wakes the cleaner, and waits at most `timeout` for free space that the log gains after
    /// [`space_changes`](Self::space_changes) returned `seen`.
    pub fn wait_for_space(&self, seen: u32, timeout: Duration) {
        self.control.blocked_writer().store(1, std::sync::atomic::Ordering::Release);
        self.wake_cleaner();
        self.control.wait(SPACE_AT, seen, Some(timeout));
    }

    /// Asks the cleaner to retire all present records, and waits at most `timeout`. Returns whether
    /// they are retired. The caller must have no [`Ticket`](super::Ticket).
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

    /// Returns the tail that a caller waits for.
    pub fn wanted(&self) -> u64 {
        self.control.wanted().load(Ordering::SeqCst)
    }

    /// Notes durably that a write-back failed, after which the kernel may take pages for clean that
    /// the disk lacks. The next opening of the pool then replays the whole log.
    pub fn distrust_kernel(&self) {
        // If this store fails too, there is nothing better to do.
        let _ = self.pool.set_session(NO_BOOT);
    }

    /// Notes that a record of names was appended. The first of a batch wakes the cleaner.
    pub(in crate::log) fn note_names(&self) {
        let named_ns = self.control.named_ns();
        if named_ns.load(Ordering::SeqCst) == 0 {
            named_ns.store(monotonic_ns().max(1), Ordering::SeqCst);
            self.wake_cleaner();
        }
    }
}
