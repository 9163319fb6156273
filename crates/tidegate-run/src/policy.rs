//! Decides when the cleaner acts: late, so that data that is written again reaches the disk once;
//! but early enough that writers find free space as long as the disk keeps up.
//!
//! Pure: a situation in, an action out. Data that is written again and again (few dirty bytes for
//! much log) is retired when three quarters of the log are used, or up to seven eighths if little
//! must be written, and then an eighth of the log at a time. Streams are synced from an eighth on.
//! Between these limits, write-back starts ahead of the sync.

use std::time::Duration;

/// The shortest and the longest segment that sums up the log.
const SEGMENT_BYTES_LEAST: u64 = 64 << 10;
const SEGMENT_BYTES_MOST: u64 = 4 << 20;

/// How many times as long a batch may take while no writer waits. A log that fills meanwhile makes
/// writers wait for the rest of the batch.
const UNBLOCKED_BATCHES: u64 = 3;

/// How many bytes of the log writers use at most, at the speed of memory, per byte of the disk.
const WRITERS_TO_DISK: u64 = 10;

/// The state of the log when the cleaner looks.
#[allow(clippy::struct_excessive_bools, reason = "each is about something else")]
#[derive(Debug, Clone, Copy)]
pub(super) struct Situation {
    /// Bytes of the log from tail to head.
    pub(super) used_bytes: u64,
    /// Bytes that a sync would write at most, of the records that were summed up.
    pub(super) dirty_bytes: u64,
    /// Whether a process waits for the whole log to be retired.
    pub(super) is_wanted: bool,
    /// Whether a writer waits for free space.
    pub(super) is_blocked: bool,
    /// Whether there was no append for a while.
    pub(super) is_idle: bool,
    /// Whether names were recorded a while ago.
    pub(super) has_old_names: bool,
}

/// An action of the cleaner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Sleep.
    Nothing,
    /// Start to write ahead of the sync.
    Start,
    /// Make records durable in their files, and free the log behind them.
    Sync,
}

/// The rules for a log of one size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Policy {
    ring_bytes: u64,
    /// Bytes of the log that one segment sums up.
    pub(super) segment_bytes: u64,
}

impl Policy {
    /// Returns the rules for a ring of `ring_bytes`.
    pub(super) fn new(ring_bytes: u64) -> Self {
        let segment_bytes = (ring_bytes / 256).clamp(SEGMENT_BYTES_LEAST, SEGMENT_BYTES_MOST);
        Self { ring_bytes, segment_bytes }
    }

    /// Returns the action for a situation.
    pub(super) fn decide(&self, situation: &Situation) -> Action {
        let &Situation { used_bytes, dirty_bytes, is_wanted, is_blocked, .. } = situation;
        let is_due = is_blocked || situation.is_idle || situation.has_old_names;
        let is_stream = dirty_bytes >= self.start_bytes();
        let is_full = used_bytes >= self.full_bytes(dirty_bytes);
        if is_wanted || used_bytes > 0 && (is_due || is_full || is_stream) {
            Action::Sync
        } else if used_bytes >= self.start_bytes() {
            Action::Start
        } else {
            Action::Nothing
        }
    }

    /// Returns the dirty bytes of one batch: as many as the disk takes in the time that writers may
    /// wait (`disk_bytes`), and more while there is free space, as writers take time to fill it.
    /// Returns `None` if the batch has no limit, since a process waits for all data.
    pub(super) fn batch_bytes(&self, situation: &Situation, disk_bytes: u64) -> Option<u64> {
        let free_bytes = self.ring_bytes.saturating_sub(situation.used_bytes);
        let is_limited = !situation.is_wanted && !situation.has_old_names;
        let unblocked_bytes = disk_bytes.saturating_mul(UNBLOCKED_BATCHES);
        is_limited.then(|| (disk_bytes + free_bytes / WRITERS_TO_DISK).min(unblocked_bytes))
    }

    /// Returns how much of the log one batch retires at most if few bytes must be written. So data
    /// that is written again and again stays in the log as long as it has space.
    pub(super) fn batch_log_bytes(&self) -> u64 {
        self.ring_bytes / 8
    }

    /// Returns the used bytes that start write-back, to keep the disk busy.
    fn start_bytes(&self) -> u64 {
        self.ring_bytes / 8
    }

    /// Returns how much of the log may be used before data that is written again and again is
    /// synced. The free rest lasts until `dirty_bytes` are on the disk.
    fn full_bytes(&self, dirty_bytes: u64) -> u64 {
        let (least, most) = (self.ring_bytes / 4 * 3, self.ring_bytes / 8 * 7);
        let needed_bytes = dirty_bytes.saturating_mul(WRITERS_TO_DISK);
        self.ring_bytes.saturating_sub(needed_bytes).clamp(least, most)
    }

    /// Returns the next head that may need work, for a log that the cleaner has just looked at.
    pub(super) fn wake_at(&self, tail: u64, head: u64, scanned: u64) -> u64 {
        if head == tail {
            return head + 1;
        }
        let start = tail + self.start_bytes();
        // Records behind an unfinished operation cannot be summed up yet. They are not looked at
        // again for each append.
        let later = head + self.segment_bytes / 8;
        if head < start { start } else { (scanned + self.segment_bytes).max(later) }
    }
}

