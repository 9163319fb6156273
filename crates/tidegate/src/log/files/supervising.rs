//! The supervisor's side of files: descriptors that it holds, failed write-backs, the heartbeat.

use std::time::Duration;

use rustix::io::Errno;

use super::Log;
use crate::log::control::KEPT_AT;
use crate::log::control::table::{FileRef, flag};
use crate::log::error::LockError;
use crate::log::pool::heartbeat::{Heartbeat, TICK_NS};
use crate::log::ring::Ring;
use crate::pmem::PmemError;
use crate::sync::Ordering;
use crate::tier::clock::{self, now_ns};

impl Log {
    /// Asks the supervisor to hold a descriptor of the file, which hears of each failed write-back.
    pub fn want_kept(&self, file: FileRef) {
        self.entry(file).set(flag::WANT_KEPT);
        self.ring.control.want_kept().store(1, std::sync::atomic::Ordering::SeqCst);
        self.ring.wake_cleaner();
    }

    /// Returns each file that was [wanted](Self::want_kept) since the last call.
    pub fn take_wanted_kept(&self) -> Vec<FileRef> {
        if self.ring.control.want_kept().swap(0, std::sync::atomic::Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        let wanted = self.entries().filter(|(_, it)| it.take_flag(flag::WANT_KEPT));
        wanted.map(|(file, _)| file).collect()
    }

    /// Notes whether the supervisor holds a descriptor of the file. It closes the descriptor only
    /// under the file's lock, after the file's story has ended.
    pub fn note_kept(&self, file: FileRef, is_kept: bool) {
        if !self.is_current(file) {
            return;
        }
        let entry = self.entry(file);
        if is_kept {
            entry.set(flag::KEPT);
            self.ring.control.announce(KEPT_AT);
        } else {
            entry.clear(flag::KEPT);
        }
    }

    /// Returns the files whose descriptors the supervisor holds, or a former one held when it died.
    pub fn kept_files(&self) -> Vec<FileRef> {
        let kept = self.entries().filter(|(_, entry)| entry.has(flag::KEPT));
        kept.map(|(file, _)| file).collect()
    }

    /// Returns whether the supervisor holds a descriptor of the file.
    pub fn is_kept(&self, file: FileRef) -> bool {
        self.entry(file).has(flag::KEPT)
    }

    /// Waits at most `timeout` for the supervisor to hold the file. Returns whether it does.
    pub fn wait_for_kept(&self, file: FileRef, timeout: Duration) -> bool {
        wait_for_supervisor(&self.ring, timeout, || self.is_kept(file))
    }

    /// Writes a heartbeat. Returns the position below which the kernel has done all operations.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn beat(&self) -> Result<u64, PmemError> {
        let ahead_ns = clock::wall_ahead_ns();
        let most_ns = self.ring.control.clock_ahead_ns().fetch_max(ahead_ns, Ordering::SeqCst);
        let set_back_ns = most_ns.saturating_sub(ahead_ns.saturating_add(TICK_NS));
        let former = self.ring.pool().heartbeat()?.unwrap_or_default();
        let done = self.ring.control.done_position();
        // Read after the slots: operations below `done` have no later time.
        let wall_ns = clock::wall_ns();
        let set_back_ns = former.set_back_ns.max(set_back_ns);
        self.ring.pool().set_heartbeat(Heartbeat { wall_ns, done, set_back_ns, recovery_ns: 0 })?;
        Ok(done)
    }

    /// Retires all records that it can, if there is no supervisor. `sync` makes all files durable
    /// as the kernel has them. Interrupted operations of dead threads do not hold the tail back,
    /// since their callers got no answer; `is_dead` takes the numbers of process and thread.
    /// Returns whether the tail has moved.
    ///
    /// Moves nothing after a failed write-back: the disk may lack data that only the log has.
    pub fn retire_alone(
        &self,
        is_dead: impl Fn(u32, u32) -> bool,
        sync: impl FnOnce() -> Result<(), Errno>,
    ) -> bool {
        let Ok(_supervision) = self.ring.supervise(Duration::ZERO) else { return false };
        let tail = self.ring.tail();
        let position = self.ring.safe_position_beside(&is_dead);
        let is_durable = position > tail && sync().is_ok() && !self.has_dropped();
        if !is_durable || self.ring.retire_to(position).is_err() {
            return false;
        }
        let operations = self.operations();
        let dead = operations.all().filter(|it| is_dead(it.process, it.thread()));
        dead.for_each(|it| operations.complete(&it));
        true
    }

    /// Returns whether the kernel may have dropped logged data of some file.
    fn has_dropped(&self) -> bool {
        let mut entries = self.entries();
        let bits = flag::FAILED | flag::DROPPED;
        entries.any(|(_, entry)| entry.has(bits))
    }

    /// Notes that a write-back of the file failed: its next sync reports that, and the cleaner
    /// [writes](Self::take_dropped) the file's records to it again.
    ///
    /// # Errors
    /// [`LockError::Stale`]: the file is gone from the table.
    pub fn note_failure(&self, file: FileRef) -> Result<(), LockError> {
        self.ring.distrust_kernel();
        self.raise(file, flag::FAILED | flag::DROPPED)
    }

    /// Marks a [dropped](Self::take_dropped) file again that the cleaner could not write yet.
    ///
    /// # Errors
    /// [`LockError::Stale`]: the file is gone from the table.
    pub fn drop_again(&self, file: FileRef) -> Result<(), LockError> {
        self.raise(file, flag::DROPPED)
    }

    fn raise(&self, file: FileRef, flags: u64) -> Result<(), LockError> {
        let entry = self.entry(file);
        if !entry.is_of(file) {
            return Err(LockError::Stale);
        }
        entry.set(flags);
        Ok(())
    }

    /// Makes the cleaner write all records to their files again before it syncs them.
    pub fn distrust_all_files(&self) {
        for (_, entry) in self.entries() {
            entry.set(flag::DROPPED);
        }
    }

    /// Returns each id of a file whose data the kernel may have dropped after a failed write-back.
    pub fn take_dropped(&self) -> Vec<u64> {
        let dropped = self.entries().filter(|(_, it)| it.take_flag(flag::DROPPED));
        dropped.map(|(_, entry)| entry.id().load(Ordering::Acquire)).collect()
    }
}

/// Waits at most `timeout` for an action of the supervisor. Returns `is_done` at the end.
pub(super) fn wait_for_supervisor(
    ring: &Ring,
    timeout: Duration,
    is_done: impl Fn() -> bool,
) -> bool {
    let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
    let until_ns = now_ns().saturating_add(timeout_ns);
    loop {
        let seen = ring.control.announced(KEPT_AT);
        if is_done() {
            return true;
        }
        let left = Duration::from_nanos(until_ns.saturating_sub(now_ns()));
        if left.is_zero() || !ring.supervisor_alive() {
            return false;
        }
        ring.control.wait(KEPT_AT, seen, Some(left));
    }
}
