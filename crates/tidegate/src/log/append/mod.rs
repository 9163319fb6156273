//! Appending: from the lock of a file to a durable record. Here are the slots, and the tickets that
//! hold them.
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
//! Map: `guard` is the lock of a file; [`FileGuard::begin`] takes a slot under it; `ticket` has the
//! kinds of records; `store` writes one to the medium, where `reserve` finds free space for it;
//! `finished` knows which records are durable.

mod finished;
mod guard;
mod reserve;
mod store;
mod ticket;

pub use guard::FileGuard;
pub(super) use reserve::Share;

use super::Log;
use super::control::SlotWords;
use super::error::AppendError;
use super::owner::{owner, thread_of};
use super::record::Header;
use super::table::{self, Entry, FileRef};
use crate::sync::{Ordering, store_before_loads};

/// A slot, for the operation of one thread on one file; dropping it says that the kernel has done
/// the operation.
pub struct Ticket<'a> {
    log: &'a Log,
    entry: Entry<'a>,
    number: u64,
    slot: SlotWords<'a>,
    /// The records say when they were made.
    is_dated: bool,
}

/// An operation that a process was killed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupted {
    pub(super) slot: u64,
    pub(super) owner: u64,
    /// Position of the record, whole or not; 0: none yet.
    pub(super) record: u64,
    /// The process.
    pub process: u32,
    /// The record, if one was finished: its operation may have been done by the kernel, or not, or
    /// in part.
    pub header: Option<Header>,
}

impl Interrupted {
    /// The thread.
    pub fn thread(&self) -> u32 {
        thread_of(self.owner)
    }
}

impl Log {
    /// Takes a slot for an operation on a file whose lock nobody uses: one whose cleaner never
    /// moves the tail past its last definition, and whose records may come in any order.
    pub(super) fn begin_unlocked(&self, file: FileRef) -> Result<Ticket<'_>, AppendError> {
        let ticket = self.claim(file)?;
        store_before_loads(ticket.slot.bound, self.control.head().load(Ordering::SeqCst));
        Ok(ticket)
    }

    fn claim(&self, file: FileRef) -> Result<Ticket<'_>, AppendError> {
        let (number, slot) = self.take_slot().ok_or(AppendError::NoSlot)?;
        slot.file.store(u64::from(file.index) + 1, Ordering::Relaxed);
        let entry = table::entry(&self.control, file.index);
        Ok(Ticket { log: self, entry, number, slot, is_dated: false })
    }

    /// Takes a free slot: near the thread's last one, so that threads seldom meet.
    pub(super) fn take_slot(&self) -> Option<(u64, SlotWords<'_>)> {
        use super::control::SLOTS;
        let owner = owner();
        let first = owner.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        (0..SLOTS).find_map(|step| {
            let number = (first + step) % SLOTS;
            let slot = self.control.slot(number);
            let take =
                || slot.owner.compare_exchange(0, owner, Ordering::SeqCst, Ordering::Relaxed);
            let taken = slot.owner.load(Ordering::Relaxed) == 0 && take().is_ok();
            if taken {
                self.note_used(number);
            }
            taken.then_some((number, slot))
        })
    }

    /// The slot with this number may have a record from now on.
    #[inline]
    fn note_used(&self, number: u64) {
        let (used, bit) = (self.control.slots_used(number / 64), 1 << (number % 64));
        if used.load(Ordering::Relaxed) & bit == 0 {
            used.fetch_or(bit, Ordering::SeqCst);
        }
    }
}

impl FileGuard<'_> {
    /// Takes a slot for an operation on the file.
    ///
    /// # Errors
    /// [`AppendError::NoSlot`].
    pub fn begin(&self) -> Result<Ticket<'_>, AppendError> {
        let log = self.log;
        let mut ticket = log.claim(self.file)?;
        ticket.is_dated = true;
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
        defined_at == 0 || defined_at < self.log.control.goal().load(Ordering::SeqCst)
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
    slot.record.store(0, Ordering::Release);
    slot.bound.store(0, Ordering::Release);
    slot.owner.store(0, Ordering::Release);
}
