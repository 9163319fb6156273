//! Heartbeats of the log's session, by the clock of file timestamps. With them recovery detects a
//! file that a process outside has changed since.
//!
//! Invariants:
//! 1. The kernel had done the operations of all records below [`Heartbeat::done`] at
//!    [`Heartbeat::wall_ns`], so they left no later time in a file.
//! 2. [`Heartbeat::recovery_ns`] is durable before recovery changes the first file, and is cleared
//!    only once no record of that session is left.
//!
//! Why 1 holds: before a writer moves the head, its slot announces the lowest position that it may
//! reserve. The slot then names the writer's record until the kernel has done the operation.
//! A heartbeat reads in this order: the head, all slots, the clock.

use crc_fast::{CrcAlgorithm, checksum};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::log::pool::LogPool;
use crate::log::pool::layout::{COPY_DISTANCE, HEARTBEAT_OFFSET, HeartbeatBytes};
use crate::log::pool::record::RecordKind;
use crate::pmem::PmemError;
use crate::tier::clock;

/// The largest apparent set-back of a clock that was not set: a tick of the coarse clock.
pub(in crate::log) const TICK_NS: u64 = 20_000_000;

/// The knowledge of the log's session at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Heartbeat {
    /// Time of the heartbeat in nanoseconds since 1970.
    pub wall_ns: u64,
    /// At `wall_ns` the kernel had done the operations of all records below this position.
    pub done: u64,
    /// The largest step back of the clock in this session, in nanoseconds.
    pub set_back_ns: u64,
    /// Time when the first recovery of this session's records began to write to files; 0: none has.
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

/// Returns the time to store in a new record of this kind, in nanoseconds since 1970; 0 for a Zero.
/// A record that is stored before the kernel does its operation does not bound a timestamp by
/// itself, so the cheaper coarse clock is sufficient.
pub(in crate::log) fn time_of(kind: RecordKind) -> u64 {
    match kind {
        RecordKind::Zero => 0,
        RecordKind::Write | RecordKind::SetSize => clock::wall_coarse_ns(),
        _ => clock::wall_ns(),
    }
}

impl LogPool {
    /// Returns the last heartbeat, or `None` if the pool has none or both copies are damaged.
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

    /// Stores a heartbeat. Durable on return.
    ///
    /// # Errors
    /// [`PmemError`].
    pub fn set_heartbeat(&self, heartbeat: Heartbeat) -> Result<(), PmemError> {
        let at = self.superblock().data_offset + HEARTBEAT_OFFSET;
        // Each copy is persisted before the next is stored: a crash tears at most one.
        for at in [at, at + COPY_DISTANCE] {
            self.region().write(at, heartbeat.encode().as_bytes())?;
            self.region().persist(at, size_of::<HeartbeatBytes>() as u64)?;
        }
        Ok(())
    }

    /// Stores that recovery is about to write to files, unless an earlier recovery stored it.
    ///
    /// # Errors
    /// [`PmemError`].
    pub(in crate::log) fn note_recovery(&self) -> Result<(), PmemError> {
        let found = self.heartbeat()?.unwrap_or_default();
        if found.recovery_ns != 0 {
            return Ok(());
        }
        self.set_heartbeat(Heartbeat { recovery_ns: clock::wall_ns(), ..found })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::IoSlice;

    use super::*;
    use crate::log::tests::{definition, key, log};

    #[test]
    fn a_heartbeat_survives_damage_of_one_copy() {
        let log = log();
        let pool = log.ring().pool();
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
        assert_eq!(log.beat().unwrap(), log.ring().head());
        let mut ticket = guard.begin().unwrap();
        let position = ticket.write(0, &[IoSlice::new(b"data")], true).unwrap();
        assert_eq!(log.beat().unwrap(), position);
        drop(ticket);
        assert_eq!(log.beat().unwrap(), log.ring().head());
        let found = log.ring().pool().heartbeat().unwrap().unwrap();
        assert_eq!((found.done, found.recovery_ns), (log.ring().head(), 0));
        assert!(found.wall_ns > 1 << 60);
    }

    #[test]
    fn a_clock_that_was_set_back_is_remembered() {
        let log = log();
        log.beat().unwrap();
        assert_eq!(log.ring().pool().heartbeat().unwrap().unwrap().set_back_ns, 0);
        let hour_ns = 3_600_000_000_000;
        log.file_systems().note_clock(clock::wall_ahead_ns() + hour_ns);
        for _ in 0..2 {
            log.beat().unwrap();
            let set_back_ns = log.ring().pool().heartbeat().unwrap().unwrap().set_back_ns;
            assert!(set_back_ns.abs_diff(hour_ns) < 1_000_000_000, "{set_back_ns}");
        }
    }
}
