//! What the log's session knew when, by the clock of times of files: so that recovery can tell a
//! file that a process outside has changed since.
//!
//! Invariants:
//! 1. The kernel had done the operations of all records below [`Heartbeat::done`] at
//!    [`Heartbeat::wall_ns`], so they left no later time in a file.
//! 2. [`Heartbeat::recovery_ns`] is durable before recovery changes the first file, and is cleared
//!    only once no record of that session is left.
//!
//! Why 1 holds: a writer's slot says from where on it reserves space before the writer moves the
//! head, and names its record until the kernel has done the operation. The heart beats in this
//! order: the head, all slots, the clock.

use crc_fast::{CrcAlgorithm, checksum};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use super::Log;
use super::control::SLOTS;
use super::layout::{COPY_DISTANCE, HEARTBEAT_OFFSET, HeartbeatBytes};
use super::pool::LogPool;
use super::record::RecordKind;
use crate::pmem::PmemError;
use crate::sync::Ordering;
use crate::tier::clock;

/// How far the clock that nobody sets may seem to differ: a tick of the coarse one.
const TICK_NS: u64 = 20_000_000;

/// What the session knew when.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Heartbeat {
    /// When: nanoseconds since 1970.
    pub wall_ns: u64,
    /// The kernel had done the operations of all records below this position.
    pub done: u64,
    /// The most that the clock was set back in this session, in nanoseconds.
    pub set_back_ns: u64,
    /// When the first recovery of this session's records began to write to files; 0: none has.
    pub recovery_ns: u64,
}

impl Heartbeat {
    fn encode(self) -> HeartbeatBytes {
        let mut bytes = HeartbeatBytes {
            checksum: U64::ZERO,
            wall_ns: U64::new(self.wall_ns),
            done: U64::new(self.done),
            set_back_ns: U64::new(self.set_back_ns),
            recovery_ns: U64::new(self.recovery_ns),
        };
        bytes.checksum = U64::new(checksum_of(&bytes));
        bytes
    }

    fn decode(bytes: &HeartbeatBytes) -> Option<Self> {
        (checksum_of(bytes) == bytes.checksum.get()).then(|| Self {
            wall_ns: bytes.wall_ns.get(),
            done: bytes.done.get(),
            set_back_ns: bytes.set_back_ns.get(),
            recovery_ns: bytes.recovery_ns.get(),
        })
    }
}

fn checksum_of(bytes: &HeartbeatBytes) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, &bytes.as_bytes()[8..])
}

/// When a record of this kind is made. A record of an operation that the kernel has yet to do
/// bounds no time by itself, so a cheaper clock will do.
pub(super) fn time_of(kind: RecordKind) -> u64 {
    match kind {
        RecordKind::Zero => 0,
        RecordKind::Write | RecordKind::SetSize => clock::wall_coarse_ns(),
        _ => clock::wall_ns(),
    }
}

