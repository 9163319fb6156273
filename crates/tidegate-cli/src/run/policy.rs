//! When the cleaner does what: late, so that what is written again reaches the disk once; but early enough that no writer has to
//! wait for much of a disk's time.
//!
//! Pure: a situation in, an action out. What is written again and again (little to write for much log) is synced when
//! three quarters of the log are used; streams are synced from a quarter on: the rest of the log is
//! free for writers while that runs. What lies between is written ahead.

/// The log is summed up in steps of at most this.
const SEGMENT_BYTES_MOST: u64 = 16 << 20;

/// What the cleaner finds when it looks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Situation {
    /// Bytes of the log from tail to head.
    pub(super) used_bytes: u64,
    /// Of them, bytes that are free, and that writers have not been shown yet.
    pub(super) owed_bytes: u64,
    /// Bytes that a sync would write at most, of what was summed up.
    pub(super) dirty_bytes: u64,
    /// Somebody waits for a sync.
    pub(super) wanted: bool,
    /// Somebody waits for room.
    pub(super) starving: bool,
    /// No append for a while.
    pub(super) idle: bool,
}

impl Situation {
    /// Writers are faster than the disk, and nobody waits for all of it.
    pub(super) fn is_pressed(&self) -> bool {
        (self.starving || self.owed_bytes > 0) && !self.wanted
    }
}

/// What to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Sleep.
    Nothing,
    /// Start to write ahead of the sync.
    Start,
    /// Make all durable, and free the log.
    Sync,
}

/// The rules for a log of one size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Policy {
    ring_bytes: u64,
    /// The log is summed up in steps of this.
    pub(super) segment_bytes: u64,
}

impl Policy {
    /// The rules for a ring of so many bytes.
    pub(super) fn new(ring_bytes: u64) -> Self {
        Self { ring_bytes, segment_bytes: (ring_bytes / 8).min(SEGMENT_BYTES_MOST) }
    }

    /// What to do now.
    pub(super) fn decide(&self, situation: &Situation) -> Action {
        let &Situation { used_bytes, dirty_bytes, wanted, starving, idle, .. } = situation;
        let quarters = |number: u64| self.ring_bytes / 4 * number;
        // Much to write takes long: it starts while there is still much room.
        let streams = dirty_bytes >= quarters(1);
        if wanted || used_bytes > 0 && (starving || idle || used_bytes >= quarters(3) || streams) {
            Action::Sync
        } else if used_bytes >= quarters(1) {
            Action::Start
        } else {
            Action::Nothing
        }
    }

    /// The next head at which something may have to be done, seen from a log that has just been looked at.
    pub(super) fn wake_at(&self, tail: u64, head: u64, scanned: u64) -> u64 {
        if head == tail {
            return head + 1;
        }
        let start = tail + self.ring_bytes / 4;
        // What cannot be summed up yet, for a writer in the middle of something, is not looked at again for each append.
        let later = head + self.segment_bytes / 8;
        if head < start { start } else { (scanned + self.segment_bytes).max(later) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn decide(used_mib: u64, dirty_mib: u64) -> Action {
        let policy = Policy::new(64 * MIB);
        let (used_bytes, dirty_bytes) = (used_mib * MIB, dirty_mib * MIB);
        policy.decide(&Situation {
            owed_bytes: 0,
            used_bytes,
            dirty_bytes,
            wanted: false,
            starving: false,
            idle: false,
        })
    }

    #[test]
    fn hot_files_are_synced_late_and_streams_early() {
        assert_eq!(decide(0, 0), Action::Nothing);
        assert_eq!(decide(15, 15), Action::Nothing);
        assert_eq!(decide(16, 15), Action::Start);
        assert_eq!(decide(16, 16), Action::Sync);
        assert_eq!(decide(32, 15), Action::Start);
        assert_eq!(decide(47, 1), Action::Start);
        assert_eq!(decide(48, 1), Action::Sync);
    }

    #[test]
    fn an_idle_log_is_retired_and_an_empty_one_left_alone() {
        let policy = Policy::new(64 * MIB);
        let (dirty_bytes, wanted, starving, idle) = (0, false, false, true);
        let idle = |used_bytes| Situation {
            owed_bytes: 0,
            used_bytes,
            dirty_bytes,
            wanted,
            starving,
            idle,
        };
        assert_eq!(policy.decide(&idle(64)), Action::Sync);
        assert_eq!(policy.decide(&idle(0)), Action::Nothing);
    }

    #[test]
    fn it_is_woken_when_that_matters_and_never_for_what_it_has_seen() {
        let policy = Policy::new(64 * MIB);
        assert_eq!(policy.wake_at(100, 100, 100), 101);
        assert_eq!(policy.wake_at(100, 164, 100), 100 + 16 * MIB);
        assert_eq!(policy.wake_at(0, 16 * MIB, 16 * MIB), 24 * MIB);
        assert_eq!(policy.wake_at(0, 30 * MIB, 16 * MIB), 31 * MIB);
    }
}
