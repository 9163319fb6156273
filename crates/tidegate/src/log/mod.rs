//! Engine `log`: a write log on persistent memory, for files and for blocks.
//!
//! A record is durable with one fence and tells by itself whether it is whole (`record`, `layout`).
//! Many processes append without a lock between them (`append`); what they share beside the pool is
//! the control memory (`control`), with the slots of operations in the middle and the table of
//! files (`table`). The rules of `run` decide what a process appends ([`cover`]). One process, the
//! supervisor, retires what the files have (`cleaner`). After a crash, `scan` finds the records.
//! From the `NVCache` paper, whose log has fixed entries of 4 KiB, two fences a write and one
//! process; docs/walks/log.md says what differs and why.
//!
//! Entry points: [`create`], [`LogPool::open`], [`Log::start`], [`Log::attach`]; [`Log::lock`],
//! [`FileGuard::begin`], [`Ticket::write`]; [`Log::safe_position`], [`Log::retire_to`];
//! [`Scanner`].

mod append;
mod check;
mod cleaner;
mod control;
mod copy;
pub mod cover;
pub mod device;
mod engine;
mod error;
mod file_systems;
#[cfg(all(test, not(loom)))]
mod flip_tests;
mod heartbeat;
mod keepers;
mod lanes;
pub mod layout;
mod losses;
mod names;
mod naming;
mod owner;
mod pool;
mod positions;
mod programs;
mod real_syncs;
mod record;
pub mod recover;
mod repair;
mod scan;
mod stats;
mod story;
mod table;
mod touched;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod model_tests;
#[cfg(all(test, not(loom)))]
mod tests;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use append::{FileGuard, Interrupted, Ticket};
pub use control::{CONTROL_BYTES, Control, FILES_MAX, SLOTS};
pub use copy::{can_write_in_place, copy_to_file, write_in_place};
pub use engine::LogEngine;
pub use error::{AppendError, LockError, LogError};
pub use file_systems::{ChangeNumbers, FileSystemRef};
pub use heartbeat::Heartbeat;
pub use lanes::{InFlight, PlainCall};
pub use layout::CODE;
pub use losses::{Damage, DeviceLoss};
pub use names::{
    Attributes, Extended, Make, NameAt, NameChange, NameRecord, Timestamp, put_extended,
};
pub use naming::NamesGuard;
pub use owner::{after_fork, current_process, process_of, thread_of};
pub use pool::{CLOSED, HeaderFault, LogOptions, LogPool, NO_BOOT, RING_BYTES_MIN, create};
pub use programs::ProgramVersion;
pub use real_syncs::{PATH_END_BYTES, PROGRAM_BYTES, RealSync, RealSyncs, SyncNames};
pub use record::{
    Definition, FileHandle, FileSystemId, Header, RecordKind, checked_path, identity,
};
pub use repair::RepairError;
pub use scan::Scanner;
pub use stats::{BUCKETS, Counter, Stats};
pub use story::{Change, CoverState};
pub use table::{FileKey, FileRef};

use control::{SPACE_AT, SUPERVISOR_LOCK_AT, Start};
use touched::Touched;

use crate::pmem::{Kind, LockFailure, Locked, Region, RegionOptions, SharedMemory};
use crate::sync::Ordering;

/// A log in use: the pool and the control memory.
pub struct Log {
    pool: LogPool,
    control: Control,
    touched: Touched,
}

/// The right to clean a log; dropping it, or dying, gives it up.
pub struct Supervision<'a>(#[expect(dead_code, reason = "held, not looked at")] Locked<'a>);

impl Log {
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
    pub(super) fn start_with_records(
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

    /// To be called in the child after a fork, beside [`after_fork`].
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

    /// The entry of the file with this key; one is made for it where there is none.
    ///
    /// # Errors
    /// [`LogError::TableFull`], [`LogError::Lock`].
    pub fn entry_for(&self, key: &FileKey) -> Result<FileRef, LogError> {
        table::find_or_add(&self.control, key)
    }

    /// The entry of the file with this key, if it has one.
    ///
    /// # Errors
    /// [`LogError::Lock`].
    pub fn find(&self, key: &FileKey) -> Result<Option<FileRef>, LogError> {
        table::find_only(&self.control, key)
    }

    /// A file of these numbers may have an entry. Costs a load or two, takes no lock.
    pub fn may_have(&self, device: u64, inode: u64) -> bool {
        table::may_have(&self.control, device, inode)
    }

    /// This process could not tell the supervisor that it is there.
    pub fn note_unannounced(&self) {
        self.control.unannounced().fetch_add(1, Ordering::SeqCst);
    }

    /// Some process could not.
    pub fn has_unannounced(&self) -> bool {
        self.control.unannounced().load(Ordering::SeqCst) > 0
    }

    /// Has the cleaner retire all that the log has by now, and waits for it, `timeout` at most:
    /// whether that was done. The caller must have no [`Ticket`].
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

    /// Counters and latencies.
    pub fn stats(&self) -> Stats<'_> {
        Stats { control: &self.control }
    }
}
