//! The ring of records: space, append, cleaning. Devices use it directly, files through `files`.
//!
//! Invariants:
//! 1. A [`Ticket`] holds a slot from before it reserves free space until its operation is done. The
//!    cleaner looks at all slots after it has chosen its goal, so it never retires a record whose
//!    operation the kernel may still have to do.
//! 2. A record names its file by an id, whose definition is not retired before the record: the
//!    slot's bound is not above it, and a definition below the cleaner's goal is written anew.
//!
//! Why both hold without a lock: the writer stores its bound and then reads head and goal. The
//! cleaner stores the goal, which is a head it has read, and then reads the bounds. All four
//! accesses are in one total order (`SeqCst`). If the cleaner misses the bound, the writer's reads
//! come after the cleaner's store: the writer reserves at or above that head, finds its definition
//! below the goal, and writes a new one. If the cleaner sees the bound, it stays below the bound.
//!
//! Map: a [`Ticket`] holds a slot; `ticket` has the kinds of records; `store` writes a record to
//! the medium, to space from `reserve`; `finished` knows which records are durable; `cleaning`
//! moves the tail.

mod cleaning;
mod finished;
mod reserve;
mod store;
mod ticket;
mod touched;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub(super) use reserve::Share;

use super::Stats;
use super::control::slots::{SlotWords, release};
use super::control::table::{self, Entry, FileRef};
use super::control::{Control, SUPERVISOR_LOCK_AT, Start};
use super::error::{AppendError, LogError};
use super::pool::LogPool;
use super::pool::heartbeat::Heartbeat;
use crate::pmem::{Kind, LockFailure, Locked, Region, RegionOptions, SharedMemory};
use crate::sync::{Ordering, store_before_loads};
use touched::Touched;

/// A log in use: the ring of records in a pool, and the control memory that its processes share.
pub struct Ring {
    pool: LogPool,
    pub(super) control: Control,
    touched: Touched,
}

/// The right to clean a log. Dropping the guard, or the thread's death, releases the right.
pub struct Supervision<'a>(#[expect(dead_code, reason = "held, not looked at")] Locked<'a>);

/// A slot for a thread's operation on a file; dropping it says that the kernel has done that.
pub struct Ticket<'a> {
    ring: &'a Ring,
    entry: Entry<'a>,
    number: u64,
    slot: SlotWords<'a>,
    /// The records carry the time of their creation.
    is_dated: bool,
}

impl Ring {
    /// Starts to use a recovered log, which has no live records: all of the ring is free space. The
    /// first `allocated_bytes` of the ring have space in the file under the pool.
    ///
    /// # Errors
    /// [`LogError`].
    pub fn start(
        pool: LogPool,
        memory: SharedMemory,
        allocated_bytes: u64,
    ) -> Result<Self, LogError> {
        pool.raise_format()?;
        let limit = pool.limit()?;
        // A process that was killed while it raised the limit may have stored it without a fence.
        // The tail must not be durable before the limit.
        pool.set_limit(limit)?;
        // Space between tail and limit may have old records with positions of new ones.
        pool.set_tail(limit)?;
        let mut position = limit;
        if allocated_bytes < pool.ring_bytes() {
            // At the ring's start, which has space: enough for a program that writes little.
            position = limit.next_multiple_of(pool.ring_bytes());
            pool.set_limit(position)?;
            pool.set_tail(position)?;
        }
        // After the tail: until the tail moves, the notes of an interrupted recovery serve.
        pool.set_heartbeat(Heartbeat { done: position, ..Heartbeat::default() })?;
        let start = Start {
            pool: pool.salt(),
            tail: position,
            limit: position,
            allocated_bytes,
            lap_bytes: pool.ring_bytes(),
            finished: position,
        };
        Ok(Self::of(pool, Control::init(memory, start)))
    }

    /// Starts to use a log with its records; new records begin at the limit. All of the ring has
    /// space. From `doubtful_from` on, space without a record holds nothing that was acknowledged.
    ///
    /// # Errors
    /// [`LogError`].
    pub(in crate::log) fn start_with_records(
        pool: LogPool,
        memory: SharedMemory,
        doubtful_from: u64,
    ) -> Result<Self, LogError> {
        pool.raise_format()?;
        let (tail, limit) = (pool.tail()?, pool.limit()?);
        // Stores of a killed process may be visible before they are durable. Free space must not be
        // used again before the tail is durable.
        pool.set_tail(tail)?;
        pool.set_limit(limit)?;
        let has_gap = doubtful_from < limit;
        // Without space for the gap, no finished position is stated until the log is cleaned.
        let is_told = !has_gap || pool.append_gap(doubtful_from).is_ok();
        let limit = pool.limit()?;
        let start = Start {
            pool: pool.salt(),
            tail,
            limit,
            allocated_bytes: pool.ring_bytes(),
            lap_bytes: pool.ring_bytes(),
            finished: if is_told { limit } else { 0 },
        };
        Ok(Self::of(pool, Control::init(memory, start)))
    }

    /// Joins a log that a supervisor in another process has started. Takes no lock and installs no
    /// signal handler.
    ///
    /// # Errors
    /// [`LogError`] if no supervisor has started this log.
    pub fn attach(pool: &Path, control: &Path) -> Result<Self, LogError> {
        let options = RegionOptions { guest: true, ..RegionOptions::default() };
        Self::resume(LogPool::open(Arc::new(Region::open(pool, &options)?))?, control)
    }

