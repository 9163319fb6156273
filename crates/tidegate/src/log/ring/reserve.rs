//! Space for a record, within the bounds of tail, limit, the file under the pool, and the share of
//! the log that the kind of record may fill.

use super::Ring;
use crate::log::control::slots::RESERVING;
use crate::log::control::{LIMIT_LOCK_AT, TIMEOUT};
use crate::log::error::AppendError;
use crate::log::pool::layout::RECORD_ALIGN_BYTES;
use crate::pmem::{LockFailure, Locked};
use crate::sync::{AtomicU64, Ordering};

/// Attempts to take the limit's lock before a thread sleeps.
const LOOKS: u32 = 100;

/// How full a record may make the log. Each kind leaves a part for the next one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::log) enum Share {
    /// Users' data.
    Data,
    /// Definitions of files, and marks: data is useless without them.
    Definitions,
    /// Records that void others or end a story: without them, a replay would undo changes that are
    /// not in the log. A part is left for the notes of recovery.
    Reserve,
}

/// Free space for a record.
#[derive(Debug, Clone, Copy)]
pub(in crate::log) struct Reserved {
    /// The former head: the space below belongs to other records.
    pub(in crate::log) from: u64,
    /// Position of the record. At the beginning of a lap it is behind a
    /// [`RecordKind::Gap`](crate::log::RecordKind::Gap).
    pub(in crate::log) position: u64,
    pub(in crate::log) end: u64,
}

impl Ring {
    /// Reserves free space for a record of `bytes` bytes, and announces that in `slot_record`
    /// before the head moves: see `finished`.
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
            // A gap record at the start of the next lap covers the rest of this one.
            let next_lap = head + (ring_bytes - at) + RECORD_ALIGN_BYTES;
            let position = if is_in_lap { head } else { next_lap };
            let end = position + bytes;
            // A tail above `end` means that the head is too: the exchange below then fails.
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

    /// Asks the cleaner to retire all records if a large record found no free space. When free
    /// space appears in steps, smaller records of other writers fill each step.
    #[cold]
    pub(super) fn ask_for_all_space(&self, bytes: u64, error: AppendError) {
        if error == AppendError::Full && bytes > self.pool.ring_bytes() / 16 {
            self.control.wanted().fetch_max(self.head(), Ordering::SeqCst);
        }
    }

    /// Returns whether the file under the pool has space for the record that ends at `end`.
    fn is_allocated(&self, end: u64) -> bool {
        let end_in_lap = (end - 1) % self.pool.ring_bytes() + 1;
        end_in_lap <= self.control.allocated_bytes().load(Ordering::Acquire)
    }

    /// Makes the kernel map the pages of a record before the stores, unless they are mapped.
    #[inline]
    fn touch(&self, position: u64, bytes: u64) {
        let region = self.pool.region();
        self.touched.note(self.pool.region_offset(position), bytes, |at| {
            // A part may end behind the file's space. A load there would allocate some, and kill
            // the program with SIGBUS if none is left.
            let end = self.pool.region_offset(0) + self.allocated_bytes();
            // The value is not used.
            let _ = region.load_u64(at.min(end - 8));
        });
    }

    /// Raises the durable limit to `end` or above. This is rare: the limit moves in steps.
    #[cold]
    fn raise_limit(&self, end: u64) -> Result<(), AppendError> {
        let _lock = self.lock_limit()?;
        let limit = self.control.limit();
        if end <= limit.load(Ordering::Relaxed) {
            return Ok(());
        }
        let raised = end.next_multiple_of(self.pool.limit_step_bytes());
        // Recovery appends its notes behind the limit, within one lap of the tail.
        let usable_end =
            self.control.tail().load(Ordering::Acquire) + self.usable_bytes(Share::Reserve);
        let raised = raised.min(usable_end).max(end);
        self.pool.set_limit(raised).map_err(|_| AppendError::Memory)?;
        // After the persistent limit: it allows writers to acknowledge records below it.
        limit.store(raised, Ordering::Release);
        Ok(())
    }

    /// Acquires the limit's lock, which holders keep for a store and a fence only.
    fn lock_limit(&self) -> Result<Locked<'_>, AppendError> {
        for _ in 0..LOOKS {
            match self.control.memory().try_lock(LIMIT_LOCK_AT) {
                Err(LockFailure::TimedOut) => self.pool.region().relax(),
                outcome => return outcome.map_err(|_| AppendError::Full),
            }
        }
        self.control.memory().lock(LIMIT_LOCK_AT, TIMEOUT).map_err(|_| AppendError::Full)
    }

    /// Returns how many bytes of the ring may be in use once a record of this share is appended.
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