impl LogPool {
    /// The last heartbeat; none in a log of a release that had none, or where both copies are
    /// damaged.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn heartbeat(&self) -> Result<Option<Heartbeat>, PmemError> {
        let at = self.superblock().data_offset + HEARTBEAT_OFFSET;
        for at in [at, at + COPY_DISTANCE] {
            let mut bytes = HeartbeatBytes::default();
            match self.region().read(at, bytes.as_mut_bytes()) {
                Ok(()) => {}
                Err(PmemError::Poisoned { .. }) => continue,
                Err(error) => return Err(error),
            }
            if let Some(found) = Heartbeat::decode(&bytes) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Stores a heartbeat: durable when this returns.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn set_heartbeat(&self, heartbeat: Heartbeat) -> Result<(), PmemError> {
        let at = self.superblock().data_offset + HEARTBEAT_OFFSET;
        // One after the other: a crash tears one of them at most.
        for at in [at, at + COPY_DISTANCE] {
            self.region().write(at, heartbeat.encode().as_bytes())?;
            self.region().persist(at, size_of::<HeartbeatBytes>() as u64)?;
        }
        Ok(())
    }

    /// Notes that recovery is about to write to files, if none has noted that before.
    ///
    /// # Errors
    /// [`PmemError`].
    pub(super) fn note_recovery(&self) -> Result<(), PmemError> {
        let found = self.heartbeat()?.unwrap_or_default();
        if found.recovery_ns != 0 {
            return Ok(());
        }
        self.set_heartbeat(Heartbeat { recovery_ns: clock::wall_ns(), ..found })
    }
}

impl Log {
    /// Beats: notes in the pool what the kernel has done by now. The position up to which it has.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn beat(&self) -> Result<u64, PmemError> {
        let ahead_ns = clock::wall_ahead_ns();
        let most_ns = self.control.clock_ahead_ns().fetch_max(ahead_ns, Ordering::SeqCst);
        let set_back_ns = most_ns.saturating_sub(ahead_ns.saturating_add(TICK_NS));
        let former = self.pool.heartbeat()?.unwrap_or_default();
        let done = self.done_position();
        // After the slots: what was done before them was done before this.
        let wall_ns = clock::wall_ns();
        let set_back_ns = former.set_back_ns.max(set_back_ns);
        self.pool.set_heartbeat(Heartbeat { wall_ns, done, set_back_ns, recovery_ns: 0 })?;
        Ok(done)
    }

    /// The position below which the kernel has done the operations of all records.
    fn done_position(&self) -> u64 {
        let head = self.control.head().load(Ordering::SeqCst);
        let slots = (0..SLOTS).map(|number| self.control.slot(number));
        slots.filter_map(|slot| slot.in_the_middle_from()).fold(head, u64::min)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::IoSlice;

    use super::super::tests::{definition, key, log};
    use super::*;

    #[test]
    fn a_heartbeat_survives_damage_of_one_copy() {
        let log = log();
        let pool = log.pool();
        let beat = Heartbeat { wall_ns: 5, done: 64, set_back_ns: 7, recovery_ns: 9 };
        pool.set_heartbeat(beat).unwrap();
        let at = pool.superblock().data_offset + HEARTBEAT_OFFSET;
        pool.region().write(at + 8, &[1]).unwrap();
        assert_eq!(pool.heartbeat().unwrap(), Some(beat));
        pool.region().write(at + COPY_DISTANCE + 8, &[1]).unwrap();
        assert_eq!(pool.heartbeat().unwrap(), None);
    }

    #[test]
    fn an_operation_in_the_middle_holds_what_is_done() {
        let log = log();
        let file = log.entry_for(&key(1)).unwrap();
        let guard = log.lock(file).unwrap();
        guard.begin_story(&definition(1), 0).unwrap();
        assert_eq!(log.beat().unwrap(), log.head());
        let mut ticket = guard.begin().unwrap();
        let position = ticket.write(0, &[IoSlice::new(b"data")], true).unwrap();
        assert_eq!(log.beat().unwrap(), position);
        drop(ticket);
        assert_eq!(log.beat().unwrap(), log.head());
        let found = log.pool().heartbeat().unwrap().unwrap();
        assert_eq!((found.done, found.recovery_ns), (log.head(), 0));
        assert!(found.wall_ns > 1 << 60);
    }

    #[test]
    fn a_clock_that_was_set_back_is_remembered() {
        let log = log();
        log.beat().unwrap();
        assert_eq!(log.pool().heartbeat().unwrap().unwrap().set_back_ns, 0);
        let hour_ns = 3_600_000_000_000;
        log.note_clock(clock::wall_ahead_ns() + hour_ns);
        for _ in 0..2 {
            log.beat().unwrap();
            let set_back_ns = log.pool().heartbeat().unwrap().unwrap().set_back_ns;
            assert!(set_back_ns.abs_diff(hour_ns) < 1_000_000_000, "{set_back_ns}");
        }
    }
}