    /// Takes over a log whose supervisor died, with the control memory that processes still use.
    ///
    /// # Errors
    /// [`LogError`] if the control memory is missing, or belongs to another pool.
    pub fn resume(pool: LogPool, control: &Path) -> Result<Self, LogError> {
        let control = Control::open(control, pool.salt())?;
        Ok(Self::of(pool, control))
    }

    fn of(pool: LogPool, control: Control) -> Self {
        let in_tmpfs = pool.region().kind() == Kind::Tmpfs;
        let touched = Touched::new(if in_tmpfs { pool.region().len_bytes() } else { 0 });
        Self { pool, control, touched }
    }

    /// Forgets the page tables of the parent. The child calls this after a fork, beside
    /// [`after_fork`](crate::log::after_fork).
    pub fn forget_pages(&self) {
        self.touched.forget();
    }

    /// Unmaps pool and control memory in this process. No operation on the log may be in progress
    /// or begin afterwards; a later read finds zeroes.
    ///
    /// # Errors
    /// The kernel's error; memory that was not unmapped stays mapped.
    pub fn abandon(&self) -> std::io::Result<()> {
        self.pool.region().abandon()?;
        self.control.memory().abandon()
    }

    /// Returns the addresses of its memory: the medium, then the control memory.
    pub fn memory(&self) -> [std::ops::Range<usize>; 2] {
        [self.pool.region().addresses(), self.control.memory().addresses()]
    }

    /// Returns the log on its medium.
    pub fn pool(&self) -> &LogPool {
        &self.pool
    }

    /// Returns a lower bound of the next record's position.
    pub fn head(&self) -> u64 {
        self.control.head().load(Ordering::SeqCst)
    }

    /// Returns the position below which all records are retired.
    pub fn tail(&self) -> u64 {
        self.control.tail().load(Ordering::SeqCst)
    }

    /// Returns how many bytes of the ring, from its start, have space in the file under the pool.
    pub fn allocated_bytes(&self) -> u64 {
        self.control.allocated_bytes().load(Ordering::Acquire)
    }

    /// Returns whether a supervisor holds the right to clean the log.
    #[inline]
    pub fn supervisor_alive(&self) -> bool {
        self.control.memory().is_held(SUPERVISOR_LOCK_AT)
    }

    /// Acquires the right to clean the log, for as long as guard and thread live, within `timeout`.
    ///
    /// # Errors
    /// [`LockFailure::TimedOut`]: another thread has it.
    pub fn supervise(&self, timeout: Duration) -> Result<Supervision<'_>, LockFailure> {
        self.control.memory().lock(SUPERVISOR_LOCK_AT, timeout).map(Supervision)
    }

    /// Returns the counters and latencies.
    pub fn stats(&self) -> Stats<'_> {
        Stats { control: &self.control }
    }

    /// Takes a slot for an operation on a file whose lock the caller holds.
    #[inline]
    pub(super) fn begin(&self, file: FileRef) -> Result<Ticket<'_>, AppendError> {
        let mut ticket = self.claim(file)?;
        ticket.is_dated = true;
        let slot = ticket.slot;
        // The module's documentation explains the order of these accesses and their orderings.
        let head = self.control.head().load(Ordering::SeqCst);
        let defined_at = ticket.entry.defined_at().load(Ordering::Relaxed);
        let bound = if defined_at == 0 { head } else { defined_at.min(head) };
        store_before_loads(slot.bound, bound);
        if ticket.needs_define() {
            slot.bound.store(head, Ordering::SeqCst);
        }
        Ok(ticket)
    }

    /// Takes a slot for an operation on a file that is used without its lock. The file's cleaner
    /// never moves the tail past its last definition, and its records may come in any order.
    pub(super) fn begin_unlocked(&self, file: FileRef) -> Result<Ticket<'_>, AppendError> {
        let ticket = self.claim(file)?;
        store_before_loads(ticket.slot.bound, self.control.head().load(Ordering::SeqCst));
        Ok(ticket)
    }

    fn claim(&self, file: FileRef) -> Result<Ticket<'_>, AppendError> {
        let (number, slot) = self.control.take_slot().ok_or(AppendError::NoSlot)?;
        slot.file.store(u64::from(file.index) + 1, Ordering::Relaxed);
        let entry = table::entry(&self.control, file.index);
        Ok(Ticket { ring: self, entry, number, slot, is_dated: false })
    }
}

impl Ticket<'_> {
    /// Returns the bound: positions from here on are not retired before the operation is done.
    #[cfg(all(test, not(loom)))]
    pub(super) fn bound(&self) -> u64 {
        self.slot.bound.load(Ordering::Relaxed)
    }

    /// Returns whether the caller must [`define`](Self::define) the file first: its definition is
    /// not in the log, or may be retired soon.
    pub fn needs_define(&self) -> bool {
        let defined_at = self.entry.defined_at().load(Ordering::Relaxed);
        defined_at == 0 || defined_at < self.ring.control.goal().load(Ordering::SeqCst)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        release(self.slot);
    }
}
