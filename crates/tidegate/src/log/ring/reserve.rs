//! Space for a record: as far as tail, limit and the file under the pool allow, and as its kind of
//! record may fill the log.

use super::Ring;
use crate::log::control::slots::RESERVING;
use crate::log::control::{LIMIT_LOCK_AT, TIMEOUT};
use crate::log::error::AppendError;
use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::pmem::{LockFailure, Locked};
use crate::sync::{AtomicU64, Ordering};

/// Looks at the lock of the limit before a thread sleeps for it.
const LOOKS: u32 = 100;

/// How full a record may make the log. Each kind leaves a part for the next.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::log) enum Share {
    /// Users' data.
    Data,
    /// Definitions of files and marks: without them, the data helps nobody.
    Definitions,
    /// What takes records back: without it, a replay would undo what the log does not have. A part
    /// is left for what recovery has to note.
    Reserve,
}

/// Free space for a record.
#[derive(Debug, Clone, Copy)]
pub(in crate::log) struct Reserved {
    /// Where the head was: before this all is reserved by others.
    pub(in crate::log) from: u64,
    /// Of the record, behind that of a [`RecordKind::Gap`](crate::log::RecordKind::Gap) where it
    /// begins a lap.
    pub(in crate::log) position: u64,
    pub(in crate::log) end: u64,
}

impl Ring {
    /// Reserves free space for a record of `bytes` bytes. `slot_record` says so before it is
    /// reserved: see `finished`.
    #[inline]
    pub(in crate::log) fn reserve(
        &self,
        slot_record: &AtomicU64,
        bytes: u64,
        usable_bytes: u64,
    ) -> Result<Reserved, AppendError> {
        let control = &self.control;
        let ring_bytes = self.pool.ring_bytes();
        loop {
            let lap_bytes = control.lap_bytes().load(Ordering::Acquire);
            if bytes + RECORD_ALIGN_BYTES > lap_bytes {
                return Err(AppendError::TooLarge);
            }
            let head = control.head().load(Ordering::SeqCst);
            let at = head % ring_bytes;
            let is_in_lap = at + bytes <= lap_bytes;
            // What the lap leaves is told by a record at the start of the next one.
            let next_lap = head + (ring_bytes - at) + RECORD_ALIGN_BYTES;
            let position = if is_in_lap { head } else { next_lap };
            let end = position + bytes;
            // A tail that has passed the end means a head that has, too: it is looked at again
            // below.
            let used_bytes = end.saturating_sub(control.tail().load(Ordering::Acquire));
            let has_space = used_bytes <= usable_bytes;
            if !has_space || !self.is_allocated(end) {
                return Err(AppendError::Full);
            }
            if end > control.limit().load(Ordering::Acquire) {
                self.raise_limit(end)?;
                continue;
            }
            slot_record.store(head | RESERVING, Ordering::Release);
            let taken =
                control.head().compare_exchange(head, end, Ordering::SeqCst, Ordering::Relaxed);
            if taken.is_ok() {
                self.alarm_cleaner(end);
                self.touch(position, bytes);
                return Ok(Reserved { from: head, position, end });
            }
            self.pool.region().relax();
        }
    }

    /// A large record found no free space: asks for all that there may be at once. Where free space
    /// is shown in steps, others fill each of them with smaller records.
    #[cold]
    pub(super) fn ask_for_all_space(&self, bytes: u64, error: AppendError) {
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
            // A part may end behind the space that the file has. A load there would take some, and
            // kill the program where none is left: SIGBUS.
            let end = self.pool.region_offset(0) + self.allocated_bytes();
            // What lies there does not matter.
            let _ = region.load_u64(at.min(end - 8));
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
        let usable_end =
            self.control.tail().load(Ordering::Acquire) + self.usable_bytes(Share::Reserve);
        let raised = raised.min(usable_end).max(end);
        self.pool.set_limit(raised).map_err(|_| AppendError::Memory)?;
        // After the persistent one: a writer that sees this one may acknowledge records below it.
        limit.store(raised, Ordering::Release);
        Ok(())
    }

    /// Held for the time of a store and a fence: seldom worth sleeping for.
    fn lock_limit(&self) -> Result<Locked<'_>, AppendError> {
        for _ in 0..LOOKS {
            match self.control.memory().try_lock(LIMIT_LOCK_AT) {
                Err(LockFailure::TimedOut) => self.pool.region().relax(),
                outcome => return outcome.map_err(|_| AppendError::Full),
            }
        }
        self.control.memory().lock(LIMIT_LOCK_AT, TIMEOUT).map_err(|_| AppendError::Full)
    }

    /// Bytes of the ring that a record may help to fill.
    pub(in crate::log) fn usable_bytes(&self, space: Share) -> u64 {
        let ring_bytes = self.pool.ring_bytes();
        let reserve_bytes = (ring_bytes / 16).min(1 << 20);
        match space {
            Share::Data => ring_bytes - reserve_bytes,
            Share::Definitions => ring_bytes - reserve_bytes / 2,
            Share::Reserve => ring_bytes - reserve_bytes / 4,
        }
    }
}
