//! When the cleaner does what: late, so that what is written again reaches the disk once; but early enough that no writer has to
//! wait for much of a disk's time.
//!
//! Pure: a situation in, an action out. What is written again and again (little to write for much log) is synced when
//! three quarters of the log are used, or up to seven eighths where the sync will not take long; streams are synced from a
//! quarter on: the rest of the log is free for writers while that runs. What lies between is written ahead.

/// The log is summed up in steps of at most this.
const SEGMENT_BYTES_MOST: u64 = 16 << 20;

/// Bytes of the log that writers use, at most, while a disk takes one: they run at the speed of memory.
const WRITERS_TO_DISK: u64 = 10;

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
    /// Writers are to be shown room that was freed only as the disk takes what is to be written next: they are faster than it, and
    /// would fill `freed_bytes` before it has `dirty_bytes`. Nobody waits for all of it.
    pub(super) fn is_paced(&self, freed_bytes: u64, dirty_bytes: u64) -> bool {
        let pressed = (self.starving || self.owed_bytes > 0) && !self.wanted;
        pressed && dirty_bytes.saturating_mul(WRITERS_TO_DISK) > freed_bytes
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
        Self { ring_bytes, segment_bytes: (ring_bytes / 16).min(SEGMENT_BYTES_MOST) }
    }

    /// What to do now.
    pub(super) fn decide(&self, situation: &Situation) -> Action {
        let &Situation { used_bytes, dirty_bytes, wanted, starving, idle, .. } = situation;
        let quarters = |number: u64| self.ring_bytes / 4 * number;
        // Much to write takes long: it starts while there is still much room.
        let streams = dirty_bytes >= quarters(1);
        let full = used_bytes >= self.full_bytes(dirty_bytes);
        let live_bytes = used_bytes - situation.owed_bytes;
        if wanted || live_bytes > 0 && (starving || idle || full || streams) {
            Action::Sync
        } else if live_bytes >= quarters(1) {
            Action::Start
        } else {
            Action::Nothing
        }
    }

    /// Of the room that was freed and that writers were not shown, how much they are to be shown while `live_bytes` of the log are
    /// brought to the disk. What they fill of it is the next batch: half of the log in the end, so that as much is free to
    /// be shown while that is written.
    pub(super) fn room_to_show(&self, owed_bytes: u64, live_bytes: u64) -> u64 {
        owed_bytes.min(live_bytes.midpoint(self.ring_bytes / 2))
    }

    /// The same while nothing is brought: a quarter of the log is free then, which is the next batch.
    pub(super) fn room_for_next(&self, owed_bytes: u64, used_bytes: u64) -> u64 {
        let free_bytes = self.ring_bytes.saturating_sub(used_bytes);
        owed_bytes.min((self.ring_bytes / 4).saturating_sub(free_bytes))
    }

    /// How many bytes the disk is to be given at once where no room is left to be shown meanwhile, and it takes `disk_bytes` in the
    /// time that writers may wait: when that is over they have filled what is free now, and wait.
    pub(super) fn batch_bytes(&self, situation: &Situation, disk_bytes: u64) -> u64 {
        let free_bytes = self.ring_bytes.saturating_sub(situation.used_bytes);
        disk_bytes + free_bytes / WRITERS_TO_DISK
    }

    /// How much of the log may be used before what is hot is synced: what is left lasts until `dirty_bytes` are on the disk.
    fn full_bytes(&self, dirty_bytes: u64) -> u64 {
        let (least, most) = (self.ring_bytes / 4 * 3, self.ring_bytes / 8 * 7);
        let needed_bytes = dirty_bytes.saturating_mul(WRITERS_TO_DISK);
        self.ring_bytes.saturating_sub(needed_bytes).clamp(least, most)
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

    /// Nothing is in the log, and nobody waits.
    const EMPTY: Situation = Situation {
        used_bytes: 0,
        owed_bytes: 0,
        dirty_bytes: 0,
        wanted: false,
        starving: false,
        idle: false,
    };

    fn decide(used_mib: u64, dirty_mib: u64) -> Action {
        let (used_bytes, dirty_bytes) = (used_mib * MIB, dirty_mib * MIB);
        Policy::new(64 * MIB).decide(&Situation { used_bytes, dirty_bytes, ..EMPTY })
    }

    #[test]
    fn hot_files_are_synced_late_and_streams_early() {
        assert_eq!(decide(0, 0), Action::Nothing);
        assert_eq!(decide(15, 15), Action::Nothing);
        assert_eq!(decide(16, 15), Action::Start);
        assert_eq!(decide(16, 16), Action::Sync);
        assert_eq!(decide(32, 15), Action::Start);
        assert_eq!(decide(47, 4), Action::Start);
        assert_eq!(decide(48, 4), Action::Sync);
        assert_eq!(decide(53, 1), Action::Start);
        assert_eq!(decide(54, 1), Action::Sync);
        assert_eq!(Policy::new(64 * MIB).full_bytes(0), 56 * MIB);
        assert_eq!(Policy::new(64 * MIB).full_bytes(u64::MAX), 48 * MIB);
    }

    #[test]
    fn a_hot_set_rewritten_a_hundred_times_is_synced_twice() {
        let policy = Policy::new(1024 * MIB);
        let (set, written) = (16 * MIB, 1600 * MIB / 4096 * 4160 * 102 / 100);
        let (mut syncs, mut tail, mut head) = (0, 0, 0);
        while head < written {
            let used_bytes = head - tail;
            let dirty_bytes = used_bytes.min(set);
            let situation = Situation { used_bytes, dirty_bytes, ..EMPTY };
            if policy.decide(&situation) == Action::Sync {
                (syncs, tail) = (syncs + 1, head);
            }
            assert!(used_bytes + set * WRITERS_TO_DISK <= 1024 * MIB + policy.segment_bytes);
            head = policy.wake_at(tail, head, head).min(written);
        }
        assert_eq!(syncs + 1, 2, "and once at the end");
    }

    #[test]
    fn room_is_held_back_only_where_the_disk_is_what_writers_wait_for() {
        let paced = |starving, owed_bytes, wanted, freed_mib, dirty_mib| {
            let (used_bytes, dirty_bytes) = (64 * MIB, dirty_mib * MIB);
            let situation =
                Situation { used_bytes, owed_bytes, dirty_bytes, wanted, starving, ..EMPTY };
            situation.is_paced(freed_mib * MIB, dirty_bytes)
        };
        assert!(paced(true, 0, false, 30, 30) && paced(false, 64, false, 30, 30), "a stream");
        assert!(!paced(true, 64, false, 30, 2), "a hot set: each sync of it costs the disk more");
        assert!(!paced(true, 64, true, 30, 30), "somebody waits for all of it");
        assert!(!paced(false, 0, false, 30, 30), "nobody waits");
    }

    /// From whatever a burst leaves: a batch of all and nothing to show, or all to show and nothing to write.
    #[test]
    fn half_of_the_log_is_written_while_the_other_half_is_shown() {
        let policy = Policy::new(64 * MIB);
        for (mut live_bytes, mut owed_bytes) in [(64 * MIB, 0), (0, 64 * MIB), (60 * MIB, 4 * MIB)]
        {
            for _ in 0..8 {
                let shown_bytes = policy.room_to_show(owed_bytes, live_bytes);
                assert!(shown_bytes <= owed_bytes);
                (owed_bytes, live_bytes) = (owed_bytes - shown_bytes + live_bytes, shown_bytes);
            }
            assert!((31 * MIB..33 * MIB).contains(&live_bytes), "{live_bytes}");
            assert_eq!(live_bytes + owed_bytes, 64 * MIB);
        }
    }

    #[test]
    fn while_nothing_is_brought_no_more_than_the_next_batch_is_shown() {
        let policy = Policy::new(64 * MIB);
        assert_eq!(policy.room_for_next(40 * MIB, 64 * MIB), 16 * MIB);
        assert_eq!(policy.room_for_next(40 * MIB, 54 * MIB), 6 * MIB, "10 are free");
        assert_eq!(policy.room_for_next(40 * MIB, 41 * MIB), 0, "and asked again: none");
        assert_eq!(policy.room_for_next(MIB, 64 * MIB), MIB);
    }

    #[test]
    fn a_batch_with_nothing_to_show_ends_when_the_log_is_full_or_little_later() {
        let policy = Policy::new(1024 * MIB);
        let limit = |used_mib, disk_mib| {
            let (used_bytes, owed_bytes, dirty_bytes) = (used_mib * MIB, 0, 256 * MIB);
            let (wanted, starving, idle) = (false, false, false);
            let situation =
                Situation { used_bytes, owed_bytes, dirty_bytes, wanted, starving, idle };
            policy.batch_bytes(&situation, disk_mib * MIB) / MIB
        };
        assert_eq!((limit(1024, 5), limit(1024, 40)), (5, 40), "what the disk takes in its time");
        assert_eq!(limit(300, 5), 5 + 72);
    }

    #[test]
    fn room_that_nobody_was_shown_is_nothing_to_be_written() {
        let policy = Policy::new(64 * MIB);
        let (wanted, starving, idle) = (false, true, false);
        let live = |live_bytes| Situation {
            used_bytes: 40 * MIB + live_bytes,
            owed_bytes: 40 * MIB,
            dirty_bytes: 0,
            wanted,
            starving,
            idle,
        };
        assert_eq!(policy.decide(&live(0)), Action::Nothing);
        assert_eq!(policy.decide(&live(64)), Action::Sync);
    }

    #[test]
    fn an_idle_log_is_retired_and_an_empty_one_left_alone() {
        let policy = Policy::new(64 * MIB);
        let idle = |used_bytes| Situation { used_bytes, idle: true, ..EMPTY };
        assert_eq!(policy.decide(&idle(64)), Action::Sync);
        assert_eq!(policy.decide(&idle(0)), Action::Nothing);
    }

    #[test]
    fn it_is_woken_when_that_matters_and_never_for_what_it_has_seen() {
        let policy = Policy::new(64 * MIB);
        assert_eq!(policy.wake_at(100, 100, 100), 101);
        assert_eq!(policy.wake_at(100, 164, 100), 100 + 16 * MIB);
        assert_eq!(policy.wake_at(0, 16 * MIB, 16 * MIB), 20 * MIB);
        assert_eq!(policy.wake_at(0, 30 * MIB, 16 * MIB), 61 * MIB / 2);
    }
}