/// How fast the disk takes batches.
#[derive(Debug, Clone, Copy)]
pub(super) struct DiskSpeed {
    bytes_per_s: u64,
}

/// The speed until a batch is measured: in the order of a slow disk's.
impl Default for DiskSpeed {
    fn default() -> Self {
        Self { bytes_per_s: 100 << 20 }
    }
}

impl DiskSpeed {
    /// Batches of fewer bytes measure the sync rather than the disk.
    const MEASURED_BYTES: u64 = 1 << 20;

    /// Notes that a batch of `bytes` took `time`.
    pub(super) fn measured(&mut self, bytes: u64, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1);
        if bytes >= Self::MEASURED_BYTES {
            self.bytes_per_s = bytes.saturating_mul(1_000_000) / us;
        }
    }

    /// Returns how many bytes the disk takes in `time`.
    pub(super) fn bytes_in(self, time: Duration) -> u64 {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        (self.bytes_per_s / 1000).saturating_mul(ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Nothing is in the log, and no process waits.
    const EMPTY: Situation = Situation {
        used_bytes: 0,
        dirty_bytes: 0,
        is_wanted: false,
        is_blocked: false,
        is_idle: false,
        has_old_names: false,
    };

    fn decide(used_mib: u64, dirty_mib: u64) -> Action {
        let (used_bytes, dirty_bytes) = (used_mib * MIB, dirty_mib * MIB);
        Policy::new(64 * MIB).decide(&Situation { used_bytes, dirty_bytes, ..EMPTY })
    }

    #[test]
    fn hot_files_are_synced_late_and_streams_early() {
        assert_eq!(decide(0, 0), Action::Nothing);
        assert_eq!(decide(7, 7), Action::Nothing);
        assert_eq!(decide(8, 7), Action::Start);
        assert_eq!(decide(8, 8), Action::Sync);
        assert_eq!(decide(47, 4), Action::Start);
        assert_eq!(decide(48, 4), Action::Sync);
        assert_eq!(decide(53, 1), Action::Start);
        assert_eq!(decide(54, 1), Action::Sync);
        assert_eq!(Policy::new(64 * MIB).full_bytes(0), 56 * MIB);
        assert_eq!(Policy::new(64 * MIB).full_bytes(u64::MAX), 48 * MIB);
    }

    #[test]
    fn a_batch_is_what_the_disk_takes_in_a_short_time() {
        let policy = Policy::new(1024 * MIB);
        let batch = |used_mib, dirty_mib, is_blocked, is_wanted| {
            let (used_bytes, dirty_bytes) = (used_mib * MIB, dirty_mib * MIB);
            let situation = Situation { used_bytes, dirty_bytes, is_wanted, is_blocked, ..EMPTY };
            policy.batch_bytes(&situation, 5 * MIB).map(|bytes| bytes / MIB)
        };
        assert_eq!(batch(1024, 1000, true, false), Some(5), "what the disk takes in its time");
        assert_eq!(batch(1024, 100, true, false), Some(5), "of a hot set too");
        assert_eq!(batch(924, 900, false, false), Some(15), "little is free: 5 + 100 / 10");
        assert_eq!(batch(300, 256, false, false), Some(15), "not as much as could be filled");
        assert_eq!(batch(300, 100, false, false), Some(15), "of a hot set too");
        assert_eq!(batch(1024, 1000, true, true), None, "a process waits for all");
    }

    #[test]
    fn a_speed_is_that_of_the_last_batch_that_says_something() {
        let ms = Duration::from_millis;
        let mut speed = DiskSpeed::default();
        speed.measured(40 * MIB, ms(100));
        speed.measured(4096, ms(100));
        assert_eq!(speed.bytes_in(ms(50)) / MIB, 19);
    }

    #[test]
    fn an_idle_log_is_retired_and_an_empty_one_left_alone() {
        let policy = Policy::new(64 * MIB);
        let idle = |used_bytes| Situation { used_bytes, is_idle: true, ..EMPTY };
        assert_eq!(policy.decide(&idle(64)), Action::Sync);
        assert_eq!(policy.decide(&idle(0)), Action::Nothing);
    }

    #[test]
    fn names_are_retired_soon_and_all_of_them() {
        let policy = Policy::new(64 * MIB);
        let (used_bytes, dirty_bytes) = (MIB, MIB);
        let named = Situation { used_bytes, dirty_bytes, has_old_names: true, ..EMPTY };
        assert_eq!(policy.decide(&named), Action::Sync);
        assert_eq!(policy.batch_bytes(&named, 4096), None);
    }

    #[test]
    fn it_is_woken_when_that_matters_and_never_for_what_it_has_seen() {
        let policy = Policy::new(64 * MIB);
        assert_eq!(policy.wake_at(100, 100, 100), 101);
        assert_eq!(policy.wake_at(100, 164, 100), 100 + 8 * MIB);
        assert_eq!(policy.wake_at(0, 16 * MIB, 16 * MIB), 16 * MIB + MIB / 4);
        assert_eq!(policy.wake_at(0, 30 * MIB, 16 * MIB), 30 * MIB + MIB / 32);
    }
}
