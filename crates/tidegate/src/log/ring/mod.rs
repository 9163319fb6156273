//! The ring of records: space, append, cleaning. A device uses it alone, files are on top.
//!
//! Invariants:
//! 1. A [`Ticket`] holds a slot from before free space is reserved until the operation is done. So
//!    the cleaner, which looks at all slots after it has chosen its goal, never retires a record
//!    whose operation the kernel may still have to do.
//! 2. A record names its file by an id whose definition is not retired before the record is: the
//!    slot's bound is not above the definition, and a definition below the cleaner's goal is
//!    written anew.
//!
//! Why both hold without a lock: the writer stores its bound and then reads head and goal; the
//! cleaner stores the goal, which is a head it has read, and then reads the bounds; all four in one
//! total order (`SeqCst`). If the cleaner misses the bound, the writer's reads come after the
//! cleaner's stores: it reserves at or above that head, and finds its definition below the goal, so
//! that it writes a new one. If the cleaner sees the bound, it stays below it.
//!
//! Map: a [`Ticket`] holds a slot; `ticket` has the kinds of records; `store` writes one to the
//! medium, where `reserve` finds free space for it; `finished` knows which records are durable;
//! `cleaning` moves the tail.

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

/// The right to clean a log; dropping it, or dying, gives it up.
pub struct Supervision<'a>(#[expect(dead_code, reason = "held, not looked at")] Locked<'a>);

/// A slot, for the operation of one thread on one file; dropping it says that the kernel has done
/// the operation.
pub struct Ticket<'a> {
    ring: &'a Ring,
    entry: Entry<'a>,
    number: u64,
    slot: SlotWords<'a>,
    /// The records say when they were made.
    is_dated: bool,
}

impl Ring {
    /// Starts to use a recovered log, whose tail is where its records begin and end: all of it is
    /// free space. `allocated_bytes` of the ring have space in the file under the pool.
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
        // A process that was killed while it raised the limit may have stored it only: the tail
        // must not be durable before it.
        pool.set_limit(limit)?;
        // What lies between tail and limit was reserved once: a new record there could meet an old
        // one's position.
        pool.set_tail(limit)?;
        let mut position = limit;
        if allocated_bytes < pool.ring_bytes() {
            // From the ring's start, which has space: a program that writes little never needs
            // more.
            position = limit.next_multiple_of(pool.ring_bytes());
            pool.set_limit(position)?;
            pool.set_tail(position)?;
        }
        // Behind the tail: what a recovery that was interrupted has noted serves until then.
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

    /// Starts to use a log with the records that are in it; new ones begin at the limit. All of the
    /// ring has space. Of what has no record from `doubtful_from` on nothing was acknowledged.
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
        // What a killed process stored may be seen before it is durable; free space must not be
        // used again before the tail is.
        pool.set_tail(tail)?;
        pool.set_limit(limit)?;
        let has_gap = doubtful_from < limit;
        // A log that has no space for that says nothing of finished records until it is cleaned.
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

    /// Joins a log that a supervisor has started, from another process: takes no lock and installs
    /// no handler there.
    ///
    /// # Errors
    /// [`LogError`]: there is no such log.
    pub fn attach(pool: &Path, control: &Path) -> Result<Self, LogError> {
        let options = RegionOptions { guest: true, ..RegionOptions::default() };
        Self::resume(LogPool::open(Arc::new(Region::open(pool, &options)?))?, control)
    }

    /// Takes over a log whose supervisor died: its control memory at `control` lives, and processes
    /// may still use it.
    ///
    /// # Errors
    /// [`LogError`]: it is not there, or belongs to another pool.
    pub fn resume(pool: LogPool, control: &Path) -> Result<Self, LogError> {
        let control = Control::open(control, pool.salt())?;
        Ok(Self::of(pool, control))
    }

    fn of(pool: LogPool, control: Control) -> Self {
        let in_tmpfs = pool.region().kind() == Kind::Tmpfs;
        let touched = Touched::new(if in_tmpfs { pool.region().len_bytes() } else { 0 });
        Self { pool, control, touched }
    }

    /// To be called in the child after a fork, beside [`after_fork`](crate::log::after_fork).
    pub fn forget_pages(&self) {
        self.touched.forget();
    }

    /// Gives the log up for this process: neither pool nor control memory is mapped any more. No
    /// operation on the log may be in the middle, or be begun after that; one that reads finds
    /// zeroes.
    ///
    /// # Errors
    /// The kernel's: what could not be given up is mapped as before.
    pub fn abandon(&self) -> std::io::Result<()> {
        self.pool.region().abandon()?;
        self.control.memory().abandon()
    }

    /// The addresses of its memory: that of the medium, and that which processes share.
    pub fn memory(&self) -> [std::ops::Range<usize>; 2] {
        [self.pool.region().addresses(), self.control.memory().addresses()]
    }

    /// The log on its medium.
    pub fn pool(&self) -> &LogPool {
        &self.pool
    }

    /// Where the next record will be, or later.
    pub fn head(&self) -> u64 {
        self.control.head().load(Ordering::SeqCst)
    }

    /// Where the records begin that are not retired.
    pub fn tail(&self) -> u64 {
        self.control.tail().load(Ordering::SeqCst)
    }

    /// Bytes of the ring, from its start, that have space in the file under the pool.
    pub fn allocated_bytes(&self) -> u64 {
        self.control.allocated_bytes().load(Ordering::Acquire)
    }

    /// A process cleans the log.
    #[inline]
    pub fn supervisor_alive(&self) -> bool {
        self.control.memory().is_held(SUPERVISOR_LOCK_AT)
    }

    /// Takes the right to clean the log, for as long as the guard and
    /// the calling thread live. Waits at most `timeout`.
    ///
    /// # Errors
    /// [`LockFailure::TimedOut`]: another thread has it.
    pub fn supervise(&self, timeout: Duration) -> Result<Supervision<'_>, LockFailure> {
        self.control.memory().lock(SUPERVISOR_LOCK_AT, timeout).map(Supervision)
    }

    /// Counters and latencies.
    pub fn stats(&self) -> Stats<'_> {
        Stats { control: &self.control }
    }

    /// Takes a slot for an operation on a file whose lock the caller holds.
    #[inline]
    pub(super) fn begin(&self, file: FileRef) -> Result<Ticket<'_>, AppendError> {
        let mut ticket = self.claim(file)?;
        ticket.is_dated = true;
        let slot = ticket.slot;
        // The module's text says why these are in this order, and how strong they are.
        let head = self.control.head().load(Ordering::SeqCst);
        let defined_at = ticket.entry.defined_at().load(Ordering::Relaxed);
        let bound = if defined_at == 0 { head } else { defined_at.min(head) };
        store_before_loads(slot.bound, bound);
        if ticket.needs_define() {
            slot.bound.store(head, Ordering::SeqCst);
        }
        Ok(ticket)
    }

    /// Takes a slot for an operation on a file whose lock nobody uses: one whose cleaner never
    /// moves the tail past its last definition, and whose records may come in any order.
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
    /// No position from here on is retired before the operation is done.
    #[cfg(all(test, not(loom)))]
    pub(super) fn bound(&self) -> u64 {
        self.slot.bound.load(Ordering::Relaxed)
    }

    /// The file's definition is not in the log, or may be retired soon: [`define`](Self::define)
    /// comes first.
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
